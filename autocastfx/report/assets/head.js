"use strict";
/* What stands around the graph: facts of the model, the place where an error begins, the legend. */
const Head = (() => {
  const { h, link } = Elements, $ = (id) => document.getElementById(id);

  function legend(model, options) {
    const swatch = (kind, said) => h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), said);
    const low = Words.short(model.variant.low), shades = model.groups[0].counts;
    const words = { low: `16 bits (${low})`, mixed: "runs in one, stored in the other", float32: "float32", given: "as its inputs are", other: "no float32 value" };
    const shown = Model.SHADES.filter((shade) => shades[shade]).map((shade) => [shade, words[shade]]);
    const entries = options.colour === "precision" ? shown : Heat.by(options.colour, model).legend;
    $("legend").replaceChildren(...entries.map(([kind, said]) => swatch(kind, said)),
      h("li", {}, h("span", { class: "swatch castline", "aria-hidden": "true" }, "◆"), "cast"));
  }

  /* The head of the page: the model, how it was converted, when and by what. */
  function facts(made, variant) {
    document.querySelector("h1").textContent = made.name || "Converted model";
    const said = [
      ["parameters", made.parameters?.toLocaleString("en")], ["device", variant.device], ["dtype", variant.low], ["op list", variant.op_list],
      ["fold", made.fold], ["made", made.date], ["autocastfx", made.autocastfx], ["torch", made.torch],
    ];
    $("facts").replaceChildren(...said.filter(([, value]) => value).map(([name, value]) => h("li", {}, h("span", {}, `${name} `), value)));
  }

  /* The share in 16 bits, and why the rest is float32; a count leads to the nodes. */
  function headline(model, search) {
    const { says, details, low, float32, reasons = [] } = model.variant.headline, whys = model.variant.whys || [];
    const part = (kind, count) => {
      const made = h("span", { class: kind });
      made.style.flexGrow = String(count);
      return made;
    };
    $("says").textContent = says;
    $("details").textContent = details;
    $("sharebar").replaceChildren(...[["low", low], ["float32", float32]].filter(([, count]) => count).map(([kind, count]) => part(kind, count)));
    $("whyfloat32").hidden = !reasons.length;
    $("reasons").replaceChildren(...reasons.map(({ says: why, count, ops }) => {
      const said = `${ops.join(", ")}: ${why}`;
      return h("li", {}, h("button", { type: "button", class: "link", "aria-label": `Go to the ${count} of ${said}`, on: () => search(`why:${whys.indexOf(why) + 1}`) },
        count.toLocaleString("en")), h("span", { title: said }, said));
    }));
  }

  /* Where Inf and NaN begin, in a page with a comparison that failed. */
  function banner(model, goTo) {
    const begin = model.variant.begin, first = begin && model.byName.get(begin.node);
    $("banner").hidden = !begin?.failing;
    if (!begin?.failing) return;
    const close = h("button", { type: "button", "aria-label": "Close this message", on: () => ($("banner").hidden = true) }, "×");
    $("banner").replaceChildren(h("span", {}, `${begin.says[0].toUpperCase()}${begin.says.slice(1)}. `, first ? link(first, goTo, "Show it") : ""), close);
  }

  const THEMES = ["system", "light", "dark"];

  /* Take the next of the themes. */
  function changeTheme() {
    const root = document.documentElement, now = THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % THEMES.length];
    root.dataset.theme = now;
    $("theme").textContent = `Theme: ${now}`;
  }

  return { banner, changeTheme, facts, headline, legend };
})();

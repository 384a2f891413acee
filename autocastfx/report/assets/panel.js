"use strict";
/* What the side panel says: of what is selected, and tables of the whole variant. Text goes in as text, never as HTML. */
const Panel = (() => {
  const MOST_ROWS = 200;
  const { bytes, many, number } = Drawing;

  function h(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key === "on") made.addEventListener("click", value);
      else if (value !== undefined && value !== null) made.setAttribute(key, value);
    }
    made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
    return made;
  }

  function percent(share) {
    const plain = Number(share);
    if (!plain) return "none";
    return plain < 0.0001 ? "< 0.01 %" : `${(100 * plain).toFixed(2)} %`;
  }

  function link(node, go, said) {
    return h("button", { type: "button", class: "link", on: () => go(node) }, breakable(said || (node.held && node.op) || node.name));
  }

  /* A name that may go on in the next line after a dot, a slash or an underscore. */
  function breakable(name) {
    return name.split(/(?<=[._/])/).flatMap((piece, i) => (i ? [document.createElement("wbr"), piece] : [piece]));
  }

  function facts(pairs) {
    const shown = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
    return h("dl", {}, shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat());
  }

  function table(titles, rows, empty) {
    if (!rows.length) return h("p", { class: "none" }, empty);
    const shown = rows.slice(0, MOST_ROWS);
    const head = h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)));
    const body = shown.map((cells) => h("tr", {}, cells.map((cell) => (cell instanceof Node ? h("td", {}, cell) : h("td", { class: /^[\d<∞]/.test(cell) ? "number" : null }, cell)))));
    const rest = rows.length > shown.length ? h("p", { class: "none" }, `and ${rows.length - shown.length} more`) : null;
    return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)), rest);
  }

  function list(nodes, go, after) {
    return h("ul", {}, nodes.map((node) => h("li", {}, link(node, go), after ? ` ${after(node)}` : "")));
  }

  function nothing(model) {
    return [
      h("h2", {}, "This model"),
      h("ul", { class: "lines" }, model.variant.summary.map((line) => h("li", {}, line))),
      h("p", { class: "hint" }, "Click a module to open it, its heading to close it, and an operation to read why it runs as it does. ",
        h("kbd", {}, "/"), " searches; ", h("kbd", {}, "Enter"), " goes to the next result."),
    ];
  }

  function ofNode(model, node, go) {
    if (node.kind === "cast") return ofCast(model, node, go);
    const shown = node.op && node.op !== node.name ? node.op : null;
    const reads = node.reads.map((id) => model.nodes[id]), readers = node.readers.map((id) => model.nodes[id]);
    const casts = reads.filter((n) => n.kind === "cast"), after = readers.filter((n) => n.kind === "cast");
    return [
      h("h2", {}, breakable(node.name)),
      facts([
        ["what", node.kind === "op" ? "operation" : node.kind === "removed" ? "in the captured graph only" : node.kind],
        [node.held ? "path" : "op", shown],
        ["module", node.module ? h("span", {}, breakable(node.module)) : node.kind === "op" ? "(root)" : null],
        ["dtype", node.dtype],
        ["precision", node.runs],
        ["category", node.category],
        ["of", node.of ? named(model, node.of, go) : null],
      ]),
      why(node),
      code(node),
      numerics(node),
      node.own ? h("p", {}, "The model casts here itself.") : null,
      casts.length ? [h("h3", {}, `Casts in: ${many(casts.length, "cast")}, ${bytes(total(casts))}`), castList(model, casts, go, (c) => Model.source(model.nodes, c))] : null,
      after.length ? [h("h3", {}, `Casts out: ${many(after.length, "cast")}, ${bytes(total(after))}`), castList(model, after, go, (c) => c)] : null,
      around("Reads", reads.map((n) => Model.source(model.nodes, n)), go),
      around("Is read by", readers.flatMap((n) => (n.kind === "cast" ? n.readers.map((id) => model.nodes[id]) : [n])), go),
    ].flat(2);
  }

  function total(casts) {
    return casts.reduce((sum, cast) => sum + (cast.bytes || 0), 0);
  }

  function castList(model, casts, go, to) {
    const said = (cast) => `${cast.dtype}, ${bytes(cast.bytes || 0)}${cast.saturates ? ", saturating" : ""}`;
    return h("ul", {}, casts.map((cast) => h("li", {}, link(cast, go, to(cast).name), ` ${said(cast)}`)));
  }

  function around(title, nodes, go) {
    const once = [...new Set(nodes)];
    if (!once.length) return null;
    const shown = list(once.slice(0, 12), go, (node) => (node.runs ? `(${node.runs})` : `(${node.kind})`));
    return [h("h3", {}, title), shown, once.length > 12 ? h("p", { class: "none" }, `and ${once.length - 12} more`) : null];
  }

  function path(model, name) {
    const node = model.byName.get(name);
    return node && node.held ? node.op : name;
  }

  function named(model, name, go) {
    const node = model.byName.get(name);
    return node ? link(node, go) : name;
  }

  function why(node) {
    if (!node.says) return null;
    if (!node.reason && !node.source) return h("p", { class: "says" }, `${node.says}.`);
    const decided = node.shade === "other" ? null : `${node.category}: ${node.reason || "no reason given"}`;
    return h("section", { class: "why", "aria-label": "Why" },
      h("p", { class: "says" }, `${node.says[0].toUpperCase()}${node.says.slice(1)}.`),
      facts([
        ["decided", decided],
        ["rule", node.shade === "other" ? null : h("code", {}, node.source)],
        ["placed", node.placed ? node.placed.map((clause) => h("p", {}, `${clause}.`)) : null],
        ["to change it", node.change ? `${node.change}.` : null],
      ].map(([name, value]) => [name, Array.isArray(value) ? h("div", {}, value) : value])));
  }

  function code(node) {
    if (!node.line) return null;
    return h("section", { "aria-label": "Source" }, h("h3", {}, "Source"), h("p", { class: "none" }, node.line), h("pre", { tabindex: 0 }, node.code || ""));
  }

  function numerics(node) {
    if (!node.numerics) return null;
    const gradient = node.numerics.gradient;
    return h("section", { "aria-label": "Against float32" }, h("h3", {}, "Against float32"), deviation(node.numerics),
      gradient && h("h4", {}, "Its gradient"), gradient && deviation(gradient));
  }

  function deviation(n) {
    return facts([["relative error", number(n.error)], ["overflow", percent(n.overflow)], ["underflow", percent(n.underflow)], ["zeros", percent(n.zeros)],
      ["NaN", percent(n.nan)]]);
  }

  function ofCast(model, cast, go) {
    return [
      h("h2", {}, breakable(cast.name)),
      facts([
        ["what", "cast, made by the conversion"],
        ["dtype", cast.dtype],
        ["of", named(model, cast.of, go)],
        ["bytes moved", (cast.bytes || 0).toLocaleString("en")],
        ["saturates", cast.saturates ? "yes: finite values beyond the range become the largest finite one" : null],
      ]),
      around("Is read by", cast.readers.map((id) => model.nodes[id]), go),
    ].flat(2);
  }

  function ofEdge(model, edge, go) {
    const casts = [...edge.casts].sort((a, b) => (b.bytes || 0) - (a.bytes || 0));
    const end = (item) => (item.inner ? item.path || "(root)" : item.name);
    return [
      h("h2", {}, `${end(edge.from)} → ${end(edge.to)}`),
      casts.length ? [h("h3", {}, `${many(casts.length, "cast")}, ${bytes(total(casts))}`), castList(model, casts, go, (c) => c)] : null,
      h("h3", {}, many(edge.values.size, "value")),
      list([...edge.values].slice(0, MOST_ROWS), go, (node) => node.dtype),
    ].flat(2);
  }

  function ofGroup(model, group) {
    const low = Drawing.short(model.variant.low);
    const words = { low: `16 bits (${low})`, float32: "float32", mixed: "mixed", given: "as given", other: "no float32 value" };
    return [
      h("h2", {}, breakable(group.path || "(root)")),
      facts([
        ["operations", String(group.ops)],
        ...Model.SHADES.map((shade) => [words[shade], group.counts[shade] ? String(group.counts[shade]) : ""]),
        ["casts", group.casts ? `${group.casts}, ${bytes(group.bytes)}` : "none"],
        ["largest error", group.error === undefined ? null : number(group.error)],
      ]),
    ];
  }

  function ops(model, search) {
    const counts = new Map();
    for (const node of model.nodes) {
      if (!node.shade || node.shade === "other" || node.kind !== "op") continue;
      if (!counts.has(node.op)) counts.set(node.op, { low: 0, float32: 0, mixed: 0, given: 0 });
      counts.get(node.op)[node.shade] += 1;
    }
    const used = ["low", "float32", "mixed", "given"].filter((shade) => [...counts.values()].some((row) => row[shade]));
    const titles = { low: Drawing.short(model.variant.low), float32: "f32", mixed: "mixed", given: "as given" };
    const all = (row) => used.reduce((sum, shade) => sum + row[shade], 0);
    const rows = [...counts].sort((a, b) => all(b[1]) - all(a[1]) || a[0].localeCompare(b[0])).map(([op, row]) => [
      h("button", { type: "button", class: "link", on: () => search(`op:${op}`) }, op),
      ...used.map((shade) => (row[shade] ? h("button", { type: "button", class: "link number", "aria-label": `${row[shade]} ${op} in ${titles[shade]}`,
        on: () => search(`op:${op} runs:${shade}`) }, String(row[shade])) : "")),
    ]);
    const unlisted = Object.entries(model.variant.unlisted || {}).map(([op, count]) => [
      h("button", { type: "button", class: "link", on: () => search(`op:${op}`) }, op), String(count)]);
    return [
      h("h2", {}, "Operations by precision"), table(["op", ...used.map((shade) => titles[shade])], rows, "No operation has a float32 value."),
      h("h2", {}, "Operations that no list names"), table(["op", "count"], unlisted, "None."),
    ];
  }

  function casts(model, go) {
    const all = model.nodes.filter((n) => n.kind === "cast").sort((a, b) => (b.bytes || 0) - (a.bytes || 0));
    const rows = all.map((cast) => [link(cast, go, path(model, cast.of)), cast.dtype.split(" → ").map(Drawing.short).join(" → "), bytes(cast.bytes || 0)]);
    return [h("h2", {}, "Casts, the costliest first"), h("p", { class: "none" }, `${many(all.length, "cast")}, ${bytes(total(all))} in each call`),
      table(["value", "dtype", "bytes"], rows, "There is no cast.")];
  }

  function errors(model, go) {
    const values = model.nodes.filter((n) => n.numerics), gradients = values.filter((n) => n.numerics.gradient).reverse();
    const parameters = model.variant.parameters || [];
    const titled = (title, what, rows) => [h("h2", {}, title), table([what, "error", "overflow", "underflow"], rows, "Nothing was compared.")];
    return [
      ...titled("Against float32, the worst first", "node", worst(values, (n) => n.numerics, (n) => link(n, go))),
      ...(gradients.length ? titled("Gradients", "node", worst(gradients, (n) => n.numerics.gradient, (n) => link(n, go))) : []),
      ...(parameters.length ? titled("Gradients of parameters", "parameter", worst(parameters, (p) => p, (p) => h("span", {}, breakable(p.name)))) : []),
    ];
  }

  /* Rows of a table, those that overflowed first. */
  function worst(all, numbersOf, first) {
    const rank = (n) => (Number(n.overflow) || Number(n.nan) ? Infinity : Number(n.error));
    const ranked = all.map((one) => [one, numbersOf(one)]).sort(([, a], [, b]) => (rank(a) === rank(b) ? 0 : rank(b) - rank(a)));
    return ranked.map(([one, n]) => [first(one), number(n.error), percent(n.overflow), percent(n.underflow)]);
  }

  return { h, nothing, ofNode, ofEdge, ofGroup, ops, casts, errors };
})();

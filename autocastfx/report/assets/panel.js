"use strict";
/* What the side panel says: of what is selected. */
const Panel = (() => {
  const { MOST_ROWS, breakable, copier, facts, h, link, list } = Elements, { bytes, many, number, percent, total } = Words;

  /* Edits of the whole conversion, best first, each with a button that copies it. */
  function edits(found) {
    if (!found.length) return [];
    const one = ({ write, where, says, effect }) => {
      const shown = h("code", {}, write);
      return h("li", {}, shown, " ", copier(write, shown), h("p", {}, `${effect}; ${says}.`, h("span", { class: "hint" }, ` For ${where}.`)));
    };
    return [h("h2", {}, "What to change"), h("ol", { id: "edits" }, found.map(one))];
  }

  function nothing(model, found = []) {
    return [
      ...edits(found),
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
        ["shape", node.shape],
        ["may differ", node.symbols],
        ["size", node.size ? bytes(node.size) : null],
        ["precision", node.runs],
        ["category", node.category],
        ["of", node.of ? named(model, node.of, go) : null],
      ]),
      before(node),
      why(node),
      settings(node),
      code(node),
      numerics(node),
      node.own ? h("p", {}, "The model casts here itself.") : null,
      casts.length ? [h("h3", {}, `Casts in: ${many(casts.length, "cast")}, ${bytes(total(casts))}`), castList(model, casts, go, (c) => Model.source(model.nodes, c))] : null,
      after.length ? [h("h3", {}, `Casts out: ${many(after.length, "cast")}, ${bytes(total(after))}`), castList(model, after, go, (c) => c)] : null,
      around("Reads", reads.map((n) => Model.source(model.nodes, n)), go),
      around("Is read by", readers.flatMap((n) => (n.kind === "cast" ? n.readers.map((id) => model.nodes[id]) : [n])), go),
    ].flat(2);
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
        ["float8", node.float8 ? node.float8.map((clause) => h("p", {}, `${clause}.`)) : null],
        ["backward", node.backward ? node.backward.map((clause) => h("p", {}, `${clause}.`)) : null],
        ["error", node.predicts],
        ["to change it", node.change ? `${node.change}.` : null],
      ].map(([name, value]) => [name, Array.isArray(value) ? h("div", {}, value) : value])),
      proposed(node));
  }

  /* What another plan says of the node. */
  function before(node) {
    if (!node.before) return null;
    const was = node.before;
    return h("section", { class: "before", "aria-label": "In the other plan" }, h("h3", {}, was.added ? "Not in the other plan" : "In the other plan"),
      was.added ? null : facts([["runs", `${was.runs}: ${was.because}`], ["decided", was.decided]]));
  }

  /* The op list that asks for the other precision. */
  function proposed(node) {
    if (!node.list) return null;
    const shown = h("pre", { tabindex: 0, class: "yaml", "aria-label": "Op list" }, node.list);
    return h("div", {}, h("p", { class: "offer" }, `A list that asks for ${node.shade === "float32" ? "16 bits" : "float32"}:`, copier(node.list, shown)), shown);
  }

  function settings(node) {
    if (!node.attributes) return null;
    return h("section", { "aria-label": "Attributes" }, h("h3", {}, "Attributes"), facts(node.attributes.map(([name, value]) => [name, h("code", {}, value)])));
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
        ["shape", cast.shape],
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
      list([...edge.values].slice(0, MOST_ROWS), go, (node) => [node.dtype, node.shape, node.size ? bytes(node.size) : ""].filter(Boolean).join(" ")),
    ].flat(2);
  }

  function ofGroup(model, group) {
    const low = Words.short(model.variant.low);
    const words = { low: `16 bits (${low})`, float32: "float32", mixed: "mixed", given: "as given", other: "no float32 value" };
    return [
      h("h2", {}, breakable(group.path || "(root)")),
      facts([
        ["layers", group.layers ? `${group.layers} with the same operations, decisions and shapes` : null],
        ["operations", String(group.ops)],
        ...Model.SHADES.map((shade) => [words[shade], group.counts[shade] ? String(group.counts[shade]) : ""]),
        ["casts", group.casts ? `${group.casts}, ${bytes(group.bytes)}` : "none"],
        ["largest value", group.size ? bytes(group.size) : null],
        ["kept for backward", group.kept === undefined ? null : bytes(group.kept)],
        ["predicted error", group.predicted === undefined ? null : number(group.predicted)],
        ["largest error", group.error === undefined ? null : number(group.error)],
      ]),
    ];
  }

  return { nothing, ofNode, ofEdge, ofGroup };
})();

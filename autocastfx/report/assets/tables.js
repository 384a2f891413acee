"use strict";
/* Tables of a whole variant: its operations, its casts, its errors; and the times of the model. */
const Tables = (() => {
  const { breakable, h, link, table } = Elements, { bytes, many, number, percent, total } = Words;

  function path(model, name) {
    const node = model.byName.get(name);
    return node && node.held ? node.op : name;
  }

  function ops(model, search) {
    const counts = new Map();
    for (const node of model.nodes) {
      if (!node.shade || node.shade === "other" || node.kind !== "op") continue;
      if (!counts.has(node.op)) counts.set(node.op, { low: 0, float8: 0, float32: 0, mixed: 0, given: 0, nodes: [] });
      counts.get(node.op).nodes.push(node);
      counts.get(node.op)[node.shade] += 1;
      if (Model.inFloat8(node)) counts.get(node.op).float8 += 1;
    }
    const used = ["low", "float8", "float32", "mixed", "given"].filter((shade) => [...counts.values()].some((row) => row[shade]));
    const titles = { low: Words.short(model.variant.low), float8: "of it float8", float32: "f32", mixed: "mixed", given: "as given" };
    const all = (row) => used.reduce((sum, shade) => sum + (shade === "float8" ? 0 : row[shade]), 0);
    const rows = [...counts].sort((a, b) => all(b[1]) - all(a[1]) || a[0].localeCompare(b[0])).map(([op, row]) => [
      h("button", { type: "button", class: "link", on: () => search(`op:${op}`) }, op),
      ...used.map((shade) => (row[shade] ? h("button", { type: "button", class: "link number", "aria-label": `${row[shade]} ${op} in ${titles[shade]}`,
        on: () => search(`op:${op} runs:${shade}`) }, String(row[shade])) : "")),
      whyOf(model, row.nodes),
    ]);
    const unlisted = Object.entries(model.variant.unlisted || {}).map(([op, count]) => [
      h("button", { type: "button", class: "link", on: () => search(`op:${op}`) }, op), String(count)]);
    return [
      h("h2", {}, "Operations by precision"), table(["op", ...used.map((shade) => titles[shade]), "why"], rows, "No operation has a float32 value."),
      h("h2", {}, "Operations that no list names"), table(["op", "count"], unlisted, "None."),
    ];
  }

  /* The most frequent reason: of those in float32, where there are any. */
  function whyOf(model, nodes) {
    const wide = nodes.filter((node) => node.shade !== "low"), counts = new Map();
    for (const { why } of wide.length ? wide : nodes) if (why) counts.set(why, (counts.get(why) || 0) + 1);
    const [first, ...rest] = [...counts].sort((a, b) => b[1] - a[1]);
    if (!first) return "";
    return h("span", {}, `${wide.length && wide.length < nodes.length ? "float32: " : ""}${model.variant.whys[first[0] - 1]}${rest.length ? ` (and ${many(rest.length, "other reason")})` : ""}`);
  }

  /* Casts whose values differ in the numbers of their layers alone are one row. */
  function casts(model, go) {
    const all = model.nodes.filter((n) => n.kind === "cast"), alike = new Map();
    for (const cast of all) {
      const of = model.byName.get(cast.of), key = JSON.stringify([placeOf(cast, of), cast.dtype, cast.bytes]);
      const group = /(^|\.)\d+(\.|$)/.test(of?.held ? of.op : of?.module || "") ? key : cast.key;
      if (!alike.has(group)) alike.set(group, []);
      alike.get(group).push(cast);
    }
    const groups = [...alike.values()].sort((a, b) => total(b) - total(a));
    const rows = groups.map((same) => {
      const [cast] = same, of = model.byName.get(cast.of);
      const value = same.length === 1 ? link(cast, go, path(model, cast.of)) : h("span", {}, link(cast, go, placeOf(cast, of)), ` ×${same.length}`);
      return [value, cast.dtype.split(" → ").map(Words.short).join(" → "), bytes(total(same))];
    });
    return [h("h2", {}, "Casts, the costliest first"), h("p", { class: "none" }, `${many(all.length, "cast")}, ${bytes(total(all))} in each call`),
      table(["value", "dtype", "bytes"], rows, "There is no cast.")];
  }

  /* Where the value of a cast is, with a star for the number of a layer. */
  function placeOf(cast, of) {
    const said = !of ? cast.of : of.held ? of.op : of.module ? `${of.module}.${of.op}` : of.name;
    return said.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
  }

  function errors(model, go) {
    const begin = model.variant.begin, first = begin && model.byName.get(begin.node);
    const values = model.nodes.filter((n) => n.numerics), gradients = values.filter((n) => n.numerics.gradient).reverse();
    const parameters = model.variant.parameters || [];
    const titled = (title, what, rows) => [h("h2", {}, title), table([what, "error", "overflow", "underflow"], rows, "Nothing was compared.")];
    return [
      begin?.says ? h("p", {}, `${begin.says[0].toUpperCase()}${begin.says.slice(1)}. `, first ? link(first, go, "Show it") : null) : null,
      ...titled("Against float32, the worst first", "node", worst(values, (n) => n.numerics, (n) => link(n, go))),
      ...(gradients.length ? titled("Gradients", "node", worst(gradients, (n) => n.numerics.gradient, (n) => link(n, go))) : []),
      ...(parameters.length ? titled("Gradients of parameters", "parameter", worst(parameters, (p) => p, (p) => h("span", {}, breakable(p.name)))) : []),
    ];
  }

  /* Rows of a table, those that overflowed first. */
  function worst(all, numbersOf, first) {
    const rank = (n) => (Words.value(n.overflow) || Words.value(n.nan) ? Infinity : Words.value(n.error));
    const ranked = all.map((one) => [one, numbersOf(one)]).sort(([, a], [, b]) => (rank(a) === rank(b) ? 0 : rank(b) - rank(a)));
    return ranked.map(([one, n]) => [first(one), number(n.error), percent(n.overflow), percent(n.underflow)]);
  }

  function changes(model, go) {
    const { summary, removed = [] } = model.variant.changes, changed = model.nodes.filter((n) => n.before);
    const words = (n) => (n.before.added ? "only here" : n.before.moved ? `${n.before.runs} → ${n.runs}` : "another reason");
    const moved = (n) => (n.before.moved ? 0 : 1);
    const rows = changed.sort((a, b) => moved(a) - moved(b)).map((n) => [link(n, go), n.op, words(n)]);
    return [
      h("h2", {}, "Changes"), h("ul", { class: "lines" }, summary.map((line) => h("li", {}, line))),
      table(["node", "op", "change"], rows, "Every node is decided and placed alike."),
      ...(removed.length ? [h("h2", {}, "Only in the other plan"), table(["node", "op", "decided"], removed.map((n) => [h("span", {}, breakable(n.name)), n.op, n.decided]))] : []),
    ];
  }

  function times({ what, sides, ops, advice }) {
    return [
      h("h2", {}, "Times"), h("p", { class: "none" }, what), table(["", "ms", "of torch.autocast's"], sides),
      h("ul", { class: "lines" }, advice.map((line) => h("li", {}, line))),
      h("h2", {}, "Milliseconds of the largest ops, each by itself"), table(["op", ...sides.map(([name]) => name)], ops, "The profiler saw none."),
    ];
  }

  return { casts, changes, errors, ops, times };
})();

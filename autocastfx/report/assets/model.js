"use strict";
/* From the data of a variant, and what is open, to what is drawn. No page is touched here. */
const Model = (() => {
  const HELD = new Set(["parameter", "buffer", "constant", "copy", "sub-graph"]);
  const SHADES = ["low", "mixed", "float32", "given", "other"];
  const MOST_OWN = 30; // as many operations of a module are drawn beside its inner modules; more are a box of their own
  const MOST_AT_FIRST = 60;

  /* Groups are the modules, and the bundles of what a large module computes itself. Group 0 is the root. */
  function build(variant) {
    const groups = variant.modules.map((m, id) => ({ id, key: `g${id}`, name: m.name, around: m.around, runs: m.runs }));
    const nodes = variant.nodes.map((n, id) => ({ op: "", dtype: "", ...n, id, key: `n${id}`, group: n.in, readers: [] }));
    for (const node of nodes) {
      node.held = HELD.has(node.kind);
      node.drawn = node.kind !== "cast";
      for (const read of node.reads) nodes[read].readers.push(node.id);
    }
    bundle(groups, nodes);
    for (const group of groups) Object.assign(group, { inner: [], nodes: [], counts: {}, ops: 0, casts: 0, bytes: 0 });
    for (const group of groups) {
      if (group.around >= 0) groups[group.around].inner.push(group.id);
      group.path = pathOf(groups, group);
      group.label = labelOf(groups, group);
    }
    for (const node of nodes) {
      groups[node.group].nodes.push(node.id);
      for (let g = node.group; g >= 0; g = groups[g].around) count(groups[g], node);
    }
    for (const node of nodes) node.heldCasts = node.reads.map((r) => nodes[r]).filter((r) => r.kind === "cast" && source(nodes, r).held);
    const byName = new Map(nodes.map((n) => [n.name, n]));
    return { variant, groups, nodes, byName };
  }

  function count(group, node) {
    if (node.kind === "cast") {
      group.casts += 1;
      group.bytes += node.bytes || 0;
    } else if (node.shade) {
      group.ops += 1;
      group.counts[node.shade] = (group.counts[node.shade] || 0) + 1;
    }
    const error = node.numerics ? Number(node.numerics.error) : NaN;
    if (!Number.isNaN(error)) group.error = Math.max(group.error ?? 0, error);
  }

  function bundle(groups, nodes) {
    const own = groups.map(() => []);
    for (const node of nodes) if (node.kind === "op" || node.kind === "made") own[node.group].push(node);
    const around = new Set(groups.map((g) => g.around));
    for (const group of groups.slice()) {
      if (!around.has(group.id) || own[group.id].length <= MOST_OWN) continue;
      const made = { id: groups.length, key: `g${groups.length}`, name: "own operations", around: group.id, bundle: true };
      groups.push(made);
      for (const node of nodes) {
        if (node.group === group.id && node.kind !== "input" && node.kind !== "output") node.group = made.id;
      }
    }
  }

  function pathOf(groups, group) {
    const names = [];
    for (let g = group; g.around >= 0; g = groups[g.around]) names.unshift(g.bundle ? `(${g.name})` : g.name);
    return names.join(".");
  }

  function labelOf(groups, group) {
    if (group.bundle) return `${groups[group.around].name || "model"}: own operations`;
    if (group.runs) return `sub-graph ${group.name}`;
    return /^\d+$/.test(group.name) ? `${groups[group.around].name}.${group.name}` : group.name || "model";
  }

  /* What a cast reads; any other node is its own source. */
  function source(nodes, node) {
    while (node.kind === "cast" && node.reads.length) node = nodes[node.reads[0]];
    return node;
  }

  /* What is open at first: what only holds others, and what holds most of the model. */
  function firstOpen(model) {
    const open = new Set([0]);
    const queue = [...model.groups[0].inner];
    while (queue.length) {
      const group = model.groups[queue.shift()];
      const drawn = group.nodes.filter((id) => model.nodes[id].drawn && !model.nodes[id].held).length;
      const holds = (!drawn && group.inner.length) || group.ops * 2 > model.groups[0].ops;
      if (!holds || boxes(model, new Set([...open, group.id]), {}).length > MOST_AT_FIRST) continue;
      open.add(group.id);
      queue.push(...group.inner);
    }
    return open;
  }

  /* The outermost closed group around each group; undefined where all around it is open. */
  function closed(model, open) {
    const found = [];
    const of = (id) => {
      if (id < 0) return undefined;
      if (!(id in found)) found[id] = of(model.groups[id].around) ?? (open.has(id) ? undefined : id);
      return found[id];
    };
    model.groups.forEach((g) => of(g.id));
    return found;
  }

  function shows(node, options) {
    return node.drawn && (!node.held || options.weights);
  }

  function boxes(model, open, options) {
    const hidden = closed(model, open);
    const found = new Map();
    for (const node of model.nodes) {
      if (!shows(node, options)) continue;
      const item = hidden[node.group] === undefined ? node : model.groups[hidden[node.group]];
      found.set(item.key, item);
    }
    return [...found.values()];
  }

  /* {boxes, edges}: edges joined by the boxes at their ends, with the values and the casts that go along. */
  function visible(model, open, options) {
    const hidden = closed(model, open);
    const stands = (node) => (hidden[node.group] === undefined ? node : model.groups[hidden[node.group]]);
    const edges = new Map();
    for (const node of model.nodes) {
      if (!shows(node, options)) continue;
      for (const read of node.reads.map((id) => model.nodes[id])) {
        const from = source(model.nodes, read);
        const [a, b] = [stands(from), stands(node)];
        if (!shows(from, options) || a === b) continue;
        const key = `e${a.key}${b.key}`;
        if (!edges.has(key)) edges.set(key, { key, from: a, to: b, values: new Set(), casts: new Set() });
        edges.get(key).values.add(from);
        if (read.kind === "cast") edges.get(key).casts.add(read);
      }
    }
    return { boxes: boxes(model, open, options), edges: [...edges.values()] };
  }

  function openTo(model, open, node) {
    const wider = new Set(open);
    for (let g = node.group; g >= 0; g = model.groups[g].around) wider.add(g);
    return wider;
  }

  /* Nodes in which every word of the query occurs; op:NAME and runs:PRECISION are exact. */
  function find(model, query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const fits = (node, word) => {
      if (word.startsWith("op:")) return node.op.toLowerCase() === word.slice(3);
      if (word.startsWith("runs:")) return node.shade === word.slice(5);
      return `${node.op || ""} ${node.name} ${node.module || ""}`.toLowerCase().includes(word);
    };
    return model.nodes.filter((node) => node.kind !== "removed" && words.every((word) => fits(node, word)));
  }

  return { build, closed, find, firstOpen, openTo, source, visible, SHADES };
})();

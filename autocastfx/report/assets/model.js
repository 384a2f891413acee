"use strict";
/* From the data of a variant, and what is open, to what is drawn. No page is touched here. */
const Model = (() => {
  const HELD = new Set(["parameter", "buffer", "constant", "copy", "sub-graph"]);
  const SHADES = ["low", "mixed", "float32", "given", "other"];
  const MOST_IN_A_ROW = 40; // longer runs of a module's own operations, between its inner modules, are a box of their own
  const MOST_WITHOUT_FLOAT32 = 8; // as are runs longer than this that mostly compute masks and positions
  const MOST_AT_ONCE = 120, PIECE = 50; // longer runs yet are cut into pieces
  const MOST_AT_FIRST = 60, SMALL_MODEL = 40;
  const MOST_ENDS = 4; // a box with more lines in or out has them drawn when it is selected

  /* Groups are the modules, the bundles of what a large module computes itself, and folded layers. Group 0 is the root. */
  function build(variant, folds) {
    const groups = variant.modules.map((m, id) => ({ id, key: `g${id}`, name: m.name, around: m.around, runs: m.runs }));
    const nodes = variant.nodes.map((n, id) => ({ op: "", dtype: "", ...n, id, key: `n${id}`, group: n.in, readers: [] }));
    for (const node of nodes) {
      node.held = HELD.has(node.kind);
      node.drawn = node.kind !== "cast";
      node.aside = node.held || (node.shade === "other" && !node.dtype && node.kind === "op"); // weights and sizes
      const error = node.numerics ? Words.value(node.numerics.error) : NaN;
      if (!Number.isNaN(error)) node.error = error;
      node.plumbing = isPlumbing(node, nodes);
      if (node.plumbing) node.feeders = feedersOf(node, nodes);
      node.lost = Boolean(node.numerics && (Words.value(node.numerics.overflow) || Words.value(node.numerics.nan)));
      for (const read of node.reads) nodes[read].readers.push(node.id);
    }
    bundle(groups, nodes);
    if (folds) Repeats.fold(groups, nodes);
    for (const group of groups) Object.assign(group, { inner: [], nodes: [], counts: {}, ops: 0, casts: 0, bytes: 0, size: 0 });
    for (const group of groups) {
      if (group.around >= 0) groups[group.around].inner.push(group.id);
      group.path = pathOf(groups, group);
      group.label = labelOf(groups, group);
    }
    for (const node of nodes) {
      groups[node.group].nodes.push(node.id);
      for (let g = node.group; g >= 0; g = groups[g].around) count(groups[g], node);
    }
    for (const group of groups) {
      const drawn = group.nodes.filter((id) => nodes[id].drawn && !nodes[id].aside && !nodes[id].plumbing);
      group.single = group.around >= 0 && !group.inner.length && drawn.length === 1; // drawn as what it computes
      if (group.single && !group.bundle && !group.runs) nodes[drawn[0]].stands = group.label;
    }
    for (const node of nodes) node.heldCasts = node.reads.map((r) => nodes[r]).filter((r) => r.kind === "cast" && source(nodes, r).held);
    const byName = new Map(nodes.map((n) => [n.name, n]));
    return { variant, groups, nodes, byName };
  }

  /* True for an operation on whole numbers that come from whole numbers alone: labels, masks, positions. */
  function isPlumbing(node, nodes) {
    if ((node.kind !== "op" && node.kind !== "made") || node.shade !== "other" || !isWhole(node)) return false;
    return node.reads.map((id) => nodes[id]).every((read) => read.plumbing || (read.aside && !read.dtype) || (isWhole(read) && (read.held || read.kind === "input")));
  }

  function isWhole(node) {
    return /^((u?int\d+|bool)( x \d+)?(,|$))+$/.test(node.dtype);
  }

  /* What reaches a value through such operations. */
  function feedersOf(node, nodes) {
    const read = node.reads.map((id) => nodes[id]).filter((one) => !one.aside);
    return [...new Set(read.flatMap((one) => (one.plumbing ? one.feeders : [one])))];
  }

  function count(group, node) {
    if (node.kind === "cast") {
      group.casts += 1;
      group.bytes += node.bytes || 0;
    } else if (node.shade) {
      group.ops += 1;
      group.counts[node.shade] = (group.counts[node.shade] || 0) + 1;
    }
    if (node.drawn && !node.held) group.size = Math.max(group.size, node.size || 0);
    if (node.kept !== undefined) group.kept = (group.kept ?? 0) + node.kept;
    if (node.error !== undefined) group.error = Math.max(group.error ?? 0, node.error);
    if (node.effect !== undefined) {
      group.effect = node.effect.map((one, i) => one + (group.effect?.[i] ?? 0));
      group.predicted = Math.hypot(...group.effect) / Math.sqrt(group.effect.length);
    }
    group.lost ||= node.lost;
    if (node.before) group.differ = (group.differ || 0) + 1;
  }

  function bundle(groups, nodes) {
    const around = new Set(groups.map((g) => g.around)), runs = [];
    let last = null;
    for (const node of nodes) {
      if ((node.kind !== "op" && node.kind !== "made") || node.aside || node.plumbing) continue;
      if (last === null || last !== node.group) runs.push([]);
      last = node.group;
      runs[runs.length - 1].push(node);
    }
    for (const run of runs) {
      const without = run.filter((node) => node.shade === "other").length, count = Math.ceil(run.length / PIECE);
      const long = run.length > MOST_IN_A_ROW || (run.length > MOST_WITHOUT_FLOAT32 && without * 2 > run.length);
      if (run.length > MOST_AT_ONCE) {
        for (let i = 0; i < count; i++) gather(groups, nodes, run.slice(i * PIECE, (i + 1) * PIECE), `operations, part ${i + 1} of ${count}`);
      } else if (long && around.has(run[0].group)) gather(groups, nodes, run, "own operations");
    }
  }

  function gather(groups, nodes, run, name) {
    const made = { id: groups.length, key: `g${groups.length}`, name, around: run[0].group, bundle: true };
    groups.push(made);
    const members = new Set(run.map((node) => node.id));
    for (const node of nodes) {
      const isTheirs = node.kind === "cast" && node.group === made.around && node.readers.some((id) => members.has(id));
      if (members.has(node.id) || isTheirs) node.group = made.id;
    }
  }

  function pathOf(groups, group) {
    const names = [];
    for (let g = group; g.around >= 0; g = groups[g.around]) {
      if (!g.layers || g === group) names.unshift(g.bundle ? `(${g.name})` : g.name);
    }
    return names.join(".");
  }

  function labelOf(groups, group) {
    if (group.layers) return `${group.path} ×${group.layers}`;
    let above = groups[group.around];
    if (above?.layers) above = groups[above.around];
    if (group.bundle) return `${above.name || "model"}: ${group.name}`;
    if (group.runs) return `sub-graph ${group.name}`;
    return /^\d+$/.test(group.name) && above?.name ? `${above.name}.${group.name}` : group.name || "model";
  }

  /* What a cast reads; any other node is its own source. */
  function source(nodes, node) {
    while (node.kind === "cast" && node.reads.length) node = nodes[node.reads[0]];
    return node;
  }

  /* What is open at first: all of a small model, else what holds much of it. */
  function firstOpen(model) {
    const open = new Set([0]), all = model.groups[0].ops;
    const queue = [...model.groups[0].inner];
    while (queue.length) {
      const group = model.groups[queue.shift()];
      if (group.single || group.layers || (all > SMALL_MODEL && group.ops * 4 <= all)) continue;
      if (boxes(model, new Set([...open, group.id]), {}).length > MOST_AT_FIRST) continue;
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
      if (!(id in found)) found[id] = of(model.groups[id].around) ?? (open.has(id) || model.groups[id].single ? undefined : id);
      return found[id];
    };
    model.groups.forEach((g) => of(g.id));
    return found;
  }

  function shows(node, options) {
    return node.drawn && (!node.aside || options.weights) && (!node.plumbing || options.integers);
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
        const value = source(model.nodes, read);
        for (const from of value.plumbing && !options.integers ? value.feeders : [value]) {
          const [a, b] = [stands(from), stands(node)];
          if (!shows(from, options) || a === b) continue;
          const key = `e${a.key}${b.key}`;
          if (!edges.has(key)) edges.set(key, { key, from: a, to: b, values: new Set(), casts: new Set() });
          edges.get(key).values.add(from);
          if (read.kind === "cast") edges.get(key).casts.add(read);
        }
      }
    }
    const all = [...edges.values()];
    return { boxes: boxes(model, open, options), edges: all.filter((e) => !far(e, all)), far: all.filter((e) => far(e, all)) };
  }

  /* Whether an edge is one of very many at an end; the first out of a box and the last into it are drawn all the same. */
  function far(edge, all) {
    edge.far ??= ["from", "to"].some((end) => {
      const same = all.filter((other) => other[end] === edge[end]);
      return same.length > MOST_ENDS && edge !== (end === "from" ? same[0] : same[same.length - 1]);
    });
    return edge.far;
  }

  function openTo(model, open, node) {
    const wider = new Set(open);
    for (let g = node.group; g >= 0; g = model.groups[g].around) wider.add(g);
    return wider;
  }

  function inFloat8(node) {
    return (node.runs || "").endsWith(", float8");
  }

  /* Nodes in which every word of the query occurs; op:NAME, runs:PRECISION, why:NUMBER and is:changed are exact. */
  function find(model, query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const fits = (node, word) => {
      if (word.startsWith("op:")) return node.op.toLowerCase() === word.slice(3);
      if (word === "is:changed") return Boolean(node.before);
      if (word === "runs:float8") return inFloat8(node);
      if (word.startsWith("why:")) return String(node.why) === word.slice(4) && node.shade !== "low" && !node.passive;
      if (word.startsWith("runs:")) return node.shade === word.slice(5);
      return `${node.op || ""} ${node.name} ${node.module || ""}`.toLowerCase().includes(word);
    };
    return model.nodes.filter((node) => node.kind !== "removed" && words.every((word) => fits(node, word)));
  }

  return { build, closed, find, firstOpen, inFloat8, openTo, source, visible, SHADES };
})();

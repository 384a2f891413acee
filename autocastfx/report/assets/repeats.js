"use strict";
/* Folds layers that are equal, and follow each other, into one group. */
const Repeats = (() => {
  /* Put a group around each run of equal layers: modules whose names are numbers. */
  function fold(groups, nodes) {
    const inner = groups.map(() => []), own = groups.map(() => []);
    for (const group of groups) if (group.around >= 0) inner[group.around].push(group);
    for (const node of nodes) own[node.group].push(node);
    const names = new Set(nodes.map((node) => node.name)), signatures = new Map();
    const signature = (group) => {
      if (!signatures.has(group)) signatures.set(group, signatureOf(group, inner, own, nodes, names));
      return signatures.get(group);
    };
    for (const layers of inner.flatMap((children) => runs(children, inner, own, signature))) gather(groups, layers);
  }

  function runs(children, inner, own, signature) {
    const layers = children.filter((child) => /^\d+$/.test(child.name) && !child.runs && !isSmall(child, inner, own));
    layers.sort((a, b) => Number(a.name) - Number(b.name));
    const found = [];
    for (const layer of layers) {
      const run = found[found.length - 1], last = run && run[run.length - 1];
      if (last && Number(layer.name) === Number(last.name) + 1 && signature(layer) === signature(last)) run.push(layer);
      else found.push([layer]);
    }
    return found.filter((run) => run.length > 1);
  }

  /* True for a module that is drawn as the one operation that it computes. */
  function isSmall(group, inner, own) {
    return !inner[group.id].length && own[group.id].filter((node) => node.drawn && !node.aside).length < 2;
  }

  /* A text that is the same for groups of the same operations, dtypes, decisions and shapes, read in the same way. */
  function signatureOf(group, inner, own, nodes, names) {
    const members = [], places = new Map(), outside = new Map();
    const visit = (g, path) => {
      for (const node of own[g.id]) members.push([node, path]);
      for (const child of inner[g.id]) visit(child, `${path}.${child.name}`);
    };
    visit(group, "");
    members.sort(([a], [b]) => a.id - b.id);
    members.forEach(([node], i) => places.set(node.id, i));
    const read = (id) => {
      if (places.has(id)) return places.get(id);
      if (!outside.has(id)) outside.set(id, `x${outside.size}`);
      return outside.get(id);
    };
    const plain = (text) => text.replace(/[A-Za-z_]\w*/g, (word) => (names.has(word) ? "·" : word));
    return JSON.stringify(members.map(([n, path]) => [path, n.kind, n.held ? "" : n.op, n.dtype, n.runs, (n.float8 || [""])[0], n.category, n.source, n.reason, n.shape,
      n.saturates, n.before, (n.attributes || []).map((pair) => pair.map(plain)), n.reads.map(read)]));
  }

  function gather(groups, layers) {
    const [first, last] = [layers[0], layers[layers.length - 1]];
    const made = { id: groups.length, key: `g${groups.length}`, name: `${first.name} … ${last.name}`, around: first.around, layers: layers.length };
    groups.push(made);
    for (const layer of layers) layer.around = made.id;
  }

  return { fold };
})();

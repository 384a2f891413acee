"use strict";
/* Places boxes of measured sizes, and the lines between them: Graphviz does. */
const Layout = (() => {
  const HEADER = 24;
  const { brief, bytes, many, short, total } = Words, { BOLD, SMALL_BOLD, content, farLines, size, width } = Box;

  function mark(edge, options) {
    const casts = [...edge.casts];
    const moved = total(casts);
    if (casts.length === 1 && edge.values.size === 1) {
      return `◆ ${casts[0].dtype.split(" → ").map(short).join("→")} ${bytes(moved)}`;
    }
    if (casts.length) return `◆ ${many(casts.length, "cast")} ${bytes(moved)}`;
    if (edge.values.size > 1) return many(edge.values.size, "value");
    const [value] = edge.values; // a node that is drawn shows its shape itself
    return options.shapes && edge.from.inner && value.shape ? brief(value.shape) : "";
  }

  /* Places everything. Throws what Graphviz says where it fails. */
  function place(viz, model, open, options) {
    const scene = Model.visible(model, open, options);
    const looks = new Map(scene.boxes.map((item) => {
      const look = content(item, model, options);
      return [item.key, { ...look, lines: [...look.lines, ...farLines(item, scene.far)] }];
    }));
    const lines = ["digraph {", `graph [rankdir=${options.direction}]`, "graph [nodesep=0.28, ranksep=0.42, nslimit=4, nslimit1=4, mclimit=0.5]",
      "node [shape=box, fixedsize=true]", "edge [arrowsize=0.1]"];
    lines.push(...clusters(model, 0, groupBy(scene.boxes), looks, open, options));
    for (const edge of scene.edges) {
      const text = mark(edge, options);
      const room = text ? `label=<<table border="0" cellborder="0" cellpadding="0" cellspacing="0" fixedsize="true" ` +
        `width="${width(text, SMALL_BOLD) + 16}" height="20"><tr><td></td></tr></table>>` : "";
      const weight = edge.casts.size || edge.values.size > 1 ? 2 : 1;
      lines.push(`${edge.from.key} -> ${edge.to.key} [weight=${weight} ${room}]`);
    }
    lines.push("}");
    const placed = JSON.parse(viz.renderString(lines.join("\n"), { format: "json0" }));
    return { ...scene, looks, ...read(placed, scene, looks, options) };
  }

  function groupBy(boxes) {
    const found = new Map();
    for (const item of boxes) {
      const around = item.inner ? item.around : item.group;
      if (!found.has(around)) found.set(around, []);
      found.get(around).push(item);
    }
    return found;
  }

  function clusters(model, id, inside, looks, open, options) {
    const lines = (inside.get(id) || []).map((item) => {
      const [w, h] = size(looks.get(item.key));
      return `${item.key} [width=${w / 72}, height=${h / 72}]`;
    });
    for (const inner of model.groups[id].inner) {
      const group = model.groups[inner];
      if (!open.has(inner) && !group.single) continue;
      const part = clusters(model, inner, inside, looks, open, options);
      if (!part.length) continue;
      if (group.single && !options.weights && !options.integers) {
        lines.push(...part);
        continue;
      }
      const room = width(header(group), BOLD) + 12;
      lines.push(`subgraph cluster_g${inner} {`, `label=<<table border="0" fixedsize="true" width="${room}" height="${HEADER}">` +
        "<tr><td></td></tr></table>>", "margin=12", ...part, "}");
    }
    return lines;
  }

  function header(group) {
    return `${group.single ? "" : "▾ "}${brief(group.bundle || group.runs ? group.label : group.path)}`;
  }

  function read(placed, scene, looks, options) {
    const [, , across, up] = placed.bb.split(",").map(Number);
    const point = (text) => {
      const [x, y] = text.split(",").map(Number);
      return [x, up - y];
    };
    const places = new Map(), frames = [];
    for (const thing of placed.objects || []) {
      if (thing.bb && thing.name.startsWith("cluster_g")) {
        const [x1, y1, x2, y2] = thing.bb.split(",").map(Number);
        frames.push({ group: Number(thing.name.slice(9)), x: x1, y: up - y2, w: x2 - x1, h: y2 - y1 });
      } else if (looks.has(thing.name)) {
        const [[x, y], [w, h]] = [point(thing.pos), size(looks.get(thing.name))];
        places.set(thing.name, { x: x - w / 2, y: y - h / 2, w, h });
      }
    }
    const byEnds = new Map(scene.edges.map((edge) => [`${edge.from.key} ${edge.to.key}`, edge]));
    const names = (placed.objects || []).map((thing) => thing.name);
    const lines = (placed.edges || []).map((line) => {
      const edge = byEnds.get(`${names[line.tail]} ${names[line.head]}`);
      const parts = line.pos.split(" ");
      const end = parts.filter((p) => p.startsWith("e,")).map((p) => point(p.slice(2)))[0];
      const points = parts.filter((p) => !/^[es],/.test(p)).map(point);
      return { edge, points, end, label: line.lp ? point(line.lp) : null, text: mark(edge, options) };
    });
    return { across, down: up, places, frames, lines };
  }

  return { HEADER, header, place };
})();

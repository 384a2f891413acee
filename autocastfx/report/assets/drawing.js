"use strict";
/* Draws what is visible: Graphviz places boxes of measured sizes, and this page draws them in its own style. */
const Drawing = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const FONT = '13px system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';
  const BOLD = `600 ${FONT}`, SMALL = FONT.replace("13px", "11px"), SMALL_BOLD = `600 ${SMALL}`;
  const HEADER = 24, CHAR_LIMIT = 40;
  const pen = document.createElement("canvas").getContext("2d");
  const SHORT = { bfloat16: "bf16", float16: "f16", float32: "f32", float64: "f64" };

  function width(text, font) {
    pen.font = font;
    return Math.ceil(pen.measureText(text).width);
  }

  function short(dtype) {
    return SHORT[dtype] || dtype;
  }

  function brief(text) {
    return text.length > CHAR_LIMIT ? `${text.slice(0, CHAR_LIMIT / 2 - 1)}…${text.slice(1 - CHAR_LIMIT / 2)}` : text;
  }

  function bytes(count) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let size = count, unit = 0;
    while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
    return `${size < 10 && unit ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
  }

  function many(count, noun) {
    return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  }

  /* The word that carries the precision besides colour and outline. */
  function chip(node, low) {
    if (node.shade === "low") return short(low);
    if (node.shade === "float32") return "f32";
    if (node.shade === "mixed") return node.runs.replace("low", short(low)).replace(", stored low", `→${short(low)}`)
      .replace(", stored float32", "→f32").replace("float32", "f32");
    if (node.shade === "given") return "as given";
    const after = node.dtype.split(" → ").pop().split(",")[0];
    if (node.kind === "made") return "made";
    return after ? short(after) : node.kind === "op" ? "no tensor" : "";
  }

  function share(group, low) {
    const words = { low: short(low), float32: "f32", mixed: "mixed", given: "as given", other: "not floating" };
    return Model.SHADES.filter((s) => group.counts[s]).map((s) => `${group.counts[s]} ${words[s]}`).join(" · ");
  }

  function content(item, model, options) {
    const low = model.variant.low;
    if (item.inner) {
      const lines = [`${many(item.ops, "op")}${item.casts ? ` · ${many(item.casts, "cast")}` : ""}`, share(item, low)];
      if (options.numerics && item.error !== undefined) lines.push(`largest error ${number(item.error)}`);
      return { title: `▸ ${brief(item.label)}`, chip: "", lines: lines.filter(Boolean), bar: item.ops > 0 };
    }
    const op = ["op", "made", "removed"].includes(item.kind) ? item.op : item.kind === "copy" ? "working copy" : item.kind;
    const lines = [brief(item.held && item.op ? item.op : item.stands ? `${item.stands} · ${item.name}` : item.name)];
    if (item.heldCasts.length && !options.weights) lines.push(`◆ ${many(item.heldCasts.length, "weight cast")}`);
    if (options.numerics && item.numerics) lines.push(`error ${number(item.numerics.error)}`);
    return { title: brief(op), chip: chip(item, low), lines };
  }

  /* Of lines that are drawn when their box is selected. */
  function farLines(item, far) {
    const into = far.filter((edge) => edge.to === item), out = far.filter((edge) => edge.from === item);
    const casts = new Set(into.flatMap((edge) => [...edge.casts])).size, lines = [];
    const name = (end) => brief(end.inner ? end.label : end.name);
    if (into.length) lines.push(`${casts ? `◆ ${many(casts, "cast")} ` : ""}← ${into.length > 1 ? `${into.length} boxes` : name(into[0].from)}`);
    if (out.length) lines.push(`→ ${out.length > 1 ? `${out.length} more boxes` : name(out[0].to)}`);
    return lines;
  }

  function number(value) {
    const plain = Number(value);
    return Number.isFinite(plain) ? (plain === 0 ? "0" : plain.toExponential(1)) : plain > 0 ? "∞" : "NaN";
  }

  function size(box) {
    const title = width(box.title, BOLD) + (box.chip ? width(box.chip, SMALL_BOLD) + 26 : 0);
    const inner = Math.max(title, ...box.lines.map((line) => width(line, line.startsWith("◆") ? SMALL_BOLD : SMALL)));
    return [Math.max(inner + 24, 96), 32 + 15 * box.lines.length + (box.bar ? 10 : 0)];
  }

  function mark(edge) {
    const casts = [...edge.casts];
    const moved = casts.reduce((sum, cast) => sum + (cast.bytes || 0), 0);
    if (casts.length === 1 && edge.values.size === 1) {
      return `◆ ${casts[0].dtype.split(" → ").map(short).join("→")} ${bytes(moved)}`;
    }
    if (casts.length) return `◆ ${many(casts.length, "cast")} ${bytes(moved)}`;
    return edge.values.size > 1 ? many(edge.values.size, "value") : "";
  }

  /* Places everything. Throws what Graphviz says where it fails. */
  function place(viz, model, open, options) {
    const scene = Model.visible(model, open, options);
    const looks = new Map(scene.boxes.map((item) => {
      const look = content(item, model, options);
      return [item.key, { ...look, lines: [...look.lines, ...farLines(item, scene.far)] }];
    }));
    const lines = ["digraph {", "graph [nodesep=0.28, ranksep=0.42, nslimit=4, nslimit1=4, mclimit=0.5]",
      "node [shape=box, fixedsize=true]", "edge [arrowsize=0.1]"];
    lines.push(...clusters(model, 0, groupBy(scene.boxes), looks, open, options));
    for (const edge of scene.edges) {
      const text = mark(edge);
      const room = text ? `label=<<table border="0" cellborder="0" cellpadding="0" cellspacing="0" fixedsize="true" ` +
        `width="${width(text, SMALL_BOLD) + 16}" height="20"><tr><td></td></tr></table>>` : "";
      const weight = edge.casts.size || edge.values.size > 1 ? 2 : 1;
      lines.push(`${edge.from.key} -> ${edge.to.key} [weight=${weight} ${room}]`);
    }
    lines.push("}");
    const placed = JSON.parse(viz.renderString(lines.join("\n"), { format: "json0" }));
    return { ...scene, looks, ...read(placed, scene, looks) };
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
      if (group.single && !options.weights) {
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

  function read(placed, scene, looks) {
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
      return { edge, points, end, label: line.lp ? point(line.lp) : null, text: mark(edge) };
    });
    return { across, down: up, places, frames, lines };
  }

  function el(tag, attributes, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function text(said, x, y, kind) {
    return el("text", { x, y, class: kind }, said);
  }

  /* An SVG group of the scene; every part that can be activated carries data-key. */
  function draw(scene, model, options) {
    const root = el("g", {});
    for (const frame of scene.frames) {
      root.append(el("rect", { class: "frame", x: frame.x, y: frame.y, width: frame.w, height: frame.h, rx: 8 }));
    }
    for (const line of scene.lines) root.append(drawLine(line));
    for (const frame of scene.frames) root.append(drawHeader(frame, model.groups[frame.group]));
    for (const line of scene.lines) if (line.label) root.append(drawMark(line));
    for (const item of scene.boxes) root.append(drawBox(item, scene.places.get(item.key), scene.looks.get(item.key), model, options));
    return root;
  }

  function drawHeader(frame, group) {
    const name = header(group);
    if (group.single) return text(name, frame.x + 12, frame.y + 22, "title");
    return el("g", { class: "header", "data-key": `f${group.id}`, role: "button", tabindex: -1, "aria-expanded": "true",
      "aria-label": `module ${group.path}, open; activate to close` },
      el("rect", { x: frame.x + 5, y: frame.y + 5, width: width(name, BOLD) + 14, height: HEADER, rx: 5 }),
      text(name, frame.x + 12, frame.y + 22, "title"));
  }

  function drawLine(line) {
    const [first, ...rest] = line.points;
    let path = `M${first}`;
    for (let i = 0; i + 2 < rest.length; i += 3) path += `C${rest[i]} ${rest[i + 1]} ${rest[i + 2]}`;
    const made = el("g", { class: line.edge.casts.size ? "edge cast" : "edge", "data-edge": line.edge.key },
      el("path", { class: "line", d: path }), el("path", { class: "near", d: path, "data-key": line.edge.key }));
    if (line.end) made.append(arrow(rest[rest.length - 1] || first, line.end));
    return made;
  }

  function arrow([x1, y1], [x2, y2]) {
    const angle = Math.atan2(y2 - y1, x2 - x1), at = (turn) => [x2 - 8 * Math.cos(angle + turn), y2 - 8 * Math.sin(angle + turn)];
    return el("path", { class: "arrow", d: `M${x2},${y2}L${at(0.42)}L${at(-0.42)}Z` });
  }

  function drawMark(line) {
    const w = width(line.text, SMALL_BOLD) + 14, [x, y] = line.label, casts = [...line.edge.casts];
    const about = `${line.text.replace("◆ ", "cast ")}, from ${spoken(line.edge.from)} to ${spoken(line.edge.to)}`;
    return el("g", { class: casts.length ? "mark cast" : "mark", "data-key": line.edge.key, role: "button", tabindex: -1, "aria-label": about },
      el("rect", { x: x - w / 2, y: y - 9, width: w, height: 18, rx: 9 }), text(line.text, x, y + 4, "small middle"));
  }

  function spoken(item) {
    return item.inner ? `module ${item.path || "(root)"}` : item.name;
  }

  function drawBox(item, at, look, model, options) {
    const { x, y, w, h } = at, isGroup = Boolean(item.inner);
    const said = isGroup ? `module ${item.path || "(root)"}, closed: ${look.lines.join(", ")}; activate to open`
      : `${look.title} ${item.name}${item.runs ? `, runs ${item.runs}` : ""}${item.dtype ? `, ${item.dtype}` : ""}`;
    const state = isGroup ? { "aria-expanded": "false" } : { "aria-pressed": "false" };
    const made = el("g", { class: `box ${isGroup ? "group" : `node ${item.shade || item.kind}`}`, "data-key": item.key, role: "button",
      tabindex: -1, "aria-label": said, ...state });
    if (isGroup) made.append(el("rect", { class: "behind", x: x + 4, y: y + 4, width: w, height: h, rx: 6 }));
    made.append(el("rect", { class: "area", x, y, width: w, height: h, rx: corner(item) }));
    if (item.shade === "float32" || item.shade === "mixed") {
      made.append(el("rect", { class: "inner", x: x + 3, y: y + 3, width: w - 6, height: h - 6, rx: Math.max(corner(item) - 3, 0) }));
    }
    made.append(text(look.title, x + 12, y + 20, "title"));
    if (look.chip) {
      const cw = width(look.chip, SMALL_BOLD) + 12;
      made.append(el("rect", { class: "chip", x: x + w - cw - 9, y: y + 7, width: cw, height: 17, rx: 3 }),
        text(look.chip, x + w - 9 - cw / 2, y + 19.5, "small middle chiptext"));
    }
    look.lines.forEach((line, i) => made.append(text(line, x + 12, y + 37 + 15 * i, line.startsWith("◆") ? "small castword" : "small")));
    if (look.bar) made.append(...bar(item, x + 12, y + h - 13, w - 24));
    made.append(el("title", {}, isGroup ? item.path : `${item.name}\n${item.module || "(root)"}\n${item.dtype || ""}`));
    return made;
  }

  function corner(item) {
    if (item.inner) return 6;
    return { low: 12, mixed: 12, float32: 0 }[item.shade] ?? 3;
  }

  function bar(group, x, y, w) {
    let at = x;
    return Model.SHADES.filter((s) => group.counts[s]).map((shade) => {
      const part = (w * group.counts[shade]) / group.ops;
      const made = el("rect", { class: `bar ${shade}`, x: at, y, width: Math.max(part - 1, 1), height: 5 });
      at += part;
      return made;
    });
  }

  /* A line straight from box to box. */
  function straight(a, b, isCast) {
    const down = b.y > a.y + a.h, from = [a.x + a.w / 2, down ? a.y + a.h : a.y], to = [b.x + b.w / 2, down ? b.y : b.y + b.h];
    const bend = (to[1] - from[1]) / 3;
    const d = `M${from}C${from[0]},${from[1] + bend} ${to[0]},${to[1] - bend} ${to}`;
    return el("g", { class: isCast ? "edge cast over" : "edge over" }, el("path", { class: "line", d }), arrow([to[0], to[1] - bend], to));
  }

  return { place, draw, straight, bytes, many, number, short, chip };
})();

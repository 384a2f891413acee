"use strict";
/* Draws a scene that was laid out, in this page's own style. */
const Drawing = (() => {
  const MOST_TOLD = 6;
  const { BOLD, SMALL_BOLD, el, text, width } = Box, { HEADER, header } = Layout;

  /* An SVG group of the scene; every part that can be activated carries data-key. */
  function draw(scene, model, options) {
    const heat = options.colour === "precision" ? null : Heat.by(options.colour, model);
    const root = el("g", {});
    for (const frame of scene.frames) {
      root.append(el("rect", { class: "frame", x: frame.x, y: frame.y, width: frame.w, height: frame.h, rx: 8 }));
    }
    for (const line of scene.lines) root.append(drawLine(line));
    for (const frame of scene.frames) root.append(drawHeader(frame, model.groups[frame.group]));
    for (const line of scene.lines) if (line.label) root.append(drawMark(line));
    for (const item of scene.boxes) root.append(Box.draw(item, scene.places.get(item.key), scene.looks.get(item.key), heat, options.changes && !(item.before || item.differ)));
    return root;
  }

  function drawHeader(frame, group) {
    const name = header(group);
    if (group.single) return text(name, frame.x + 12, frame.y + 22, "title");
    return el("g", { class: "header", "data-key": `f${group.id}`, role: "button", tabindex: -1, "aria-expanded": "true",
      "aria-label": `${group.layers ? `${group.layers} equal layers` : "module"} ${group.path}, open; activate to close` },
      el("rect", { x: frame.x + 5, y: frame.y + 5, width: width(name, BOLD) + 14, height: HEADER, rx: 5 }),
      text(name, frame.x + 12, frame.y + 22, "title"));
  }

  function drawLine(line) {
    const [first, ...rest] = line.points;
    let path = `M${first}`;
    for (let i = 0; i + 2 < rest.length; i += 3) path += `C${rest[i]} ${rest[i + 1]} ${rest[i + 2]}`;
    const made = el("g", { class: line.edge.casts.size ? "edge cast" : "edge", "data-edge": line.edge.key },
      el("path", { class: "line", d: path }), el("path", { class: "near", d: path, "data-key": line.edge.key }, el("title", {}, told(line.edge))));
    if (line.end) made.append(arrow(rest[rest.length - 1] || first, line.end));
    return made;
  }

  /* Dtypes, shapes and bytes of what goes along. */
  function told(edge) {
    const values = [...edge.values], shown = values.slice(0, MOST_TOLD);
    const lines = shown.map((n) => [n.held ? n.op : n.name, n.dtype, n.shape, n.size ? Words.bytes(n.size) : ""].filter(Boolean).join(" "));
    return [...lines, ...(values.length > shown.length ? [`and ${values.length - shown.length} more`] : [])].join("\n");
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

  /* A line straight from box to box. */
  function straight(a, b, isCast, direction) {
    if (direction === "LR") {
      const right = b.x > a.x + a.w, from = [right ? a.x + a.w : a.x, a.y + a.h / 2], to = [right ? b.x : b.x + b.w, b.y + b.h / 2];
      const bend = (to[0] - from[0]) / 3;
      return over(from, [from[0] + bend, from[1]], [to[0] - bend, to[1]], to, isCast);
    }
    const down = b.y > a.y + a.h, from = [a.x + a.w / 2, down ? a.y + a.h : a.y], to = [b.x + b.w / 2, down ? b.y : b.y + b.h];
    const bend = (to[1] - from[1]) / 3;
    return over(from, [from[0], from[1] + bend], [to[0], to[1] - bend], to, isCast);
  }

  function over(from, near, far, to, isCast) {
    const d = `M${from}C${near} ${far} ${to}`;
    return el("g", { class: isCast ? "edge cast over" : "edge over" }, el("path", { class: "line", d }), arrow(far, to));
  }

  return { draw, straight };
})();

"use strict";
/* Boxes: what stands in them, how large they are, and how they are drawn. */
const Box = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const FONT = '13px system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';
  const BOLD = `600 ${FONT}`, SMALL = FONT.replace("13px", "11px"), SMALL_BOLD = `600 ${SMALL}`;
  const { brief, bytes, many, number, percent, short, value } = Words;
  const STRONG = { "◆": "small castword", "Δ": "small changeword" };
  const pen = document.createElement("canvas").getContext("2d");

  function width(text, font) {
    pen.font = font;
    return Math.ceil(pen.measureText(text).width);
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
    return Model.SHADES.filter((s) => group.counts[s]).map((s) => `${group.counts[s].toLocaleString("en")} ${words[s]}`).join(" · ");
  }

  function content(item, model, options) {
    const low = model.variant.low;
    if (item.inner) {
      const each = item.layers ? [`${item.layers} equal layers`] : [];
      const lines = [`${many(item.ops, "op")}${item.casts ? ` · ${many(item.casts, "cast")}` : ""}`, share(item, low), ...each];
      if (item.differ) lines.push(`Δ ${many(item.differ, "node")} changed`);
      if (options.colour === "bytes" && item.size) lines.push(`largest value ${bytes(item.size)}`);
      if (options.colour === "predicted" && item.predicted !== undefined) lines.push(`predicted error ${number(item.predicted)}`);
      if (options.colour === "kept" && item.kept !== undefined) lines.push(`keeps ${bytes(item.kept)}`);
      if (options.numerics && item.lost) lines.push("Inf or NaN inside");
      else if (options.numerics && item.error !== undefined) lines.push(`largest error ${number(item.error)}`);
      return { title: `▸ ${brief(item.label)}`, chip: "", lines: lines.filter(Boolean), bar: item.ops > 0 };
    }
    const op = ["op", "made", "removed"].includes(item.kind) ? item.op : item.kind === "copy" ? "working copy" : item.kind;
    const lines = [brief(item.held && item.op ? item.op : item.stands ? `${item.stands} · ${item.name}` : item.name)];
    if (item.before) lines.push(changed(item));
    if (options.shapes && item.shape) lines.push(`${brief(item.shape)} ${bytes(item.size || 0)}`);
    if (item.heldCasts.length && !options.weights) lines.push(`◆ ${many(item.heldCasts.length, "weight cast")}`);
    if (options.colour === "predicted" && item.predicted !== undefined) lines.push(`predicted error ${number(item.predicted)}`);
    if (options.colour === "kept" && item.kept !== undefined) lines.push(`keeps ${bytes(item.kept)}`);
    if (options.numerics && item.numerics) {
      const { error, overflow, nan } = item.numerics; // the error is of the rest
      lines.push(item.lost ? `Inf or NaN: ${percent(Math.max(value(overflow), value(nan)))}` : `error ${number(error)}`);
    }
    return { title: brief(op), chip: chip(item, low), lines };
  }

  /* How another plan decides the node. */
  function changed(node) {
    if (node.before.added) return "Δ only in this plan";
    return node.before.moved ? `Δ ${node.before.runs} → ${node.runs}` : "Δ another reason";
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

  function size(box) {
    const title = width(box.title, BOLD) + (box.chip ? width(box.chip, SMALL_BOLD) + 26 : 0);
    const inner = Math.max(title, ...box.lines.map((line) => width(line, /^[◆Δ]/.test(line) ? SMALL_BOLD : SMALL)));
    return [Math.max(inner + 24, 96), 32 + 15 * box.lines.length + (box.bar ? 10 : 0)];
  }

  function draw(item, at, look, heat, faded) {
    const { x, y, w, h } = at, isGroup = Boolean(item.inner);
    const what = item.layers ? `${item.layers} equal layers` : "module";
    const said = isGroup ? `${what} ${item.path || "(root)"}, closed: ${look.lines.join(", ")}; activate to open`
      : `${look.title} ${item.name}${item.runs ? `, runs ${item.runs}` : ""}${item.dtype ? `, ${item.dtype}` : ""}${item.shape ? `, ${item.shape}` : ""}`;
    const state = isGroup ? { "aria-expanded": "false" } : { "aria-pressed": "false" };
    const made = el("g", { class: `box ${isGroup ? "group" : `node ${item.shade || item.kind}`}${item.lost ? " lost" : heat ? ` ${heat.of(item)}` : ""}${faded ? " faded" : ""}`, "data-key": item.key, role: "button",
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
    look.lines.forEach((line, i) => made.append(text(line, x + 12, y + 37 + 15 * i, STRONG[line[0]] || "small")));
    if (look.bar) made.append(...bar(item, x + 12, y + h - 13, w - 24));
    made.append(el("title", {}, isGroup ? item.path : [item.name, item.module || "(root)", item.dtype, item.shape].filter(Boolean).join("\n")));
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

  return { BOLD, SMALL_BOLD, content, corner, draw, el, farLines, size, text, width };
})();

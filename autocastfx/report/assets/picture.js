"use strict";
/* The drawing as a picture of its own, SVG or PNG, in the colours that are shown. */
const Picture = (() => {
  const { el } = Box;
  const MARGIN = 16, SHARP = 2, MOST_ACROSS = 8000, MOST_PIXELS = 100e6; // what browsers draw on a canvas

  /* The text of an SVG file that needs nothing else. */
  function svg(view, scene) {
    const [w, h] = [scene.across + 2 * MARGIN, scene.down + 2 * MARGIN].map(Math.ceil);
    const drawn = view.cloneNode(true);
    drawn.setAttribute("transform", `translate(${MARGIN} ${MARGIN})`);
    for (const near of drawn.querySelectorAll(".near")) near.remove();
    for (const one of drawn.querySelectorAll("*")) for (const name of ["role", "tabindex", "aria-expanded", "aria-pressed"]) one.removeAttribute(name);
    const ground = el("rect", { class: "ground", width: w, height: h });
    const root = el("svg", { width: w, height: h, viewBox: `0 0 ${w} ${h}` }, el("style", {}, rules()), ground, drawn);
    return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(root)}\n`;
  }

  /* The page's rules for what is drawn, with the colours of now in place of their names. */
  function rules() {
    const probe = document.body.appendChild(document.createElement("i")), known = new Map();
    const colour = (name) => {
      if (!known.has(name)) {
        probe.style.color = `var(${name})`;
        known.set(name, getComputedStyle(probe).color);
      }
      return known.get(name);
    };
    const all = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
    const own = all.filter((rule) => rule.selectorText?.startsWith("svg ") && !/:hover|:focus/.test(rule.selectorText)).map((rule) => rule.cssText);
    const text = [...own, ".ground { fill: var(--stage); }"].join("\n").replace(/var\((--[\w-]+)\)/g, (_, name) => colour(name));
    probe.remove();
    return text;
  }

  /* A promise of a PNG file. */
  async function png(view, scene) {
    const image = new Image(), [w, h] = [scene.across + 2 * MARGIN, scene.down + 2 * MARGIN].map(Math.ceil);
    const scale = Math.min(SHARP, MOST_ACROSS / w, MOST_ACROSS / h, Math.sqrt(MOST_PIXELS / (w * h)));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg(view, scene))}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [Math.ceil(w * scale), Math.ceil(h * scale)];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((resolve, reject) => canvas.toBlob((made) => (made ? resolve(made) : reject(new Error("the drawing is too large"))), "image/png"));
  }

  /* Hand a file to the person, as a download. */
  function save(name, parts, type) {
    const url = URL.createObjectURL(new Blob([parts], { type })), link = document.createElement("a");
    [link.href, link.download] = [url, name];
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  return { png, save, svg };
})();

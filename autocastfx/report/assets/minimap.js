"use strict";
/* A small map of the whole drawing: what is seen of it is framed, and a click or a drag goes there. */
const Minimap = (() => {
  const WIDE = 180, HIGH = 110;
  const { el } = Box;

  function of(map, port) {
    let scale = 1, seen = null;

    /* Show a scene. */
    function update(scene, model, options) {
      scale = Math.min(WIDE / scene.across, HIGH / scene.down);
      map.setAttribute("viewBox", `0 0 ${scene.across} ${scene.down}`);
      map.setAttribute("width", Math.max(scene.across * scale, 12));
      map.setAttribute("height", Math.max(scene.down * scale, 12));
      const heat = options.colour === "precision" ? null : Heat.by(options.colour, model);
      const frames = scene.frames.map((f) => el("rect", { class: "spot frame", x: f.x, y: f.y, width: f.w, height: f.h }));
      const boxes = scene.boxes.map((item) => {
        const at = scene.places.get(item.key), shade = item.inner ? "group" : item.shade || item.kind;
        return el("rect", { class: `spot ${heat ? heat.of(item) : shade}`, x: at.x, y: at.y, width: at.w, height: at.h });
      });
      seen = el("rect", { class: "seen", "stroke-width": 2 / scale });
      map.replaceChildren(...frames, ...boxes, seen);
      follow();
    }

    /* Frame what is seen; where that is all, the map is not needed. */
    function follow() {
      if (!seen) return;
      const { x, y, w, h } = port.seen(), [, , across, down] = map.getAttribute("viewBox").split(" ").map(Number);
      const [left, top, line] = [Math.max(x, 0), Math.max(y, 0), 1 / scale];
      const [right, bottom] = [Math.min(x + w, across), Math.min(y + h, down)];
      const framed = { x: left + line, y: top + line, width: Math.max(right - left - 2 * line, 0), height: Math.max(bottom - top - 2 * line, 0) };
      for (const [name, value] of Object.entries(framed)) seen.setAttribute(name, value);
      map.toggleAttribute("hidden", x <= 0 && y <= 0 && x + w >= across && y + h >= down);
    }

    function go(event) {
      const box = map.getBoundingClientRect();
      port.centre((event.clientX - box.left) / scale, (event.clientY - box.top) / scale);
    }

    map.addEventListener("pointerdown", (event) => {
      map.setPointerCapture(event.pointerId);
      go(event);
    });
    map.addEventListener("pointermove", (event) => {
      if (map.hasPointerCapture(event.pointerId)) go(event);
    });
    port.listen(follow);
    return { update };
  }

  return { of };
})();

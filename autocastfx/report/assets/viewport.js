"use strict";
/* Which part of the drawing is seen, and how large: dragging, wheel, zoom. */
const Viewport = (() => {
  const EDGE = 40, MARGIN = 16, READABLE = 0.85, LEGIBLE = 0.8, SMALLEST = 0.5, LARGEST = 1.2;

  function of(frame, view) {
    let x = 0, y = 0, zoom = 1, drag = null;

    const listeners = [];
    const move = () => {
      view.setAttribute("transform", `translate(${x} ${y}) scale(${zoom})`);
      for (const told of listeners) told();
    };

    function room() {
      const box = frame.getBoundingClientRect();
      return [box.width, box.height];
    }

    /* How large a scene is where all of it is shown. */
    function scaleOf(scene) {
      const [w, h] = room();
      return Math.min((w - 2 * MARGIN) / scene.across, (h - 2 * MARGIN) / scene.down, LARGEST);
    }

    /* Show a scene: all of it, or from its beginning as large as can be read. */
    function fit(scene, whole, direction) {
      if (!scene) return;
      const [w, h] = room(), across = (w - 2 * MARGIN) / scene.across, down = (h - 2 * MARGIN) / scene.down, all = scaleOf(scene);
      zoom = whole || all >= LEGIBLE ? all : Math.max(all, Math.min(direction === "LR" ? down : across, 1), SMALLEST);
      x = Math.max((w - scene.across * zoom) / 2, MARGIN);
      y = Math.max((h - scene.down * zoom) / 2, MARGIN);
      move();
    }

    function zoomBy(factor, at) {
      const [w, h] = room(), [px, py] = at || [w / 2, h / 2];
      const next = Math.min(3, Math.max(0.05, zoom * factor)), ratio = next / zoom;
      [x, y, zoom] = [px - (px - x) * ratio, py - (py - y) * ratio, next];
      move();
    }

    /* The part of the drawing that is seen. */
    function seen() {
      const [w, h] = room();
      return { x: -x / zoom, y: -y / zoom, w: w / zoom, h: h / zoom };
    }

    /* Bring a point of the drawing into the middle. */
    function centre(px, py) {
      const [w, h] = room();
      [x, y] = [w / 2 - px * zoom, h / 2 - py * zoom];
      move();
    }

    /* Call a function after each move. */
    function listen(told) {
      listeners.push(told);
    }

    /* Move by a distance of the drawing. */
    function shift(dx, dy) {
      [x, y] = [x + dx * zoom, y + dy * zoom];
      move();
    }

    /* Bring a place into view; with `centre`, into the middle of it and large enough to read. */
    function reveal(place, centre) {
      if (!place) return;
      if (centre && zoom < 0.6) zoom = READABLE;
      const [w, h] = room(), left = x + place.x * zoom, top = y + place.y * zoom, wide = place.w * zoom, high = place.h * zoom;
      if (centre) [x, y] = [x + w / 2 - left - wide / 2, y + h / 2 - top - high / 2];
      else {
        x += Math.max(EDGE - left, 0) + Math.min(w - EDGE - left - wide, 0);
        y += Math.max(EDGE - top, 0) + Math.min(h - EDGE - top - high, 0);
      }
      move();
    }

    frame.addEventListener("pointerdown", (event) => {
      if (event.button === 0) drag = { x: event.clientX, y: event.clientY, moved: false };
    });
    window.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      drag = { x: event.clientX, y: event.clientY, moved: true };
      [x, y] = [x + dx, y + dy];
      frame.classList.add("dragged");
      move();
    });
    window.addEventListener("pointerup", () => {
      const moved = drag?.moved;
      drag = null;
      if (moved) setTimeout(() => frame.classList.remove("dragged"), 0); // after the click that ends a drag
    });
    frame.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = frame.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) zoomBy(Math.exp(-event.deltaY / 300), [event.clientX - box.left, event.clientY - box.top]);
      else {
        [x, y] = [x - event.deltaX, y - event.deltaY];
        move();
      }
    }, { passive: false });

    new ResizeObserver(() => move()).observe(frame);
    return { centre, fit, listen, reveal, scaleOf, seen, shift, zoomBy };
  }

  return { of, LEGIBLE };
})();

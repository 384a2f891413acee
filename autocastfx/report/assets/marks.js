"use strict";
/* Marks in the drawing what is selected, and the lines that begin or end there. */
const Marks = (() => {
  function show(view, scene, key, chosen, direction) {
    const part = (one) => view.querySelector(`[data-key="${one}"]`);
    for (const old of view.querySelectorAll(".selected, .beside")) {
      old.classList.remove("selected", "beside");
      if (old.hasAttribute("aria-pressed")) old.setAttribute("aria-pressed", "false");
    }
    for (const old of view.querySelectorAll(".over")) old.remove();
    if (!chosen) return;
    const edges = new Map(scene.edges.map((edge) => [edge.key, edge]));
    const cast = chosen.kind === "cast" ? chosen : null;
    for (const line of scene.lines) {
      const near = cast ? line.edge.casts.has(cast) : line.edge.key === key || line.edge.from.key === key || line.edge.to.key === key;
      if (near) view.querySelector(`[data-edge="${line.edge.key}"]`).classList.add(cast || line.edge.key === key ? "selected" : "beside");
      if (near && (cast || line.edge.key === key)) part(line.edge.key).closest(".mark")?.classList.add("selected");
    }
    for (const one of view.querySelectorAll(`.mark`)) {
      const edge = edges.get(one.dataset.key);
      if (edge && (edge.key === key || (cast && edge.casts.has(cast)))) one.classList.add("selected");
    }
    for (const edge of scene.far) {
      const ends = [edge.from, edge.to].map((end) => scene.places.get(end.key));
      if (cast ? edge.casts.has(cast) : edge.from.key === key || edge.to.key === key) {
        view.firstChild.append(Drawing.straight(...ends, edge.casts.size > 0, direction));
      }
    }
    const box = part(key);
    if (!box) return;
    box.classList.add("selected");
    if (box.hasAttribute("aria-pressed")) box.setAttribute("aria-pressed", "true");
  }

  return { show };
})();

"use strict";
/* Colours of boxes by a number: the error of a value, or its bytes. A closed module has that of its largest. */
const Heat = (() => {
  const LEVELS = 5;
  const DECADES = [1e-4, 1e-3, 1e-2, 1e-1]; // between the levels of errors
  const { bytes } = Words;

  /* {of(item), legend}: the class of a box, and [class, words] for each. */
  function by(what, model) {
    return what === "error" ? byError() : byBytes(model);
  }

  function byError() {
    const words = ["0.01 %", "0.1 %", "1 %", "10 %"].map((share) => `error to ${share}`);
    const legend = [...words, "larger", "Inf or NaN"].map((said, i) => [i < LEVELS ? `heat${i}` : "lost", said]);
    const of = (item) => (item.lost ? "lost" : item.error === undefined ? "unknown" : `heat${level(item.error, DECADES)}`);
    return { of, legend: [...legend, ["unknown", "not compared"]] };
  }

  function byBytes(model) {
    const sizes = model.nodes.filter((n) => n.drawn && !n.held && n.size).map((n) => n.size);
    const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
    const bounds = sizes.length ? [1, 2, 3, 4].map((i) => least * (most / least) ** (i / LEVELS)) : [];
    const legend = [...new Set(bounds)].map((bound, i) => [`heat${i}`, `to ${bytes(bound)}`]);
    if (sizes.length) legend.push([`heat${LEVELS - 1}`, `to ${bytes(most)}`]);
    const of = (item) => (item.size ? `heat${level(item.size, bounds)}` : "unknown");
    return { of, legend: [...legend, ["unknown", "not known"]] };
  }

  function level(value, bounds) {
    return bounds.filter((bound) => value > bound).length;
  }

  return { by };
})();

"use strict";
/* Colours of boxes by a number: the error of a value, the predicted error, or bytes. A closed module has that of its largest;
   its predicted error, and the bytes that it keeps for backward, are of all inside. */
const Heat = (() => {
  const LEVELS = 5;
  const DECADES = [1e-4, 1e-3, 1e-2, 1e-1]; // between the levels of errors
  const { bytes, number } = Words;

  /* {of(item), legend}: the class of a box, and [class, words] for each. */
  function by(what, model) {
    if (what === "error") return byError();
    if (what === "predicted") return spread(model, (item) => item.predicted, number, "none predicted");
    if (what === "kept") return spread(model, (item) => item.kept, bytes, "nothing kept");
    return spread(model, (item) => (item.held ? 0 : item.size), bytes, "not known");
  }

  function byError() {
    const words = ["0.01 %", "0.1 %", "1 %", "10 %"].map((share) => `error to ${share}`);
    const legend = [...words, "larger", "Inf or NaN"].map((said, i) => [i < LEVELS ? `heat${i}` : "lost", said]);
    const of = (item) => (item.lost ? "lost" : item.error === undefined ? "unknown" : `heat${level(item.error, DECADES)}`);
    return { of, legend: [...legend, ["unknown", "not compared"]] };
  }

  /* Levels of equal ratios between the least and the largest number of a node. */
  function spread(model, numberOf, words, without) {
    const numbers = model.nodes.filter((n) => n.drawn && numberOf(n)).map(numberOf);
    const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
    const bounds = numbers.length ? [1, 2, 3, 4].map((i) => least * (most / least) ** (i / LEVELS)) : [];
    const legend = [...new Set(bounds)].map((bound, i) => [`heat${i}`, `to ${words(bound)}`]);
    if (numbers.length) legend.push([`heat${LEVELS - 1}`, `to ${words(most)}`]);
    const of = (item) => (numberOf(item) ? `heat${level(numberOf(item), bounds)}` : "unknown");
    return { of, legend: [...legend, ["unknown", without]] };
  }

  function level(value, bounds) {
    return bounds.filter((bound) => value > bound).length;
  }

  return { by };
})();

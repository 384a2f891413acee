"use strict";
/* Numbers and names in words. */
const Words = (() => {
  const LONGEST = 40;
  const SHORT = { bfloat16: "bf16", float16: "f16", float32: "f32", float64: "f64" };

  function short(dtype) {
    return SHORT[dtype] || dtype;
  }

  function brief(text, longest = LONGEST) {
    return text.length > longest ? `${text.slice(0, longest / 2 - 1)}…${text.slice(1 - longest / 2)}` : text;
  }

  function bytes(count) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let size = count, unit = 0;
    while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
    return `${size < 10 && unit ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
  }

  /* The bytes that casts move together. */
  function total(casts) {
    return casts.reduce((sum, cast) => sum + (cast.bytes || 0), 0);
  }

  function many(count, noun) {
    return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  }

  /* What the data says of a number: JSON has neither infinity nor NaN. */
  function value(said) {
    return said === "inf" ? Infinity : Number(said);
  }

  function number(said) {
    const plain = value(said);
    return Number.isFinite(plain) ? (plain === 0 ? "0" : plain.toExponential(1)) : plain > 0 ? "∞" : "NaN";
  }

  function percent(share) {
    const plain = value(share);
    if (!plain) return "none";
    return plain < 0.0001 ? "< 0.01 %" : `${(100 * plain).toFixed(2)} %`;
  }

  return { brief, bytes, many, number, percent, short, total, value };
})();

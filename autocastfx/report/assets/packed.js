"use strict";
/* The nodes of the page's data, which report/packed.py writes by columns. */
const Packed = (() => {
  const OWN = { name: "\x01", module: "\x02" };

  function filled(value, node) {
    if (typeof value === "string") {
      let text = value;
      for (const [key, sign] of Object.entries(OWN)) text = text.split(sign).join(node[key]);
      return text;
    }
    if (Array.isArray(value)) return value.map((one) => filled(one, node));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, filled(one, node)]));
  }

  function nodes({ count, columns }) {
    const rows = Array.from({ length: count }, () => ({}));
    for (const own of [true, false])
      for (const [key, { of, at }] of Object.entries(columns))
        if (key in OWN === own)
          at.split(" ").forEach((number, row) => {
            if (number !== "") rows[row][key] = own ? of[number] : filled(of[number], rows[row]);
          });
    return rows;
  }

  function read(text) {
    const data = JSON.parse(text);
    for (const variant of data.variants) variant.nodes = nodes(variant.nodes);
    return data;
  }

  return { read };
})();

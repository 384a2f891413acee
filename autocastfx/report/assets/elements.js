"use strict";
/* Elements of the panel: links, facts, tables, and a button that copies. Text goes in as text, never as HTML. */
const Elements = (() => {
  const MOST_ROWS = 200;

  function h(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key === "on") made.addEventListener("click", value);
      else if (value !== undefined && value !== null) made.setAttribute(key, value);
    }
    made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
    return made;
  }

  function link(node, go, said) {
    return h("button", { type: "button", class: "link", on: () => go(node) }, breakable(said || (node.held && node.op) || node.name));
  }

  /* A name that may go on in the next line after a dot, a slash or an underscore. */
  function breakable(name) {
    return name.split(/(?<=[._/])/).flatMap((piece, i) => (i ? [document.createElement("wbr"), piece] : [piece]));
  }

  function facts(pairs) {
    const shown = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
    return h("dl", {}, shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat());
  }

  function table(titles, rows, empty) {
    if (!rows.length) return h("p", { class: "none" }, empty);
    const shown = rows.slice(0, MOST_ROWS);
    const head = h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)));
    const body = shown.map((cells) => h("tr", {}, cells.map((cell) => (cell instanceof Node ? h("td", {}, cell) : h("td", { class: /^[\d<∞]/.test(cell) ? "number" : null }, cell)))));
    const rest = rows.length > shown.length ? h("p", { class: "none" }, `and ${rows.length - shown.length} more`) : null;
    return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)), rest);
  }

  function list(nodes, go, after) {
    return h("ul", {}, nodes.map((node) => h("li", {}, link(node, go), after ? ` ${after(node)}` : "")));
  }

  /* A button that copies a text; where the clipboard cannot be written, it selects the text instead. */
  function copier(text, shown) {
    const select = () => {
      getSelection().selectAllChildren(shown);
      button.textContent = "Selected: copy it now";
    };
    const button = h("button", { type: "button", class: "copy", on: () => {
      if (!navigator.clipboard) return select();
      navigator.clipboard.writeText(text).then(() => (button.textContent = "Copied"), select);
    } }, "Copy");
    return button;
  }

  return { MOST_ROWS, breakable, copier, facts, h, link, list, table };
})();

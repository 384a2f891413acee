"use strict";
/* The tabs of the panel. */
const Tabs = (() => {
  const TITLES = { selection: "Selection", ops: "Operations", casts: "Casts", errors: "Errors" };
  const { h } = Elements;

  function make(tabs, hasErrors, pick) {
    const names = Object.keys(TITLES).filter((name) => name !== "errors" || hasErrors);
    tabs.replaceChildren(...names.map((name) => h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel",
      on: () => pick(name) }, TITLES[name])));
  }

  function show(tabs, panel, name, content) {
    for (const tab of tabs.children) {
      const on = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(on));
      tab.setAttribute("tabindex", on ? "0" : "-1");
    }
    panel.setAttribute("aria-labelledby", `tab-${name}`);
    panel.replaceChildren(...content.filter(Boolean));
    panel.scrollTop = 0;
  }

  return { make, show };
})();

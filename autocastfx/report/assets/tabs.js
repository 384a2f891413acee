"use strict";
/* The tabs of the panel. */
const Tabs = (() => {
  const TITLES = { selection: "Selection", ops: "Operations", casts: "Casts", errors: "Errors", changes: "Changes", times: "Times" };
  const { h } = Elements;

  function make(tabs, has, pick) {
    const names = Object.keys(TITLES).filter((name) => has[name] ?? true);
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

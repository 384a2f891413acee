"use strict";
/* Keys of the graph, of the page, and of the tabs. */
const Keyboard = (() => {
  const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

  /* `does` holds step(key, direction), activate(key), closeAround(key), escape(), search(), zoom(factor) and fit(). */
  function listen(graph, does) {
    graph.addEventListener("keydown", (event) => {
      const key = event.target.dataset?.key;
      if (!key || event.ctrlKey || event.metaKey || event.altKey) return;
      if (ARROWS[event.key]) does.step(key, ARROWS[event.key]);
      else if (event.key === "Enter" || event.key === " ") does.activate(key);
      else if (event.key === "Backspace") does.closeAround(key);
      else return;
      event.preventDefault();
    });
    document.addEventListener("keydown", (event) => {
      const typing = event.target.matches?.("input, select, textarea");
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") does.escape();
      else if (typing && event.target.type !== "checkbox") return;
      else if (event.key === "/") does.search();
      else if (event.key === "+") does.zoom(1.25);
      else if (event.key === "-") does.zoom(0.8);
      else if (event.key === "0") does.fit();
      else return;
      event.preventDefault();
    });
  }

  /* The key of what lies next to a place in a direction; null if nothing does. */
  function nearest(from, [dx, dy], keys, spot) {
    const middle = (p) => [p.x + p.w / 2, p.y + p.h / 2], [x0, y0] = middle(from);
    let best = null, least = Infinity;
    for (const key of keys) {
      const place = spot(key);
      if (!place) continue;
      const [x, y] = middle(place), along = (x - x0) * dx + (y - y0) * dy, aside = Math.abs((x - x0) * dy) + Math.abs((y - y0) * dx);
      if (along > 4 && along + 2 * aside < least) [best, least] = [key, along + 2 * aside];
    }
    return best;
  }

  /* Arrow keys, Home and End go from tab to tab. */
  function listenToTabs(tabs, pick) {
    tabs.addEventListener("keydown", (event) => {
      const all = [...tabs.children], at = all.indexOf(event.target);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined) return;
      const tab = all[(to + all.length) % all.length];
      pick(tab.id.slice(4));
      tab.focus();
      event.preventDefault();
    });
  }

  return { listen, listenToTabs, nearest };
})();

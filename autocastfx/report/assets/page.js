"use strict";
/* The page's state, and what people do to it. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const graph = $("graph"), view = $("view"), { h } = Panel, port = Viewport.of(graph, view);
  const state = { model: null, open: new Set(), scene: null, selected: null, current: null, tab: "selection", hits: [], hit: -1 };
  const options = { weights: false, numerics: false };
  let viz = null;

  /* ---- what is drawn ---- */

  function item(key) {
    if (!key) return null;
    if (key[0] === "n") return state.model.nodes[Number(key.slice(1))];
    if (key[0] === "e") return state.scene.edges.find((edge) => edge.key === key) || null;
    return state.model.groups[Number(key.slice(1))];
  }

  function redraw(anchor) {
    const before = anchor && state.scene ? spot(anchor) : null;
    try {
      state.scene = Drawing.place(viz, state.model, state.open, options);
    } catch (error) {
      $("status").textContent = `The graph cannot be drawn: ${error.message}. The tables beside it are complete.`;
      return;
    }
    view.replaceChildren(Drawing.draw(state.scene, state.model, options));
    $("status").textContent = "";
    const after = anchor ? spot(anchor) : null;
    if (before && after) port.shift(before.x - after.x, before.y - after.y);
    setCurrent(state.current && part(state.current) ? state.current : firstKey(), false);
    mark();
  }

  /* Where the box, the frame or the closed module around it is drawn. */
  function spot(key) {
    const scene = state.scene;
    if (key[0] === "e") {
      const line = scene.lines.find((l) => l.edge.key === key);
      if (!line) return null;
      const [x, y] = line.label || line.points[Math.floor(line.points.length / 2)];
      return { x, y, w: 0, h: 0 };
    }
    if (key[0] !== "n") {
      const frame = scene.frames.find((f) => f.group === Number(key.slice(1)));
      if (frame) return { x: frame.x, y: frame.y, w: Math.min(frame.w, 200), h: 30 };
      return scene.places.get(`g${key.slice(1)}`) || null;
    }
    return scene.places.get(key) || null;
  }

  function part(key) {
    return view.querySelector(`[data-key="${key}"]`);
  }

  function firstKey() {
    return state.scene.boxes.length ? state.scene.boxes[0].key : null;
  }

  function setCurrent(key, focus) {
    if (state.current && part(state.current)) part(state.current).setAttribute("tabindex", "-1");
    state.current = key;
    const now = key && part(key);
    if (!now) return;
    now.setAttribute("tabindex", "0");
    if (focus) {
      port.reveal(spot(key));
      now.focus({ preventScroll: true });
    }
  }

  function mark() {
    for (const old of view.querySelectorAll(".selected, .beside")) {
      old.classList.remove("selected", "beside");
      if (old.hasAttribute("aria-pressed")) old.setAttribute("aria-pressed", "false");
    }
    for (const old of view.querySelectorAll(".over")) old.remove();
    const key = state.selected, chosen = item(key);
    if (!chosen) return;
    const cast = chosen.kind === "cast" ? chosen : null;
    for (const line of state.scene.lines) {
      const near = cast ? line.edge.casts.has(cast) : line.edge.key === key || line.edge.from.key === key || line.edge.to.key === key;
      if (near) view.querySelector(`[data-edge="${line.edge.key}"]`).classList.add(cast || line.edge.key === key ? "selected" : "beside");
      if (near && (cast || line.edge.key === key)) part(line.edge.key).closest(".mark")?.classList.add("selected");
    }
    for (const one of view.querySelectorAll(`.mark`)) {
      const edge = item(one.dataset.key);
      if (edge && (edge.key === key || (cast && edge.casts.has(cast)))) one.classList.add("selected");
    }
    for (const edge of state.scene.far) {
      const ends = [edge.from, edge.to].map((end) => state.scene.places.get(end.key));
      if (cast ? edge.casts.has(cast) : edge.from.key === key || edge.to.key === key) {
        view.firstChild.append(Drawing.straight(...ends, edge.casts.size > 0));
      }
    }
    const box = part(key);
    if (!box) return;
    box.classList.add("selected");
    if (box.hasAttribute("aria-pressed")) box.setAttribute("aria-pressed", "true");
  }

  /* ---- moving about ---- */

  function step(key, [dx, dy]) {
    const from = spot(key);
    if (!from) return;
    const middle = (p) => [p.x + p.w / 2, p.y + p.h / 2], [x0, y0] = middle(from);
    const keys = [...view.querySelectorAll("[data-key][tabindex]")].map((one) => one.dataset.key);
    let best = null, least = Infinity;
    for (const other of keys) {
      const place = other === key ? null : spot(other);
      if (!place) continue;
      const [x, y] = middle(place), along = (x - x0) * dx + (y - y0) * dy, aside = Math.abs((x - x0) * dy) + Math.abs((y - y0) * dx);
      if (along > 4 && along + 2 * aside < least) [best, least] = [other, along + 2 * aside];
    }
    if (best) setCurrent(best, true);
  }

  /* ---- opening and selecting ---- */

  function activate(key, focus) {
    const kind = key[0], id = Number(key.slice(1));
    if (kind === "g") toggle(id, true);
    else if (kind === "f") toggle(id, false);
    else select(key);
    if (focus) setCurrent(kind === "g" ? `f${id}` : kind === "f" ? `g${id}` : key, true);
  }

  function toggle(id, opens) {
    state.open = new Set(state.open);
    if (opens) state.open.add(id);
    else state.open.delete(id);
    state.selected = null;
    redraw(`f${id}`);
    state.current = opens ? `f${id}` : `g${id}`;
    setCurrent(state.current, false);
    show("selection", Panel.ofGroup(state.model, state.model.groups[id]));
  }

  function select(key) {
    state.selected = key;
    const chosen = item(key);
    mark();
    if (!chosen) show("selection", Panel.nothing(state.model));
    else if (key[0] === "e") show("selection", Panel.ofEdge(state.model, chosen, goTo));
    else show("selection", Panel.ofNode(state.model, chosen, goTo));
  }

  /* Open all that is around a node, and select it. */
  function goTo(node) {
    const needed = node.kind === "cast" ? [Model.source(state.model.nodes, node), ...node.readers.map((id) => state.model.nodes[id])] : [node];
    if (needed.some((n) => n.held)) setChoice("weights", true);
    let open = state.open;
    for (const one of needed.slice(0, 3)) open = Model.openTo(state.model, open, one);
    const same = open.size === state.open.size;
    state.open = open;
    if (viz && !same) redraw();
    const target = node.kind === "cast" ? needed[needed.length - 1] : node;
    state.selected = node.key;
    select(node.key);
    if (!viz) return;
    setCurrent(part(target.key) ? target.key : state.current, false);
    port.reveal(spot(target.key), true);
  }

  function setChoice(name, on) {
    if (options[name] === on) return;
    options[name] = $(name).checked = on;
    if (viz) redraw(state.current);
  }

  /* ---- the panel ---- */

  const TABS = { selection: "Selection", ops: "Operations", casts: "Casts", errors: "Errors" };

  function tabs() {
    const names = Object.keys(TABS).filter((name) => name !== "errors" || state.model.nodes.some((n) => n.numerics));
    $("tabs").replaceChildren(...names.map((name) => h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel",
      on: () => pick(name) }, TABS[name])));
  }

  function pick(name) {
    if (name === "selection") return void (state.selected ? select(state.selected) : show(name, Panel.nothing(state.model)));
    if (name === "ops") show(name, Panel.ops(state.model, search));
    if (name === "casts") show(name, Panel.casts(state.model, goTo));
    if (name === "errors") show(name, Panel.errors(state.model, goTo));
  }

  function show(name, content) {
    state.tab = name;
    for (const tab of $("tabs").children) {
      const on = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(on));
      tab.setAttribute("tabindex", on ? "0" : "-1");
    }
    $("panel").setAttribute("aria-labelledby", `tab-${name}`);
    $("panel").replaceChildren(...content.filter(Boolean));
    $("panel").scrollTop = 0;
  }

  /* ---- search ---- */

  function search(query) {
    $("query").value = query;
    lookUp();
    next(1);
  }

  function lookUp() {
    state.hits = Model.find(state.model, $("query").value);
    state.hit = -1;
    $("hits").textContent = $("query").value.trim() ? (state.hits.length ? `${state.hits.length} found` : "nothing found") : "";
  }

  function next(by) {
    if (!state.hits.length) return;
    state.hit = (state.hit + by + state.hits.length) % state.hits.length;
    $("hits").textContent = `${state.hit + 1} of ${state.hits.length}`;
    goTo(state.hits[state.hit]);
  }

  /* ---- wiring ---- */

  function start(number) {
    state.model = Model.build(data.variants[number]);
    Object.assign(state, { open: Model.firstOpen(state.model), scene: null, selected: null, current: null });
    const measured = state.model.nodes.some((n) => n.numerics);
    $("numerics-choice").hidden = !measured;
    options.numerics = $("numerics").checked = measured;
    legend();
    tabs();
    show("selection", Panel.nothing(state.model));
    lookUp();
    if (!viz) return;
    redraw();
    port.fit(state.scene, false);
  }

  function legend() {
    const low = Drawing.short(state.model.variant.low), shades = state.model.groups[0].counts;
    const words = { low: `16 bits (${low})`, mixed: "runs in one, stored in the other", float32: "float32", given: "as its inputs are", other: "no float32 value" };
    const entries = Model.SHADES.filter((s) => shades[s]).map((s) => h("li", {}, h("span", { class: `swatch ${s}`, "aria-hidden": "true" }), words[s]));
    $("legend").replaceChildren(...entries, h("li", {}, h("span", { class: "swatch castline", "aria-hidden": "true" }, "◆"), "cast"));
  }

  const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

  graph.addEventListener("keydown", (event) => {
    const key = event.target.dataset?.key;
    if (!key || event.ctrlKey || event.metaKey || event.altKey) return;
    if (ARROWS[event.key]) step(key, ARROWS[event.key]);
    else if (event.key === "Enter" || event.key === " ") activate(key, true);
    else if (event.key === "Backspace") closeAround(key);
    else return;
    event.preventDefault();
  });

  function closeAround(key) {
    const one = item(key);
    let around = key[0] === "f" ? one.id : key[0] === "g" ? one.around : key[0] === "n" ? one.group : 0;
    while (around > 0 && state.model.groups[around].single) around = state.model.groups[around].around;
    if (around > 0) activate(`f${around}`, true);
  }

  graph.addEventListener("click", (event) => {
    if (graph.classList.contains("dragged")) return;
    const key = event.target.closest?.("[data-key]")?.dataset.key;
    if (key) activate(key, !key.startsWith("e"));
    else select(null);
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      select(null);
      if (state.scene) setCurrent(state.current, true);
    } else if (typing && event.target.type !== "checkbox") return;
    else if (event.key === "/") $("query").select();
    else if (event.key === "+") port.zoomBy(1.25);
    else if (event.key === "-") port.zoomBy(0.8);
    else if (event.key === "0") port.fit(state.scene, true);
    else return;
    event.preventDefault();
  });
  $("tabs").addEventListener("keydown", (event) => {
    const all = [...$("tabs").children], at = all.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    const tab = all[(to + all.length) % all.length];
    pick(tab.id.slice(4));
    tab.focus();
    event.preventDefault();
  });
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    next(1);
  });
  $("query").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !event.shiftKey) return;
    event.preventDefault();
    next(-1);
  });
  $("query").addEventListener("input", lookUp);
  $("closer").addEventListener("click", () => port.zoomBy(1.25));
  $("farther").addEventListener("click", () => port.zoomBy(0.8));
  $("fit").addEventListener("click", () => port.fit(state.scene, true));
  $("reset").addEventListener("click", () => start(Number($("variant").value)));
  for (const name of ["weights", "numerics"]) $(name).addEventListener("change", (event) => setChoice(name, event.target.checked));

  const THEMES = ["system", "light", "dark"];
  $("theme").addEventListener("click", () => {
    const root = document.documentElement, now = THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % THEMES.length];
    root.dataset.theme = now;
    $("theme").textContent = `Theme: ${now}`;
  });
  $("variant").replaceChildren(...data.variants.map((v, i) => h("option", { value: i }, v.title)));
  $("variant").value = String(data.shown);
  document.querySelector(".variant").hidden = data.variants.length < 2;
  $("variant").addEventListener("change", () => start(Number($("variant").value)));

  start(data.shown);
  Viz.instance().then((made) => {
    viz = made;
    redraw();
    port.fit(state.scene, false);
    document.documentElement.dataset.drawn = String(Math.round(performance.now()));
  }).catch((error) => {
    $("status").textContent = `Graphviz cannot be started: ${error.message}. The tables beside this are complete.`;
  });
})();

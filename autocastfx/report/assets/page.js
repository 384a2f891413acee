"use strict";
/* The page's state, and what people do to it. */
(() => {
  const data = Packed.read(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const graph = $("graph"), view = $("view"), { h } = Elements, port = Viewport.of(graph, view), map = Minimap.of($("map"), port), WIDE = 1100, MOST_DRAWN_TWICE = 80;
  const state = { variant: 0, model: null, open: new Set(), scene: null, selected: null, current: null, hasChosen: new Set() };
  const options = { weights: false, integers: false, numerics: false, shapes: true, changes: false, folds: true, colour: "precision", direction: "TB" };
  const found = Search.of((query) => Model.find(state.model, query), (node) => goTo(node));
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
      state.scene = Layout.place(viz, state.model, state.open, options);
    } catch (error) {
      $("status").textContent = `The graph cannot be drawn: ${error.message}. The tables beside it are complete.`;
      return;
    }
    view.replaceChildren(Drawing.draw(state.scene, state.model, options));
    map.update(state.scene, state.model, options);
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
    if (!state.scene) return;
    Marks.show(view, state.scene, state.selected, item(state.selected), options.direction);
  }

  /* ---- moving about ---- */

  function step(key, direction) {
    const from = spot(key), keys = [...view.querySelectorAll("[data-key][tabindex]")].map((one) => one.dataset.key);
    const best = from && Keyboard.nearest(from, direction, keys.filter((other) => other !== key), spot);
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
    Address.write(state.variant, key && key[0] === "n" ? chosen.name : null);
    if (!chosen) show("selection", Panel.nothing(state.model, state.variant === data.shown ? data.model?.edits : []));
    else if (key[0] === "e") show("selection", Panel.ofEdge(state.model, chosen, goTo));
    else show("selection", Panel.ofNode(state.model, chosen, goTo));
  }

  /* Open all that is around a node, and select it. */
  function goTo(node) {
    const needed = node.kind === "cast" ? [Model.source(state.model.nodes, node), ...node.readers.map((id) => state.model.nodes[id])] : [node];
    if (needed.some((n) => n.held)) choose("weights", true);
    if (needed.some((n) => n.plumbing)) choose("integers", true);
    let open = state.open;
    for (const one of needed.slice(0, 3)) open = Model.openTo(state.model, open, one);
    const same = open.size === state.open.size;
    state.open = open;
    if (viz && !same) redraw();
    const target = node.kind === "cast" ? needed[needed.length - 1] : node;
    state.selected = node.key;
    select(node.key);
    if (!state.scene) return;
    setCurrent(part(target.key) ? target.key : state.current, false);
    port.reveal(spot(target.key), true);
  }

  /* Draw in another way. */
  function choose(name, value) {
    if (options[name] === value) return;
    options[name] = value;
    if ($(name).type === "checkbox") $(name).checked = value;
    else $(name).value = value;
    Head.legend(state.model, options);
    if (!viz) return;
    redraw(state.current);
    const at = state.selected && spot(state.selected);
    if (name === "direction" && at) port.reveal(at, true);
    else if (name === "direction") port.fit(state.scene, false, options.direction);
  }

  /* Fold equal layers or not. What is open stays so, and so does what is selected. */
  function fold(on) {
    options.folds = on;
    const before = state.model, selected = state.selected?.[0] === "n" ? before.nodes[Number(state.selected.slice(1))].name : null;
    const open = new Set([...state.open].map((id) => before.groups[id]?.path));
    state.model = Model.build(data.variants[state.variant], on);
    state.open = new Set(state.model.groups.filter((g) => !g.layers && open.has(g.path)).map((g) => g.id));
    Object.assign(state, { scene: null, selected: null, current: null });
    found.lookUp();
    if (viz) {
      redraw();
      port.fit(state.scene, false, options.direction);
    }
    if (selected) goTo(state.model.byName.get(selected));
    else pick("selection");
  }

  /* ---- the panel ---- */

  function tabs() {
    Tabs.make($("tabs"), { errors: state.model.nodes.some((n) => n.numerics), changes: "changes" in state.model.variant, times: "timing" in data }, pick);
  }

  function pick(name) {
    if (name === "selection") return void (state.selected ? select(state.selected) : show(name, Panel.nothing(state.model, state.variant === data.shown ? data.model?.edits : [])));
    show(name, name === "ops" ? Tables.ops(state.model, found.search) : name === "times" ? Tables.times(data.timing) : Tables[name](state.model, goTo));
  }

  function show(name, content) {
    Tabs.show($("tabs"), $("panel"), name, content);
  }

  /* ---- wiring ---- */

  function start(number) {
    state.variant = number;
    state.model = Model.build(data.variants[number], options.folds);
    Object.assign(state, { open: Model.firstOpen(state.model), scene: null, selected: null, current: null });
    const measured = state.model.nodes.some((n) => n.numerics);
    $("numerics-choice").hidden = !measured;
    options.numerics = $("numerics").checked = measured;
    $("changes-choice").hidden = !("changes" in state.model.variant);
    if ($("changes-choice").hidden) options.changes = $("changes").checked = false;
    if (measured && !state.hasChosen.has("colour")) options.colour = $("colour").value = "error";
    const has = (name) => state.model.nodes.some((n) => n[name] !== undefined);
    for (const [name, there] of [["error", measured], ["predicted", has("predicted")], ["kept", has("kept")]]) {
      $("colour").querySelector(`[value=${name}]`).disabled = !there;
      if (!there && options.colour === name) options.colour = $("colour").value = "precision";
    }
    Head.legend(state.model, options);
    Head.facts(data.model || {}, state.model.variant);
    Head.headline(state.model, found.search);
    Head.banner(state.model, goTo);
    tabs();
    pick("changes" in state.model.variant ? "changes" : "selection");
    found.lookUp();
    if (viz) drawFirst();
  }

  /* Draw from left to right in a wide window, where the whole can then be read or is larger, unless a person has chosen. */
  function drawFirst() {
    if (!state.hasChosen.has("direction")) options.direction = $("direction").value = "TB";
    redraw();
    const before = state.scene ? port.scaleOf(state.scene) : Infinity;
    if (state.scene && !state.hasChosen.has("direction") && graph.clientWidth >= WIDE && state.scene.boxes.length <= MOST_DRAWN_TWICE) {
      for (const direction of ["LR", "TB"]) {
        if (direction === "TB" && port.scaleOf(state.scene) > Math.min(before, Viewport.LEGIBLE)) break;
        options.direction = $("direction").value = direction;
        redraw();
      }
    }
    port.fit(state.scene, false, options.direction);
  }

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
  Keyboard.listen(graph, {
    step, closeAround,
    activate: (key) => activate(key, true),
    escape: () => {
      select(null);
      if (state.scene) setCurrent(state.current, true);
    },
    search: () => $("query").select(),
    zoom: (factor) => port.zoomBy(factor),
    fit: () => port.fit(state.scene, true),
  });
  Keyboard.listenToTabs($("tabs"), pick);
  $("closer").addEventListener("click", () => port.zoomBy(1.25));
  $("farther").addEventListener("click", () => port.zoomBy(0.8));
  $("fit").addEventListener("click", () => port.fit(state.scene, true));
  $("reset").addEventListener("click", () => begin(state.variant));
  for (const name of ["weights", "integers", "numerics", "shapes", "changes"]) $(name).addEventListener("change", (event) => choose(name, event.target.checked));
  for (const name of ["colour", "direction"]) {
    $(name).addEventListener("change", (event) => {
      state.hasChosen.add(name);
      choose(name, event.target.value);
    });
  }
  $("folds").addEventListener("change", (event) => fold(event.target.checked));
  const file = (suffix) => `${(data.model?.name || "model").replace(/\W+/g, "_")}.${suffix}`;
  $("svg").addEventListener("click", () => state.scene && Picture.save(file("svg"), Picture.svg(view, state.scene), "image/svg+xml"));
  $("png").addEventListener("click", () => state.scene && Picture.png(view, state.scene).then((made) => Picture.save(file("png"), made, "image/png"), (error) => {
    $("status").textContent = `The picture cannot be made: ${error.message}. Save it as SVG.`;
  }));

  $("theme").addEventListener("click", Head.changeTheme);
  $("variant").replaceChildren(...data.variants.map((v, i) => h("option", { value: i }, v.title)));
  document.querySelector(".variant").hidden = data.variants.length < 2;
  $("variant").addEventListener("change", () => begin(Number($("variant").value)));

  function begin(number) {
    Address.write(number, null);
    start(number);
  }

  /* Show what the address says; without it, where a comparison failed. */
  function visit() {
    const said = Address.read(), number = data.variants[said.variant] ? Number(said.variant) : data.shown;
    if (state.model === null || state.variant !== number) start(number);
    $("variant").value = String(number);
    const begin = state.model.variant.begin, name = said.node ?? (begin?.failing ? begin.node : null);
    return name ? state.model.byName.get(name) : undefined;
  }

  window.addEventListener("hashchange", () => {
    const node = visit();
    if (node) goTo(node);
  });
  const first = visit();
  Viz.instance().then((made) => {
    viz = made;
    drawFirst();
    if (first) goTo(first);
    document.documentElement.dataset.drawn = String(Math.round(performance.now()));
  }).catch((error) => {
    $("status").textContent = `Graphviz cannot be started: ${error.message}. The tables beside this are complete.`;
  });
})();

// The atlas: input events, requests to the server, and the readout.

import { drawRamp, ends, Palette } from "./atlas.colour.js";
import { legend, Picture, visible } from "./atlas.draw.js";
import { Heads } from "./atlas.heads.js";
import { Search, strongest } from "./atlas.search.js";
import { asCount, asWeight, find, Tokens } from "./atlas.text.js";
import { Tiles } from "./atlas.tiles.js";
import { View } from "./atlas.view.js";

const touched = window.matchMedia("(pointer: coarse)").matches;
const HINT = touched ? "Drag to move, pinch to zoom, tap to read a cell." : "Drag to move, scroll to zoom. Keys: arrows, + and −, 0 for the whole map, [ and ] for the heads, n for the strongest cells.";
const SCALES = ["root", "linear", "log"];
const state = { layer: 0, head: 0, scale: "root", known: Infinity, hover: null, pointer: null, keyed: false, spot: null, token: null };
const view = new View();
const palette = new Palette();
let meta, tiles, tokens, picture, heads, search, ranked = { key: "", at: -1, cells: [] }, moved = false, asked = false, polling = 0, writing = 0, scaled = 0;

const root = document.documentElement;
const darker = window.matchMedia("(prefers-color-scheme: dark)");
const map = () => meta.layers[state.layer];
const pathOf = (level, row, col) => `tile/${state.layer}/${state.head}/${level}/${row}/${col}`;

function applyTheme(theme) {
  root.dataset.theme = theme;
  find("theme").textContent = theme === "dark" ? "Light" : "Dark";
  find("theme").setAttribute("aria-pressed", String(theme === "dark"));
  if (!picture) return;
  picture.readTheme();
  if (palette.version) palette.set(palette.low, palette.high, palette.scale, picture.colours.none);
  redraw();
}

// Draw at most once per frame.
function redraw() {
  root.dataset.ready = "false";
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    askFor();
    rescale();
    point();
    picture.draw(palette, state.hover, state.token, state.known < view.queries ? heads.thumbnail() : null);
    picture.overview(find("overview"), tiles.get(pathOf(view.top, 0, 0)));
    const { left, top } = view.bands();
    find("stage").style.setProperty("--left", `${left}px`);
    find("stage").style.setProperty("--top", `${top}px`);
    root.dataset.ready = String(tiles.idle && tokens.idle && !writing);
  });
}

// Request the whole map first, then the tiles two levels coarser than those shown, then those shown.
function askFor() {
  const { level, top } = view, { side } = meta, { base } = map();
  const order = [{ level: top, row: 0, col: 0 }, ...(level + 2 <= top ? visible(view, level + 2, side) : []), ...visible(view, level, side)];
  const wanted = [];
  for (const { level: at, row, col } of order) {
    const cell = 2 ** at, first = row * side * cell;
    if (at >= base && first >= state.known) continue;
    const rows = Math.min(side, Math.ceil(view.queries / cell) - row * side), cols = Math.min(side, Math.ceil(view.keys / cell) - col * side);
    const until = at >= base ? Math.min(state.known, view.queries) : view.queries;
    const path = pathOf(at, row, col), there = tiles.kept.get(path);
    const fresh = Boolean(there) && (there.known >= view.queries || there.known >= until || there.known >= first + rows * cell);
    wanted.push({ path, rows, cols, known: until, fresh });
  }
  tiles.need(wanted);
}

// Fit the colour scale to the tiles in view, once all of them are loaded or 400 ms have passed.
function rescale() {
  const shown = visible(view, view.level, meta.side).map(({ level, row, col }) => tiles.kept.get(pathOf(level, row, col))).filter(Boolean);
  const now = performance.now();
  if (!tiles.idle && palette.version && now - scaled < 400) return;
  const known = shown.length ? shown : [tiles.kept.get(pathOf(view.top, 0, 0))].filter(Boolean);
  const found = ends(known, state.scale) ?? (known.length && !palette.version ? [state.scale === "log" ? 1e-6 : 0, 1] : null);
  if (!found) return;
  scaled = now;
  const [low, high] = found;
  if (palette.version && palette.low === low && palette.high === high && palette.scale === state.scale) return;
  palette.set(low, high, state.scale, picture.colours.none);
  legend(find("ticks"), palette);
}

// Find the cell under the pointer, or at the centre when the keyboard is used.
function point() {
  const { left, top } = view.bands();
  const spot = state.spot && [view.across(state.spot.key + 0.5), view.down(state.spot.query + 0.5)];
  const at = spot ?? state.pointer ?? (state.keyed ? [(view.width + left) / 2, (view.height + top) / 2] : null);
  const [key, query] = at ? [view.keyAt(at[0]), view.queryAt(at[1])] : [-1, -1];
  const cell = 2 ** view.level;
  const inside = at && at[0] >= left && at[1] >= top && key >= 0 && query >= 0 && key < view.keys && query < view.queries;
  state.hover = inside ? { cell, key: Math.floor(key / cell) * cell, query: Math.floor(query / cell) * cell } : null;
  find("unit").textContent = cell > 1 ? `mean of ${cell} × ${cell} weights` : "weight";
  updateReadout();
}

function updateReadout() {
  const line = find("readout"), { hover } = state;
  if (!hover) {
    if (line.dataset.said !== "hint") line.replaceChildren(HINT);
    line.dataset.said = "hint";
    return;
  }
  const { cell, query, key } = hover, { side } = meta;
  const size = side * cell;
  const tile = tiles.kept.get(pathOf(view.level, Math.floor(query / size), Math.floor(key / size)));
  const weight = tile?.values[((query % size) / cell) * tile.cols + (key % size) / cell];
  const pending = weight === undefined || (Number.isNaN(weight) && tile.known < view.queries);
  const [who, whom] = [ranged("query", "queries", query, cell, view.queries), ranged("key", "keys", key, cell, view.keys)];
  const number = document.createElement("b");
  number.textContent = `${pending ? "…" : asWeight(weight)},`;
  const said = [cell > 1 ? "mean weight " : "weight ", number, " ", ...who, " → ", ...whom];
  const text = said.map((part) => part.textContent ?? part).join("");
  if (line.dataset.said === text) return;
  line.dataset.said = text;
  line.replaceChildren(...said);
}

function ranged(one, many, start, cell, count) {
  const stop = Math.min(start + cell, count);
  const quote = (index) => {
    const node = document.createElement("bdi");
    const text = tokens.at(state.layer, many, index) ?? "…", letters = [...text];
    node.textContent = letters.length > 24 ? `${letters.slice(0, 23).join("")}…` : text;
    return node;
  };
  if (stop - start === 1) return [`${one} ${asCount(start)} “`, quote(start), "”"];
  return [`${many} ${asCount(start)}–${asCount(stop - 1)} “`, quote(start), "” to “", quote(stop - 1), "”"];
}

// Poll the progress of the coarse levels until they are complete.
async function poll() {
  clearTimeout(polling);
  const { layer, head } = state;
  if (view.top < map().base) {
    state.known = Infinity;
    return notice("");
  }
  try {
    const answer = await fetch(`progress/${layer}/${head}`);
    if (!answer.ok) throw new Error(await answer.text());
    const { progress, known, trouble } = await answer.json();
    if (layer !== state.layer || head !== state.head) return;
    if (state.known !== known) {
      state.known = known;
      redraw();
    }
    if (trouble) return notice(trouble, true);
    if (progress >= 1) return notice("");
    notice(`Computing the coarse levels, ${Math.floor(100 * progress)} %`, false, progress);
    polling = setTimeout(poll, 400);
  } catch (error) {
    failed(error);
    polling = setTimeout(poll, 3000);
  }
}

function notice(text, wrong = false, progress = null) {
  find("notice").hidden = !text;
  find("notice").classList.toggle("wrong", wrong);
  find("notice-text").textContent = text;
  find("progress").hidden = progress === null;
  if (Number.isNaN(progress)) find("progress").removeAttribute("value");  // it moves, but says no number
  else find("progress").value = progress ?? 0;
}

// Show a failure until a request succeeds again.
let failing = false;
function failed(error) {
  if (!error && !failing) return;
  failing = Boolean(error);
  if (!error) return poll();
  notice(error instanceof TypeError ? "The atlas no longer answers: the program that served it has exited." : error.message, true);
}

function chosen(layer, head) {
  moved = true;
  choose(layer, head);
}

function choose(layer, head) {
  const other = layer !== state.layer;
  const before = map();
  state.layer = layer;
  state.head = Math.min(head, map().heads - 1);
  const { queries, keys, top, base } = map();
  Object.assign(view, { queries, keys, top });
  state.known = top < base ? Infinity : 0;
  scaled = -Infinity;
  fillSelects();
  if (other && (before.queries !== queries || before.keys !== keys)) view.show();
  canvas().setAttribute("aria-label", `Attention map of ${map().name}, head ${state.head}: ${asCount(queries)} queries by ${asCount(keys)} keys. ${HINT}`);
  state.spot = null;
  heads.mark(state.layer, state.head);
  find("report").href = `report.html#layer=${encodeURIComponent(map().name)}&head=${state.head}`;
  poll();
  settled();
}

function fillSelects() {
  const fill = (id, names, chosen) => {
    const list = find(id);
    if (list.options.length !== names.length) list.replaceChildren(...names.map((name, at) => new Option(name, at)));
    list.value = String(chosen);
  };
  fill("layer", meta.layers.map(({ name }) => name || "model"), state.layer);
  fill("head", Array.from({ length: map().heads }, (_, head) => String(head)), state.head);
  find("before").disabled = state.head === 0;
  find("after").disabled = state.head === map().heads - 1;
}

const canvas = () => find("map");

// Keep the view in the address: layer/head/query/key/pixels per pair/colour scale.
function settled() {
  redraw();
  clearTimeout(writing);
  writing = setTimeout(() => {
    writing = 0;
    redraw();
    const digits = Math.max(0, Math.ceil(Math.log10(view.scale)) + 2);
    history.replaceState(null, "", `#${state.layer}/${state.head}/${view.y.toFixed(digits)}/${view.x.toFixed(digits)}/${view.scale.toPrecision(6)}/${state.scale}`);
  }, 100);
}

function restoreView() {
  const named = /^#layer=([^&]*)&head=(\d+)$/.exec(location.hash);  // as the report names a head
  const parts = location.hash.slice(1).split("/");
  let [layer, head, y, x, scale] = parts.map(Number);
  if (named) [layer, head] = [meta.layers.findIndex(({ name }) => name === decoded(named[1])), Number(named[2])];
  const there = Number.isInteger(layer) && layer in meta.layers && Number.isInteger(head) && head >= 0 && head < meta.layers[layer].heads;
  state.scale = SCALES.includes(parts[5]) ? parts[5] : "root";
  for (const radio of document.getElementsByName("scale")) radio.checked = radio.value === state.scale;
  choose(there ? layer : 0, there ? head : 0);
  if (there && [x, y, scale].every(Number.isFinite) && scale > 0) view.go(x, y, scale);
  else view.show();
  settled();
  return there;
}
function decoded(text) {
  try { return decodeURIComponent(text); } catch { return ""; }
}

// Go to the next of the strongest cells in view.
function nextStrongest() {
  const key = [state.layer, state.head, view.level, view.x, view.y, view.scale].join();
  if (ranked.key !== key) {
    const there = visible(view, view.level, meta.side).map((place) => ({ ...place, tile: tiles.kept.get(pathOf(place.level, place.row, place.col)) })).filter(({ tile }) => tile);
    ranked = { key, at: -1, cells: strongest(view, view.level, meta.side, there) };
  }
  if (!ranked.cells.length) return;
  ranked.at = (ranked.at + 1) % ranked.cells.length;
  const { query, key: at } = ranked.cells[ranked.at];
  const half = Math.floor(2 ** view.level / 2);
  state.spot = { query: query + half, key: at + half };
  moved = true;
  redraw();
}

// Zoom into the cell that was found, until its tokens can be read.
function zoomToSpot() {
  const { query, key } = state.spot;
  const { left, top } = view.bands(24);
  view.glide(() => view.go(key + 0.5 - left / 48, query + 0.5 - top / 48, Math.max(24, view.scale)), settled);
}

// Show the row and the column of a token, where they meet.
function goToToken(token) {
  state.token = token;
  state.spot = null;
  moved = true;
  if (token === null) return redraw();
  const scale = Math.max(view.scale, 16), { left, top } = view.bands(scale);
  view.glide(() => view.go(Math.min(token, view.keys - 1) + 0.5 - left / 2 / scale, Math.min(token, view.queries - 1) + 0.5 - top / 2 / scale, scale), settled);
}

function zoomBy(factor, px, py) {
  const { left, top } = view.bands();
  view.glide(() => view.zoom(factor, px ?? (view.width + left) / 2, py ?? (view.height + top) / 2), settled);
}

function pointers() {
  const held = new Map();
  const spot = (event) => {
    const box = canvas().getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const middle = () => [0, 1].map((axis) => [...held.values()].reduce((sum, at) => sum + at[axis], 0) / held.size);
  const spread = () => (held.size < 2 ? 1 : Math.hypot(...[0, 1].map((axis) => [...held.values()][0][axis] - [...held.values()][1][axis])));
  canvas().addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas().setPointerCapture(event.pointerId);
    canvas().classList.add("held");
    find("touch").hidden = moved = true;
    find("panel").classList.remove("open");
    state.spot = null;
    view.stop();
    held.set(event.pointerId, spot(event));
    state.pointer = spot(event);
    redraw();
  });
  canvas().addEventListener("pointermove", (event) => {
    state.keyed = false;
    state.spot = null;
    state.pointer = held.size > 1 ? null : spot(event);
    if (!held.has(event.pointerId)) return redraw();
    const [before, wide] = [middle(), spread()];
    held.set(event.pointerId, spot(event));
    const after = middle();
    view.pan(after[0] - before[0], after[1] - before[1]);
    if (held.size > 1 && wide > 0) view.zoom(spread() / wide, ...after);
    settled();
  });
  const release = (event) => {
    held.delete(event.pointerId);
    if (!held.size) canvas().classList.remove("held");
  };
  for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) canvas().addEventListener(name, release);
  canvas().addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") state.pointer = null;
    redraw();
  });
  canvas().addEventListener("wheel", (event) => {
    event.preventDefault();
    view.stop();
    moved = true;
    const lines = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const turned = Math.max(-240, Math.min(240, event.deltaY * lines));
    view.zoom(Math.exp(-turned * (event.ctrlKey ? 0.01 : 0.0022)), ...spot(event));
    settled();
  }, { passive: false });
  canvas().addEventListener("dblclick", (event) => zoomBy(event.shiftKey ? 0.5 : 2, ...spot(event)));
}

function overviewEvents() {
  const small = find("overview");
  const go = (event) => {
    if (!(event.buttons & 1)) return;
    const box = small.getBoundingClientRect(), { left, top } = view.bands();
    const key = ((event.clientX - box.left) / box.width) * view.keys, query = ((event.clientY - box.top) / box.height) * view.queries;
    view.go(key - left / 2 / view.scale, query - top / 2 / view.scale, view.scale);
    settled();
  };
  small.addEventListener("pointerdown", (event) => {
    small.setPointerCapture(event.pointerId);
    go(event);
  });
  small.addEventListener("pointermove", go);
}

function keys() {
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input, .head")) return;
    const far = event.shiftKey ? 0.9 : 0.2, [dx, dy] = [far * view.width, far * view.height];
    const step = {
      ArrowLeft: () => view.pan(dx, 0), ArrowRight: () => view.pan(-dx, 0), ArrowUp: () => view.pan(0, dy), ArrowDown: () => view.pan(0, -dy),
    }[event.key];
    const act = { "+": () => zoomBy(2), "=": () => zoomBy(2), "-": () => zoomBy(0.5), "−": () => zoomBy(0.5), 0: whole, Home: whole, "[": () => find("before").click(), "]": () => find("after").click(), n: nextStrongest, Enter: state.spot && event.target === canvas() ? zoomToSpot : null }[event.key];
    if (!step && !act) return;
    event.preventDefault();
    moved = state.keyed = true;
    state.pointer = null;
    if (step) state.spot = null;
    if (step) view.glide(step, settled);
    else act();
  });
}

const whole = () => view.glide(() => view.show(), settled);

async function readMeta() {
  const answer = await fetch("meta.json");
  if (!answer.ok) throw new Error(await answer.text());
  const found = await answer.json();
  document.title = `${found.title} · attention atlas`;
  find("title").textContent = found.title;
  find("title").title = found.title;
  find("note").textContent = found.note;
  find("note").hidden = !found.note;
  return found;
}

// Wait until the model has computed its first layer.
async function firstLayer() {
  for (;;) {
    const found = await readMeta();
    if (found.layers.length) return found;
    notice(`The model is reading the text${found.expected ? `: 0 of ${asCount(found.expected)} layers so far` : ""}`, false, NaN);
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
}

// Add the layers that the model has computed since, until it has computed all.
async function addLayers() {
  const growing = meta.expected !== null;
  find("kicker").textContent = growing ? `Attention atlas · ${asCount(meta.layers.length)} of ${asCount(meta.expected)} layers so far` : "Attention atlas";
  if (!growing) return;
  setTimeout(async () => {
    const found = await readMeta().catch(() => null);  // the next request shows that the program has exited
    if (found) {
      meta.expected = found.expected;
      meta.layers.push(...found.layers.slice(meta.layers.length));
      fillSelects();
      heads.grow(meta.layers);
    }
    addLayers();
  }, 1000);
}

async function start() {
  applyTheme(darker.matches ? "dark" : "light");
  drawRamp(find("ramp"));
  meta = await firstLayer();
  notice("");
  tokens = new Tokens(meta.tokens, redraw);
  tiles = new Tiles(palette, redraw, failed);
  picture = new Picture(canvas(), view, meta.side, (level, row, col) => tiles.get(pathOf(level, row, col)), (side, index) => tokens.at(state.layer, side, index));
  picture.readTheme();
  picture.resize();
  heads = new Heads((layer, head) => { moved = true; find("panel").classList.remove("open"); choose(layer, head); }, examined);
  search = new Search(() => state.layer, goToToken);
  pointers();
  overviewEvents();
  keys();
  find("next").addEventListener("click", nextStrongest);
  find("touch").hidden = !touched;
  find("listed").addEventListener("click", () => find("listed").setAttribute("aria-expanded", String(find("panel").classList.toggle("open"))));
  find("in").addEventListener("click", () => zoomBy(2));
  find("out").addEventListener("click", () => zoomBy(0.5));
  find("whole").addEventListener("click", whole);
  find("layer").addEventListener("change", (event) => chosen(Number(event.target.value), state.head));
  find("head").addEventListener("change", (event) => chosen(state.layer, Number(event.target.value)));
  find("before").addEventListener("click", () => chosen(state.layer, Math.max(0, state.head - 1)));
  find("after").addEventListener("click", () => chosen(state.layer, state.head + 1));
  for (const radio of document.getElementsByName("scale")) {
    radio.addEventListener("change", () => {
      state.scale = radio.value;
      scaled = -Infinity;
      settled();
    });
  }
  find("theme").addEventListener("click", () => applyTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  darker.addEventListener("change", () => applyTheme(darker.matches ? "dark" : "light"));
  window.addEventListener("hashchange", restoreView);
  new ResizeObserver(() => {
    const kept = view.whole;
    picture.resize();
    if (kept) view.show();
    settled();
  }).observe(canvas());
  moved = restoreView();
  addLayers();
  heads.follow(meta.layers);
}

// Open on the most notable head, unless somebody has chosen one or moved the map.
function examined({ first, report }) {
  find("report").hidden = !report;
  if (first && !moved && first[0] in meta.layers) choose(...first);
  else redraw();
}

start().catch(failed);

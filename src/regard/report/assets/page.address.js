// The address keeps what is shown, and the browser's Back returns to it. A frame may have no history: it is not needed.

const SCALES = ["root", "linear", "log"], VIEWS = ["map", "lines"], HEADS = ["grid", "table", "scatter"];
const DEFAULTS = { statistic: 0, heads: "grid", scale: "root", view: "map", direction: "queries", token: null, pinned: null };
const placeText = ({ layer, head }) => `${layer}.${look.layers[layer].heads[head]}`;

function written() {
  const parts = [["head", placeText(state)]];
  const add = (name, text) => parts.push([name, encodeURIComponent(text)]);
  if (state.pinned) add("pin", placeText(state.pinned));
  if (state.token !== null) add("token", state.token);
  if (state.direction !== DEFAULTS.direction) add("direction", state.direction);
  if (state.statistic !== DEFAULTS.statistic && look.statistics.length) add("statistic", state.statistic === MAPS ? "map" : look.statistics[state.statistic].name);
  if (state.heads !== DEFAULTS.heads) add("heads", state.heads);
  if (state.heads === "scatter") add("axes", state.axes.map((which) => look.statistics[which].name).join("~"));
  if (state.scale !== DEFAULTS.scale) add("scale", state.scale);
  if (state.view !== DEFAULTS.view) add("view", state.view);
  return `#${parts.map((part) => part.join("=")).join("&")}`;
}

// What an address names; parts that are missing or make no sense are left out.
function read(hash) {
  const parts = new Map(hash.slice(1).split("&").map((part) => {
    const at = part.indexOf("=");
    try { return [part.slice(0, at), decodeURIComponent(part.slice(at + 1))]; } catch { return ["", ""]; }
  }));
  const found = {};
  const named = (text) => look.statistics.findIndex((about) => about.name === text);
  const oneOf = (name, values) => { if (values.includes(parts.get(name))) found[name] = parts.get(name); };
  const head = parts.has("layer") ? placeOfName(parts.get("layer"), parts.get("head")) : placeOfText(parts.get("head"));
  if (head) Object.assign(found, head);
  found.pinned = placeOfText(parts.get("pin"));
  if (/^\d+$/.test(parts.get("token") ?? "")) found.token = Number(parts.get("token"));
  const statistic = parts.get("statistic") === "map" ? MAPS : named(parts.get("statistic"));
  if (statistic >= 0 || statistic === MAPS && parts.get("statistic") === "map") found.statistic = statistic;
  oneOf("heads", HEADS);
  oneOf("scale", SCALES);
  oneOf("view", VIEWS);
  oneOf("direction", ["queries", "keys"]);
  const axes = (parts.get("axes") ?? "").split("~").map(named);
  if (axes.length === 2 && !axes.includes(-1)) found.axes = axes;
  return found;
}
function placeOfText(text) {
  const numbers = /^(\d+)\.(-?\d+)$/.exec(text ?? "");
  const layer = numbers && look.layers[Number(numbers[1])];
  const head = layer ? layer.heads.indexOf(Number(numbers[2])) : -1;
  return head >= 0 ? { layer: Number(numbers[1]), head } : null;
}
// The atlas names a layer by its name.
function placeOfName(name, number) {
  const layer = look.layers.findIndex((one) => one.name === name);
  const head = layer >= 0 ? look.layers[layer].heads.indexOf(Number(number)) : -1;
  return head >= 0 ? { layer, head } : null;
}

function writeAddress(how) {
  const address = written();
  if (address === window.location.hash) return;
  try { window.history[how](null, "", address); } catch { /* a frame without an address of its own */ }
}

// Change what is shown, and keep it in the address: one step of the browser's history per change.
function changed(change, how = "pushState") {
  const before = { ...state };
  Object.assign(state, change);
  writeAddress(how);
  apply(before);
}

function restored() {
  const found = read(window.location.hash);
  const before = { ...state };
  Object.assign(state, DEFAULTS, found);
  apply(before);
}

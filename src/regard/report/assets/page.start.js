// Shared by all parts of the page: the theme, elements, numbers and tokens as text, unpacked data.

const root = document.documentElement;
const darker = window.matchMedia("(prefers-color-scheme: dark)");

// A file opened from disk may have no storage; the theme is then not remembered.
function remembered() {
  try { return window.localStorage.getItem("regard-theme"); } catch { return null; }
}
function remember(theme) {
  try { window.localStorage.setItem("regard-theme", theme); } catch { /* no storage */ }
}
function applyTheme(theme) {
  root.dataset.theme = theme === "dark" || theme === "light" ? theme : darker.matches ? "dark" : "light";
}
applyTheme(remembered());

const find = (id) => document.getElementById(id);
const themed = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// Text is only ever inserted as text, never parsed as markup.
function make(tag, { text, ...attributes } = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

function asNumber(value) {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  const text = size < 1e-3 || size >= 1e5 ? value.toExponential(1).replace("e+", "e") : String(Number(value.toPrecision(3)));
  return text.replaceAll("-", "−");
}
const asWeight = (value) => (value >= 5e-4 ? value.toFixed(3) : value < 1e-4 ? asNumber(value) : String(Number(value.toPrecision(2))));
const asCount = (value) => value.toLocaleString("en-US");
const withUnit = (value, { unit, factor }) => (unit && Number.isFinite(value) ? `${asNumber(value * factor)} ${unit}` : asNumber(value));

// Invisible characters get a sign; those that would reverse or hide the text are escaped.
const SIGNS = { " ": "·", "\n": "↵", "\r": "\\r", "\t": "⇥", "\u00a0": "␣" };
const HIDDEN = /[ \n\r\t\u00a0]|(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu;
const escaped = (char) => SIGNS[char] ?? `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`;

function pieces(token) {
  if (token === null) return [["…", true]];
  if (token === "") return [["∅", true]];
  const found = [];
  let from = 0;
  for (const match of token.matchAll(HIDDEN)) {
    if (match.index > from) found.push([token.slice(from, match.index), false]);
    found.push([escaped(match[0]), true]);
    from = match.index + match[0].length;
  }
  if (from < token.length) found.push([token.slice(from), false]);
  return found;
}
const legible = (token) => pieces(token).map(([text]) => text).join("");
const spelled = (token) => pieces(token).map(([text, sign]) => (sign ? make("span", { class: "sign", text }) : text));

function bytes(text) {
  const raw = window.atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}
function floats(text) {
  const view = new DataView(bytes(text).buffer);
  return Float32Array.from({ length: view.byteLength / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

let look;
const state = { layer: 0, head: 0, statistic: 0, named: new Set(), scale: "log", direction: "queries" };
const here = () => look.layers[state.layer];
const statisticOf = (layer, head, which) => layer.numbers[head * look.statistics.length + which];

function unpacked(text) {
  const found = JSON.parse(text);
  for (const layer of found.layers) layer.numbers = floats(layer.statistics);
  found.ranges = found.statistics.map((about, which) => {
    let [low, high] = [Infinity, -Infinity];
    for (const layer of found.layers) {
      for (let at = which; at < layer.numbers.length; at += found.statistics.length) {
        const value = layer.numbers[at];
        if (Number.isFinite(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
      }
    }
    return widened(low, high, about);
  });
  return found;
}

// Heads with almost the same value get almost the same colour: a range spans at least 2 % of its largest number.
function widened(low, high, { factor }) {
  const least = Math.max(0.02 * Math.max(Math.abs(low), Math.abs(high)), factor === 100 ? 0.01 : 0);
  const lack = least - (high - low);
  if (!(lack > 0) || !Number.isFinite(lack)) return [low, high];
  const start = low >= 0 ? Math.max(0, low - lack / 2) : low - lack / 2;
  return [start, start + least];
}

// Unpack the large arrays of a layer when it is first shown.
function opened(layer) {
  if (layer.open) return layer.open;
  const sides = layer.cells.map((cells, side) => Math.ceil(cells / layer.every[side]));
  layer.open = {
    height: sides[0], width: sides[1], cells: bytes(layer.maps), largest: floats(layer.largest),
    rows: edges(look.texts[layer.queries].length, layer.cells[0], layer.every[0]),
    cols: edges(look.texts[layer.keys].length, layer.cells[1], layer.every[1]),
    keys: bytes(layer.strongest), weights: bytes(layer.weights),
  };
  return layer.open;
}
function edges(length, cells, every) {
  const found = [];
  for (let cell = 0; cell < cells; cell += every) found.push(Math.ceil((cell * length) / cells));
  return [...found, length];
}

const tokenAt = (text, place) => {
  const run = text.runs.find(([start, tokens]) => place >= start && place < start + tokens.length);
  return run ? run[1][place - run[0]] : null;
};

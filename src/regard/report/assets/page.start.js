// Shared by all parts of the page: the theme, elements, numbers and tokens as text, unpacked data.

const root = document.documentElement;
const darker = window.matchMedia("(prefers-color-scheme: dark)");

// A file opened from disk, or a frame, may have no storage; the theme is then not remembered.
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
const within = (low, value, high) => Math.min(high, Math.max(low, value));
const sharpness = () => within(1, window.devicePixelRatio || 1, 3);

// Text is only ever inserted as text, never parsed as markup.
function filled(node, { text, ...attributes } = {}, ...children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}
const make = (tag, ...rest) => filled(document.createElement(tag), ...rest);

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
const nameOf = (layer) => layer.name || "model";
const labelled = (about) => (about.unit ? `${about.label} (${about.unit})` : about.label);

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

// Inflate (RFC 1951) in a zlib stream. A browser's own DecompressionStream would make every reader asynchronous.
const LENGTHS = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const DISTANCES = [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577];
const ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

function huffman(lengths) {
  const counts = new Uint16Array(16), offsets = new Uint16Array(16), symbols = new Uint16Array(lengths.length);
  for (const length of lengths) counts[length]++;
  counts[0] = 0;
  for (let length = 1; length < 15; length++) offsets[length + 1] = offsets[length] + counts[length];
  lengths.forEach((length, symbol) => { if (length) symbols[offsets[length]++] = symbol; });
  return { counts, symbols };
}

function inflated(text, size) {
  const data = bytes(text), out = new Uint8Array(size);
  let at = 2, hold = 0, held = 0, end = 0, last = false;
  const bits = (count) => {
    for (; held < count; held += 8) hold |= data[at++] << held;
    const value = hold & ((1 << count) - 1);
    hold >>>= count;
    held -= count;
    return value;
  };
  const symbol = ({ counts, symbols }) => {
    let code = 0, first = 0, index = 0;
    for (let length = 1; ; length++) {
      if (!held) { hold = data[at++]; held = 8; }
      code |= hold & 1;
      hold >>>= 1;
      held--;
      const count = counts[length];
      if (code - count < first) return symbols[index + code - first];
      index += count;
      first = (first + count) << 1;
      code <<= 1;
    }
  };
  const trees = () => {
    const [literals, distances, count] = [bits(5) + 257, bits(5) + 1, bits(4) + 4];
    const meta = new Array(19).fill(0);
    for (let i = 0; i < count; i++) meta[ORDER[i]] = bits(3);
    const tree = huffman(meta), lengths = [];
    while (lengths.length < literals + distances) {
      const found = symbol(tree);
      if (found < 16) lengths.push(found);
      else {
        const [repeated, times] = found === 16 ? [lengths.at(-1), 3 + bits(2)] : [0, found === 17 ? 3 + bits(3) : 11 + bits(7)];
        for (let i = 0; i < times; i++) lengths.push(repeated);
      }
    }
    return [huffman(lengths.slice(0, literals)), huffman(lengths.slice(literals))];
  };
  while (!last) {
    last = bits(1) === 1;
    const kind = bits(2);
    if (kind === 0) {
      held = hold = 0;
      const length = data[at] + 256 * data[at + 1];
      out.set(data.subarray(at + 4, at + 4 + length), end);
      at += 4 + length;
      end += length;
      continue;
    }
    const fixed = () => [huffman(Array.from({ length: 288 }, (_, i) => (i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8))), huffman(new Array(30).fill(5))];
    const [literals, distances] = kind === 2 ? trees() : fixed();
    for (let found = symbol(literals); found !== 256; found = symbol(literals)) {
      if (found < 256) { out[end++] = found; continue; }
      const length = LENGTHS[found - 257] + bits(LENGTH_BITS[found - 257]);
      const code = symbol(distances);
      const back = DISTANCES[code] + bits(Math.max(0, (code >> 1) - 1));
      for (let i = 0; i < length; i++, end++) out[end] = out[end - back];
    }
  }
  return out;
}

let look;
const state = {
  layer: 0, head: 0, pinned: null, statistic: 0, heads: "grid", axes: [0, 1], scale: "root", view: "map",
  direction: "queries", token: null, named: new Set(),
};
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

// Whether each cell of a layer's maps is one query and one key.
const isExact = (layer) => [layer.queries, layer.keys].every((text, side) => layer.every[side] === 1 && layer.cells[side] === look.texts[text].length);

// Unpack the large arrays of a layer when it is first shown.
function opened(layer) {
  if (layer.open) return layer.open;
  const [height, width] = layer.cells.map((cells, side) => Math.ceil(cells / layer.every[side]));
  const [queries, keys] = [look.texts[layer.queries], look.texts[layer.keys]];
  const heads = layer.heads.length, pairs = heads * layer.k * rowsOf(layer);
  layer.open = {
    height, width, cells: inflated(layer.maps, heads * height * width), largest: floats(layer.largest),
    exact: isExact(layer),
    rows: edges(queries.length, layer.cells[0], layer.every[0]),
    cols: edges(keys.length, layer.cells[1], layer.every[1]),
    keys: inflated(layer.strongest, pairs * layer.width), weights: inflated(layer.weights, pairs * 2), pairs,
  };
  return layer.open;
}
const rowsOf = (layer) => look.texts[layer.queries].parts.reduce((sum, [start, stop]) => sum + stop - start, 0);
function edges(length, cells, every) {
  const found = [];
  for (let cell = 0; cell < cells; cell += every) found.push(Math.ceil((cell * length) / cells));
  return [...found, length];
}

const tokenAt = (text, place) => {
  const run = text.runs.find(([start, tokens]) => place >= start && place < start + tokens.length);
  return run ? run[1][place - run[0]] : null;
};

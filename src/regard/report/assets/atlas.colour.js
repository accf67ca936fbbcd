// Colours for weights: from dark violet to bright yellow, on a scale that adapts to the tiles in view.

const STOPS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const opaque = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

const RAMP = Array.from({ length: 256 }, (_, i) => {
  const place = (i / 255) * (STOPS.length - 1);
  const at = Math.min(STOPS.length - 2, Math.floor(place));
  const [low, high] = [parts(STOPS[at]), parts(STOPS[at + 1])];
  return low.map((c, k) => Math.round(c + (place - at) * (high[k] - c)));
});
const PACKED = Uint32Array.from(RAMP, opaque);

// The upper half of a float (sign, exponent, 7 bits of the fraction) indexes its colour: one table lookup per cell.
const middles = new Float32Array(Uint32Array.from({ length: 1 << 15 }, (_, i) => (i << 16) | 0x8000).buffer);

export class Palette {
  constructor() {
    this.table = new Uint32Array(1 << 15);
    this.version = 0;
    this.low = this.high = 0;
    this.scale = "root";
  }

  // The position of a weight on the scale, 0 to 1.
  place(weight) {
    const share = weight / this.high;
    const at = this.scale === "log" ? 1 + Math.log(share) / Math.log(this.high / this.low) : this.scale === "root" ? Math.sqrt(share) : share;
    return Math.min(1, Math.max(0, at));
  }

  set(low, high, scale, none) {
    Object.assign(this, { low, high, scale });
    const first = 0x0080, infinite = 0x7f80;
    for (let i = first; i < infinite; i++) this.table[i] = PACKED[Math.round(255 * this.place(middles[i]))];
    this.table.fill(PACKED[0], 1, first);
    this.table[0] = opaque(parts(none));
    this.table.fill(0, infinite);  // NaN: not known yet
    this.version++;
  }

  paint(tile) {
    const image = tile.pen.createImageData(tile.cols, tile.rows);
    const pixels = new Uint32Array(image.data.buffer);
    const { bits } = tile;
    for (let i = 0; i < bits.length; i++) pixels[i] = this.table[bits[i] >>> 16];
    tile.pen.putImageData(image, 0, 0);
    tile.painted = this.version;
  }

  light(weight) {
    return this.place(weight) > 0.45;
  }
}

// A small map of a head, from bytes that hold the square roots of its weights, up to `top`.
export function drawThumbnail(canvas, { cells, shape: [rows, cols], largest }, top) {
  const raw = window.atob(cells);
  canvas.width = cols;
  canvas.height = rows;
  const pen = canvas.getContext("2d"), image = pen.createImageData(cols, rows);
  const pixels = new Uint32Array(image.data.buffer), stretch = Math.sqrt(largest / top);
  for (let i = 0; i < pixels.length; i++) {
    const step = raw.charCodeAt(i);
    pixels[i] = step ? PACKED[Math.min(255, Math.round(step * stretch))] : 0;
  }
  pen.putImageData(image, 0, 0);
}

export function drawRamp(canvas) {
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(PACKED);
  pen.putImageData(image, 0, 0);
}

// Round up or down to 1, 2, 5, 10, …
export function round(value, up) {
  const ten = 10 ** Math.floor(Math.log10(value) + 1e-9);
  const steps = [1, 2, 5, 10].map((step) => step * ten);
  return up ? steps.find((step) => step >= value * (1 - 1e-6)) ?? 10 * ten : steps.findLast((step) => step <= value * (1 + 1e-6)) ?? ten;
}

// The ends of the scale for the tiles in view, from their weights above 0. A log scale leaves out the lowest hundredth;
// the others start at 0 and leave out the highest weights, which would make all other cells dark: a hundredth of them
// on a linear scale, a thousandth under a square root.
export function ends(tiles, scale) {
  let most = 0, count = 0;
  const bins = new Float64Array(1024);
  for (const { highest, counts } of tiles) {
    most = Math.max(most, highest);
    for (let i = 0; i < 1024; i++) {
      bins[i] += counts[i];
      count += counts[i];
    }
  }
  if (!count) return null;
  const kept = { log: 1, root: 0.999, linear: 0.99 }[scale];
  const [low, high] = [share(bins, count / 100), kept === 1 ? most : Math.min(most, share(bins, kept * count + 1))].map((x) => Math.min(Math.max(x, 1e-37), 1));
  const top = round(high, true);
  return scale === "log" ? [Math.min(round(Math.max(low, top * 1e-9), false), top / 10), top] : [0, top];
}

// The weight that has `count` weights below it, to within a quarter.
function share(bins, count) {
  let below = 0, bin = 0;
  while (bin < 1023 && below + bins[bin] <= count) below += bins[bin++];
  return new Float32Array(Uint32Array.of(bin << 21).buffer)[0];
}

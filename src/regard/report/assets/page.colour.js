// Colours for numbers: a few stops from dark violet to bright yellow, interpolated linearly in OKLab.
// Lightness rises evenly, so that the order is visible to colour-blind readers and in greyscale.

const STOPS = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"];

const toLinear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const toGamma = (c) => (c <= 0.0031308 ? c * 12.92 : 1.055 * c ** (1 / 2.4) - 0.055);

function oklab(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => toLinear(parseInt(hex.slice(at, at + 2), 16) / 255));
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}
function rgb([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((c) => Math.round(255 * Math.min(1, Math.max(0, toGamma(Math.max(0, c))))));
}

const RAMP = (() => {
  const stops = STOPS.map(oklab);
  // Place the stops by their lightness, so that equal steps of a number are equal steps of lightness.
  const places = stops.map(([L]) => (L - stops[0][0]) / (stops.at(-1)[0] - stops[0][0]));
  return Array.from({ length: 256 }, (_, i) => {
    const t = i / 255;
    const at = Math.min(stops.length - 2, places.findLastIndex((place) => place <= t));
    const part = (t - places[at]) / (places[at + 1] - places[at]);
    return rgb(stops[at].map((c, axis) => c + part * (stops[at + 1][axis] - c)));
  });
})();

const colour = (t) => RAMP[Math.round(255 * Math.min(1, Math.max(0, t)))];
const css = (t) => `rgb(${colour(t).join(" ")})`;

function drawRamp(canvas) {
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(256, 1);
  RAMP.forEach((c, i) => image.data.set([...c, 255], 4 * i));
  pen.putImageData(image, 0, 0);
}

// Where a weight is on a scale that ends at `top`, 0 to 1. A log scale spans as many powers of ten as a map can hold.
const DECADES = 2 * Math.log(255);
function placed(weight, top, scale) {
  const share = weight / top;
  const t = scale === "root" ? Math.sqrt(share) : scale === "linear" ? share : 1 + Math.log(share) / DECADES;
  return within(0, t, 1);
}

// A map as an image, one pixel per cell; cells of weight 0 stay transparent.
function painted(layer, head, scale, top) {
  const { width, height, cells, largest } = opened(layer);
  const canvas = make("canvas", { width, height });
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const inks = Uint32Array.from({ length: layer.steps + 1 }, (_, count) => {
    const [r, g, b] = colour(placed(largest[head] * (count / layer.steps) ** 2, top, scale));
    return count ? ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0 : 0;
  });
  const first = head * width * height;
  for (let i = 0; i < pixels.length; i++) pixels[i] = inks[cells[first + i]];
  pen.putImageData(image, 0, 0);
  return canvas;
}

// A small map: the mean weights of a head in at most THUMBNAIL × THUMBNAIL cells, and the largest of them.
const THUMBNAIL = 40;
function pooled(layer, head) {
  const { width, height, cells, largest } = opened(layer);
  const [down, across] = [height, width].map((count) => Math.ceil(count / THUMBNAIL));
  const [rows, cols] = [Math.ceil(height / down), Math.ceil(width / across)];
  const sums = new Float32Array(rows * cols);
  const weights = Float32Array.from({ length: layer.steps + 1 }, (_, count) => largest[head] * (count / layer.steps) ** 2);
  for (let y = 0, i = head * width * height; y < height; y++) {
    const row = Math.floor(y / down) * cols;
    for (let x = 0; x < width; x++, i++) sums[row + Math.floor(x / across)] += weights[cells[i]];
  }
  let most = 0;
  for (let i = 0; i < sums.length; i++) {
    const [row, col] = [Math.floor(i / cols), i % cols];
    sums[i] /= Math.min(down, height - row * down) * Math.min(across, width - col * across);
    if (sums[i] > most) most = sums[i];
  }
  return { rows, cols, sums, most };
}
function thumbnail({ rows, cols, sums }, scale, top) {
  const canvas = make("canvas", { width: cols, height: rows });
  const pen = canvas.getContext("2d"), image = pen.createImageData(cols, rows);
  sums.forEach((weight, i) => { if (weight > 0) image.data.set([...colour(placed(weight, top, scale)), 255], 4 * i); });
  pen.putImageData(image, 0, 0);
  return canvas;
}

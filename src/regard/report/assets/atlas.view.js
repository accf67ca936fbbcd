// The view: the pair at the centre of the picture, and the pixels per pair.

const LARGEST = 72;
const MARGIN = 14;
const between = (low, value, high) => Math.min(high, Math.max(low, value));

export class View {
  constructor() {
    Object.assign(this, { x: 0, y: 0, scale: 1, width: 1, height: 1, queries: 1, keys: 1, top: 0, moving: 0 });
  }

  // The axes are wider when zoomed in far enough to show tokens on them.
  bands(scale = this.scale) {
    const grown = between(0, (scale - 9) / 6, 1);
    const wide = Math.min(132, this.width * 0.27), high = Math.min(108, this.height * 0.25);
    return { left: 64 + grown * (Math.max(wide, 64) - 64), top: 28 + grown * (Math.max(high, 28) - 28) };
  }

  get spelled() {
    return this.scale >= 12.5;
  }

  // The finest level whose cells are at least a pixel wide.
  get level() {
    return between(0, Math.ceil(-Math.log2(this.scale) - 1e-6), this.top);
  }

  across(key) {
    return (key - this.x) * this.scale + this.width / 2;
  }

  down(query) {
    return (query - this.y) * this.scale + this.height / 2;
  }

  keyAt(px) {
    return (px - this.width / 2) / this.scale + this.x;
  }

  queryAt(py) {
    return (py - this.height / 2) / this.scale + this.y;
  }

  // The scale and centre that bring the whole map into view.
  fit() {
    let scale = this.scale;
    for (let turn = 0; turn < 4; turn++) {
      const { left, top } = this.bands(scale);
      const [wide, high] = [this.width - left - 2 * MARGIN, this.height - top - 2 * MARGIN];
      scale = between(1e-6, Math.min(wide / this.keys, high / this.queries), LARGEST);
    }
    const { left, top } = this.bands(scale);
    return { scale, x: this.keys / 2 - left / 2 / scale, y: this.queries / 2 - top / 2 / scale };
  }

  get whole() {
    const { left, top } = this.bands();
    const [right, bottom] = [this.across(this.keys), this.down(this.queries)];
    return this.across(0) >= left - 1 && this.down(0) >= top - 1 && right <= this.width + 1 && bottom <= this.height + 1;
  }

  go(x, y, scale) {
    this.scale = between(Math.min(this.fit().scale * 0.8, LARGEST), scale, LARGEST);
    const { left, top } = this.bands();
    const slack = [left / 2 / this.scale, top / 2 / this.scale];
    this.x = between(-slack[0], x, this.keys);
    this.y = between(-slack[1], y, this.queries);
  }

  show() {
    const { x, y, scale } = this.fit();
    this.go(x, y, scale);
  }

  pan(dx, dy) {
    this.go(this.x - dx / this.scale, this.y - dy / this.scale, this.scale);
  }

  // Zoom, keeping the pair under a pixel in place.
  zoom(factor, px, py) {
    const [key, query] = [this.keyAt(px), this.queryAt(py)];
    this.go(this.x, this.y, this.scale * factor);
    this.go(key - (px - this.width / 2) / this.scale, query - (py - this.height / 2) / this.scale, this.scale);
  }

  // Animate a step for 200 ms, unless reduced motion is preferred.
  glide(step, changed) {
    const from = { x: this.x, y: this.y, scale: this.scale };
    step();
    const to = { x: this.x, y: this.y, scale: this.scale };
    const turn = ++this.moving;
    if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) return changed();
    const start = performance.now();
    const frame = (now) => {
      if (turn !== this.moving) return;
      const t = between(0, (now - start) / 200, 1), eased = 1 - (1 - t) ** 3;
      this.scale = from.scale * (to.scale / from.scale) ** eased;
      // Move the centre with the scale, so that a fixed point stays fixed during the animation.
      const share = to.scale === from.scale ? eased : (1 / from.scale - 1 / this.scale) / (1 / from.scale - 1 / to.scale);
      this.x = from.x + share * (to.x - from.x);
      this.y = from.y + share * (to.y - from.y);
      if (t < 1) requestAnimationFrame(frame);
      changed();
    };
    this.scale = from.scale;
    this.x = from.x;
    this.y = from.y;
    requestAnimationFrame(frame);
  }

  stop() {
    this.moving++;
  }
}

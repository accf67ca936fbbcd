// Tiles: requested by urgency, four at a time; requests for tiles that left the view are aborted.

const AT_ONCE = 4;
const KEPT = 220;

export class Tiles {
  constructor(palette, changed, failed) {
    Object.assign(this, { palette, changed, failed });
    this.kept = new Map();  // by path, least recently used first
    this.wanted = [];
    this.pending = new Map();  // path -> AbortController
    this.refused = new Map();  // path -> time of the next attempt
  }

  // A loaded tile, painted with the current palette; or null.
  get(path) {
    const tile = this.kept.get(path);
    if (!tile) return null;
    this.kept.delete(path);
    this.kept.set(path, tile);
    if (tile.painted !== this.palette.version && this.palette.version) this.palette.paint(tile);
    return tile;
  }

  // The tiles needed now, most urgent first; a `fresh` tile in the cache is not requested again.
  need(wanted) {
    const paths = new Set(wanted.map(({ path }) => path));
    for (const [path, control] of this.pending) if (!paths.has(path)) control.abort();
    const now = performance.now();
    this.wanted = wanted.filter(({ path, fresh }) => !(this.kept.has(path) && fresh) && !((this.refused.get(path) ?? 0) > now));
    this.pump();
  }

  get idle() {
    return this.pending.size === 0 && this.wanted.length === 0;
  }

  pump() {
    while (this.pending.size < AT_ONCE && this.wanted.length) {
      const next = this.wanted.shift();
      if (!this.pending.has(next.path)) this.load(next);
    }
  }

  async load({ path, rows, cols, known }) {
    const control = new AbortController();
    this.pending.set(path, control);
    try {
      const answer = await fetch(path, { signal: control.signal });
      if (!answer.ok) throw new Error(await answer.text());
      const buffer = await answer.arrayBuffer();
      if (buffer.byteLength !== 4 * rows * cols) throw new Error("a tile has the wrong size");
      this.keep(path, this.decode(buffer, rows, cols, known));
      this.refused.delete(path);
      this.failed(null);
    } catch (error) {
      if (error.name !== "AbortError") {
        this.refused.set(path, performance.now() + 3000);
        this.failed(error);
      }
    } finally {
      this.pending.delete(path);
      this.pump();
      this.changed();
    }
  }

  decode(buffer, rows, cols, known) {
    const canvas = document.createElement("canvas");
    canvas.width = cols;
    canvas.height = rows;
    const [values, bits] = [new Float32Array(buffer), new Uint32Array(buffer)];
    const counts = new Uint32Array(1024);  // histogram of weights above 0, by exponent and two bits of the fraction
    let highest = 0;
    for (let i = 0; i < values.length; i++) {
      if (values[i] > 0) {
        counts[bits[i] >>> 21]++;
        if (values[i] > highest) highest = values[i];
      }
    }
    return { rows, cols, known, values, bits, counts, highest, canvas, pen: canvas.getContext("2d"), painted: -1 };
  }

  keep(path, tile) {
    this.kept.delete(path);
    this.kept.set(path, tile);
    for (const old of this.kept.keys()) {
      if (this.kept.size <= KEPT) break;
      if (!this.pending.has(old)) this.kept.delete(old);
    }
  }
}

// Find things: a word in the text, and the strongest cells in view.

import { asCount, find } from "./atlas.text.js";

const MOST = 300; // strongest cells of a view

export class Search {
  constructor(layer, go) {
    Object.assign(this, { layer, go, places: [], at: -1, asked: "" });
    find("search").addEventListener("keydown", (event) => {
      event.stopPropagation(); // the map moves by some of these keys
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") find("map").focus();
      else return;
      event.preventDefault();
    });
    find("search").addEventListener("input", () => {
      if (!find("search").value.trim()) this.clear();
    });
  }

  clear() {
    this.asked = "";
    this.places = [];
    find("matches").textContent = "";
    this.go(null);
  }

  async step(by) {
    const text = find("search").value.trim().slice(0, 100), asked = `${this.layer()}/${text}`;
    if (!text) return this.clear();
    if (asked !== this.asked) {
      const answer = await fetch(`search/${this.layer()}/queries/${encodeURIComponent(text)}`).catch(() => null);
      if (!answer?.ok) return;
      Object.assign(this, { places: await answer.json(), at: by > 0 ? -1 : 0, asked });
    }
    const { length } = this.places;
    find("matches").textContent = length ? "" : "not found";
    if (!length) return this.go(null);
    this.at = (this.at + by + length) % length;
    find("matches").textContent = `${asCount(this.at + 1)} of ${asCount(length)}`;
    this.go(this.places[this.at]);
  }
}

// The strongest cells in view, strongest first: [{ query, key, weight }]; `tiles` are those in view, at one level.
export function strongest(view, level, side, tiles) {
  const cell = 2 ** level, { left, top } = view.bands();
  const inView = (from, to, first, count) => [Math.max(0, Math.ceil(from / cell - 0.5) - first), Math.min(count, Math.floor(to / cell + 0.5) - first)];
  let found = [];
  for (const { row, col, tile } of tiles) {
    const [above, below] = inView(view.queryAt(top), view.queryAt(view.height), row * side, tile.rows);
    const [from, to] = inView(view.keyAt(left), view.keyAt(view.width), col * side, tile.cols);
    let least = found.length >= MOST ? found.at(-1).weight : 0;
    for (let y = above; y < below; y++) {
      for (let x = from; x < to; x++) {
        const weight = tile.values[y * tile.cols + x];
        if (!(weight > least)) continue;
        found.push({ query: (row * side + y) * cell, key: (col * side + x) * cell, weight });
        if (found.length < 4 * MOST) continue;
        found = found.sort((a, b) => b.weight - a.weight).slice(0, MOST);
        least = found.at(-1).weight;
      }
    }
  }
  return found.sort((a, b) => b.weight - a.weight || a.query - b.query || a.key - b.key).slice(0, MOST);
}

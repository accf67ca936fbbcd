// The picture: tiles, or coarser ones while finer ones load; axes with tokens or numbers; the overview.

import { ends, Palette } from "./atlas.colour.js";
import { asCount, themed } from "./atlas.text.js";

// The tiles of a level that are in view, nearest to the centre first.
export function visible(view, level, side) {
  const size = side * 2 ** level;
  const range = (from, to, count) => [Math.max(0, Math.floor(from / size)), Math.min(Math.ceil(count / size), Math.ceil(to / size))];
  const [left, right] = range(view.keyAt(0), view.keyAt(view.width), view.keys);
  const [top, bottom] = range(view.queryAt(0), view.queryAt(view.height), view.queries);
  const found = [];
  for (let row = top; row < bottom; row++) for (let col = left; col < right; col++) found.push({ level, row, col });
  const far = ({ row, col }) => Math.hypot((row + 0.5) * size - view.y, (col + 0.5) * size - view.x);
  return found.sort((a, b) => far(a) - far(b));
}

export class Picture {
  constructor(canvas, view, side, tileAt, tokenAt) {
    Object.assign(this, { canvas, view, side, tileAt, tokenAt, pen: canvas.getContext("2d"), sharp: 1 });
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    this.sharp = Math.min(3, Math.max(1, window.devicePixelRatio || 1));
    this.canvas.width = Math.round(clientWidth * this.sharp);
    this.canvas.height = Math.round(clientHeight * this.sharp);
    this.view.width = clientWidth;
    this.view.height = clientHeight;
  }

  readTheme() {
    this.colours = Object.fromEntries(["page", "card", "ink", "soft", "line", "faint", "none", "accent", "on-accent"].map((name) => [name, themed(`--${name}`)]));
    this.mono = themed("--mono");
    this.sans = themed("--sans");
    const cloth = document.createElement("canvas");
    cloth.width = cloth.height = 8;
    const pen = cloth.getContext("2d");
    pen.fillStyle = this.colours.faint;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = this.colours.line;
    for (const x of [-4, 4, 12]) {
      pen.moveTo(x - 5, 9);
      pen.lineTo(x + 5, -1);
    }
    pen.stroke();
    this.unknown = this.pen.createPattern(cloth, "repeat");
  }

  // The row and the column of a token that was searched for.
  guides(token) {
    const { view, pen, colours } = this;
    const thick = Math.max(1, view.scale);
    pen.save();
    pen.globalAlpha = view.scale > 6 ? 0.22 : 0.75;
    pen.fillStyle = colours.accent;
    if (token < view.queries) pen.fillRect(view.across(0), view.down(token), view.keys * view.scale, thick);
    if (token < view.keys) pen.fillRect(view.across(token), view.down(0), thick, view.queries * view.scale);
    pen.restore();
  }

  draw(palette, hover, token = null, backdrop = null) {
    const { pen, view, colours } = this;
    pen.setTransform(this.sharp, 0, 0, this.sharp, 0, 0);
    pen.fillStyle = colours.page;
    pen.fillRect(0, 0, view.width, view.height);
    const [left, top] = [this.snap(view.across(0)), this.snap(view.down(0))];
    const [right, bottom] = [this.snap(view.across(view.keys)), this.snap(view.down(view.queries))];
    pen.save();
    pen.beginPath();
    pen.rect(left, top, Math.max(right - left, 1), Math.max(bottom - top, 1));
    pen.clip();
    pen.fillStyle = this.unknown;
    pen.fillRect(0, 0, view.width, view.height);
    if (backdrop) {
      pen.globalAlpha = 0.6; // it is coarse, and in colours of its own
      pen.imageSmoothingEnabled = true;
      pen.drawImage(backdrop, left, top, right - left, bottom - top);
      pen.globalAlpha = 1;
    }
    for (const place of visible(view, view.level, this.side)) this.place(place);
    pen.restore();
    pen.strokeStyle = colours.line;
    pen.strokeRect(left - 0.5, top - 0.5, right - left + 1, bottom - top + 1);
    if (view.scale >= 46) this.numbers(palette);
    if (token !== null) this.guides(token);
    if (hover) this.outline(hover);
    this.axes(hover);
  }

  snap(x) {
    return Math.round(x * this.sharp) / this.sharp;
  }

  // Draw a tile over the nearest coarser one that is loaded; if the tile itself is missing, draw its finer ones.
  place({ level, row, col }) {
    const own = this.tileAt(level, row, col);
    if (!own || own.known < this.view.queries) {
      for (let up = level + 1; up <= this.view.top; up++) {
        const by = 2 ** (up - level);
        const coarse = this.tileAt(up, Math.floor(row / by), Math.floor(col / by));
        if (!coarse) continue;
        this.image(coarse, up, Math.floor(row / by), Math.floor(col / by), { level, row, col });
        break;
      }
    }
    if (own) return this.image(own, level, row, col);
    if (level === 0) return;
    for (const [r, c] of [[0, 0], [0, 1], [1, 0], [1, 1]]) {
      const fine = this.tileAt(level - 1, 2 * row + r, 2 * col + c);
      if (fine) this.image(fine, level - 1, 2 * row + r, 2 * col + c);
    }
  }

  // Draw a tile, or the part of it that another, finer tile covers.
  image(tile, level, row, col, within = { level, row, col }) {
    const { view, pen, side } = this;
    const cell = 2 ** level, size = side * 2 ** within.level;
    const left = Math.max(0, (within.col * size) / cell - col * side), top = Math.max(0, (within.row * size) / cell - row * side);
    const cols = Math.min(size / cell, tile.cols - left), rows = Math.min(size / cell, tile.rows - top);
    if (cols <= 0 || rows <= 0) return;
    const x = this.snap(view.across((col * side + left) * cell)), y = this.snap(view.down((row * side + top) * cell));
    const right = this.snap(view.across((col * side + left + cols) * cell)), bottom = this.snap(view.down((row * side + top + rows) * cell));
    pen.imageSmoothingEnabled = cell * view.scale < 1;
    pen.drawImage(tile.canvas, left, top, cols, rows, x, y, right - x, bottom - y);
  }

  // Write single weights into their cells.
  numbers(palette) {
    const { view, pen, side } = this;
    pen.font = `11px ${this.sans}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let i = Math.max(0, Math.floor(view.queryAt(0))); i < Math.min(view.queries, view.queryAt(view.height)); i++) {
      for (let j = Math.max(0, Math.floor(view.keyAt(0))); j < Math.min(view.keys, view.keyAt(view.width)); j++) {
        const tile = this.tileAt(0, Math.floor(i / side), Math.floor(j / side));
        const weight = tile?.values[(i % side) * tile.cols + (j % side)];
        if (!(weight > 0)) continue;
        pen.fillStyle = palette.light(weight) ? "#14181c" : "#ffffff";
        pen.fillText(weight < 5e-4 ? weight.toExponential(0).replace("-", "−") : weight.toFixed(3), view.across(j + 0.5), view.down(i + 0.5));
      }
    }
  }

  outline({ cell, query, key }) {
    const { view, pen } = this;
    const [x, y] = [this.snap(view.across(key)), this.snap(view.down(query))];
    const width = Math.max(3, view.across(Math.min(key + cell, view.keys)) - x), height = Math.max(3, view.down(Math.min(query + cell, view.queries)) - y);
    pen.lineWidth = 1;
    pen.strokeStyle = "#0009";
    pen.strokeRect(x - 1.5, y - 1.5, width + 3, height + 3);
    pen.strokeStyle = "#fff";
    pen.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
  }

  axes(hover) {
    const { view, pen, colours } = this;
    const { left, top } = view.bands();
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, view.width, top);
    pen.fillRect(0, 0, left, view.height);
    pen.fillStyle = colours.line;
    pen.fillRect(left - 1, top - 1, view.width, 1);
    pen.fillRect(left - 1, top - 1, 1, view.height);
    this.axis("keys", left, top, view.width, hover);
    this.axis("queries", top, left, view.height, hover);
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, left - 1, top - 1);
    pen.fillStyle = colours.soft;
    pen.font = `11px ${this.sans}`;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    if (top >= 44) {
      pen.fillText("keys →", left - 8, top - 28);
      pen.fillText("queries ↓", left - 8, top - 12);
      return;
    }
    pen.fillText("queries ↓", left - 5, top / 2);
    const wide = pen.measureText("keys →").width;
    pen.fillStyle = colours.card;
    pen.fillRect(view.width - wide - 18, 0, wide + 18, top - 1);
    pen.fillStyle = colours.soft;
    pen.fillText("keys →", view.width - 9, top / 2 - 2);
  }

  // One axis, from `from` to `to` and `thick` pixels wide; the axis of the keys is horizontal, with rotated labels.
  axis(side, from, thick, to, hover) {
    const { view, pen } = this;
    const flat = side === "keys";
    const along = flat ? (i) => view.across(i) : (i) => view.down(i);
    const [first, last] = flat ? [view.keyAt(from), view.keyAt(to)] : [view.queryAt(from), view.queryAt(to)];
    const count = flat ? view.keys : view.queries;
    pen.save();
    pen.beginPath();
    pen.rect(...(flat ? [from, 0, to - from, thick] : [0, from, thick, to - from]));
    pen.clip();
    const held = hover && { start: flat ? hover.key : hover.query, stop: Math.min((flat ? hover.key : hover.query) + hover.cell, count) };
    const step = view.spelled ? 1 : ticks((flat ? 78 : 44) / view.scale);
    const start = Math.max(0, Math.floor(first / step) * step), stop = Math.min(count, Math.ceil(last));
    if (held) this.mark(flat, along(held.start), along(held.stop), thick);
    for (let i = start; i < stop; i += step) {
      const lit = held && i >= held.start && i < held.stop, at = along(i + 0.5);
      if (view.spelled) this.word(side, flat, i, at, thick, lit);
      else if (!held || Math.abs(at - along(held.start)) > (flat ? 52 : 16)) this.number(flat, i, at, thick);
    }
    if (held && !view.spelled) this.tag(flat, held.start, (along(held.start) + along(held.stop)) / 2, thick, from, to);
    pen.restore();
  }

  mark(flat, start, stop, thick) {
    const [at, size] = [start, Math.max(2, stop - start)];
    this.pen.fillStyle = this.colours.accent;
    this.pen.fillRect(...(flat ? [at, this.view.spelled ? 0 : thick - 4, size, thick - 1] : [this.view.spelled ? 0 : thick - 4, at, thick - 1, size]));
  }

  number(flat, i, at, thick) {
    const { pen, colours } = this;
    pen.fillStyle = colours.line;
    pen.fillRect(...(flat ? [Math.round(at), thick - 6, 1, 5] : [thick - 6, Math.round(at), 5, 1]));
    pen.fillStyle = colours.soft;
    pen.font = `11px ${this.sans}`;
    pen.textBaseline = "middle";
    pen.textAlign = flat ? "center" : "right";
    if (flat) pen.fillText(asCount(i), at, thick / 2 - 2);
    else pen.fillText(asCount(i), thick - 9, at);
  }

  // The index under the pointer, drawn over the other labels.
  tag(flat, i, at, thick, from, to) {
    const { pen, colours } = this;
    pen.font = `600 11px ${this.sans}`;
    const text = asCount(i), width = pen.measureText(text).width + 10;
    const middle = flat ? Math.min(to - width / 2, Math.max(from + width / 2, at)) : at;
    pen.fillStyle = colours.accent;
    pen.beginPath();
    pen.roundRect(...(flat ? [middle - width / 2, 4, width, thick - 9] : [thick - 5 - width, middle - 9, width, 18]), 4);
    pen.fill();
    pen.fillStyle = colours["on-accent"];
    pen.textBaseline = "middle";
    pen.textAlign = flat ? "center" : "right";
    pen.fillText(text, flat ? middle : thick - 10, flat ? thick / 2 : middle + 0.5);
  }

  word(side, flat, i, at, thick, lit) {
    const { pen, colours } = this;
    const token = this.tokenAt(side, i);
    pen.save();
    if (flat) {
      pen.translate(at, thick - 8);
      pen.rotate(-Math.PI / 2);
    } else {
      pen.translate(thick - 8, at);
    }
    pen.textBaseline = "middle";
    pen.font = `10px ${this.sans}`;
    const index = asCount(i), numbered = lit || i % (this.view.scale < 24 ? 5 : 1) === 0;
    let room = thick - 14;
    if (numbered) {
      pen.fillStyle = lit ? colours["on-accent"] : colours.soft;
      pen.globalAlpha = lit ? 1 : 0.75;
      pen.textAlign = flat ? "right" : "left";
      pen.fillText(index, flat ? room : -room, 0.5);
      pen.globalAlpha = 1;
      room -= pen.measureText(index).width + 8;
    }
    pen.font = `12px ${this.mono}`;
    pen.textAlign = flat ? "left" : "right";
    pen.fillStyle = lit ? colours["on-accent"] : colours.ink;
    pen.fillText(shortened(pen, token ?? "…", room), 0, 0.5);
    pen.restore();
  }

  // The whole map, small, on its own colour scale, with a frame around the part in view.
  overview(canvas, tile) {
    const { view, colours } = this;
    canvas.hidden = view.whole || !tile;
    if (canvas.hidden) return;
    const most = view.width < 600 ? 84 : 148;
    const unit = most / Math.max(view.keys, view.queries);
    const [width, height] = [view.keys, view.queries].map((size) => Math.max(12, Math.round(size * unit)));
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = width * this.sharp;
    canvas.height = height * this.sharp;
    const pen = canvas.getContext("2d");
    pen.scale(this.sharp, this.sharp);
    pen.imageSmoothingQuality = "high";
    const cell = 2 ** view.top;
    pen.drawImage(this.miniature(tile), 0, 0, view.keys / cell, view.queries / cell, 0, 0, width, height);
    const { left, top } = view.bands();
    const [x, right] = [left, view.width].map((px) => Math.min(1, Math.max(0, view.keyAt(px) / view.keys)) * width);
    const [y, bottom] = [top, view.height].map((py) => Math.min(1, Math.max(0, view.queryAt(py) / view.queries)) * height);
    const [w, h] = [Math.max(right - x, 6), Math.max(bottom - y, 6)];
    pen.fillStyle = `${colours.page}44`;
    pen.beginPath();
    pen.rect(0, 0, width, height);
    pen.rect(x, y, w, h);
    pen.fill("evenodd");
    pen.strokeStyle = "#fff";
    pen.lineWidth = 3;
    pen.strokeRect(x, y, w, h);
    pen.strokeStyle = "#0b5c77";
    pen.lineWidth = 1.5;
    pen.strokeRect(x, y, w, h);
  }

  miniature(tile) {
    const { none } = this.colours;
    if (tile.miniature?.none !== none) {
      const own = new Palette(), canvas = document.createElement("canvas");
      own.set(...(ends([tile], "root") ?? [0, 1]), "root", none);
      canvas.width = tile.cols;
      canvas.height = tile.rows;
      own.paint({ ...tile, pen: canvas.getContext("2d") });
      tile.miniature = { none, canvas };
    }
    return tile.miniature.canvas;
  }
}

// The smallest step of 1, 2 or 5 times a power of ten that is at least `least`.
function ticks(least) {
  const ten = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(least, 1))));
  return [1, 2, 5, 10].map((step) => step * ten).find((step) => step >= least);
}

function shortened(pen, text, room) {
  const width = pen.measureText(text).width;
  if (width <= room) return text;
  const letters = [...text];
  return `${letters.slice(0, Math.max(1, Math.floor((letters.length * room) / width) - 1)).join("")}…`;
}

// Ticks of the colour scale: powers of ten, or 0, half and the maximum.
export function legend(box, palette) {
  const marks = [];
  if (palette.scale === "log") {
    const [first, last] = [Math.ceil(Math.log10(palette.low) - 1e-6), Math.floor(Math.log10(palette.high) + 1e-6)];
    const skip = Math.max(1, Math.ceil((last - first) / 5));
    for (let power = last; power >= first; power -= skip) marks.push(10 ** power);
    if (last - first < 2) for (let power = first - 1; power <= last; power++) marks.push(2 * 10 ** power, 5 * 10 ** power);
  } else {
    for (const part of palette.scale === "root" ? [0, 0.1, 0.4, 1] : [0, 0.5, 1]) marks.push(palette.high * part);
  }

  const within = marks.filter((value) => value >= palette.low * 0.99 && value <= palette.high * 1.01);
  box.replaceChildren(...within.map((value) => {
    const node = document.createElement("span");
    const text = value > 0 && value < 1e-3 ? value.toExponential(0).replace("e-", "e−") : String(Number(value.toPrecision(2)));
    node.textContent = palette.scale !== "log" && value === palette.high && value < 1 ? `≥ ${text}` : text;
    node.style.left = `${100 * palette.place(value)}%`;
    return node;
  }));
}

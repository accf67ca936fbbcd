// The map of the chosen head, and of a pinned one beside it: axes with tokens, a cursor, zoom, a readout of the cell.

const zoom = { x: 0, y: 0, size: 1 }; // the part in view, as shares of the map
const cursor = { row: 0, col: 0, shown: false };
const LABEL = 13; // pixels between labels, at least
const LARGEST = 30; // pixels of a token, at most
let figures = [];

class MapFigure {
  constructor(prefix, place) {
    Object.assign(this, { place, canvas: find(`${prefix}map`), box: find(`${prefix}plot`), mark: find(`${prefix}cursor`), left: 0, top: 0, width: 1, height: 1 });
    this.listen();
  }
  get layer() { return look.layers[this.place().layer]; }
  get open() { return opened(this.layer); }
  get label() { return `${look.short[this.place().layer]} H${this.layer.heads[this.place().head]}`; }
  get name() { return `${nameOf(this.layer)} · head ${this.layer.heads[this.place().head]}`; }

  // Pixels of a cell's edge, and the cell under a pixel.
  across(col) { return this.left + ((col / this.open.width - zoom.x) / zoom.size) * this.width; }
  down(row) { return this.top + ((row / this.open.height - zoom.y) / zoom.size) * this.height; }
  colAt(px) { return (((px - this.left) / this.width) * zoom.size + zoom.x) * this.open.width; }
  rowAt(py) { return (((py - this.top) / this.height) * zoom.size + zoom.y) * this.open.height; }

  draw(top) {
    const { open, canvas } = this;
    const room = this.box.clientWidth;
    if (!room) return;
    const tokens = [open.rows.at(-1), open.cols.at(-1)];
    const most = within(300, window.innerHeight - 260, 820);
    this.left = room < 420 ? 74 : 104;
    this.top = room < 420 ? 64 : 84;
    this.width = Math.min(room - this.left - 2, most);
    this.height = Math.min(most, Math.max(this.width / 4, (this.width * tokens[0]) / tokens[1]));
    if (tokens[0] > tokens[1]) this.width = Math.max(this.height / 4, Math.min(this.width, (this.height * tokens[1]) / tokens[0]));
    const [width, height] = [Math.ceil(this.left + this.width + 1), Math.ceil(this.top + this.height + 1)];
    const sharp = sharpness();
    canvas.width = width * sharp;
    canvas.height = height * sharp;
    canvas.style.width = `${width}px`;
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, this.top, this.width, this.height);
    pen.clip();
    pen.fillStyle = themed("--none");
    pen.fillRect(this.left, this.top, this.width, this.height);
    pen.imageSmoothingEnabled = this.width / zoom.size < open.width;
    pen.drawImage(painted(this.layer, this.place().head, state.scale, top), this.across(0), this.down(0), this.width / zoom.size, this.height / zoom.size);
    if (!open.exact) this.singles(pen, top);
    pen.restore();
    this.labels(pen, open.rows, look.texts[this.layer.queries], false);
    this.labels(pen, open.cols, look.texts[this.layer.keys], true);
    pen.fillStyle = themed("--soft");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.fillText("keys →", 2, 12);
    pen.fillText("queries ↓", 2, 27);
    canvas.style.touchAction = canvas.style.cursor = "";
    if (zoom.size < 1) Object.assign(canvas.style, { touchAction: "none", cursor: "grab" });
    canvas.setAttribute("aria-label", `Map of ${this.name}: ${asCount(tokens[0])} queries by ${asCount(tokens[1])} keys in ${open.height} × ${open.width} cells, ${state.scale} colours. Arrow keys read it cell by cell; plus and minus zoom.`);
  }

  // Zoomed in, the strongest single weights of each query are drawn over the cells that hold means.
  singles(pen, top) {
    const { open, layer } = this;
    const [high, wide] = [this.height / zoom.size / open.rows.at(-1), this.width / zoom.size / open.cols.at(-1)];
    if (Math.min(high, wide) < 3) return;
    const inCell = (edge, token) => {
      const cell = edge.findLastIndex((start) => start <= token);
      return cell + (token - edge[cell]) / (edge[cell + 1] - edge[cell]);
    };
    const rows = [open.rows[within(0, Math.floor(this.rowAt(this.top)), open.height - 1)], open.rows[within(0, Math.ceil(this.rowAt(this.top + this.height)), open.height)]];
    for (let query = rows[0]; query < rows[1]; query++) {
      for (const [key, weight] of attended(layer, this.place().head, query)) {
        pen.fillStyle = css(placed(weight, top, state.scale));
        pen.fillRect(this.across(inCell(open.cols, key)), this.down(inCell(open.rows, query)), Math.max(2, wide), Math.max(2, high));
      }
    }
  }

  // Every token has a label if there is room; otherwise the first of every few cells.
  labels(pen, starts, text, flat) {
    const at = flat ? (cell) => this.across(cell) : (cell) => this.down(cell);
    const size = at(1) - at(0), cells = starts.length - 1;
    const [from, to] = flat ? [this.left, this.left + this.width] : [this.top, this.top + this.height];
    const [first, last] = (flat ? [this.colAt(from), this.colAt(to)] : [this.rowAt(from), this.rowAt(to)]).map(Math.floor);
    const each = (size * cells) / starts.at(-1) >= LABEL, step = each ? 1 : Math.max(1, Math.ceil(LABEL / size));
    pen.save();
    pen.fillStyle = themed("--soft");
    pen.font = `${within(9, size * step - 2, 11)}px ${themed("--mono")}`;
    pen.textBaseline = "middle";
    pen.textAlign = flat ? "left" : "right";
    const room = (flat ? this.top : this.left) - 8;
    for (let cell = Math.ceil(Math.max(0, first) / step) * step; cell < Math.min(cells, last + 1); cell += step) {
      const [start, stop] = each ? [starts[cell], starts[cell + 1]] : [starts[cell], starts[cell] + 1];
      for (let token = start; token < stop; token++) {
        const along = at(cell + (token - start + 0.5) / (stop - start));
        if (along < from || along > to || (flat && along < 62)) continue;
        const label = clipped(pen, token, legible(tokenAt(text, token)), room);
        pen.save();
        pen.translate(flat ? along : this.left - 5, flat ? this.top - 5 : along);
        if (flat) pen.rotate(-Math.PI / 2);
        pen.fillText(label, 0, 0);
        pen.restore();
      }
    }
    pen.restore();
  }

  // Put the cursor around its cell, if that is in view.
  point() {
    const [left, top] = [this.across(cursor.col), this.down(cursor.row)];
    const [right, bottom] = [this.across(cursor.col + 1), this.down(cursor.row + 1)];
    const seen = right > this.left && bottom > this.top && left < this.left + this.width && top < this.top + this.height;
    this.mark.hidden = !cursor.shown || !seen;
    const [x, y] = [Math.max(left, this.left), Math.max(top, this.top)];
    Object.assign(this.mark.style, {
      left: `${x - 1}px`, top: `${y - 1}px`,
      width: `${Math.max(3, Math.min(right, this.left + this.width) - x + 2)}px`, height: `${Math.max(3, Math.min(bottom, this.top + this.height) - y + 2)}px`,
    });
  }

  weightAt(row, col) {
    const { open, layer } = this;
    const { head } = this.place();
    return open.largest[head] * (open.cells[(head * open.height + row) * open.width + col] / layer.steps) ** 2;
  }

  listen() {
    const { canvas } = this;
    const spot = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const under = (event) => {
      const [px, py] = spot(event);
      const inside = px >= this.left && py >= this.top && px < this.left + this.width && py < this.top + this.height;
      return inside ? [Math.floor(this.rowAt(py)), Math.floor(this.colAt(px))] : null;
    };
    let held = null, dragged = false;
    canvas.addEventListener("pointerdown", (event) => {
      dragged = false;
      if (event.button !== 0 || zoom.size >= 1) return;
      held = spot(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const to = spot(event);
      if (held && Math.hypot(to[0] - held[0], to[1] - held[1]) > (dragged ? 0 : 4)) {
        dragged = true;
        moveTo(zoom.x - ((to[0] - held[0]) / this.width) * zoom.size, zoom.y - ((to[1] - held[1]) / this.height) * zoom.size, zoom.size);
        held = to;
      }
      const place = under(event);
      if (place) pointAt(...place); else hidePoint();
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) canvas.addEventListener(name, () => { held = null; });
    canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && hidePoint());
    canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && pointAt(cursor.row, cursor.col));
    canvas.addEventListener("blur", hidePoint);
    canvas.addEventListener("click", (event) => {
      const place = under(event);
      if (!place || dragged) return;
      pointAt(...place);
      holdPair(this.open.rows[place[0]], this.open.cols[place[1]]);
    });
    canvas.addEventListener("dblclick", (event) => zoomBy(event.shiftKey ? 0.5 : 2, this, ...spot(event)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoomBy(Math.exp(-within(-240, event.deltaY, 240) * (Math.abs(event.deltaY) < 40 ? 0.01 : 0.004)), this, ...spot(event));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      const factor = { "+": 2, "=": 2, "-": 0.5, "−": 0.5 }[event.key];
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (move) reveal(cursor.row + move[0], cursor.col + move[1]);
      else if (factor) zoomBy(factor, this, this.across(cursor.col + 0.5), this.down(cursor.row + 0.5));
      else if (event.key === "0") moveTo(0, 0, 1);
      else if (event.key === "Enter") holdPair(this.open.rows[cursor.row], this.open.cols[cursor.col]);
      else return;
      event.preventDefault();
    });
  }
}

// "\u2068" and "\u2069" isolate a right-to-left token from the text around it.
function clipped(pen, place, text, room) {
  if (text === String(place)) return text; // positions are shown in place of tokens
  let letters = [...text].slice(0, 24);
  const whole = () => `${place} \u2068${letters.join("")}\u2069`;
  if (pen.measureText(whole()).width <= room && letters.length === [...text].length) return whole();
  while (letters.length && pen.measureText(`${whole()}…`).width > room) letters = letters.slice(0, -1);
  return letters.length ? `${place} \u2068${letters.join("")}…\u2069` : String(place);
}

const shownFigures = () => (state.pinned ? figures : figures.slice(0, 1));
const topOf = (shown) => Math.max(...shown.map((figure) => figure.open.largest[figure.place().head]));

function drawMap() {
  const shown = shownFigures();
  const map = state.view === "map";
  find("map-legend").hidden = !map;
  find("zoom").hidden = !map;
  for (const figure of figures) figure.box.hidden = !map;
  if (!map) return;
  const top = topOf(shown);
  for (const figure of shown) figure.draw(top);
  mapLegend(top);
  find("map-unit").textContent = figures[0].open.exact ? "weight" : "mean weight";
  find("out").disabled = find("whole").disabled = zoom.size >= 1;
  find("in").disabled = zoom.size <= smallest(figures[0]);
  pointed();
}

// The smallest part of the map that may fill the picture: its tokens are then large.
const smallest = ({ open, width }) => Math.min(1, width / LARGEST / Math.max(open.rows.at(-1), open.cols.at(-1)));

function moveTo(x, y, size) {
  zoom.size = within(smallest(figures[0]), size, 1);
  zoom.x = within(0, x, 1 - zoom.size);
  zoom.y = within(0, y, 1 - zoom.size);
  drawMap();
}

// Zoom, keeping the point under a pixel in place.
function zoomBy(factor, figure = figures[0], px = figure.left + figure.width / 2, py = figure.top + figure.height / 2) {
  const [a, b] = [within(0, (px - figure.left) / figure.width, 1), within(0, (py - figure.top) / figure.height, 1)];
  const size = within(smallest(figure), zoom.size / factor, 1);
  moveTo(zoom.x + a * (zoom.size - size), zoom.y + b * (zoom.size - size), size);
}

// Point at a cell, and move the map if it is not in view.
function reveal(row, col) {
  const { open } = figures[0];
  [cursor.row, cursor.col, cursor.shown] = [within(0, row, open.height - 1), within(0, col, open.width - 1), true];
  const into = (start, cell, count) => within((cell + 1) / count - zoom.size, start, cell / count);
  const [x, y] = [into(zoom.x, cursor.col, open.width), into(zoom.y, cursor.row, open.height)];
  if (x !== zoom.x || y !== zoom.y) moveTo(x, y, zoom.size); else pointed();
}
function pointAt(row, col) {
  const { open } = figures[0];
  [cursor.row, cursor.col, cursor.shown] = [within(0, row, open.height - 1), within(0, col, open.width - 1), true];
  pointed();
}
function hidePoint() {
  cursor.shown = false;
  pointed();
}

const RAISED = [..."⁰¹²³⁴⁵⁶⁷⁸⁹"];
function asTick(value) {
  const power = Math.round(Math.log10(value));
  const round = power < -2 && Math.abs(value / 10 ** power - 1) < 1e-9;
  return round ? `10⁻${[...String(-power)].map((digit) => RAISED[digit]).join("")}` : asNumber(value);
}

// Round numbers along the colours, those at the ends first, none too close to another.
function mapLegend(top) {
  const ticks = find("map-ticks");
  ticks.replaceChildren();
  const wide = find("map-ramp").clientWidth, taken = [];
  const put = (value) => {
    const t = value > 0 ? placed(value, top, state.scale) : 0;
    const text = asTick(value), room = 4 * text.length + 5;
    if ((t < 0.02 && value > 0 && state.scale === "log") || taken.some(([at, other]) => Math.abs(at - t * wide) < room + other)) return;
    taken.push([t * wide, room]);
    const tick = make("span", { text });
    tick.style.left = `${100 * t}%`;
    ticks.append(tick);
  };
  if (!(top > 0)) return put(0);
  const round = [1, 0.1, 0.01, 0.001, 1e-4, 1e-5].filter((value) => value <= top);
  if (state.scale !== "log") put(0);
  put(top);
  for (const value of state.scale === "log" ? round : [0.5, 0.25, ...round, 0.05, 0.02, 0.005].filter((value) => value < top)) put(value);
  find("map-ramp").setAttribute("aria-label", `Colours up to ${asNumber(top)}, on a ${{ root: "square-root", log: "logarithmic", linear: "linear" }[state.scale]} scale`);
}

function spanned(start, stop, text) {
  const first = legible(tokenAt(text, start));
  if (stop - start === 1) return `${asCount(start)} “${first}”`;
  return `${asCount(start)}–${asCount(stop - 1)} “${first}” … “${legible(tokenAt(text, stop - 1))}”`;
}

// Place the cursors, and say what the cell holds.
function pointed() {
  const [own] = figures;
  const { open, layer } = own;
  for (const figure of shownFigures()) figure.point();
  const sizes = `${asCount(open.rows.at(-1))} queries × ${asCount(open.cols.at(-1))} keys`;
  if (state.view === "lines") return;
  if (!cursor.shown) {
    const held = open.exact ? `Every weight of ${sizes}.` : `${open.height} × ${open.width} cells over ${sizes}.`;
    find("cell").textContent = `${held} Point at a cell to read it; click to see its tokens. Zoom with + and −, a double click, or Ctrl and the wheel.`;
    return;
  }
  const { row, col } = cursor;
  const queries = spanned(open.rows[row], open.rows[row + 1], look.texts[layer.queries]);
  const keys = spanned(open.cols[col], open.cols[col + 1], look.texts[layer.keys]);
  const weight = own.weightAt(row, col);
  const pinned = state.pinned && comparable() ? ` (pinned: ${asNumber(figures[1].weightAt(row, col))})` : "";
  find("cell").textContent = `\u2068${queries}\u2069 → \u2068${keys}\u2069: ${open.exact ? "weight" : "mean weight"} ${asNumber(weight)}${pinned}`;
}
// Whether the maps of the pinned head and of the chosen one have the same cells.
const comparable = () => figures[0].open.height === figures[1].open.height && figures[0].open.width === figures[1].open.width;

function mapEvents() {
  figures = [new MapFigure("", () => state), new MapFigure("pinned-", () => state.pinned ?? state)];
  find("in").addEventListener("click", () => zoomBy(2));
  find("out").addEventListener("click", () => zoomBy(0.5));
  find("whole").addEventListener("click", () => moveTo(0, 0, 1));
  for (const input of document.querySelectorAll("input[name=scale]")) input.addEventListener("change", () => changed({ scale: input.value }));
  for (const input of document.querySelectorAll("input[name=view]")) input.addEventListener("change", () => changed({ view: input.value }));
  drawRamp(find("map-ramp"));
}

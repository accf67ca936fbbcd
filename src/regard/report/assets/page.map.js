// The pooled map of the chosen head: axes with tokens where they fit, a cursor, and a readout of the cell.

const plot = { left: 0, top: 0, width: 0, height: 0, row: 0, col: 0 };

function drawMap() {
  const layer = here();
  const open = opened(layer);
  const canvas = find("map");
  const room = find("plot").clientWidth;
  const tokens = [open.rows.at(-1), open.cols.at(-1)];
  plot.left = room < 420 ? 74 : 96;
  plot.top = room < 420 ? 64 : 78;
  plot.width = Math.min(room - plot.left - 2, 560);
  plot.height = Math.min(560, Math.max(plot.width / 4, (plot.width * tokens[0]) / tokens[1]));
  if (tokens[0] > tokens[1]) plot.width = Math.max(plot.height / 4, Math.min(plot.width, (plot.height * tokens[1]) / tokens[0]));
  const [width, height] = [Math.ceil(plot.left + plot.width + 1), Math.ceil(plot.top + plot.height + 1)];
  const sharp = Math.min(3, Math.max(1, window.devicePixelRatio || 1));
  canvas.width = width * sharp;
  canvas.height = height * sharp;
  canvas.style.width = `${width}px`;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  pen.fillStyle = themed("--none");
  pen.fillRect(plot.left, plot.top, plot.width, plot.height);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(painted(layer, state.head, state.scale), plot.left, plot.top, plot.width, plot.height);
  labels(pen, open.rows, look.texts[layer.queries], plot.height / open.height, false);
  labels(pen, open.cols, look.texts[layer.keys], plot.width / open.width, true);
  pen.fillStyle = themed("--soft");
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "left";
  pen.fillText("keys →", 2, 12);
  pen.fillText("queries ↓", 2, 27);
  canvas.setAttribute("aria-label", `Pooled map of ${layer.name || "model"}, head ${layer.heads[state.head]}: ${asCount(tokens[0])} queries by ${asCount(tokens[1])} keys in ${open.height} × ${open.width} cells, ${state.scale} colours. Arrow keys read it cell by cell.`);
  mapLegend(open.largest[state.head]);
  point(plot.row, plot.col);
}

function labels(pen, starts, text, size, across) {
  const step = Math.max(1, Math.ceil(13 / size));
  pen.save();
  pen.fillStyle = themed("--soft");
  pen.font = `${Math.min(11, Math.max(9, size * step - 2))}px ${themed("--mono")}`;
  pen.textBaseline = "middle";
  pen.textAlign = across ? "left" : "right";
  const room = (across ? plot.top : plot.left) - 8;
  for (let cell = 0; cell < starts.length - 1; cell += step) {
    const along = (cell + 0.5) * size;
    const label = clipped(pen, starts[cell], legible(tokenAt(text, starts[cell])), room);
    if (across) {
      if (plot.left + along < 62) continue;
      pen.save();
      pen.translate(plot.left + along, plot.top - 5);
      pen.rotate(-Math.PI / 2);
      pen.fillText(label, 0, 0);
      pen.restore();
    } else {
      pen.fillText(label, plot.left - 5, plot.top + along);
    }
  }
  pen.restore();
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

const RAISED = [..."⁰¹²³⁴⁵⁶⁷⁸⁹"];
function asTick(value) {
  const power = Math.round(Math.log10(value));
  const round = power < -1 && Math.abs(value / 10 ** power - 1) < 1e-9;
  return round ? `10⁻${[...String(-power)].map((digit) => RAISED[digit]).join("")}` : asNumber(value);
}

function mapLegend(largest) {
  const ticks = find("map-ticks");
  ticks.replaceChildren();
  const steps = look.steps[0];
  const put = (value, t) => {
    const tick = make("span", { text: asTick(value) });
    tick.style.left = `${100 * t}%`;
    ticks.append(tick);
  };
  if (largest > 0 && state.scale === "log") {
    const t = (value) => 1 + Math.log(value / largest) / (2 * Math.log(steps));
    const highest = Math.floor(Math.log10(largest) + 1e-6);
    const apart = (t(10) - t(1)) * find("map-ramp").clientWidth; // pixels between two powers of ten
    const each = Math.max(1, Math.ceil(34 / Math.max(apart, 1)));
    for (let power = highest; t(10 ** power) > 0.02; power -= each) put(10 ** power, t(10 ** power));
    if (t(10 ** highest) < 0.85) put(largest, 1);
  } else {
    for (const part of [0, 0.5, 1]) put(largest * part, part);
  }
  find("map-ramp").setAttribute("aria-label", `Colours up to ${asNumber(largest)}, on a ${state.scale === "log" ? "logarithmic" : "linear"} scale`);
}

function spanned(start, stop, text) {
  const first = legible(tokenAt(text, start));
  if (stop - start === 1) return `${asCount(start)} “${first}”`;
  return `${asCount(start)}–${asCount(stop - 1)} “${first}” … “${legible(tokenAt(text, stop - 1))}”`;
}

function point(row, col, visible = false) {
  const layer = here();
  const open = opened(layer);
  plot.row = Math.min(open.height - 1, Math.max(0, row));
  plot.col = Math.min(open.width - 1, Math.max(0, col));
  const cursor = find("cursor");
  const [width, height] = [plot.width / open.width, plot.height / open.height];
  cursor.hidden = !visible;
  cursor.style.left = `${plot.left + plot.col * width - 1}px`;
  cursor.style.top = `${plot.top + plot.row * height - 1}px`;
  cursor.style.width = `${Math.max(3, width + 2)}px`;
  cursor.style.height = `${Math.max(3, height + 2)}px`;
  if (!visible) {
    find("cell").textContent = `${open.height} × ${open.width} cells over ${asCount(open.rows.at(-1))} queries × ${asCount(open.cols.at(-1))} keys. Point at a cell to read it; click to see its query below.`;
    return;
  }
  const count = open.cells[(state.head * open.height + plot.row) * open.width + plot.col];
  const weight = open.largest[state.head] * (count / look.steps[0]) ** 2;
  const queries = spanned(open.rows[plot.row], open.rows[plot.row + 1], look.texts[layer.queries]);
  const keys = spanned(open.cols[plot.col], open.cols[plot.col + 1], look.texts[layer.keys]);
  find("cell").textContent = `\u2068${queries}\u2069 → \u2068${keys}\u2069: mean weight ${count ? asNumber(weight) : "0"}`;
}

function mapEvents() {
  const canvas = find("map");
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const open = opened(here());
    const row = Math.floor(((event.clientY - box.top - plot.top) / plot.height) * open.height);
    const col = Math.floor(((event.clientX - box.left - plot.left) / plot.width) * open.width);
    return row >= 0 && col >= 0 && row < open.height && col < open.width ? [row, col] : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const place = under(event);
    if (place) point(...place, true); else point(plot.row, plot.col);
  });
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && point(plot.row, plot.col));
  canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && point(plot.row, plot.col, true));
  canvas.addEventListener("blur", () => point(plot.row, plot.col));
  canvas.addEventListener("click", (event) => {
    const place = under(event);
    if (!place) return;
    point(...place, true);
    holdQuery(opened(here()).rows[place[0]]);
  });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (move) point(plot.row + move[0], plot.col + move[1], true);
    else if (event.key === "Enter") holdQuery(opened(here()).rows[plot.row]);
    else return;
    event.preventDefault();
  });
  for (const input of document.querySelectorAll("input[name=scale]")) {
    input.addEventListener("change", () => {
      state.scale = input.value;
      drawMap();
      if (state.statistic === MAPS) colourGrid();
    });
  }
  drawRamp(find("map-ramp"));
}

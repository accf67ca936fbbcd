// Drawings: axes, histograms, curves, scatter plots and the grid of heads.

// Where a value is on an axis from 0 to 1: shares as they are, distances and logits on a scale of logarithms, as their bins are.
const transforms = { linear: (x) => x, log: (x) => Math.log1p(Math.max(0, x)), asinh: Math.asinh };
const hues = ["#3b78c2", "#d9772b", "#2d9a63", "#c24a54", "#8566c4", "#9a6b4f", "#cf6fb0", "#7b7f86", "#a8a02c", "#27a3b4", "#5d5fe0"];
const short = (x) => (Math.abs(x) >= 10000 ? x.toExponential(0) : `${Number(x.toPrecision(3))}`);
const hue = (at) => hues[at % hues.length];

function range(values) {
  const some = values.filter((x) => x !== null);
  if (!some.length) return [0, 1];
  const [low, high] = [Math.min(...some), Math.max(...some)];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}
// Round numbers on a transformed axis from low to high, where they are on it.
function transformedTicks(transform, low, high) {
  if (transform === "linear") return ticks(low, high).map((t) => [t, t]);
  const round = [0, ...[...Array(13).keys()].flatMap((k) => [1, 3].map((m) => m * 10 ** (k - 2)))];
  const both = transform === "asinh" ? [...round.slice(1).map((x) => -x), ...round] : round;
  const inside = both.map((x) => [transforms[transform](x), x]).filter(([t]) => t >= low && t <= high).sort((a, b) => a[0] - b[0]);
  const far = inside.filter(([t], i) => inside.slice(0, i).every(([u]) => t - u > (high - low) / 14) || i === 0);
  return far.length > 1 ? far : ticks(low, high).map((t) => [t, (transform === "log" ? Math.expm1 : Math.sinh)(t)]);
}
function ticks(low, high, count = 5) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count));
  const wide = [1, 2, 5, 10].map((k) => k * step).find((s) => (high - low) / s <= count) || step;
  const found = [];
  for (let x = Math.ceil(low / wide) * wide; x <= high + 1e-9; x += wide) found.push(Math.abs(x) < 1e-12 ? 0 : x);
  return found;
}

// A scatter plot of points {x, y, fill, out, name, href, tip}, with axes; `diagonal` marks x = y.
function scatter(points, across, up, { diagonal = false, width = 760, height = 470 } = {}) {
  const [left, bottom, pad] = [66, 40, 14];
  const [bx, byy] = [transforms[across.transform], transforms[up.transform]];
  let X = range(points.map((p) => (p.x === null ? null : bx(p.x)))), Y = range(points.map((p) => (p.y === null ? null : byy(p.y))));
  if (diagonal) X = Y = [Math.min(X[0], Y[0]), Math.max(X[1], Y[1])];
  const px = (x) => left + pad + ((bx(x) - X[0]) / (X[1] - X[0])) * (width - left - 2 * pad);
  const py = (y) => height - bottom - pad - ((byy(y) - Y[0]) / (Y[1] - Y[0])) * (height - bottom - 2 * pad);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": `${across.title} across, ${up.title} up` });
  const inverses = { linear: (x) => x, log: Math.expm1, asinh: Math.sinh };
  for (const [t, value] of transformedTicks(across.transform, ...X)) {
    const x = left + pad + ((t - X[0]) / (X[1] - X[0])) * (width - left - 2 * pad);
    svg.append(make("line.axis", { x1: x, x2: x, y1: 0, y2: height - bottom }), make("text", { x, y: height - bottom + 15, "text-anchor": "middle" }, short(value)));
  }
  for (const [t, value] of transformedTicks(up.transform, ...Y)) {
    const y = height - bottom - pad - ((t - Y[0]) / (Y[1] - Y[0])) * (height - bottom - 2 * pad);
    svg.append(make("line.axis", { x1: left, x2: width, y1: y, y2: y }), make("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, short(value)));
  }
  if (diagonal) {
    const low = Math.max(X[0], Y[0]), high = Math.min(X[1], Y[1]);
    const un = inverses[across.transform];
    if (high > low) svg.append(make("line.axis", { x1: px(un(low)), y1: py(un(low)), x2: px(un(high)), y2: py(un(high)), "stroke-dasharray": "4 4" }));
  }
  svg.append(make("text.name", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, diagonal ? across.label : titled(across.title)));
  svg.append(make("text.name", { transform: `translate(11 ${(height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, diagonal ? up.label : titled(up.title)));
  const radius = points.length > 1500 ? 3 : points.length > 300 ? 4 : 6;
  for (const p of points) {
    if (p.x === null || p.y === null) continue;
    const dot = make(`circle.dot${p.out ? ".out" : ""}`, { cx: px(p.x).toFixed(1), cy: py(p.y).toFixed(1), r: radius, fill: p.fill, tabindex: p.out ? -1 : 0, "aria-label": p.name, "data-name": p.name });
    if (p.tip) for (const kind of ["pointermove", "focus"]) dot.addEventListener(kind, (event) => { same(p.name); tell(event, ...p.tip()); });
    for (const kind of ["pointerleave", "blur"]) dot.addEventListener(kind, () => { same(null); hush(); });
    if (p.href) {
      dot.addEventListener("click", () => { location.href = p.href; });
      dot.addEventListener("keydown", (event) => { if (event.key === "Enter") location.href = p.href; });
    }
    svg.append(dot);
  }
  return svg;
}

// Mark a head wherever it is drawn.
function same(name) {
  for (const one of document.querySelectorAll(".same")) one.classList.remove("same");
  if (name) for (const one of document.querySelectorAll(`[data-name="${name}"]`)) one.classList.add("same");
}

// The grid of layers and heads; `cells` are {at, fill, out, name, href, tip}.
function headGrid(cells) {
  const layers = Math.max(0, ...cells.map((c) => c.at[0])) + 1, heads = Math.max(0, ...cells.map((c) => c.at[1])) + 1;
  const size = within(9, Math.floor(380 / heads), 38);
  const grid = make("div.grid", { "--cell": `${size}px` });
  grid.style.gridTemplateColumns = `2.2rem repeat(${heads}, ${size}px)`;
  grid.append(make("b"));
  const every = size < 18 ? 4 : 1;
  for (let h = 0; h < heads; h++) grid.append(make("b", {}, h % every ? "" : `${h}`));
  const found = new Map(cells.map((c) => [`${c.at}`, c]));
  for (let l = 0; l < layers; l++) {
    grid.append(make("b", {}, `L${l}`));
    for (let h = 0; h < heads; h++) {
      const c = found.get(`${[l, h]}`);
      if (!c) { grid.append(make("span")); continue; }
      const cell = make(`a${c.out ? ".out" : ""}`, { href: c.href, "aria-label": c.name, "data-name": c.name });
      cell.style.background = c.fill;
      cell.addEventListener("pointermove", (event) => { same(c.name); tell(event, ...c.tip()); });
      cell.addEventListener("pointerleave", () => { same(null); hush(); });
      grid.append(cell);
    }
  }
  return grid;
}

function legend(low, high, words) {
  const ramp = make("canvas", { width: 256, height: 1 });
  drawRamp(ramp);
  return make("div.legend", {}, make("span", {}, number(low)), ramp, make("span", {}, number(high)), make("span", {}, words || ""));
}

// A histogram with its mean and deciles.
function histogram(summary, scale) {
  const [width, height] = [250, 74];
  const svg = make("svg.bars", { viewBox: `0 0 ${width} ${height + 14}`, width });
  const counts = summary.counts, edges = summary.edges;
  if (!counts.length) return make("p.hint", {}, "no row has it");
  const transform = transforms[scale.transform], low = transform(edges[0]), high = transform(edges.at(-1)) || 1;
  const at = (x) => within(0, ((transform(x) - low) / (high - low || 1)) * width, width);
  const most = Math.max(...counts);
  counts.forEach((count, i) => {
    const [x, end] = [at(edges[i]), at(edges[i + 1])], tall = count ? Math.max(1.5, Math.sqrt(count / most) * height) : 0;
    const box = make("rect", { x: x.toFixed(1), y: (height - tall).toFixed(1), width: Math.max(1, end - x - 0.6).toFixed(1), height: tall.toFixed(1) });
    box.addEventListener("pointermove", (event) => tell(event, make("b", {}, `${number(edges[i])} – ${number(edges[i + 1])}`), make("div", {}, `${whole(count)} of ${whole(summary.count)} rows`)));
    box.addEventListener("pointerleave", hush);
    svg.append(box);
  });
  if (summary.mean !== null) svg.append(make("line.mean", { x1: at(summary.mean), x2: at(summary.mean), y1: 0, y2: height }));
  svg.append(make("text", { x: 0, y: height + 12 }, number(edges[0])), make("text", { x: width, y: height + 12, "text-anchor": "end" }, number(edges.at(-1))));
  return svg;
}

// A curve over buckets, or bars if the buckets have no order.
function curve([names, means, counts], ordered, [width, height] = [520, 190]) {
  const [left, bottom] = [44, 26];
  const svg = make("svg.bars", { viewBox: `0 0 ${width} ${height}`, width });
  const high = Math.max(1e-9, ...means), low = Math.min(0, ...means);
  const y = (x) => height - bottom - ((x - low) / (high - low)) * (height - bottom - 10);
  const step = (width - left) / Math.max(1, names.length), x = (i) => left + (i + 0.5) * step;
  for (const t of ticks(low, high, 4)) svg.append(make("line.axis", { x1: left, x2: width, y1: y(t), y2: y(t) }), make("text", { x: left - 5, y: y(t) + 4, "text-anchor": "end" }, number(t)));
  const every = Math.ceil(names.length / 9);
  if (ordered) svg.append(make("path.line", { d: means.map((m, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(m).toFixed(1)}`).join("") }));
  names.forEach((name, i) => {
    const mark = ordered ? make("circle.knot", { cx: x(i), cy: y(means[i]), r: 3.5 }) : make("rect", { x: x(i) - step * 0.36, width: step * 0.72, y: Math.min(y(0), y(means[i])), height: Math.abs(y(0) - y(means[i])) });
    mark.addEventListener("pointermove", (event) => tell(event, make("b", {}, name), make("div", {}, `mean ${number(means[i])} over ${whole(counts[i])} rows`)));
    mark.addEventListener("pointerleave", hush);
    svg.append(mark);
    if (!ordered || i % every === 0) svg.append(make("text", { x: x(i), y: height - 8, "text-anchor": "middle" }, ordered ? name.split("–")[0] : name));
  });
  return svg;
}

function sortedTable(columns, rows, start) {
  let [by_, down] = start;
  const body = make("tbody"), head = make("tr");
  const fill = () => {
    const order = [...rows].sort((a, b) => {
      const [x, y] = [columns[by_].value(a), columns[by_].value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    body.replaceChildren(...order.slice(0, 600).map((row) => make("tr", {}, columns.map((c) => c.cell(row)))));
    [...head.children].forEach((th, i) => th.setAttribute("aria-sort", i === by_ ? (down ? "descending" : "ascending") : "none"));
  };
  columns.forEach((c, i) => head.append(make(`th${c.left ? "" : ".number"}`, { scope: "col" }, make("button", { type: "button", title: c.about || "", onclick: () => { down = i === by_ ? !down : !c.left; by_ = i; fill(); } }, c.title))));
  fill();
  return make("div.scroll.tall", {}, make("table", {}, make("thead", {}, head), body));
}

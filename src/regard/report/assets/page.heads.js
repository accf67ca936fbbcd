// The heads as a table to sort, and as a scatter plot over any two statistics; both lead to a head.

const MOST_ROWS = 1000; // of the table, that a browser lays out quickly
const sorting = { by: -1, falling: true }; // -1: by layer and head
const headNumbers = () => look.layers.flatMap((layer, at) => layer.heads.map((number, head) => ({ layer: at, head, number })));
const hrefOf = ({ layer, number }) => `#head=${layer}.${number}`;

function sorted() {
  const every = headNumbers();
  if (sorting.by < 0) return sorting.falling ? every : every.reverse();
  const value = ({ layer, head }) => statisticOf(look.layers[layer], head, sorting.by);
  const rank = (place) => (Number.isNaN(value(place)) ? -Infinity : value(place) * (sorting.falling ? 1 : -1));
  return every.sort((one, other) => rank(other) - rank(one) || one.layer - other.layer || one.head - other.head);
}

function drawTable() {
  const columns = [{ label: "Head", meaning: "the layer and the head" }, ...look.statistics];
  const heading = make("tr");
  columns.forEach((about, at) => {
    const by = at - 1;
    const sort = sorting.by === by ? (sorting.falling === (by >= 0) ? "descending" : "ascending") : "none";
    const button = make("button", { type: "button", title: about.meaning, text: at ? labelled(about) : about.label });
    button.addEventListener("click", () => {
      sorting.falling = sorting.by === by ? !sorting.falling : true;
      sorting.by = by;
      drawTable();
      find("table-view").querySelectorAll("thead button")[at].focus();
    });
    heading.append(make("th", { scope: "col", "aria-sort": sort, class: at ? "number" : "" }, button));
  });
  heading.append(make("th", { scope: "col", text: "Found" }));
  const every = sorted();
  const body = make("tbody", {}, ...every.slice(0, MOST_ROWS).map(tableRow));
  const note = every.length > MOST_ROWS ? [make("p", { class: "hint", text: `The first ${asCount(MOST_ROWS)} of ${asCount(every.length)} heads in this order.` })] : [];
  find("table-view").replaceChildren(make("table", { class: "all" }, make("thead", {}, heading), body), ...note);
  markTable();
}

function tableRow(place) {
  const layer = look.layers[place.layer];
  const link = make("a", { href: hrefOf(place), title: nameOf(layer), text: `${look.short[place.layer]} H${place.number}` });
  const row = make("tr", { "data-layer": place.layer, "data-head": place.head }, make("th", { scope: "row" }, link));
  look.statistics.forEach((about, which) => {
    const value = statisticOf(layer, place.head, which);
    const [low, high] = look.ranges[which];
    const cell = make("td", { class: "number", text: asNumber(value * about.factor) });
    if (Number.isFinite(value) && high > low) cell.style.setProperty("--part", `${((100 * (value - low)) / (high - low)).toFixed(1)}%`);
    row.append(cell);
  });
  const rules = [...new Set(remarksOn(place.layer, place.number).map((remark) => remark.rule))];
  row.append(make("td", { text: rules.join(", ") }));
  row.addEventListener("click", (event) => {
    event.preventDefault();
    choose(place.layer, place.head);
  });
  return row;
}

function markTable() {
  for (const row of find("table-view").querySelectorAll("tbody tr")) {
    const chosen = Number(row.dataset.layer) === state.layer && Number(row.dataset.head) === state.head;
    row.classList.toggle("chosen", chosen);
    row.querySelector("a").setAttribute("aria-current", String(chosen));
  }
}

const draw = (tag, ...rest) => filled(document.createElementNS(find("dots").namespaceURI, tag), ...rest);
let dots = []; // { place, x, y, node }, from left to right

function drawScatter() {
  const room = Math.max(260, find("scatter").clientWidth);
  const [width, height, left, bottom] = [Math.min(room, 1100), room < 600 ? 300 : 400, 52, 34];
  const [across, up] = state.axes.map((which) => ({ which, about: look.statistics[which], range: look.ranges[which] }));
  const span = ({ range: [low, high] }) => (high > low ? high - low : 1);
  const x = (value) => left + 10 + ((value - across.range[0]) / span(across)) * (width - left - 24);
  const y = (value) => height - bottom - 10 - ((value - up.range[0]) / span(up)) * (height - bottom - 24);
  const svg = filled(find("dots"), { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `Heads by ${across.about.label} and ${up.about.label}. Arrow keys move, Enter selects.` });
  svg.replaceChildren();
  for (const value of ticksOf(across)) {
    svg.append(draw("line", { class: "rule", x1: x(value), x2: x(value), y1: 6, y2: height - bottom }));
    svg.append(draw("text", { x: x(value), y: height - bottom + 15, "text-anchor": "middle", text: asNumber(value * across.about.factor) }));
  }
  for (const value of ticksOf(up)) {
    svg.append(draw("line", { class: "rule", x1: left, x2: width - 6, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", text: asNumber(value * up.about.factor) }));
  }
  svg.append(draw("text", { class: "name", x: width - 6, y: height - 4, "text-anchor": "end", text: `${labelled(across.about)} →` }));
  svg.append(draw("text", { class: "name", x: left + 4, y: 14, text: `↑ ${labelled(up.about)}` }));
  dots = [];
  let missing = 0;
  for (const place of headNumbers()) {
    const [a, b] = state.axes.map((which) => statisticOf(look.layers[place.layer], place.head, which));
    if (!Number.isFinite(a) || !Number.isFinite(b)) { missing++; continue; }
    dots.push({ place, x: x(a), y: y(b), node: dotOf(place, x(a), y(b), [across.about, a], [up.about, b]) });
  }
  dots.sort((one, other) => one.x - other.x || other.y - one.y);
  svg.append(...dots.map(({ node }) => node));
  const hint = `Colours go from the first layer (dark) to the last (bright).${missing ? ` ${asCount(missing)} heads lack one of the two numbers.` : ""}`;
  find("dots-hint").textContent = hint;
  markScatter();
}

function dotOf(place, x, y, ...values) {
  const level = cells[place.layer][place.head].classList;
  const said = values.map(([about, value]) => `${about.label} ${withUnit(value, about)}`).join(", ");
  const name = `${nameOf(look.layers[place.layer])}, head ${place.number}: ${said}`;
  const last = Math.max(1, look.layers.length - 1);
  const dot = draw("circle", { cx: x, cy: y, r: 5.5, fill: css(0.12 + (0.8 * place.layer) / last) });
  const node = draw("a", { href: hrefOf(place), "aria-label": name, tabindex: "-1", class: `dot ${level.contains("problem") ? "problem" : level.contains("notable") ? "notable" : ""}` }, dot);
  node.addEventListener("click", (event) => {
    event.preventDefault();
    choose(place.layer, place.head);
    node.focus();
  });
  node.addEventListener("keydown", dotKey);
  const tip = () => showTip(place.layer, place.head, node);
  node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && tip());
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("focus", () => node.matches(":focus-visible") && tip());
  node.addEventListener("blur", hideTip);
  return node;
}

// Arrow keys go to the nearest dot in their direction.
function dotKey(event) {
  const from = dots.find(({ node }) => node === event.currentTarget);
  const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
  if (!dx && !dy) return;
  event.preventDefault();
  let best = null;
  for (const dot of dots) {
    const [along, aside] = dx ? [(dot.x - from.x) * dx, dot.y - from.y] : [(dot.y - from.y) * dy, dot.x - from.x];
    const far = Math.hypot(along, 2 * aside);
    if (along > 0.5 && (!best || far < best.far)) best = { far, dot };
  }
  if (!best) return;
  from.node.setAttribute("tabindex", "-1");
  best.dot.node.setAttribute("tabindex", "0");
  best.dot.node.focus();
}

function markScatter() {
  const is = ({ place }, other) => other && place.layer === other.layer && place.head === other.head;
  for (const dot of dots) {
    const chosen = is(dot, state);
    dot.node.classList.toggle("chosen", chosen);
    dot.node.classList.toggle("pinned", Boolean(is(dot, state.pinned)));
    dot.node.setAttribute("aria-current", String(chosen));
    dot.node.setAttribute("tabindex", chosen ? "0" : "-1");
    if (chosen) dot.node.parentNode.append(dot.node); // on top of the others
  }
  if (dots.length && !dots.some((dot) => is(dot, state))) dots[0].node.setAttribute("tabindex", "0");
}

// Some four round numbers inside the range.
function ticksOf({ range: [low, high], about: { factor } }) {
  if (!(high > low)) return Number.isFinite(low) ? [low] : [];
  const rough = ((high - low) * factor) / 6, ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * ten).find((size) => size >= rough) / factor;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-9); at++) found.push(at * step);
  return found;
}

const KEYBOARD = { grid: "Arrow keys move, Enter selects.", table: "Click a heading to sort, a row to select.", scatter: "Arrow keys move, Enter selects." };
function showHeads() {
  find("board").dataset.heads = state.heads;
  for (const name of Object.keys(KEYBOARD)) find(`${name}-view`).hidden = name !== state.heads;
  document.querySelector(`input[name=heads][value=${state.heads}]`).checked = true;
  find("by-keyboard").textContent = KEYBOARD[state.heads];
  if (state.heads === "table") drawTable();
  if (state.heads === "scatter") drawScatter();
}

function headsEvents() {
  for (const input of document.querySelectorAll("input[name=heads]")) {
    input.addEventListener("change", () => changed({ heads: input.value }));
    if (!look.statistics.length) input.disabled = input.value !== "grid";
  }
  ["across", "up"].forEach((id, axis) => {
    look.statistics.forEach((about, which) => find(id).append(make("option", { value: which, text: labelled(about) })));
    find(id).addEventListener("change", (event) => changed({ axes: state.axes.map((which, at) => (at === axis ? Number(event.target.value) : which)) }));
  });
}

// The overview: one row per layer, one column per head, coloured by a statistic or showing the maps themselves.

const MAPS = -1; // in place of a statistic
const MOST_MAPS = 1200; // small maps that a browser draws quickly
let cells = []; // [layer][head]

// The paths of the layers, written once: their common parts, or each one if there are few.
function paths(names) {
  if (names.length === 1) return `L0: ${names[0] || "the model itself"}`;
  const parts = names.map((name) => name.split("."));
  const least = Math.min(...parts.map((part) => part.length));
  const same = (place) => parts.every((part) => part.at(place) === parts[0].at(place));
  let before = 0;
  let after = 0;
  while (before < least - 1 && same(before)) before++;
  while (after < least - 1 - before && same(-1 - after)) after++;
  const own = parts.map((part) => part.slice(before, part.length - after).join("."));
  if (own.every((name, at) => name === String(at))) return `L*: ${[...parts[0].slice(0, before), "*", ...parts[0].slice(parts[0].length - after)].join(".")}`;
  return names.length <= 12 ? names.map((name, at) => `L${at}: ${name || "the model itself"}`).join(" · ") : "";
}

function buildGrid() {
  const grid = find("heads");
  const columns = Math.max(...look.layers.map((layer) => layer.heads.length));
  look.short = look.layers.map((_, at) => `L${at}`);
  find("pattern").textContent = paths(look.layers.map((layer) => layer.name));
  grid.setAttribute("aria-rowcount", look.layers.length + 1);
  grid.setAttribute("aria-colcount", columns + 1);
  const sparse = columns > 16 ? 4 : 1;
  const top = make("div", { role: "row" }, make("span", { role: "columnheader", "aria-label": "Layer" }));
  for (let column = 0; column < columns; column++) {
    const text = String(look.layers[0].heads[column] ?? column);
    top.append(make("span", { role: "columnheader", "aria-label": `Head ${text}`, text: column % sparse ? "" : text }));
  }
  grid.append(top);
  cells = look.layers.map((layer, at) => {
    const row = make("div", { role: "row" }, make("span", { role: "rowheader", "aria-label": nameOf(layer), title: nameOf(layer), text: look.short[at] }));
    const made = layer.heads.map((_, head) => make("div", { role: "gridcell", class: "cellule", tabindex: "-1", "data-layer": at, "data-head": head }));
    row.append(...made);
    for (let column = made.length; column < columns; column++) row.append(make("span"));
    grid.append(row);
    return made;
  });
  for (const remark of look.remarks.toReversed()) {
    for (const cell of remarked(remark)) {
      cell.classList.remove("problem", "notable");
      cell.classList.add(remark.level);
    }
  }
  drawRamp(find("heads-ramp"));
  gridEvents(grid);
}
const remarked = (remark) => remark.heads.map((number) => cells[remark.layer][look.layers[remark.layer].heads.indexOf(number)]);
// What was found about a head, problems first.
const remarksOn = (layer, number) => look.remarks.filter((remark) => remark.layer === layer && remark.heads.includes(number));

function sizeGrid() {
  find("board").dataset.maps = String(state.statistic === MAPS);
  const room = find("heads").parentElement.clientWidth;
  const columns = Math.max(...look.layers.map((layer) => layer.heads.length));
  const label = cells[0][0].parentElement.firstElementChild.getBoundingClientRect().width + 12;
  const largest = state.statistic === MAPS ? 64 : 34;
  const size = Math.max(state.statistic === MAPS ? 20 : 8, Math.min(largest, Math.floor((room - label) / columns) - 2));
  const grid = find("heads");
  grid.style.setProperty("--cell", `${size}px`);
  grid.style.gridTemplateColumns = `max-content repeat(${columns}, ${size}px)`;
}

const mapsLabel = () => (look.layers.every(isExact) ? "Maps" : "Pooled maps");
// Small maps of all heads, and the end of the scale that they share: half of them have a cell as large as this.
let small = null;
function smallMaps() {
  if (small) return small;
  const maps = look.layers.map((layer) => layer.heads.map((_, head) => pooled(layer, head)));
  const most = maps.flat().map((map) => map.most).sort((one, other) => one - other);
  small = { maps, top: most[most.length >> 1] || 1 };
  return small;
}
const heads = () => look.layers.reduce((sum, layer) => sum + layer.heads.length, 0);

function colourGrid() {
  const which = state.statistic;
  const maps = which === MAPS;
  const about = maps ? { label: mapsLabel(), unit: "", factor: 1, meaning: "the map of every head, all in the same colours" } : look.statistics[which];
  const shown = maps ? smallMaps() : null;
  const [low, high] = maps ? [0, 0] : look.ranges[which];
  look.layers.forEach((layer, at) => layer.heads.forEach((number, head) => {
    const cell = cells[at][head];
    const value = maps ? NaN : statisticOf(layer, head, which);
    const known = Number.isFinite(value);
    cell.style.background = known ? css(high > low ? (value - low) / (high - low) : 0.5) : "";
    cell.replaceChildren(...(maps ? [thumbnail(shown.maps[at][head], state.scale, shown.top)] : known ? [] : [asNumber(value)]));
    const said = maps ? "map" : `${about.label} ${withUnit(value, about)}`;
    const level = cell.classList.contains("problem") ? ", problem" : cell.classList.contains("notable") ? ", notable" : "";
    cell.setAttribute("aria-label", `${nameOf(layer)}, head ${number}: ${said}${level}`);
  }));
  find("meaning").textContent = about.meaning ? `${about.label}: ${about.meaning}.` : "";
  find("heads-legend").hidden = maps || !(high >= low);
  find("heads-low").textContent = asNumber(low * about.factor);
  find("heads-high").textContent = asNumber(high * about.factor);
  find("heads-unit").textContent = about.unit;
  find("heads-ramp").setAttribute("aria-label", `Colours from ${withUnit(low, about)} to ${withUnit(high, about)}`);
  sizeGrid();
}

function markGrid() {
  cells.forEach((row, layer) => row.forEach((cell, head) => {
    const chosen = layer === state.layer && head === state.head;
    cell.setAttribute("aria-selected", String(chosen));
    cell.tabIndex = chosen ? 0 : -1;
    cell.classList.toggle("named", state.named.has(cell));
    cell.classList.toggle("pinned", state.pinned?.layer === layer && state.pinned.head === head);
  }));
}

function gridEvents(grid) {
  const placeOf = (event) => {
    const cell = event.target.closest(".cellule");
    return cell && [Number(cell.dataset.layer), Number(cell.dataset.head), cell];
  };
  grid.addEventListener("click", (event) => {
    const place = placeOf(event);
    if (!place) return;
    choose(place[0], place[1]);
    hideTip();
    if (find("detail").getBoundingClientRect().top > window.innerHeight * 0.75) find("detail").scrollIntoView({ behavior: "smooth" });
  });
  const show = (event) => {
    const place = placeOf(event);
    if (place) showTip(...place); else hideTip();
  };
  grid.addEventListener("pointerover", (event) => event.pointerType === "mouse" && show(event));
  grid.addEventListener("pointerleave", hideTip);
  grid.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && show(event));
  grid.addEventListener("focusout", hideTip);
  grid.addEventListener("keydown", (event) => {
    const place = placeOf(event);
    if (place) gridKey(event, ...place);
  });
}

function gridKey(event, layer, head) {
  const last = (row) => cells[row].length - 1;
  const to = {
    ArrowLeft: [layer, head - 1], ArrowRight: [layer, head + 1], ArrowUp: [layer - 1, head], ArrowDown: [layer + 1, head],
    Home: [event.ctrlKey ? 0 : layer, 0], End: event.ctrlKey ? [cells.length - 1, last(cells.length - 1)] : [layer, last(layer)],
    PageUp: [0, head], PageDown: [cells.length - 1, head],
  }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    choose(layer, head);
  } else if (event.key === "Escape") {
    hideTip();
    state.named.clear();
    markGrid();
  } else if (to && !event.altKey && !event.metaKey) {
    const row = Math.min(cells.length - 1, Math.max(0, to[0]));
    const next = cells[row][Math.min(last(row), Math.max(0, to[1]))];
    cells[layer][head].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  } else {
    return;
  }
  event.preventDefault();
}

function showTip(layer, head, cell) {
  const tip = find("tip");
  const of = look.layers[layer];
  const list = make("dl");
  look.statistics.forEach((about, which) => {
    const current = which === state.statistic ? "current" : "";
    list.append(make("dt", { class: current, text: about.label }), make("dd", { class: current, text: withUnit(statisticOf(of, head, which), about) }));
  });
  tip.replaceChildren(make("b", { text: `${nameOf(of)} · head ${of.heads[head]}` }), list);
  tip.hidden = false;
  const [box, own] = [cell.getBoundingClientRect(), tip.getBoundingClientRect()];
  const right = box.right + 10 + own.width < root.clientWidth;
  const left = right ? box.right + 10 : box.left - 10 - own.width;
  tip.style.left = `${Math.max(8, Math.min(left, root.clientWidth - own.width - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(box.top - 8, window.innerHeight - own.height - 8))}px`;
}
function hideTip() { find("tip").hidden = true; }

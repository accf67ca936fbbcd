// The page as a whole: header, the chosen head, and the events that connect the parts.

function choose(layer, head, named = null) {
  if (named) state.named = new Set(named);
  else if (!state.named.has(cells[layer][head])) state.named.clear();
  changed({ layer, head });
  markGrid();
}

// Show what has changed since `before`.
function apply(before) {
  const differs = (...names) => names.some((name) => before[name] !== state[name]);
  const head = differs("layer", "head", "pinned");
  if (head) {
    markGrid();
    markTable();
    markScatter();
    markRemarks();
    showHead();
  }
  if (differs("statistic") || (differs("scale") && state.statistic === MAPS)) colourGrid();
  if (differs("heads", "axes")) showHeads();
  if (differs("statistic", "axes", "view", "scale")) showChoices();
  if (head || differs("token", "direction")) showTokens();
  if (head || differs("scale", "view")) {
    drawMap();
    drawLines();
  }
}

function showChoices() {
  find("statistic").value = String(state.statistic);
  ["across", "up"].forEach((id, axis) => { find(id).value = String(state.axes[axis]); });
  for (const name of ["scale", "view"]) document.querySelector(`input[name=${name}][value=${state[name]}]`).checked = true;
}

function showHead() {
  const layer = here(), { pinned } = state;
  const number = layer.heads[state.head];
  find("detail-title").textContent = figures[0].name;
  find("numbers-head").textContent = `${look.short[state.layer]} H${number}`;
  find("before").disabled = state.layer === 0 && state.head === 0;
  find("after").disabled = state.layer === look.layers.length - 1 && state.head === layer.heads.length - 1;
  find("said").replaceChildren(...remarksOn(state.layer, number).slice(0, 4).map((remark) => make("li", {}, markOf(remark), make("span", { text: remark.text }))));
  find("pin").textContent = pinned ? "Unpin" : "Pin";
  find("pin").setAttribute("aria-pressed", String(Boolean(pinned)));
  find("sides").classList.toggle("pinned", Boolean(pinned));
  find("pinned-figure").hidden = find("own-title").hidden = find("pinned-value").hidden = !pinned;
  find("pinned-title").textContent = `Pinned: ${figures[1].label}`;
  find("own-title").textContent = figures[0].label;
  find("numbers").replaceChildren(...look.statistics.map((about, which) => statisticRow(about, which)));
  if (look.atlas) find("atlas").href = `${look.atlas}#layer=${encodeURIComponent(layer.name)}&head=${number}`;
}

function statisticRow(about, which) {
  const value = statisticOf(here(), state.head, which);
  const [low, high] = look.ranges[which];
  const strip = make("div", { class: "strip", role: "img", "aria-label": "no value" });
  const put = (number, kind) => {
    if (!Number.isFinite(number)) return;
    const dot = make("i", { class: kind });
    dot.style.left = `${high > low ? (100 * (number - low)) / (high - low) : 50}%`;
    strip.append(dot);
  };
  if (Number.isFinite(value)) strip.setAttribute("aria-label", `all heads: from ${withUnit(low, about)} to ${withUnit(high, about)}`);
  const name = make("th", { scope: "row", text: about.label });
  if (about.meaning) name.title = about.meaning;
  const row = make("tr", {}, name, make("td", { class: "number", text: withUnit(value, about) }));
  if (state.pinned) {
    const other = statisticOf(look.layers[state.pinned.layer], state.pinned.head, which);
    row.append(make("td", { class: "number", text: withUnit(other, about) }));
    put(other, "other");
  }
  put(value, "");
  row.append(make("td", {}, strip));
  return row;
}

function buildHeader() {
  find("facts").append(...look.facts.map(([name, fact]) => make("div", {}, make("dt", { text: name }), make("dd", { text: fact }))));
  const atlas = look.atlas ? [] : ["The command regard atlas, with the same model and text, shows maps of any length to pan and zoom."];
  find("notes").append(...[...look.notes, ...atlas].map((text) => make("li", { text })));
  find("atlas").hidden = !look.atlas;
  const button = find("theme");
  const label = () => {
    const dark = root.dataset.theme === "dark";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to the ${dark ? "light" : "dark"} theme`);
    button.setAttribute("aria-pressed", String(dark));
  };
  const change = (theme) => { applyTheme(theme); label(); drawMap(); drawLines(); };
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    remember(theme);
    change(theme);
  });
  darker.addEventListener("change", () => change(remembered()));
  applyTheme(remembered()); // a frame may learn the colours of its page after the first look and before the listener
  label();
}

function buildChoice() {
  const pick = find("statistic");
  look.statistics.forEach((about, which) => pick.append(make("option", { value: which, text: labelled(about) })));
  if (heads() <= MOST_MAPS) pick.append(make("option", { value: MAPS, text: mapsLabel() }));
  if (!look.statistics.length) state.statistic = MAPS;
  pick.addEventListener("change", () => changed({ statistic: Number(pick.value) }));
}

function step(by) {
  let [layer, head] = [state.layer, state.head + by];
  if (head < 0) head = look.layers[--layer]?.heads.length - 1;
  else if (head >= look.layers[layer].heads.length) [layer, head] = [layer + 1, 0];
  if (look.layers[layer]) choose(layer, head);
}

function start() {
  look = unpacked(find("look").textContent);
  mapEvents();
  linesEvents();
  buildHeader();
  buildGrid();
  buildRemarks();
  buildChoice();
  headsEvents();
  tokenEvents();
  const varied = (which) => look.ranges[which][1] > look.ranges[which][0];
  const second = ["distance", "max_logit"].map((name) => look.statistics.findIndex((about) => about.name === name)).find((which) => which > 0 && varied(which));
  state.axes = [0, second ?? Math.min(1, look.statistics.length - 1)];
  const worst = look.remarks.find((remark) => remark.layer >= 0 && remark.heads.length);
  if (worst) Object.assign(state, { layer: worst.layer, head: look.layers[worst.layer].heads.indexOf(worst.heads[0]) });
  Object.assign(state, read(window.location.hash));
  writeAddress("replaceState");
  apply({});
  pageEvents();
}

function pageEvents() {
  find("before").addEventListener("click", () => step(-1));
  find("after").addEventListener("click", () => step(1));
  find("pin").addEventListener("click", () => changed({ pinned: state.pinned ? null : { layer: state.layer, head: state.head } }));
  find("skip").addEventListener("click", (event) => { // in a frame, the link would lead to the page around it
    event.preventDefault();
    find("overview").focus();
  });
  window.addEventListener("popstate", restored);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    sizeGrid();
    drawMap();
    drawLines();
    if (state.heads === "scatter") drawScatter();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    hideTip();
    if (find("detail").contains(document.activeElement)) cells[state.layer][state.head].focus();
  });
}
document.addEventListener("DOMContentLoaded", start);

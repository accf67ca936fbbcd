// The page as a whole: header, findings, the chosen head, and the events that connect the parts.

const FIRST_REMARKS = 8;

function choose(layer, head, named = null) {
  state.layer = layer;
  state.head = head;
  if (named) state.named = new Set(named);
  else if (!state.named.has(cells[layer][head])) state.named.clear();
  for (const link of document.querySelectorAll("#remarks a")) {
    const remark = look.remarks[link.dataset.remark];
    link.setAttribute("aria-current", String(remark.layer === layer && remark.heads.includes(look.layers[layer].heads[head])));
  }
  const address = `#head=${layer}.${look.layers[layer].heads[head]}`;
  if (window.location.hash !== address) window.location.replace(address);
  markGrid();
  showHead();
}

function showHead() {
  const layer = here();
  const number = layer.heads[state.head];
  const name = `${layer.name || "model"} · head ${number}`;
  find("detail-title").textContent = name;
  find("tokens-head").textContent = name;
  find("before").disabled = state.layer === 0 && state.head === 0;
  find("after").disabled = state.layer === look.layers.length - 1 && state.head === layer.heads.length - 1;
  const said = look.remarks.filter((remark) => remark.layer === state.layer && remark.heads.includes(number));
  find("said").replaceChildren(...said.slice(0, 4).map((remark) => make("li", {}, markOf(remark), make("span", { text: remark.text }))));
  find("numbers").replaceChildren(...look.statistics.map((about, which) => statisticRow(about, which)));
  drawMap();
  buildTexts();
  shade();
}

function statisticRow(about, which) {
  const value = statisticOf(here(), state.head, which);
  const [low, high] = look.ranges[which];
  const strip = make("div", { class: "strip", role: "img", "aria-label": "no value" });
  if (Number.isFinite(value)) {
    strip.setAttribute("aria-label", `all heads: from ${withUnit(low, about)} to ${withUnit(high, about)}`);
    const dot = make("i");
    dot.style.left = `${high > low ? (100 * (value - low)) / (high - low) : 50}%`;
    strip.append(dot);
  }
  const name = make("th", { scope: "row", text: about.label });
  if (about.meaning) name.title = about.meaning;
  return make("tr", {}, name, make("td", { class: "number", text: withUnit(value, about) }), make("td", {}, strip));
}

const markOf = (remark) => make("span", { class: `mark ${remark.level}`, role: "img", "aria-label": remark.level });

function buildHeader() {
  find("facts").append(...look.facts.map(([name, fact]) => make("div", {}, make("dt", { text: name }), make("dd", { text: fact }))));
  find("notes").append(...look.notes.map((text) => make("li", { text })));
  const button = find("theme");
  const label = () => {
    const dark = root.dataset.theme === "dark";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to the ${dark ? "light" : "dark"} theme`);
    button.setAttribute("aria-pressed", String(dark));
  };
  const change = (theme) => { applyTheme(theme); label(); drawMap(); };
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    remember(theme);
    change(theme);
  });
  darker.addEventListener("change", () => change(remembered()));
  label();
}

function buildRemarks() {
  const problems = look.remarks.filter((remark) => remark.level === "problem").length;
  const count = look.remarks.length;
  find("findings-count").textContent = count ? `${asCount(problems)} ${problems === 1 ? "problem" : "problems"}, ${asCount(count - problems)} notable` : "none";
  const ordered = look.remarks.map((remark, at) => [remark, at]).sort((one, other) => (one[0].level === other[0].level ? one[1] - other[1] : one[0].level === "problem" ? -1 : 1));
  const items = ordered.map(([remark, at]) => make("li", {}, markOf(remark), remarkText(remark, at)));
  items.slice(FIRST_REMARKS).forEach((item) => { item.hidden = true; });
  find("remarks").append(...items);
  const more = find("more");
  more.hidden = items.length <= FIRST_REMARKS;
  more.textContent = `Show all ${asCount(items.length)}`;
  more.addEventListener("click", () => {
    items.forEach((item) => { item.hidden = false; });
    more.hidden = true;
    items[FIRST_REMARKS].querySelector("a")?.focus();
  });
}

function remarkText(remark, at) {
  const where = make("span", { class: "where", text: ` ${remark.rule}` });
  if (remark.layer < 0) return make("span", {}, remark.text, where);
  const layer = look.layers[remark.layer];
  const first = remark.heads.length ? layer.heads.indexOf(remark.heads[0]) : 0;
  const link = make("a", { href: `#head=${remark.layer}.${layer.heads[first]}`, "data-remark": at, text: remark.text });
  link.addEventListener("click", (event) => {
    event.preventDefault();
    choose(remark.layer, first, remark.heads.length ? remarked(remark) : cells[remark.layer]);
    const top = find("overview").getBoundingClientRect().top;
    if (top > window.innerHeight * 0.6) find("overview").scrollIntoView({ behavior: "smooth" });
  });
  return make("span", {}, link, where);
}

function buildChoice() {
  const pick = find("statistic");
  look.statistics.forEach((about, which) => pick.append(make("option", { value: which, text: about.unit ? `${about.label} (${about.unit})` : about.label })));
  const heads = look.layers.reduce((sum, layer) => sum + layer.heads.length, 0);
  if (heads <= MOST_MAPS) pick.append(make("option", { value: MAPS, text: "Pooled maps" }));
  if (!look.statistics.length) state.statistic = MAPS;
  pick.value = String(state.statistic);
  pick.addEventListener("change", () => { state.statistic = Number(pick.value); colourGrid(); });
}

function step(by) {
  let [layer, head] = [state.layer, state.head + by];
  if (head < 0) head = look.layers[--layer]?.heads.length - 1;
  else if (head >= look.layers[layer].heads.length) [layer, head] = [layer + 1, 0];
  if (look.layers[layer]) choose(layer, head);
}

function addressed() {
  const found = /^#head=(\d+)\.(-?\d+)$/.exec(window.location.hash);
  const layer = found && look.layers[Number(found[1])];
  const head = layer ? layer.heads.indexOf(Number(found[2])) : -1;
  return head >= 0 ? [Number(found[1]), head] : null;
}

function start() {
  look = unpacked(find("look").textContent);
  buildHeader();
  buildGrid();
  buildRemarks();
  buildChoice();
  mapEvents();
  tokenEvents();
  colourGrid();
  const worst = look.remarks.find((remark) => remark.layer >= 0 && remark.heads.length);
  choose(...(addressed() ?? (worst ? [worst.layer, look.layers[worst.layer].heads.indexOf(worst.heads[0])] : [0, 0])));
  find("before").addEventListener("click", () => step(-1));
  find("after").addEventListener("click", () => step(1));
  window.addEventListener("hashchange", () => {
    const place = addressed();
    if (place && (place[0] !== state.layer || place[1] !== state.head)) choose(...place);
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    sizeGrid();
    drawMap();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    hideTip();
    if (find("detail").contains(document.activeElement) || find("tokens").contains(document.activeElement)) cells[state.layer][state.head].focus();
  });
}
document.addEventListener("DOMContentLoaded", start);

// The tokens as text: pointing at one shades and lists the tokens that it attends to, or that attend to it.

const WINDOW = 512; // tokens shown at once
const LISTED = 16;
const SPACED = 12; // if fewer than one in so many tokens has a space, the tokens carry no spaces
const FIRST = 64; // the token selected at first: with some text before it, and in view
let boxes = {}; // { queries, keys }: one box for both in self-attention
let active = null; // { place, held }
let target = null; // the other token of a cell that was clicked

function windowsOf(spans) {
  return spans.flatMap(([start, stop]) => {
    const count = Math.max(1, Math.ceil((stop - start) / WINDOW));
    const edge = (at) => start + Math.round(((stop - start) * at) / count);
    return Array.from({ length: count }, (_, at) => [edge(at), edge(at + 1)]);
  });
}

function buildTexts() {
  const layer = here();
  const same = layer.queries === layer.keys;
  const known = boxes.queries && boxes.queries.text === layer.queries && boxes.keys.text === layer.keys;
  if (known) return;
  const { parts } = look.texts[layer.queries];
  find("texts").replaceChildren();
  active = null;
  boxes = {};
  if (!parts.length || !layer.k) {
    find("texts").append(make("p", { class: "hint", text: "The strongest keys of the queries are not in this page." }));
    return;
  }
  boxes.queries = textBox(layer.queries, same ? "Tokens" : "Queries", parts);
  const runs = look.texts[layer.keys].runs.map(([start, tokens]) => [start, start + tokens.length]);
  boxes.keys = same ? boxes.queries : textBox(layer.keys, "Keys", runs);
  for (const box of new Set(Object.values(boxes))) {
    find("texts").append(box.node);
    box.turn(0);
  }
  const [start, stop] = boxes[state.direction].window();
  active = { place: Math.min(stop, start + FIRST) - 1, held: true };
}

function textBox(text, label, spans) {
  const windows = windowsOf(spans);
  const { length } = look.texts[text];
  const list = make("div", { class: "text", role: "listbox", "aria-orientation": "horizontal", "aria-label": label });
  const box = { text, list, at: 0, tokens: new Map(), window: () => windows[box.at] };
  const name = ([start, stop]) => `${label} ${asCount(start)}–${asCount(stop - 1)} of ${asCount(length)}`;
  const pick = make("select", { "aria-label": `Part of the ${label.toLowerCase()}` });
  windows.forEach((part, at) => pick.append(make("option", { value: at, text: name(part) })));
  const back = make("button", { class: "quiet", type: "button", text: "‹", "aria-label": "Previous part" });
  const on = make("button", { class: "quiet", type: "button", text: "›", "aria-label": "Next part" });
  box.turn = (at) => {
    box.at = Math.min(windows.length - 1, Math.max(0, at));
    pick.value = String(box.at);
    back.disabled = box.at === 0;
    on.disabled = box.at === windows.length - 1;
    fill(box);
  };
  box.reach = (place) => {
    const at = windows.findIndex(([start, stop]) => place >= start && place < stop);
    if (at >= 0 && at !== box.at) {
      box.turn(at);
      markMatches(find("search").value);
    }
    return at >= 0;
  };
  const move = (at) => {
    box.turn(at);
    markMatches(find("search").value);
    if (boxes[state.direction] === box) hold(box.window()[0]); else shade();
  };
  pick.addEventListener("change", () => move(Number(pick.value)));
  back.addEventListener("click", () => move(box.at - 1));
  on.addEventListener("click", () => move(box.at + 1));
  const pager = windows.length > 1 ? make("div", { class: "pager" }, back, pick, on) : make("h3", { text: name(windows[0]) });
  box.node = make("div", {}, pager, list);
  box.move = move;
  textEvents(box);
  return box;
}

function fill(box) {
  const [start, stop] = box.window();
  const text = look.texts[box.text];
  box.tokens.clear();
  box.list.scrollTop = 0;
  box.list.replaceChildren();
  const tokens = Array.from({ length: stop - start }, (_, at) => tokenAt(text, start + at));
  const spaced = tokens.filter((token) => token !== null && /\s/.test(token)).length;
  box.list.classList.toggle("bare", spaced * SPACED < tokens.length);
  for (let place = start; place < stop; place++) {
    const token = tokens[place - start];
    const node = make("span", { class: "token", role: "option", tabindex: "-1", "aria-selected": "false", "data-place": place, "aria-label": `${place} ${legible(token)}` }, ...spelled(token));
    box.tokens.set(place, node);
    box.list.append(node);
    const broken = token !== null && token.endsWith("\n") && !(tokenAt(text, place + 1) ?? "x").startsWith("\n");
    box.list.append(broken ? make("br") : make("wbr"));
  }
}

function textEvents(box) {
  const placeOf = (event) => {
    const node = event.target.closest(".token");
    return node && boxes[state.direction] === box ? Number(node.dataset.place) : null;
  };
  let held = null;
  box.list.addEventListener("pointerover", (event) => {
    const place = placeOf(event);
    if (place === null || event.pointerType !== "mouse") return;
    if (active?.held) held = active.place;
    active = { place, held: false };
    shade();
  });
  box.list.addEventListener("pointerleave", () => {
    if (held !== null) active = { place: held, held: true };
    shade();
  });
  box.list.addEventListener("focusin", (event) => {
    const place = placeOf(event);
    if (place === null || !event.target.matches(":focus-visible")) return;
    held = null;
    active = { place, held: false };
    shade();
  });
  box.list.addEventListener("click", (event) => {
    const place = placeOf(event);
    if (place !== null) hold((held = place), null, false); // the pointer must not end up over another token
  });
  box.list.addEventListener("keydown", (event) => textKey(event, box, placeOf(event)));
  box.release = () => { held = null; };
}

function textKey(event, box, place) {
  if (place === null || event.altKey || event.metaKey || event.ctrlKey) return;
  const [start, stop] = box.window();
  const near = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: start, End: stop - 1 }[event.key];
  const line = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const page = { PageUp: -1, PageDown: 1 }[event.key];
  if (near !== undefined || line) {
    const to = line ? tokenInLine(box, place, line) : Math.min(stop - 1, Math.max(start, near));
    box.tokens.get(place).tabIndex = -1;
    box.tokens.get(to).tabIndex = 0;
    box.tokens.get(to).focus();
  } else if (page) {
    box.move(box.at + page);
    box.tokens.get(box.window()[0]).focus();
  } else if (event.key === "Enter" || event.key === " ") {
    hold(place);
  } else if (event.key === "Escape" && active?.held) {
    box.release();
    active = { place, held: false };
    state.token = target = null;
    writeAddress("replaceState");
    shade();
    event.stopPropagation();
  } else {
    return;
  }
  event.preventDefault();
}

// The token nearest to the one at `place` in the line above or below.
function tokenInLine(box, place, line) {
  const from = box.tokens.get(place);
  const [start, stop] = box.window();
  let [best, top] = [place, null];
  for (let at = place + line; at >= start && at < stop; at += line) {
    const node = box.tokens.get(at);
    if (Math.abs(node.offsetTop - from.offsetTop) < 4) continue;
    if (top !== null && Math.abs(node.offsetTop - top) >= 4) break;
    top ??= node.offsetTop;
    const off = (other) => Math.abs(other.offsetLeft - from.offsetLeft);
    if (best === place || off(node) < off(box.tokens.get(best))) best = at;
  }
  return best;
}

function hold(place, key = null, scroll = true) {
  active = { place, held: true };
  target = key;
  changed({ token: place });
  shade();
  if (scroll) scrollToToken(boxes[state.direction], place);
}
// Scroll the text, never the page.
function scrollToToken({ list, tokens }, place) {
  const node = tokens.get(place);
  if (!node) return;
  const below = node.offsetTop + node.offsetHeight - list.clientHeight;
  if (node.offsetTop < list.scrollTop) list.scrollTop = node.offsetTop - 30;
  else if (below > list.scrollTop) list.scrollTop = below + 30;
}
// Show the tokens of a cell: what its query attends to, or what attends to its key.
function holdPair(query, key) {
  const [from, to] = state.direction === "queries" ? [query, key] : [key, query];
  if (boxes.queries && boxes[state.direction].reach(from)) hold(from, to);
}

// The strongest keys of a query: [[place, weight], …], strongest first.
function attended(layer, head, query) {
  const open = opened(layer);
  let row = 0;
  for (const [start, stop] of look.texts[layer.queries].parts) {
    if (query >= start && query < stop) return pairs(open, layer, head, row + query - start);
    row += stop - start;
  }
  return [];
}

function pairs(open, layer, head, row) {
  const found = [], queries = rowsOf(layer);
  for (let at = 0; at < layer.k; at++) {
    const place = (head * layer.k + at) * queries + row;
    const count = open.weights[place] + 256 * open.weights[open.pairs + place];
    if (count === 0) break;
    let key = 0;
    for (let byte = layer.width - 1; byte >= 0; byte--) key = key * 256 + open.keys[byte * open.pairs + place];
    found.push([key, (count / layer.fine) ** 2]);
  }
  return found;
}
function attending(layer, head, key) {
  const open = opened(layer);
  const found = [];
  let row = 0;
  for (const [start, stop] of look.texts[layer.queries].parts) {
    for (let query = start; query < stop; query++, row++) {
      const pair = pairs(open, layer, head, row).find(([place]) => place === key);
      if (pair) found.push([query, pair[1]]);
    }
  }
  return found.sort((one, other) => other[1] - one[1]);
}

const partnersOf = ({ layer, head }) => (state.direction === "queries" ? attended : attending)(look.layers[layer], head, active.place);

function shade() {
  if (!boxes.queries) return;
  const out = state.direction === "queries";
  const [from, to] = out ? [boxes.queries, boxes.keys] : [boxes.keys, boxes.queries];
  for (const box of [from, to]) {
    box.list.classList.toggle("idle", box !== from);
    for (const node of box.tokens.values()) {
      node.style.removeProperty("--w");
      node.classList.remove("origin", "target");
      node.setAttribute("aria-selected", "false");
      node.tabIndex = -1;
    }
  }
  const origin = active && from.tokens.get(active.place);
  (origin ?? from.tokens.values().next().value).tabIndex = 0;
  markLines();
  if (!active) {
    find("partners").replaceChildren(make("p", { text: "No token is selected." }));
    return;
  }
  const found = partnersOf(state);
  for (const [place, weight] of found) to.tokens.get(place)?.style.setProperty("--w", (0.1 + 0.9 * Math.sqrt(weight)).toFixed(3));
  if (target !== null && active.held) to.tokens.get(target)?.classList.add("target");
  origin?.classList.add("origin");
  origin?.setAttribute("aria-selected", String(active.held));
  const name = legible(tokenAt(look.texts[from.text], active.place));
  const title = make("h3", {}, make("bdi", { text: `“${name}”` }), ` ${out ? "query" : "key"} ${asCount(active.place)}`);
  const lists = [partnerList(state, found, from, to)];
  const other = state.pinned && look.layers[state.pinned.layer];
  if (other && other.queries === here().queries && other.keys === here().keys) lists.unshift(partnerList(state.pinned, partnersOf(state.pinned), from, to));
  if (lists.length > 1) lists.forEach((list, at) => list.prepend(make("h4", { text: figures[1 - at].label })));
  find("partners").replaceChildren(title, make("div", { class: lists.length > 1 ? "two" : "" }, ...lists));
}

function partnerList({ layer: at }, found, from, to) {
  const layer = look.layers[at], out = state.direction === "queries";
  const total = found.reduce((sum, [, weight]) => sum + weight, 0);
  const none = `gives no key a weight of ${look.least} or more`;
  const strongest = found.length === 1 ? "its strongest key holds" : `its ${found.length} strongest keys hold`;
  const summary = out
    ? found.length ? `attends to these tokens; ${strongest} ${asWeight(total)} of its weight` : none
    : `is among the ${layer.k} strongest keys of ${asCount(found.length)} of ${asCount(rowsOf(layer))} queries`;
  const first = found.length > LISTED ? `; the first ${LISTED}:` : "";
  const list = make("ol");
  const most = found.length ? found[0][1] : 1;
  for (const [place, weight] of found.slice(0, LISTED)) {
    const bar = make("span", { class: "amount" });
    bar.style.width = `${Math.max(2, (100 * weight) / most)}%`;
    const token = tokenAt(look.texts[to.text], place);
    const before = token === String(place) ? [] : [make("span", { class: "place", text: `${place} ` })];
    const who = make("bdi", { class: "who" }, ...before, ...spelled(token));
    const row = make("button", { class: place === target && active.held ? "partner target" : "partner", type: "button" }, bar, make("span", { class: "number", text: asWeight(weight) }), who);
    row.addEventListener("click", () => {
      if (to === from && to.reach(place)) hold(place); else if (to.reach(place)) shade();
      scrollToToken(to, place);
    });
    list.append(make("li", {}, row));
  }
  return make("div", {}, make("p", { text: summary + first }), list);
}

// Follow the direction and the token of the address.
function showTokens() {
  document.querySelector(`input[name=direction][value=${state.direction}]`).checked = true;
  buildTexts();
  if (!boxes.queries) return;
  const box = boxes[state.direction];
  if (state.token !== null && box.reach(state.token)) {
    if (active?.place !== state.token) {
      target = null;
      scrollToToken(box, state.token);
    }
    active = { place: state.token, held: true };
  } else if (!active || !box.tokens.has(active.place) || active.held) {
    const [start, stop] = box.window();
    const first = Math.min(stop, start + FIRST) - 1;
    active = { place: state.token === null || !box.tokens.has(active?.place) ? first : active.place, held: true };
    target = null;
  }
  shade();
}

// Find a word: also one that several tokens make up. Spaces do not count, since many tokenizers drop them.
const searching = { places: [], at: -1 };
function search(text) {
  const box = boxes[state.direction];
  const wanted = text.replaceAll(/\s+/g, "").toLowerCase();
  searching.places = [];
  searching.at = -1;
  if (box && wanted) {
    for (const [start, tokens] of look.texts[box.text].runs) {
      const lengths = tokens.map((token) => token.replaceAll(/\s+/g, "").toLowerCase());
      const whole = lengths.join("");
      const ends = [];
      lengths.reduce((sum, token) => { ends.push(sum + token.length); return sum + token.length; }, 0);
      let token = 0;
      for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + 1)) {
        while (ends[token] <= at) token++;
        if (searching.places.at(-1) !== start + token) searching.places.push(start + token);
      }
    }
  }
  markMatches(wanted);
}
function markMatches(wanted) {
  const box = boxes[state.direction], found = new Set(searching.places);
  for (const [place, node] of box?.tokens ?? []) node.classList.toggle("match", found.has(place));
  const count = asCount(searching.places.length);
  find("matches").textContent = !wanted ? "" : !found.size ? "not found" : searching.at < 0 ? `${count} found` : `${asCount(searching.at + 1)} of ${count}`;
}
function nextMatch(by) {
  const { places } = searching;
  if (!places.length) return;
  searching.at = (searching.at + by + (searching.at < 0 && by < 0 ? 1 : 0) + places.length) % places.length;
  const box = boxes[state.direction];
  if (!box.reach(places[searching.at])) return;
  hold(places[searching.at]);
  markMatches("found");
}

function tokenEvents() {
  for (const input of document.querySelectorAll("input[name=direction]")) input.addEventListener("change", () => changed({ direction: input.value }));
  const box = find("search");
  box.addEventListener("input", () => search(box.value));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    nextMatch(event.shiftKey ? -1 : 1);
  });
}

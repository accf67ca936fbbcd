// Lines from each query to the keys that it attends to, the tokens of both sides in a column each.

const SHOWN_ENDS = 200; // tokens of a column
const ROW = 18; // pixels per token
let lineFigures = [];

class LinesFigure {
  constructor(prefix, place) {
    Object.assign(this, { place, host: find(`${prefix}lines`), hover: null, key: "" });
  }
  get layer() { return look.layers[this.place().layer]; }

  // The tokens of a side that are shown: those around the selected one.
  part(side) {
    const { length } = look.texts[this.layer[side]];
    const self = this.layer.queries === this.layer.keys;
    const at = active && (self || state.direction === side) ? active.place : 0;
    const start = Math.floor(Math.min(at, length - 1) / SHOWN_ENDS) * SHOWN_ENDS;
    return [start, Math.min(length, start + SHOWN_ENDS)];
  }

  draw() {
    const parts = { queries: this.part("queries"), keys: this.part("keys") };
    const key = JSON.stringify([this.layer.queries, this.layer.keys, parts]);
    if (key !== this.key) {
      this.key = key;
      this.parts = parts;
      this.columns = { queries: this.column("queries"), keys: this.column("keys") };
      this.canvas = make("canvas", { "aria-hidden": "true" });
      const [from, to] = ["queries", "keys"].map((side) => make("h3", { text: `${side === "queries" ? "queries" : "keys"} ${asCount(parts[side][0])}–${asCount(parts[side][1] - 1)}` }));
      const body = make("div", { class: "strands" }, from, make("span"), to, this.columns.queries, this.canvas, this.columns.keys);
      this.host.replaceChildren(body);
    }
    this.host.style.maxHeight = `${within(300, window.innerHeight - 180, 900)}px`;
    this.paint();
    const shown = this.host.querySelector("[aria-selected='true']");
    const top = shown?.offsetTop ?? 0, { scrollTop, clientHeight } = this.host;
    if (shown && (top < scrollTop || top > scrollTop + clientHeight - ROW)) this.host.scrollTop = top - clientHeight / 2;
  }

  column(side) {
    const [start, stop] = this.parts[side];
    const text = look.texts[this.layer[side]];
    const list = make("div", { class: `ends ${side}`, role: "listbox", "aria-label": `${side === "queries" ? "Queries" : "Keys"}: arrow keys move, Enter holds` });
    for (let place = start; place < stop; place++) {
      const token = tokenAt(text, place);
      const number = token === String(place) ? [] : [make("span", { class: "place", text: place })];
      list.append(make("div", { class: "end", role: "option", tabindex: place === start ? "0" : "-1", "aria-selected": "false", "data-place": place, title: `${place} ${legible(token)}` }, ...number, make("bdi", {}, ...spelled(token))));
    }
    const placeOf = (event) => { const node = event.target.closest(".end"); return node ? Number(node.dataset.place) : null; };
    const point = (place) => { this.hover = place === null ? null : { side, place }; this.paint(); };
    list.addEventListener("pointerover", (event) => event.pointerType === "mouse" && point(placeOf(event)));
    list.addEventListener("pointerleave", () => point(null));
    list.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && point(placeOf(event)));
    list.addEventListener("focusout", () => point(null));
    list.addEventListener("click", (event) => placeOf(event) !== null && this.hold(side, placeOf(event)));
    list.addEventListener("keydown", (event) => {
      const place = placeOf(event);
      const to = { ArrowUp: place - 1, ArrowDown: place + 1, Home: start, End: stop - 1 }[event.key];
      const across = { ArrowLeft: "queries", ArrowRight: "keys" }[event.key];
      if (event.key === "Enter" || event.key === " ") this.hold(side, place);
      else if (to !== undefined) this.focus(side, within(start, to, stop - 1));
      else if (across) this.focus(across, within(this.parts[across][0], place, this.parts[across][1] - 1));
      else return;
      event.preventDefault();
    });
    return list;
  }

  focus(side, place) {
    const node = this.columns[side].children[place - this.parts[side][0]];
    this.columns[side].querySelector("[tabindex='0']").tabIndex = -1;
    node.tabIndex = 0;
    node.focus();
  }

  hold(side, place) {
    active = { place, held: true };
    target = null;
    changed({ direction: side, token: place });
  }

  // The lines of the token under the pointer, or of the held one, stand out; if neither, all are drawn alike.
  paint() {
    const { layer, canvas } = this, { head } = this.place();
    const [queries, keys] = [this.parts.queries, this.parts.keys];
    const wide = canvas.parentElement.clientWidth - this.columns.queries.offsetWidth - this.columns.keys.offsetWidth;
    const high = ROW * Math.max(queries[1] - queries[0], keys[1] - keys[0]), sharp = Math.min(2, sharpness());
    canvas.width = Math.max(1, wide * sharp);
    canvas.height = high * sharp;
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    pen.strokeStyle = themed("--accent");
    const held = state.token !== null && active?.held ? { side: state.direction, place: active.place } : null;
    const chosen = this.hover ?? held;
    const weights = new Map(); // of the other side's tokens, for the chosen one
    for (let query = queries[0]; query < queries[1]; query++) {
      for (const [key, weight] of attended(layer, head, query)) {
        const mine = chosen && (chosen.side === "queries" ? query : key) === chosen.place;
        if (mine) weights.set(chosen.side === "queries" ? key : query, weight);
        if (key < keys[0] || key >= keys[1]) continue;
        const strength = placed(weight, 1, state.scale);
        pen.globalAlpha = chosen && !mine ? 0.1 * strength : Math.max(mine ? 0.15 : 0, strength);
        pen.lineWidth = mine ? 1 + 3 * strength : 0.6 + 1.6 * strength;
        pen.beginPath();
        pen.moveTo(0, ROW * (query - queries[0] + 0.5));
        pen.lineTo(wide, ROW * (key - keys[0] + 0.5));
        pen.stroke();
      }
    }
    this.shade(chosen, weights, held);
  }

  shade(chosen, weights, held) {
    for (const side of ["queries", "keys"]) {
      [...this.columns[side].children].forEach((node, at) => {
        const place = this.parts[side][0] + at;
        const weight = chosen && chosen.side !== side ? weights.get(place) : undefined;
        node.style.setProperty("--w", weight ? (0.1 + 0.9 * Math.sqrt(weight)).toFixed(3) : "0");
        node.classList.toggle("origin", Boolean(chosen) && chosen.side === side && chosen.place === place);
        node.setAttribute("aria-selected", String(Boolean(held) && held.side === side && held.place === place));
      });
    }
  }
}

function drawLines() {
  const shown = state.view === "lines" && Boolean(boxes.queries);
  lineFigures.forEach((figure, at) => {
    figure.host.hidden = !shown || (at === 1 && !state.pinned);
    if (!figure.host.hidden) figure.draw();
  });
  if (state.view !== "lines") return;
  find("cell").textContent = shown
    ? `Each line is a weight of at least ${look.least}, among the ${here().k} strongest of its query; the darker, the larger. Click a query on the left or a key on the right to follow its lines.`
    : "The strongest keys of the queries are not in this page.";
}
function markLines() {
  if (state.view === "lines") drawLines();
}
function linesEvents() {
  lineFigures = [new LinesFigure("", () => state), new LinesFigure("pinned-", () => state.pinned ?? state)];
}

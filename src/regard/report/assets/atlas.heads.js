// The list of heads: a small map, statistics and findings of each; it grows while the model is examined.

import { drawThumbnail } from "./atlas.colour.js";
import { asCount, asNumber, find } from "./atlas.text.js";

const SHOWN = ["entropy", "first_share", "previous_share"]; // the statistics of an entry
const node = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

export class Heads {
  constructor(choose, known) {
    Object.assign(this, { choose, known, layers: [], found: null, chosen: [0, 0], order: "notable" });
    find("order").addEventListener("change", (event) => { this.order = event.target.value; this.build(); });
    find("heads").addEventListener("click", (event) => this.pick(event.target.closest(".head")));
    find("heads").addEventListener("keydown", (event) => this.key(event));
  }

  // Ask what is known by now, until everything is.
  async follow(layers) {
    this.layers = layers;
    const answer = await fetch("heads.json").catch(() => null);
    if (answer?.ok) {
      const found = await answer.json();
      const more = !this.found || found.layers.length > this.found.layers.length || found.complete !== this.found.complete;
      this.found = found;
      if (more) {
        this.options();
        this.build();
      }
      const { length } = found.layers;
      find("about-heads").textContent = found.complete || !length ? "" : `Examined ${asCount(length)} of ${asCount(this.layers.length)} layers`;
      if (found.complete) return this.known(found);
    }
    if (answer) setTimeout(() => this.follow(this.layers), 1000);
  }

  // The layers that the model has computed by now.
  grow(layers) {
    const more = layers.length !== this.count;
    this.layers = layers;
    if (more) this.build();
  }

  options() {
    const { statistics } = this.found;
    const named = [["notable", "notable first"], ["model", "as in the model"], ...statistics.flatMap(({ label }, at) => [[`${at}+`, `${label}, largest first`], [`${at}-`, `${label}, smallest first`]])];
    if (find("order").options.length !== named.length) find("order").replaceChildren(...named.map(([value, text]) => new Option(text, value)));
    find("order").value = this.order;
  }

  entries() {
    const every = this.layers.flatMap(({ heads, name }, layer) => Array.from({ length: heads }, (_, head) => ({ layer, head, name, about: this.found?.layers[layer]?.[head], remarks: [] })));
    const places = new Map(every.map((entry) => [`${entry.layer}.${entry.head}`, entry]));
    for (const remark of this.found?.remarks ?? []) for (const head of remark.heads) places.get(`${remark.layer}.${head}`)?.remarks.push(remark);
    const column = parseInt(this.order, 10), sign = this.order.endsWith("+") ? -1 : 1;
    const value = ({ about }) => about?.values[column] ?? sign * Infinity;
    const grade = ({ remarks }) => (remarks.some(({ level }) => level === "problem") ? 0 : remarks.length ? 1 : 2);
    if (this.order === "notable") return every.sort((a, b) => grade(a) - grade(b));
    return Number.isInteger(column) ? every.sort((a, b) => sign * (value(a) - value(b)) || 0) : every;
  }

  build() {
    const largest = (this.found?.layers ?? []).flat().map((about) => about.largest).sort((a, b) => a - b);
    const top = largest.at(largest.length >> 1) || 1; // one scale for all: half of the heads have a cell as large as this
    this.count = this.layers.length;
    find("heads").replaceChildren(...this.entries().map((entry) => this.entry(entry, top)));
    this.mark(...this.chosen);
  }

  entry({ layer, head, name, about, remarks }, top) {
    const canvas = node("canvas", { "aria-hidden": "true" });
    if (about) {
      drawThumbnail(canvas, about, top);
      canvas.dataset.drawn = "";
    }
    const title = node("b");
    title.textContent = `L${layer} H${head}`;
    const values = node("div", { class: "values" });
    values.textContent = about ? this.numbers(about).join(", ") : "";
    const rules = [...new Map(remarks.map((remark) => [remark.rule, remark])).values()].map((remark) => {
      const text = node("span");
      text.textContent = remark.rule;
      return node("span", { class: "rule", title: remark.text }, node("span", { class: `mark ${remark.level}`, role: "img", "aria-label": remark.level }), text);
    });
    const said = remarks.map(({ text }) => text).join(" ");
    return node("div", { class: "head", role: "option", tabindex: "-1", "data-layer": layer, "data-head": head, title: name, "aria-label": `${name || "model"}, head ${head}. ${values.textContent} ${said}` }, canvas, node("div", {}, title, node("div", { class: "rules" }, ...rules), values));
  }

  // The statistic that orders the list first, then a few that tell heads apart.
  numbers(about) {
    const { statistics } = this.found;
    const column = parseInt(this.order, 10);
    const wanted = statistics.map((_, at) => at).filter((at) => at === column || SHOWN.includes(statistics[at].name));
    wanted.sort((a, b) => (b === column) - (a === column));
    return wanted.slice(0, 3).filter((at) => about.values[at] !== null).map((at) => {
      const { label, unit, factor } = statistics[at];
      const value = about.values[at] * factor;
      const text = unit === "%" ? value.toFixed(value < 10 ? 1 : 0) : asNumber(value);
      return `${label.toLowerCase()} ${text}${unit ? `\u00a0${unit}` : ""}`;
    });
  }

  // The small map of the chosen head, to show until its coarse levels are known.
  thumbnail() {
    return find("heads").querySelector("[aria-selected='true'] canvas[data-drawn]");
  }

  mark(layer, head) {
    this.chosen = [layer, head];
    let tabbed = null;
    for (const entry of find("heads").children) {
      const is = Number(entry.dataset.layer) === layer && Number(entry.dataset.head) === head;
      entry.setAttribute("aria-selected", String(is));
      entry.tabIndex = -1;
      if (is) tabbed = entry;
    }
    tabbed ??= find("heads").firstElementChild;
    if (!tabbed) return;
    tabbed.tabIndex = 0;
    const box = find("heads"), top = tabbed.offsetTop;
    if (top < box.scrollTop || top + tabbed.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top - 40;
  }

  pick(entry) {
    if (entry) this.choose(Number(entry.dataset.layer), Number(entry.dataset.head));
  }

  key(event) {
    const entry = event.target.closest(".head");
    const to = { ArrowDown: entry?.nextElementSibling, ArrowUp: entry?.previousElementSibling, Home: entry?.parentElement.firstElementChild, End: entry?.parentElement.lastElementChild }[event.key];
    if (event.key === "Enter" || event.key === " ") this.pick(entry);
    else if (to === undefined) return;
    else if (to) {
      entry.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    }
    event.preventDefault();
    event.stopPropagation(); // the map moves by the same keys
  }
}

// The page of one head: histograms, curves, tokens and exemplars.

const S = DATA.statistics;
by("title").textContent = `${headName(DATA.at)}`;
by("kicker").replaceChildren(make("a", { href: "../index.html" }, `Census of ${DATA.title}`));
by("facts").append(make("div", {}, make("dt", {}, "layer"), make("dd", {}, DATA.layer)), make("div", {}, make("dt", {}, "group"), make("dd", {}, `${DATA.group.name} (${DATA.group.size} heads, ${DATA.group.words}${DATA.group.sure === null ? "" : ` ${DATA.group.sure.toFixed(2)}`})`)));
[1, 0].forEach((i) => { const one = DATA.around[i]; if (one.length) by("steps").prepend(make("a.quiet", { href: `${one[2]}.html`, rel: i ? "next" : "prev", "aria-label": i ? "Next head" : "Previous head" }, i ? `${headName(one)} ›` : `‹ ${headName(one)}`)); });
document.addEventListener("keydown", (event) => {
  const to = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = to && !["SELECT", "INPUT"].includes(event.target.tagName) && document.querySelector(`a[rel="${to}"]`);
  if (link) link.click();
});

const small = S.map((s, i) => {
  const x = DATA.summaries[i];
  const rank = x.mean === null ? "" : `rank ${x.rank + 1} of ${DATA.heads}`;
  const deciles = x.deciles[4] === null ? "" : `median ${number(x.deciles[4])}, 10–90 % ${number(x.deciles[0])} – ${number(x.deciles[8])}`;
  const broken = x.undefined ? `; not finite in ${whole(x.undefined)} rows` : "";
  return make("div.stat", { title: `${s.about}; deciles are exact to ${s.exact}` }, make("div.bar", {}, make("h3", {}, titled(s.title)), make("span.big", {}, number(x.mean))), histogram(x, s), make("p.hint", {}, deciles + broken), make("p.hint", {}, rank));
});

let shownStatistic = 1;
function curves() {
  const c = DATA.summaries[shownStatistic].curves;
  by("curves").replaceChildren(
    make("div", {}, make("h3", {}, "by position in the text"), curve(c.position, true)),
    make("div", {}, make("h3", {}, "by length of the text"), curve(c.length, true)),
    make("div", {}, make("h3", {}, "by class of token"), curve(c.class, false)));
}

function tokenList(rows, shares) {
  if (!rows.length) return make("p.hint", {}, "none");
  const most = Math.max(...rows.map((row) => row[1]));
  return make("ol.tokens", {}, rows.slice(0, 14).map(([text, share, count]) => make("li", {}, make("code", {}, visible(text)), make("i", { "--part": `${(100 * share) / most}%` }), make("span.number", {}, shares ? `${(100 * share).toFixed(1)} %` : number(share)), make("span.number.hint", {}, `${whole(count)} ×`))));
}
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣");

// One exemplar: its text with the row framed and its keys marked, arrows to those near by, and the others quoted.
function example(e) {
  const first = e.position - e.place, weights = new Map(e.keys.map(([position, weight]) => [position, weight]));
  const text = make("p.text");
  e.tokens.forEach((token, i) => {
    if (token < 0) return;
    const position = first + i, weight = weights.get(position);
    const kind = i === e.place ? "span.row" : weight === undefined ? "span" : "span.key";
    const whole = DATA.texts[token].replaceAll("\n", "⏎"), bare = whole.trimStart() || whole;
    const span = make(kind, { "data-position": position, title: weight === undefined ? null : `weight ${number(weight)}` }, bare);
    if (bare !== whole) text.append(whole.slice(0, whole.length - bare.length));
    if (weight !== undefined) { span.classList.add("key"); span.style.setProperty("--part", `${Math.round(18 + 82 * weight)}%`); }
    text.append(span);
  });
  const near = (position) => position >= first && position < first + e.tokens.length && e.tokens[position - first] >= 0;
  const far = e.keys.filter(([position]) => !near(position)).map(([position, weight, around]) => {
    const quoted = make("q");
    around.forEach((token, i) => { if (token >= 0) quoted.append(i === (around.length - 1) / 2 ? make("span.key", { "--part": `${Math.round(18 + 82 * weight)}%` }, DATA.texts[token].replaceAll("\n", "⏎")) : DATA.texts[token].replaceAll("\n", "⏎")); });
    return make("span", {}, `${number(weight)} on `, quoted, ` ${whole(Math.abs(e.position - position))} ${position < e.position ? "back" : "ahead"}`);
  });
  const score = e.kind === "sample" ? "at random" : number(e.score);
  const box = make("div.example", {}, make("div.meta", {}, make("span", { title: e.document }, `${e.document} · token ${whole(e.start + e.position)}`), make("b", {}, score)), text, far.length ? make("div.far", {}, far) : "");
  requestAnimationFrame(() => arrows(box, e));
  return box;
}
function arrows(box, e) {
  for (const old of box.querySelectorAll("svg")) old.remove();
  const frame = box.getBoundingClientRect(), from = box.querySelector(".row");
  if (!from) return;
  const middle = (span) => { const r = span.getClientRects()[0] || span.getBoundingClientRect(); return [r.left + r.width / 2 - frame.left, r.top - frame.top + 2]; };
  const svg = make("svg"), [x0, y0] = middle(from);
  for (const [position, weight] of e.keys) {
    const to = box.querySelector(`.text [data-position="${position}"]`);
    if (!to || to === from || weight < 0.03) continue;
    const [x, y] = middle(to), lift = Math.min(26, 7 + Math.abs(x - x0) * 0.06), high = Math.min(y, y0) - lift;
    svg.append(make("path", { d: `M${x0.toFixed(1)} ${y0.toFixed(1)}C${x0.toFixed(1)} ${high.toFixed(1)} ${x.toFixed(1)} ${high.toFixed(1)} ${x.toFixed(1)} ${y.toFixed(1)}`, "stroke-width": (0.6 + 2.6 * weight).toFixed(2) }),
      make("path", { d: `M${(x - 3).toFixed(1)} ${(y - 4).toFixed(1)}L${x.toFixed(1)} ${y.toFixed(1)}L${(x + 3).toFixed(1)} ${(y - 4).toFixed(1)}`, "stroke-width": 1.2 }));
  }
  box.append(svg);
}
const kinds = DATA.behaviours.filter(([name]) => name !== "sample");
// The tab that is open first: induction or duplicate for a head that does it, otherwise the strongest weights.
const does = S.findIndex((s, i) => ["induction", "duplicate"].includes(s.name) && DATA.summaries[i].mean > 0.3);
let kind = does < 0 ? 0 : kinds.findIndex(([name]) => name === S[does].name);
function examples() {
  const of = (name) => DATA.exemplars.filter((e) => e.kind === name);
  const column = (name, about) => make("div", {}, make("h3", {}, titled(name === "sample" ? "A random sample" : name)), make("p.hint", {}, about), of(name).map(example), of(name).length ? "" : make("p.hint", {}, "no row shows it"));
  by("examples").replaceChildren(column(...kinds[kind]), column("sample", DATA.behaviours.find(([name]) => name === "sample")[1]));
  [...by("kinds").children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === kind)));
}

by("main").append(
  make("section.card", {}, make("div.bar", {}, make("h2", {}, "Exemplars"), make("div.tabs", { id: "kinds" }, kinds.map(([name], i) => make("button.quiet", { type: "button", onclick: () => { kind = i; examples(); } }, name)))), make("div.examples", { id: "examples" })),
  make("section.card", {}, make("div.bar", {}, make("h2", {}, "Statistics"), make("span.hint", {}, "over every row; heights are square roots of counts, the line is the mean")), make("div.small", {}, small)),
  make("section.card", {}, make("div.bar", {}, make("h2", {}, "Where it changes"), choice("Mean of", S.map((s) => s.title), shownStatistic, (i) => { shownStatistic = i; curves(); })), make("div.two", { id: "curves" })),
  make("div.two", {},
    make("section.card", {}, make("h2", {}, "Tokens that receive most"), make("p.hint", {}, "share of all weight of this head"), tokenList(DATA.keys, true)),
    make("section.card", {}, make("h2", {}, "Tokens at which it looks away"), make("p.hint", {}, "mean of the strongest weight, where it is on neither the first token nor a neighbour"), tokenList(DATA.queries, false)),
    make("section.card", {}, make("h2", {}, "Nearest heads"), make("p.hint", {}, "by the distance of their profiles"), make("ol.tokens", {}, DATA.nearest.map(([layer, head, name, far]) => make("li", {}, make("a", { href: `${name}.html` }, headName([layer, head])), make("i", { "--part": `${100 * Math.exp(-3 * far)}%` }), make("span.number", {}, number(far))))))),
);
examples();
curves();
addEventListener("resize", examples);

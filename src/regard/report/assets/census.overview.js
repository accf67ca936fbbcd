// The overview: every head in a scatter plot, a grid and a table; groups and a threshold filter all three.

const S = DATA.statistics;
const place = (name) => S.findIndex((s) => s.name === name);
const view = { across: place("distance"), up: place("relative_entropy"), colour: -1, shown: new Set(DATA.groups.map((_, i) => i)), by: 0, least: null, layer: -1 };
const names = DATA.names;
const isOut = (head) => !view.shown.has(head.group) || (view.least !== null && !(head.means[view.by] >= view.least)) || (view.layer >= 0 && head.at[0] !== view.layer);

function paint() {
  if (view.colour < 0) return DATA.heads.map((head) => hue(head.group));
  const transform = transforms[S[view.colour].transform], [low, high] = range(DATA.heads.map((h) => (h.means[view.colour] === null ? null : transform(h.means[view.colour]))));
  return DATA.heads.map((h) => (h.means[view.colour] === null ? "var(--none)" : css((transform(h.means[view.colour]) - low) / (high - low))));
}
function tipOf(head) {
  const top = ["relative_entropy", "first_share", "previous_share", "self_share", "induction", "duplicate", "distance", "max_logit"].map(place);
  return [make("b", {}, headName(head.at)), make("div.hint", {}, DATA.groups[head.group].name), make("dl", {}, top.flatMap((i) => [make("dt", {}, S[i].title), make("dd", {}, number(head.means[i]))]))];
}
function draw() {
  const fills = paint();
  const marks = DATA.heads.map((head, i) => ({ at: head.at, x: head.means[view.across], y: head.means[view.up], fill: fills[i], out: isOut(head), name: headName(head.at), href: `heads/${names[i]}.html`, tip: () => tipOf(head) }));
  marks.sort((a, b) => b.out - a.out);
  by("scatter").replaceChildren(scatter(marks, S[view.across], S[view.up]));
  by("grid").replaceChildren(headGrid(marks));
  const left = marks.filter((m) => !m.out).length;
  by("count").textContent = left === marks.length ? `${whole(left)} heads` : `${whole(left)} of ${whole(marks.length)} heads`;
  const coloured = view.colour >= 0 ? legend(...range(DATA.heads.map((h) => h.means[view.colour])), S[view.colour].about) : make("p.hint", {}, "coloured by group");
  by("legend").replaceChildren(coloured);
  by("table").replaceChildren(table(DATA.heads.filter((head) => !isOut(head))));
}
function table(heads) {
  const index = new Map(DATA.heads.map((head, i) => [head, i]));
  const columns = [
    { title: "Head", left: true, value: (h) => h.at[0] * 10000 + h.at[1], cell: (h) => make("td", {}, make("a", { href: `heads/${names[index.get(h)]}.html` }, headName(h.at))) },
    { title: "Group", left: true, value: (h) => DATA.groups[h.group].name, cell: (h) => make("td", {}, DATA.groups[h.group].name) },
    ...S.map((s, i) => {
      const transform = transforms[s.transform], [low, high] = range(DATA.heads.map((h) => (h.means[i] === null ? null : transform(h.means[i]))));
      return { title: s.title, about: s.about, value: (h) => h.means[i], cell: (h) => make("td.number.part", { "--part": h.means[i] === null ? "0%" : `${(100 * (transform(h.means[i]) - low)) / (high - low)}%` }, number(h.means[i])) };
    }),
  ];
  return sortedTable(columns, heads, [0, false]);
}

const chips = DATA.groups.map((group, i) => {
  const chip = make("button.chip", { type: "button", "aria-pressed": "true", "--hue": hue(i), title: "Click to hide or show this group; double-click to show it alone" },
    make("i"), make("span", {}, group.name), make("span.hint", {}, `${group.size} · ${group.words}${group.sure === null ? "" : ` ${group.sure.toFixed(2)}`}`));
  const press = () => chips.forEach((one, at) => one.setAttribute("aria-pressed", String(view.shown.has(at))));
  chip.addEventListener("click", () => { if (view.shown.has(i)) view.shown.delete(i); else view.shown.add(i); press(); draw(); });
  chip.addEventListener("dblclick", () => { view.shown = new Set([i]); press(); draw(); });
  return chip;
});
const titles = S.map((s) => s.title);
const least = make("input", { type: "number", step: "any", placeholder: "any", "aria-label": "the least mean", oninput: () => { view.least = least.value === "" ? null : Number(least.value); draw(); } });

by("main").append(
  DATA.remarks.length ? make("ul.card.remarks", {}, DATA.remarks.map((text) => make("li", {}, text))) : "",
  make("section.card", {}, make("div.bar", {}, make("h2", {}, "Groups"), make("span.hint", {}, "heads with similar profiles; the number is the silhouette: 1 is sure, 0 is a guess")),
    make("div.chips", {}, chips),
    make("div.controls", {}, choice("Only heads with", titles, 0, (i) => { view.by = i; draw(); }), make("label.choice", {}, "of at least", least),
      choice("in", ["every layer", ...DATA.layers.map((name, i) => `L${i}`)], 0, (i) => { view.layer = i - 1; draw(); }), make("span.hint", { id: "count" }))),
  make("div.wide-left", {},
    make("section.card", {}, make("h2", {}, "Heads by two statistics"),
      make("div.controls", {}, choice("Across", titles, view.across, (i) => { view.across = i; draw(); }), choice("Up", titles, view.up, (i) => { view.up = i; draw(); })),
      make("div", { id: "scatter" })),
    make("section.card", {}, make("div.bar", {}, make("h2", {}, "Layers and heads"), choice("Colour", ["group", ...titles], 0, (i) => { view.colour = i - 1; draw(); })),
      make("div.scroll", { id: "grid" }), make("div", { id: "legend" }), make("p.hint", {}, DATA.legend.join("; ")))),
  make("section.card", {}, make("div.bar", {}, make("h2", {}, "All heads"), make("span.hint", {}, "means over every row; click a title to sort, a head to open its page")), make("div", { id: "table" })),
);
draw();

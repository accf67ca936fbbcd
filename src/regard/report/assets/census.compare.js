// Two censuses compared: which heads moved.

const S = DATA.statistics;
const view = { statistic: 1 };
const tipOf = (head) => [make("b", {}, headName(head.at)), make("div.hint", {}, `moved ${number(head.moved)}, most in ${S[head.most].title}`), make("dl", {}, S.flatMap((s, i) => [make("dt", {}, s.title), make("dd", {}, `${number(head.first[i])} → ${number(head.first[i] === null || head.changes[i] === null ? null : head.first[i] + head.changes[i])}`)]))];
const top = Math.max(1e-9, ...DATA.heads.map((head) => head.moved));
function marks() {
  const i = view.statistic;
  return DATA.heads.map((head) => ({ at: head.at, x: head.first[i], y: head.first[i] === null || head.changes[i] === null ? null : head.first[i] + head.changes[i], fill: css(head.moved / top), out: false, name: headName(head.at), href: null, tip: () => tipOf(head) }));
}
function draw() {
  const s = S[view.statistic];
  by("scatter").replaceChildren(scatter(marks(), { ...s, label: `${titled(s.title)} in ${DATA.titles[0]}` }, { ...s, label: `… in ${DATA.titles[1]}` }, { diagonal: true }));
}
const columns = [
  { title: "Head", left: true, value: (h) => h.at[0] * 10000 + h.at[1], cell: (h) => make("td", {}, headName(h.at)) },
  { title: "moved", about: "the mean distance of the histograms, 0 to 1", value: (h) => h.moved, cell: (h) => make("td.number.part", { "--part": `${(100 * h.moved) / top}%` }, number(h.moved)) },
  { title: "most in", left: true, value: (h) => S[h.most].title, cell: (h) => make("td", {}, S[h.most].title) },
  ...S.map((s, i) => ({ title: s.title, about: s.about, value: (h) => h.changes[i], cell: (h) => make("td.number", {}, h.changes[i] === null ? "–" : `${h.changes[i] > 0 ? "+" : ""}${number(h.changes[i])}`) })),
];
const lone = DATA.only.flatMap((layers, i) => (layers.length ? [`only in ${DATA.titles[i]}: ${layers.join(", ")}`] : []));
by("main").append(
  lone.length ? make("ul.card.remarks", {}, lone.map((text) => make("li", {}, text))) : "",
  make("div.wide-left", {},
    make("section.card", {}, make("div.bar", {}, make("h2", {}, "Before and after"), choice("Mean of", S.map((s) => s.title), view.statistic, (i) => { view.statistic = i; draw(); })), make("p.hint", {}, "heads on the dashed line did not change; colour shows how far a head moved in all statistics"), make("div", { id: "scatter" })),
    make("section.card", {}, make("h2", {}, "Which heads moved"), make("div.scroll", {}, headGrid(marks())), legend(0, top, "mean distance of the histograms"))),
  make("section.card", {}, make("div.bar", {}, make("h2", {}, "Changes"), make("span.hint", {}, `${DATA.titles[1]} minus ${DATA.titles[0]}; click a title to sort`)), sortedTable(columns, DATA.heads, [1, true])),
);
draw();

// The findings: one line per rule, with a link to each head that it names; every sentence on request.

const FIRST_REMARKS = 8;
const markOf = (remark) => make("span", { class: `mark ${remark.level}`, role: "img", "aria-label": remark.level });
const ruleName = (rule) => { const text = rule.replaceAll(/[-_]/g, " "); return text.slice(0, 1).toUpperCase() + text.slice(1); };

// Findings of one rule and level, in order; problems first.
function grouped() {
  const groups = new Map();
  look.remarks.forEach((remark, at) => {
    const key = `${remark.level} ${remark.rule}`;
    if (!groups.has(key)) groups.set(key, { rule: remark.rule, level: remark.level, found: [] });
    groups.get(key).found.push([remark, at]);
  });
  return [...groups.values()].sort((one, other) => (one.level === "problem" ? 0 : 1) - (other.level === "problem" ? 0 : 1));
}

function buildRemarks() {
  const groups = grouped();
  const named = new Set(look.remarks.flatMap((remark) => remark.heads.map((number) => `${remark.layer}.${number}`)));
  const counted = (level) => groups.filter((group) => group.level === level).length;
  const problems = counted("problem");
  find("findings-count").textContent = groups.length ? `${problems} ${problems === 1 ? "problem" : "problems"}, ${counted("notable")} notable; they name ${asCount(named.size)} of ${asCount(heads())} heads` : "none";
  const items = groups.map((group) => make("li", {}, markOf(group), groupLine(group)));
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

function groupLine({ rule, found }) {
  const line = make("div", { class: "rule-line" }, make("b", { text: ruleName(rule) }));
  const linked = found.filter(([remark]) => remark.layer >= 0).sort((one, other) => one[0].layer - other[0].layer);
  line.append(...linked.map(([remark, at]) => layerLinks(remark, at)));
  const sentences = [...new Set(found.map(([remark]) => remark.text))];
  if (sentences.length === 1) line.append(make("span", { class: "where", text: sentences[0] }));
  else line.append(make("details", {}, make("summary", { text: `${sentences.length} sentences` }), make("ul", { class: "sentences" }, ...sentences.map((text) => make("li", { text })))));
  return line;
}

// "layer: head head head", each a link.
function layerLinks(remark, at) {
  const layer = look.layers[remark.layer];
  const group = make("span", { class: "layer-links" }, make("span", { class: "where", text: look.short[remark.layer], title: nameOf(layer) }));
  const numbers = remark.heads.length ? remark.heads : [layer.heads[0]];
  for (const number of numbers) {
    const head = layer.heads.indexOf(number);
    const said = remark.heads.length ? String(number) : "all";
    const link = make("a", { href: hrefOf({ layer: remark.layer, number }), "data-remark": at, "data-number": number, title: remark.text, "aria-label": `${nameOf(layer)}, head ${said}: ${remark.text}`, text: said });
    link.addEventListener("click", (event) => {
      event.preventDefault();
      choose(remark.layer, head, remark.heads.length ? remarked(remark) : cells[remark.layer]);
      const top = find("detail").getBoundingClientRect().top;
      if (top > window.innerHeight * 0.6) find("board").scrollIntoView({ behavior: "smooth" });
    });
    group.append(link);
  }
  return group;
}

function markRemarks() {
  for (const link of document.querySelectorAll("#remarks a")) {
    const remark = look.remarks[link.dataset.remark];
    link.setAttribute("aria-current", String(remark.layer === state.layer && Number(link.dataset.number) === here().heads[state.head]));
  }
}

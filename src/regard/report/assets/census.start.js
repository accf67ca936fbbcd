// What all pages of a census share: elements, numbers, the theme, and the tooltip.

const DATA = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const within = (low, x, high) => Math.min(high, Math.max(low, x));

// An element from a tag with classes, attributes, and children; text is always text, never markup.
function make(tag, given = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const drawn = ["svg", "g", "rect", "circle", "line", "path", "text"].includes(name);
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) element.style.setProperty(key, value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const number = (x) => {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size && size < 0.001) return x.toExponential(1);
  if (size < 10) return x.toFixed(3);
  return size < 1000 ? x.toFixed(1) : Math.round(x).toLocaleString("en");
};
const whole = (x) => x.toLocaleString("en");
const headName = ([layer, head]) => `L${layer} H${head}`;
const titled = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  by("theme").textContent = theme === "dark" ? "Light" : "Dark";
  by("theme").setAttribute("aria-pressed", String(theme === "dark"));
}
let theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
try { theme = localStorage.getItem("regard-theme") || theme; } catch { theme = theme || "light"; }
const asked = new URLSearchParams(location.search).get("theme");
if (asked === "dark" || asked === "light") theme = asked;
useTheme(theme);
by("theme").addEventListener("click", () => {
  theme = theme === "dark" ? "light" : "dark";
  useTheme(theme);
  try { localStorage.setItem("regard-theme", theme); } catch { return; }
});

for (const [name, text] of Object.entries(DATA.facts || {})) {
  by("facts").append(make("div", {}, make("dt", {}, name), make("dd", {}, text)));
}

function tell(event, ...content) {
  const tip = by("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const at = event.clientX === undefined || !event.clientX ? event.target.getBoundingClientRect() : { right: event.clientX, bottom: event.clientY };
  tip.style.left = `${within(4, at.right + 12, innerWidth - box.width - 8)}px`;
  tip.style.top = `${within(4, at.bottom + 12, innerHeight - box.height - 8)}px`;
}
const hush = () => { by("tip").hidden = true; };

function choice(label, options, chosen, change) {
  const select = make("select", { onchange: () => change(Number(select.value)) });
  options.forEach((text, at) => select.append(make("option", { value: at, selected: at === chosen }, text)));
  return make("label.choice", {}, label, select);
}

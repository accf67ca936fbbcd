// Tokens and numbers as text: tokens are loaded in blocks on demand, and are never parsed as markup.

export const find = (id) => document.getElementById(id);
export const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const asCount = (value) => value.toLocaleString("en-US");

export function asWeight(value) {
  if (Number.isNaN(value)) return "not a number";
  if (value === 0) return "0";
  const text = value < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(4)));
  return text.replace("e-", "e−");
}

// A statistic, to three digits.
export function asNumber(value) {
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e5) ? value.toExponential(1).replace("e+", "e") : String(Number(value.toPrecision(3)));
  return text.replaceAll("-", "−");
}

// Invisible characters get a sign; those that would reverse or hide the text are escaped.
const SIGNS = { " ": "·", "\n": "↵", "\r": "\\r", "\t": "⇥", "\u00a0": "␣" };
const HIDDEN = /[ \n\r\t\u00a0]|(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu;
const escaped = (char) => SIGNS[char] ?? `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`;
const legible = (token) => (token === "" ? "∅" : token.replaceAll(HIDDEN, escaped));

export class Tokens {
  constructor(size, changed) {
    this.size = size;
    this.changed = changed;
    this.blocks = new Map();
  }

  // The text of a token, or null while it loads.
  at(layer, side, index) {
    const block = Math.floor(index / this.size);
    const path = `tokens/${layer}/${side}/${block}`;
    if (!this.blocks.has(path)) {
      this.blocks.set(path, null);
      this.load(path);
    }
    return this.blocks.get(path)?.[index - block * this.size] ?? null;
  }

  get idle() {
    return ![...this.blocks.values()].includes(null);
  }

  async load(path) {
    try {
      const answer = await fetch(path);
      if (!answer.ok) throw new Error(await answer.text());
      this.blocks.set(path, (await answer.json()).map(legible));
      this.changed();
    } catch {
      this.blocks.delete(path);  // requested again when it is next needed
    }
  }
}

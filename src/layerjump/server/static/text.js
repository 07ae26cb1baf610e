// Printable tokens and numbers. A token is only ever shown as text, never as markup.

const SYMBOLS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
// Control characters, and those that change the direction of the text around them.
const CONTROLS = /[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/gu;
const INVISIBLE = /^[\p{Cf}\p{Cn}\p{Zs}\p{Zl}\p{Zp}]*$/u;

export function visible(text) {
  if (text === "") return "∅";
  const shown = text.replace(/[ \n\t\r]/g, (letter) => SYMBOLS[letter]).replace(CONTROLS, code);
  return INVISIBLE.test(shown) ? [...shown].map(code).join("") : shown;
}

// A token as somebody types it: the symbols of blanks and line breaks stand for these.
export function toToken(text) {
  return text.replace(/[␣↵⇥␍]/g, (symbol) => Object.keys(SYMBOLS).find((letter) => SYMBOLS[letter] === symbol));
}

// Running text: spaces and line breaks stay, so that it reads as text.
export function running(text) {
  return text.replace(/\r\n?/g, "\n").split("\n").map((line) => line.replace(CONTROLS, (c) => (c === "\t" ? c : code(c)))).join("↵\n");
}

function code(letter) {
  return `⟨${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

// Numbers with a few significant digits.
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return String(Math.round(value));
  if (size < 0.001) return value.toExponential(0).replaceAll("-", "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export function percent(share) {
  return `${number(100 * share)} %`;
}

export function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

// An element with a class and text or children; text never becomes markup.
export function element(name, { className = "", text = null, children = [], ...attributes } = {}) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== null) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Fill a select; its options are replaced only if they changed.
export function fillSelect(select, choices, value) {
  const encoded = JSON.stringify(choices);
  if (select.dataset.choices !== encoded) {
    select.replaceChildren(...choices.map(([name, text]) => element("option", { value: name, text })));
    select.dataset.choices = encoded;
  }
  select.value = value;
}

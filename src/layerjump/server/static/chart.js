// Line charts over levels: ranks of pinned tokens, and probabilities of concepts.

import { LINES } from "./colours.js";
import { element, number, visible } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const HEIGHT = 190;
const MARGIN = { left: 40, right: 8, top: 10, bottom: 30 };
const DASHES = ["", "5 3"];

// ── pinned tokens: rank by level, on a logarithmic scale with rank 1 on top ──

export function drawPins(place, readings, { level, column, unpin }) {
  const lenses = [...readings];
  const [, first] = lenses[0];
  place.hidden = !first.followed.length;
  place.replaceChildren();
  if (place.hidden) return;
  place.append(element("h2", { text: "Pinned tokens" }), rankChart(lenses, level, column), pinKeys(lenses, level, column, unpin));
  if (lenses.length > 1) {
    place.append(element("p", { className: "quiet", text: `solid: ${lenses[0][0]}, dashed: ${lenses[1][0]}` }));
  }
}

function pinKeys(lenses, level, column, unpin) {
  const [, first] = lenses[0];
  const items = first.followed.map((followed, index) => {
    const description = lenses.map(([, reading]) => describeRank(reading.followed[index], level, column)).join(" · ");
    const text = visible(followed.text);
    if (!unpin) return key(index, text, description); // in a saved file
    const button = element("button", { type: "button", className: "pin", "aria-label": `Unpin ${text}`, text: "✕" });
    button.addEventListener("click", () => unpin(followed.id));
    return key(index, text, description, button);
  });
  return element("ul", { className: "pinned", children: items });
}

function describeRank(followed, level, column) {
  return `rank ${followed.rank[level][column] + 1}, p ${number(followed.probability[level][column])}`;
}

function rankChart(lenses, level, column) {
  const [, first] = lenses[0];
  const ranks = lenses.flatMap(([, reading]) => reading.followed.flatMap((one) => one.rank.map((row) => row[column] + 1)));
  const decades = Math.max(1, Math.ceil(Math.log10(Math.max(...ranks))));
  const names = first.followed.map((one) => visible(one.text)).join(", ");
  const lines = lenses.flatMap(([, reading], which) => reading.followed.map((one, index) => {
    return { shares: one.rank.map((row) => Math.log10(row[column] + 1) / decades), index, dash: DASHES[which % 2] };
  }));
  const rules = Array.from({ length: decades + 1 }, (_, decade) => [decade / decades, (10 ** decade).toLocaleString("en")]);
  return chart({ levels: first.levels, here: level, label: `Rank of ${names} by level`, rules, lines });
}

// ── concepts: probability by level, 1 on top; a bar where the lead is taken for good ──

export function raceChart(answer, column, here) {
  const lines = answer.concepts.map(({ probability }, index) => ({ shares: probability.map((row) => 1 - row[column]), index, dash: "" }));
  const rules = [0, 0.25, 0.5, 0.75, 1].map((share) => [share, String(1 - share)]);
  const label = `Probability of ${answer.concepts.map(({ name }) => name).join(", ")} by level`;
  const crossing = answer.levels.indexOf(answer.crossing[column]);
  return chart({ levels: answer.levels, here, label, rules, lines, crossing });
}

export function raceKeys(answer, column, level) {
  const items = answer.concepts.map(({ name, tokens, probability }, index) => {
    const item = key(index, name, `p ${number(probability[level][column])} at this level`);
    item.title = `Tokens: ${tokens.map(visible).join(" ")}`;
    return item;
  });
  return element("ul", { className: "pinned", children: items });
}

// ── shared ──

function key(index, text, description, ...more) {
  const swatch = element("span", { className: "swatch" });
  swatch.style.backgroundColor = LINES[index % LINES.length];
  const word = element("span", { className: "token", dir: "auto", text });
  return element("li", { children: [swatch, word, element("span", { className: "quiet", text: description }), ...more] });
}

// `shares` are 0 on top and 1 at the bottom; `rules` are horizontal lines with their names.
function chart({ levels, here, label, rules, lines, crossing = null }) {
  const last = levels.length - 1;
  const x = (at) => MARGIN.left + (at / Math.max(1, last)) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (share) => MARGIN.top + share * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const [share, name] of rules) {
    svg.append(shape("line", { x1: x(0), x2: x(last), y1: y(share), y2: y(share), class: "rule" }));
    svg.append(shape("text", { x: MARGIN.left - 6, y: y(share) + 4, "text-anchor": "end" }, name));
  }
  for (const at of ticks(last)) svg.append(shape("text", { x: x(at), y: HEIGHT - 14, "text-anchor": "middle" }, levels[at]));
  svg.append(shape("text", { x: x(last / 2), y: HEIGHT - 1, "text-anchor": "middle" }, "level"));
  svg.append(shape("line", { x1: x(here), x2: x(here), y1: y(0), y2: y(1), class: "here" }));
  if (crossing !== null) svg.append(shape("line", { x1: x(crossing), x2: x(crossing), y1: y(0), y2: y(1), class: "crossing" }));
  for (const { shares, index, dash } of lines) {
    const points = shares.map((share, at) => `${x(at).toFixed(1)},${y(share).toFixed(1)}`).join(" ");
    svg.append(shape("polyline", { points, stroke: LINES[index % LINES.length], class: "line", "stroke-dasharray": dash }));
  }
  return svg;
}

function ticks(last) {
  const step = [1, 2, 5, 10, 20].find((size) => last / size <= 8) ?? 50;
  const positions = [];
  for (let at = 0; at <= last; at += step) positions.push(at);
  return positions;
}

export function shape(name, attributes, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) node.setAttribute(attribute, value);
  if (text !== null) node.textContent = text;
  return node;
}

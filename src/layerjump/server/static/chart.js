// Pinned tokens: their rank by level at the selected position, on a logarithmic scale with rank 1 on top.

import { LINES } from "./colours.js";
import { element, number, visible } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const HEIGHT = 190;
const MARGIN = { left: 40, right: 8, top: 10, bottom: 30 };
const DASHES = ["", "5 3"];

export function drawPins(place, readings, { level, column, unpin }) {
  const lenses = [...readings];
  const [, first] = lenses[0];
  place.replaceChildren(element("h2", { text: "Pinned tokens" }));
  if (!first.followed.length) {
    place.append(element("p", { className: "quiet", text: "Pin a token with ☆ to track its rank through the levels." }));
    return;
  }
  place.append(chart(lenses, level, column), keys(lenses, level, column, unpin));
  if (lenses.length > 1) {
    place.append(element("p", { className: "quiet", text: `solid: ${lenses[0][0]}, dashed: ${lenses[1][0]}` }));
  }
}

function keys(lenses, level, column, unpin) {
  const [, first] = lenses[0];
  const list = element("ul", { className: "pinned" });
  first.followed.forEach((followed, index) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.backgroundColor = LINES[index % LINES.length];
    const description = lenses.map(([, reading]) => describeRank(reading.followed[index], level, column)).join(" · ");
    const text = visible(followed.text);
    const button = element("button", { type: "button", className: "pin", "aria-label": `Unpin ${text}`, text: "✕" });
    button.addEventListener("click", () => unpin(followed.id));
    const word = element("span", { className: "token", dir: "auto", text });
    list.append(element("li", { children: [swatch, word, element("span", { className: "quiet", text: description }), button] }));
  });
  return list;
}

function describeRank(followed, level, column) {
  return `rank ${followed.rank[level][column] + 1}, p ${number(followed.probability[level][column])}`;
}

function chart(lenses, level, column) {
  const [, first] = lenses[0];
  const last = first.levels.length - 1;
  const ranks = lenses.flatMap(([, reading]) => reading.followed.flatMap((one) => one.rank.map((row) => row[column] + 1)));
  const decades = Math.max(1, Math.ceil(Math.log10(Math.max(...ranks))));
  const x = (at) => MARGIN.left + (at / Math.max(1, last)) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (rank) => MARGIN.top + (Math.log10(rank) / decades) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const names = first.followed.map((one) => visible(one.text)).join(", ");
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Rank of ${names} by level` });
  for (let decade = 0; decade <= decades; decade += 1) {
    const at = y(10 ** decade);
    svg.append(shape("line", { x1: x(0), x2: x(last), y1: at, y2: at, class: "rule" }));
    svg.append(shape("text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, (10 ** decade).toLocaleString("en")));
  }
  for (const at of ticks(last)) {
    svg.append(shape("text", { x: x(at), y: HEIGHT - 14, "text-anchor": "middle" }, first.levels[at]));
  }
  svg.append(shape("text", { x: x(last / 2), y: HEIGHT - 1, "text-anchor": "middle" }, "level"));
  svg.append(shape("line", { x1: x(level), x2: x(level), y1: y(1), y2: y(10 ** decades), class: "here" }));
  lenses.forEach(([, reading], which) => reading.followed.forEach((one, index) => {
    const points = one.rank.map((row, at) => `${x(at).toFixed(1)},${y(row[column] + 1).toFixed(1)}`).join(" ");
    const stroke = LINES[index % LINES.length];
    svg.append(shape("polyline", { points, stroke, class: "line", "stroke-dasharray": DASHES[which % 2] }));
  }));
  return svg;
}

function ticks(last) {
  const step = [1, 2, 5, 10, 20].find((size) => last / size <= 8) ?? 50;
  const positions = [];
  for (let at = 0; at <= last; at += step) positions.push(at);
  return positions;
}

function shape(name, attributes, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

// The selected cell: its top tokens with bars, its numbers, and buttons to pin tokens.

import { element, number, visible } from "./text.js";

// `pin(id)` pins a token; null in a saved file.
export function drawCell(place, readings, { level, column, pins, pin, onLeave }) {
  const [first] = readings.values();
  const token = visible(first.tokens[first.positions[column]].text);
  const title = element("h2", { text: `Level ${first.levels[level]}, after ` });
  title.append(element("span", { className: "token", dir: "auto", text: token }));
  const parts = [...readings].map(([name, reading]) => {
    return element("div", { children: lensPart(name, reading, level, column, pins, pin) });
  });
  const className = parts.length > 1 ? "lenses pair" : "lenses";
  place.replaceChildren(title, element("div", { className, children: parts }));
  place.onkeydown = (event) => {
    if (event.key === "Escape") onLeave();
  };
}

function lensPart(name, reading, level, column, pins, pin) {
  const last = reading.levels.length - 1;
  const own = reading.top[last][column][0];
  const list = element("ol", { className: "best", "aria-label": `Top tokens of ${name}` });
  reading.top[level][column].forEach((id, place) => {
    list.append(bestRow(reading, id, reading.probability[level][column][place], id === own, pins, pin));
  });
  const facts = [
    ["entropy", number(reading.entropy[level][column])],
    ["KL to the model", number(reading.kl[level][column])],
    ["top-2 gap", number(reading.confidence[level][column])],
    ["next-token loss", number(reading.cross_entropy[level][column])],
    ["settled at level", reading.levels[reading.decided_at[column] ?? last]],
  ];
  const numbers = element("dl", { className: "facts" });
  for (const [what, value] of facts) {
    if (value === "–") continue;
    const children = [element("dt", { text: what }), element("dd", { text: value })];
    numbers.append(element("div", { children }));
  }
  const fitted = reading.positions[column] >= reading.fitted_from || level === last;
  const note = fitted ? [] : [element("p", { className: "quiet", text: "The maps were not fitted on this position." })];
  return [element("h3", { text: level === last ? `${name}: the model itself` : name }), list, numbers, ...note];
}

function bestRow(reading, id, probability, own, pins, pin) {
  const text = visible(reading.words[id]);
  const isPinned = pins.includes(id);
  const button = !pin ? element("span") : element("button", {
    type: "button", className: "pin", "aria-pressed": String(isPinned), "aria-label": `Pin ${text}`, text: isPinned ? "★" : "☆",
    title: isPinned ? "Unpin" : "Pin: track its rank through the levels",
  });
  button.dataset.pin = id;
  button.addEventListener("click", () => pin(id));
  const fill = element("span", { className: "fill" });
  fill.style.width = `${100 * probability}%`;
  const bar = element("span", { className: "track", "aria-hidden": "true", children: [fill] });
  const word = element("span", { className: own ? "token own" : "token", dir: "auto", text });
  if (own) word.title = "the model’s prediction";
  return element("li", { children: [button, word, bar, element("span", { className: "number", text: number(probability) })] });
}

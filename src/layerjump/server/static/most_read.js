// The tokens that a lens reads most often in the cells that the grid shows.

import { element, number, visible } from "./text.js";

const SHOWN = 10;

// Tokens by how many cells they lead in; cells that the maps were not fitted on do not count.
export function countTop(reading, { rows, columns }) {
  const fitted = columns.filter((column) => reading.positions[column] >= reading.fitted_from);
  const counts = new Map();
  for (const row of rows) {
    for (const column of fitted) {
      const id = reading.top[row][column][0];
      const entry = counts.get(id) ?? { id, cells: 0, probability: 0 };
      entry.cells += 1;
      entry.probability += reading.probability[row][column][0];
      counts.set(id, entry);
    }
  }
  const tokens = [...counts.values()].sort((a, b) => b.cells - a.cells || b.probability - a.probability);
  return { cells: rows.length * fitted.length, tokens };
}

// `pin(id)` pins a token; null in a saved file.
export function drawMostRead(place, name, reading, shown, { pin }) {
  const { cells, tokens } = countTop(reading, shown);
  const [first, last] = [reading.levels[shown.rows[0]], reading.levels[shown.rows.at(-1)]];
  const words = `${tokens.length} tokens lead in ${cells} cells of ${name}: levels ${first} to ${last}, positions `
    + `${reading.positions[shown.columns[0]]} to ${reading.positions[shown.columns.at(-1)]}. Filter narrows them.`;
  const list = element("ol", { className: "best", "aria-label": "Most-read tokens" });
  for (const { id, cells: count, probability } of tokens.slice(0, SHOWN)) {
    const text = visible(reading.words[id]);
    const button = pin ? element("button", { type: "button", className: "pin", "aria-label": `Pin ${text}`, title: "Pin", text: "☆" }) : element("span");
    button.addEventListener("click", () => pin?.(id));
    const fill = element("span", { className: "fill" });
    fill.style.width = `${(100 * count) / tokens[0].cells}%`;
    const bar = element("span", { className: "track", "aria-hidden": "true", children: [fill] });
    const cellsText = element("span", {
      className: "number", text: `${count} ×`, title: `in ${count} cells, with a mean probability of ${number(probability / count)}`,
    });
    list.append(element("li", { children: [button, element("span", { className: "token", dir: "auto", text }), bar, cellsText] }));
  }
  place.replaceChildren(element("p", { className: "quiet", text: words }), list);
}

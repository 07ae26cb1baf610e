// The page's grid in a notebook (anywidget): one reading, the selected cell, pinned tokens. It lives in a shadow root,
// so that its style and the notebook's do not mix.

import { drawPins } from "./chart.js";
import { MEASURES } from "./colours.js";
import { Grid } from "./grid.js";
import { drawCell } from "./panel.js";
import { element, fillSelect } from "./text.js";

const MOST_PINS = 6;

export function render({ model, el }, style) {
  const root = el.shadowRoot ?? el.attachShadow({ mode: "open" });
  const select = element("select", { "aria-label": "Colour" });
  fillSelect(select, Object.entries(MEASURES).map(([name, { title }]) => [name, title]), "probability");
  const label = element("label", { text: "Colour " });
  label.append(select);
  const [grids, cell, pins] = ["grids", "cell", "pins"].map((id) => element("section", { id }));
  cell.className = pins.className = "card";
  const aside = element("aside", { children: [cell, pins] });
  const main = element("main", { id: "reading", children: [grids, aside] });
  const page = element("div", { className: "page", children: [element("div", { className: "controls", children: [label] }), main] });
  const dark = document.body.dataset.jpThemeLight === "false";
  if (document.body.dataset.jpThemeLight) page.style.colorScheme = dark ? "dark" : "light";
  root.replaceChildren(element("style", { text: style }), page);
  let at = null;
  let grid = null;

  function choose(level, column, { focus = false } = {}) {
    const reading = model.get("reading");
    at = [level, column];
    grid.choose(level, column, { focus });
    const readings = new Map([[reading.lens, reading]]);
    const followed = reading.followed.map(({ id }) => id);
    drawCell(cell, readings, { level, column, pins: followed, pin, onLeave: () => grid.at?.focus() });
    drawPins(pins, readings, { level, column, unpin: pin });
  }

  // The kernel computes the ranks of a pinned token, and sends a new reading.
  function pin(id) {
    const wanted = model.get("pins");
    const changed = wanted.includes(id) ? wanted.filter((other) => other !== id) : [...wanted, id].slice(-MOST_PINS);
    model.set("pins", changed);
    model.save_changes();
  }

  function draw() {
    const reading = model.get("reading");
    const open = () => cell.querySelector("button")?.focus();
    grid = new Grid(reading, reading.lens, { onSelect: (level, column) => choose(level, column, { focus: true }), onOpen: open, onPin: pin });
    grids.replaceChildren(grid.figure);
    paint();
    choose(...(at ?? [reading.levels.length - 1, reading.positions.length - 1]));
  }

  function paint() {
    const measure = MEASURES[select.value];
    grid.paint(measure, measure.most([model.get("reading")]));
  }

  select.addEventListener("change", paint);
  model.on("change:reading", draw);
  draw();
  return () => model.off("change:reading", draw);
}

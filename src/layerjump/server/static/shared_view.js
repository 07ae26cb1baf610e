// A saved file: the grids of a snapshot, and what was shown beside them.

import { drawPins } from "./chart.js";
import { MEASURES } from "./colours.js";
import { drawWhy } from "./explain.js";
import { passing } from "./filters.js";
import { Grid, linkScrolling } from "./grid.js";
import { drawMostRead } from "./most_read.js";
import { drawCell } from "./panel.js";
import { drawRace } from "./race.js";
import { element, running } from "./text.js";
import { drawContinuations } from "./what_if.js";

const $ = (id) => document.getElementById(id);

export function showSnapshot() {
  const snapshot = JSON.parse($("snapshot").textContent);
  const { state, model, grids: saved, prompt, version } = snapshot;
  const shown = saved.filter(({ kind }) => kind === "lens");
  const readings = new Map(shown.map(({ name, reading }) => [name, reading]));
  const inCell = new Map(saved.filter(({ kind }) => kind !== "second").map(({ name, reading }) => [name, reading]));
  const [main] = readings.values();
  let { level, column } = state;
  $("about").textContent = `${model}, saved by layerjump ${version}`;
  $("prompt").textContent = running(prompt);
  const measure = MEASURES[state.colour];
  const most = measure.most(saved.map(({ reading }) => reading));
  const own = [];
  const grids = saved.map(({ kind, name, title, reading }) => {
    const select = (toLevel, toColumn) => {
      if (kind === "second") grid.choose(toLevel, toColumn, { focus: true });
      else choose(toLevel, toColumn, grid);
    };
    const grid = new Grid(reading, name, { title, onSelect: select, onOpen: () => {}, onPin: () => {} });
    grid.paint(measure, most);
    if (kind === "changed") grid.compare(main);
    if (kind === "second") grid.choose(...(state.secondAt ?? [0, 0]));
    else {
      grid.filter(passing(reading, state));
      own.push(grid);
    }
    return grid;
  });
  $("grids").replaceChildren(...grids.map((grid) => grid.figure));
  $("grids").classList.toggle("pair", grids.length > 1);
  linkScrolling(grids);
  showPanels(snapshot);
  choose(level, column);

  function choose(toLevel, toColumn, focused = null) {
    [level, column] = [toLevel, toColumn];
    for (const grid of own) grid.choose(level, column, { focus: grid === focused });
    drawCell($("cell"), inCell, { level, column, pins: [], pin: null, onLeave: () => choose(level, column, own[0]) });
    drawPins($("pins"), readings, { level, column, unpin: null });
    if (snapshot.race) drawRace($("race").lastChild, snapshot.race, level, column);
  }
}

function showPanels({ state, why, what, race, grids }) {
  const add = (id, title, draw) => {
    const place = element("div");
    $(id).replaceChildren(element("h2", { text: title }), place);
    $(id).hidden = false;
    draw(place);
  };
  if (why) add("why", "Why?", (place) => drawWhy(place, why));
  if (what) add("what-if", "What if?", (place) => drawContinuations(place, what));
  if (race) add("race", "Concept race", () => {});
  const [{ name, reading }] = grids;
  if (state.open.includes("most")) add("most", "Most-read tokens", (place) => drawMostRead(place, name, reading, passing(reading, state), { pin: null }));
}

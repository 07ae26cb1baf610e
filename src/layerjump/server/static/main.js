// The page: its controls, its requests, and its address, which holds the whole state.

import { ask, fit, Refused } from "./api.js";
import { drawPins } from "./chart.js";
import { MEASURES } from "./colours.js";
import { exitsOf } from "./exits.js";
import { GeneratePanel } from "./generate.js";
import { Grid, linkScrolling } from "./grid.js";
import { drawCell } from "./panel.js";
import { fromHash, toHash } from "./state.js";
import { element, fillSelect, listed, number, percent } from "./words.js";

const MOST_PINS = 16;
const $ = (id) => document.getElementById(id);
const fresh = !location.hash; // not opened by a link: start with a default prompt
let state = fromHash(location.hash);
let models = new Map(); // name → its status from the server
let fittedHere = []; // estimators that the server fits
let readings = new Map(); // lens → its trajectory of the text
let grids = [];
let shown = ""; // the request whose answer is shown
let asking = null; // aborts the running request
let typed = false; // the user has typed a prompt
let generating = null; // the generate panel

// ── the address ──

// `push` adds a history entry, which Back undoes; small moves replace the address.
function go(change, { push = true } = {}) {
  state = { ...state, ...change };
  const address = toHash(state);
  if (address !== location.hash) history[push ? "pushState" : "replaceState"](null, "", address);
  return show();
}

addEventListener("popstate", () => {
  state = fromHash(location.hash);
  if (!models.size) return; // the start of the page reads it
  state = withDefaults(state);
  $("text").value = state.text;
  show();
});

function withDefaults(given) {
  const known = models.has(given.model) ? given.model : [...models.keys()][0];
  return { ...given, model: known, colour: given.colour in MEASURES ? given.colour : "probability" };
}

// ── requests ──

async function show() {
  if (!models.size) return; // the start of the page calls again, with the models
  fillControls();
  const lenses = [...new Set([state.lens, state.other].filter(Boolean))];
  const question = { model: state.model, text: state.text, lenses, tokens: state.pins };
  const key = JSON.stringify(question);
  if (key === shown) {
    draw();
    return;
  }
  asking?.abort();
  const mine = (asking = new AbortController());
  trouble("");
  if (!state.text) {
    say("Type a prompt.");
    return;
  }
  try {
    document.body.classList.add("waiting");
    const answer = await answerTo(question, mine.signal);
    if (mine.signal.aborted) return;
    readings = new Map(lenses.map((name) => [name, answer.lenses[name]]));
    shown = key;
    const [first] = readings.values();
    say(`${lengthSaid(first)} × ${first.levels.length} levels in ${number(answer.seconds, 2)} s`);
    build();
  } catch (error) {
    if (mine.signal.aborted) return;
    if (!(error instanceof Refused)) throw error;
    say("");
    trouble(error.message);
  } finally {
    if (asking === mine) {
      document.body.classList.remove("waiting");
      $("fitting").hidden = true;
    }
  }
}

async function answerTo(question, signal) {
  say("Running …");
  const waiting = (answer) => say(waitingSaid(answer, question.model));
  await prepare(question.model, question.lenses, { signal, waiting });
  say("Running …");
  return ask("/api/lens", question, { signal, waiting });
}

// Load the model and fit the lenses, unless that is done.
async function prepare(model, lenses, { signal, waiting }) {
  if (models.get(model).state !== "ready") {
    say(`Loading ${model} …`);
    note(await ask("/api/load", { model }, { signal, waiting }));
  }
  const states = new Map(models.get(model).lenses.map((lens) => [lens.name, lens.state]));
  if (!lenses.some((name) => states.get(name) === "not fitted")) return;
  const missing = fittedHere.filter((name) => states.get(name) === "not fitted"); // one pass fits them all
  await fit(model, missing, { signal, progress: (job) => showFitting(job) });
  $("fitting").hidden = true;
  note(await ask("/api/load", { model }, { signal, waiting }));
}

function lengthSaid({ task, positions, tokens }) {
  const cut = task === "causal" && positions.length < tokens.length;
  return cut ? `The last ${positions.length} of ${tokens.length} positions` : `${positions.length} positions`;
}

function waitingSaid(answer, model) {
  if (answer.doing?.startsWith("loading")) return `Loading ${model} …`;
  if (answer.position === 0) return "Running …";
  return `Busy, position ${answer.position}${answer.doing ? ` (${answer.doing})` : ""} …`;
}

function showFitting(job) {
  say("");
  $("fitting").hidden = false;
  const bar = $("fitting-bar");
  const share = job.total ? job.done / job.total : 0;
  if (share) bar.value = share;
  else bar.removeAttribute("value");
  const left = job.seconds_left === null ? "" : `, about ${Math.max(1, Math.round(job.seconds_left))} s left`;
  const far = share < 1 ? `${percent(Math.round(100 * share) / 100)}${left}` : "solving";
  const what = `Fitting ${listed(job.estimators)} for ${job.model} on the Python documentation (once, then cached)`;
  $("fitting-words").textContent = job.state === "waiting" ? `${what}: queued` : `${what}: ${far}`;
}

function note(model) {
  models.set(model.name, model);
  fillControls();
}

// ── drawing ──

function build() {
  const focused = document.activeElement?.closest("figure.grid")?.dataset.lens;
  const pinButton = document.activeElement?.dataset?.pin;
  const [first] = readings.values();
  const inside = state.level < first.levels.length && state.column < first.positions.length;
  if (state.level === null || !inside) {
    const column = first.positions.length - 1;
    state = { ...state, level: first.decided_at[column] ?? first.levels.length - 1, column };
    history.replaceState(null, "", toHash(state));
  }
  const opened = () => $("cell").querySelector("button")?.focus();
  grids = [...readings].map(([name, reading]) => {
    const chosen = (level, column) => go({ level, column }, { push: false }).then(() => focusOn(name));
    return new Grid(reading, name, { chosen, opened, pinned: pin });
  });
  linkScrolling(grids);
  $("grids").replaceChildren(...grids.map((grid) => grid.figure));
  $("grids").classList.toggle("pair", grids.length > 1);
  for (const id of ["reading", "exit", "legend"]) $(id).hidden = false;
  draw();
  if (focused) focusOn(focused);
  else if (pinButton) $("cell").querySelector(`[data-pin="${CSS.escape(pinButton)}"]`)?.focus();
}

function draw() {
  if (!readings.size) return;
  const measure = MEASURES[state.colour];
  const most = measure.most([...readings.values()]);
  const from = Math.max(...[...readings.values()].map((reading) => reading.fitted_from));
  $("savings").replaceChildren();
  for (const grid of grids) {
    grid.paint(measure, most);
    const exits = exitsOf(grid.reading, state.strength, from);
    grid.ring(exits?.rows);
    $("savings").append(element("p", { text: savingSaid(grid, exits) }));
    grid.choose(state.level, state.column);
  }
  const { level, column } = state;
  const left = () => focusOn(grids[0].name);
  drawCell($("cell"), readings, { level, column, pins: state.pins, pin, left });
  drawPins($("pins"), readings, { level, column, unpin: pin });
}

function savingSaid(grid, exits) {
  if (!exits) return `${grid.name}: no position that the maps were fitted on`;
  const blocks = grid.reading.n_blocks;
  return `${grid.name}: early exit would save ${number(exits.saved, 2)} of ${blocks} blocks (${percent(exits.share)}) and agree `
    + `with the full model on ${percent(exits.agreement)} of ${exits.count} positions`;
}

function focusOn(lens) {
  const grid = grids.find((one) => one.name === lens) ?? grids[0];
  grid?.choose(state.level, state.column, { focus: true });
}

function pin(id) {
  const pins = state.pins.includes(id) ? state.pins.filter((other) => other !== id) : [...state.pins, id];
  if (pins.length > MOST_PINS) trouble(`At most ${MOST_PINS} tokens can be pinned; unpin one first.`);
  else go({ pins });
}

function say(words) {
  $("status").textContent = words;
}

function trouble(words) {
  $("trouble").textContent = words.charAt(0).toUpperCase() + words.slice(1);
  $("trouble").hidden = !words;
}

// ── controls ──

function fillControls() {
  fillSelect($("model"), [...models.keys()].map((name) => [name, name]), state.model);
  const lenses = (models.get(state.model)?.lenses ?? []).filter((lens) => lens.state !== "other weights");
  const choices = lenses.map(({ name, state: how }) => [name, how === "not fitted" ? `${name} (fitted on first use)` : name]);
  fillSelect($("lens"), choices, state.lens);
  fillSelect($("other"), [["", "none"], ...choices], state.other);
  fillSelect($("colour"), Object.entries(MEASURES).map(([name, { title }]) => [name, title]), state.colour);
  $("strength").value = state.strength;
  $("strength-said").textContent = state.strength.toFixed(2);
  $("strength").setAttribute("aria-valuetext", `λ ${state.strength.toFixed(2)}`);
  generating?.fill(); // null until the models are known
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (text === state.text) go({});
  else go({ text, level: null, column: null });
});
$("text").addEventListener("input", () => { typed = true; });
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("model").addEventListener("change", (event) => {
  // Token ids of another vocabulary are other tokens.
  go({ model: event.target.value, text: $("text").value, pins: [], level: null, column: null });
});
for (const name of ["lens", "other", "colour"]) {
  $(name).addEventListener("change", (event) => go({ [name]: event.target.value, text: $("text").value }));
}
$("strength").addEventListener("input", (event) => go({ strength: Number(event.target.value) }, { push: false }));
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  focusOn(grids[0]?.name);
});
$("link").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(location.href);
    say("Link copied: it holds the prompt and all settings.");
  } catch {
    say("The browser does not allow copying; the page’s address is the link.");
  }
});

const pageForPanel = {
  get state() { return state; },
  get model() { return models.get(state.model); },
  get prompt() { return $("text").value; },
  go: (change) => go(change, { push: false }),
  prepare: (signal) => prepare(state.model, [state.lens], { signal, waiting: () => {} }),
};

// ── light and dark ──

const root = document.documentElement;
const remembered = localStorage.getItem("theme");
if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;
$("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});

// ── start ──

try {
  const said = await ask("/api/models");
  models = new Map(said.models.map((model) => [model.name, model]));
  fittedHere = said.fitted_here;
  generating = new GeneratePanel(pageForPanel, said.limits.new_tokens);
  state = withDefaults(state);
  if (!state.text && fresh) {
    const model = models.get(state.model);
    state.text = model.mask ? `The capital of France is ${model.mask}.` : "The capital of France is the city of";
  }
  if (!typed) $("text").value = state.text;
  go({}, { push: false });
} catch (error) {
  trouble(error.message);
}

// The page: its controls, its requests, and its address, which holds the whole state.

import { ask, fit, Refused } from "./api.js";
import { drawPins } from "./chart.js";
import { MEASURES } from "./colours.js";
import { exitsOf } from "./exits.js";
import { GeneratePanel } from "./generate.js";
import { Grid, linkScrolling } from "./grid.js";
import { drawCell } from "./panel.js";
import { fromHash, toHash } from "./state.js";
import { element, fillSelect, listed, number, percent } from "./text.js";

const MOST_PINS = 16;
const $ = (id) => document.getElementById(id);
const isFresh = !location.hash; // not opened by a link: start with a default prompt
let state = fromHash(location.hash);
let models = new Map(); // name → its status from the server
let fittedHere = []; // estimators that the server fits
let readings = new Map(); // lens → its trajectory of the text
let grids = [];
let shownKey = ""; // the request whose answer is shown
let running = null; // aborts the running request
let hasTyped = false; // the user has typed a prompt
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

function withDefaults(parsed) {
  const model = models.has(parsed.model) ? parsed.model : [...models.keys()][0];
  return { ...parsed, model, colour: parsed.colour in MEASURES ? parsed.colour : "probability" };
}

// ── requests ──

async function show() {
  if (!models.size) return; // the start of the page calls again, with the models
  fillControls();
  const lenses = [...new Set([state.lens, state.other].filter(Boolean))];
  const request = { model: state.model, text: state.text, lenses, tokens: state.pins };
  const key = JSON.stringify(request);
  if (key === shownKey) {
    draw();
    return;
  }
  running?.abort();
  const controller = (running = new AbortController());
  showError("");
  if (!state.text) {
    showStatus("Type a prompt.");
    return;
  }
  try {
    document.body.classList.add("waiting");
    const answer = await answerRequest(request, controller.signal);
    if (controller.signal.aborted) return;
    readings = new Map(lenses.map((name) => [name, answer.lenses[name]]));
    shownKey = key;
    const [first] = readings.values();
    showStatus(`${describeLength(first)} × ${first.levels.length} levels in ${number(answer.seconds, 2)} s`);
    build();
  } catch (error) {
    if (controller.signal.aborted) return;
    if (!(error instanceof Refused)) throw error;
    showStatus("");
    showError(error.message);
  } finally {
    if (running === controller) {
      document.body.classList.remove("waiting");
      $("fitting").hidden = true;
    }
  }
}

async function answerRequest(request, signal) {
  showStatus("Running …");
  const waiting = (answer) => showStatus(describeWaiting(answer, request.model));
  await prepare(request.model, request.lenses, { signal, waiting });
  showStatus("Running …");
  return ask("/api/lens", request, { signal, waiting });
}

// Load the model and fit the lenses, unless that is done.
async function prepare(model, lenses, { signal, waiting }) {
  if (models.get(model).state !== "ready") {
    showStatus(`Loading ${model} …`);
    updateModel(await ask("/api/load", { model }, { signal, waiting }));
  }
  const states = new Map(models.get(model).lenses.map((lens) => [lens.name, lens.state]));
  if (!lenses.some((name) => states.get(name) === "not fitted")) return;
  const missing = fittedHere.filter((name) => states.get(name) === "not fitted"); // one pass fits them all
  await fit(model, missing, { signal, progress: (job) => showFitting(job) });
  $("fitting").hidden = true;
  updateModel(await ask("/api/load", { model }, { signal, waiting }));
}

function describeLength({ task, positions, tokens }) {
  const cut = task === "causal" && positions.length < tokens.length;
  return cut ? `The last ${positions.length} of ${tokens.length} positions` : `${positions.length} positions`;
}

function describeWaiting(answer, model) {
  if (answer.doing?.startsWith("loading")) return `Loading ${model} …`;
  if (answer.position === 0) return "Running …";
  return `Busy, position ${answer.position}${answer.doing ? ` (${answer.doing})` : ""} …`;
}

function showFitting(job) {
  showStatus("");
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

function updateModel(model) {
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
  const onOpen = () => $("cell").querySelector("button")?.focus();
  grids = [...readings].map(([name, reading]) => {
    const onSelect = (level, column) => go({ level, column }, { push: false }).then(() => focusOn(name));
    return new Grid(reading, name, { onSelect, onOpen, onPin: pin });
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
    $("savings").append(element("p", { text: describeSavings(grid, exits) }));
    grid.choose(state.level, state.column);
  }
  const { level, column } = state;
  const onLeave = () => focusOn(grids[0].name);
  drawCell($("cell"), readings, { level, column, pins: state.pins, pin, onLeave });
  drawPins($("pins"), readings, { level, column, unpin: pin });
}

function describeSavings(grid, exits) {
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
  if (pins.length > MOST_PINS) showError(`At most ${MOST_PINS} tokens can be pinned; unpin one first.`);
  else go({ pins });
}

function showStatus(words) {
  $("status").textContent = words;
}

function showError(words) {
  $("trouble").textContent = words.charAt(0).toUpperCase() + words.slice(1);
  $("trouble").hidden = !words;
}

// ── controls ──

function fillControls() {
  fillSelect($("model"), [...models.keys()].map((name) => [name, name]), state.model);
  const lenses = (models.get(state.model)?.lenses ?? []).filter((lens) => lens.state !== "other weights");
  const choices = lenses.map(({ name, state: fitted }) => [name, fitted === "not fitted" ? `${name} (fitted on first use)` : name]);
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
$("text").addEventListener("input", () => { hasTyped = true; });
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
    showStatus("Link copied: it holds the prompt and all settings.");
  } catch {
    showStatus("The browser does not allow copying; the page’s address is the link.");
  }
});

const page = {
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
  const answer = await ask("/api/models");
  models = new Map(answer.models.map((model) => [model.name, model]));
  fittedHere = answer.fitted_here;
  generating = new GeneratePanel(page, answer.limits.new_tokens);
  state = withDefaults(state);
  if (!state.text && isFresh) {
    const model = models.get(state.model);
    state.text = model.mask ? `The capital of France is ${model.mask}.` : "The capital of France is the city of";
  }
  if (!hasTyped) $("text").value = state.text;
  go({}, { push: false });
} catch (error) {
  showError(error.message);
}

// The page: its controls, its requests, and its address, which holds the whole state.

import { ask, fit, Refused } from "./api.js";
import { drawPins } from "./chart.js";
import { ChatBox, toMessages, withLastMessage } from "./chat.js";
import { MEASURES } from "./colours.js";
import { exitsOf } from "./exits.js";
import { WhyPanel } from "./explain.js";
import { FilterPanel, passing } from "./filters.js";
import { GeneratePanel } from "./generate.js";
import { Grid, linkScrolling } from "./grid.js";
import { Guide } from "./guide.js";
import { drawMostRead } from "./most_read.js";
import { drawCell } from "./panel.js";
import { RacePanel } from "./race.js";
import { saveFile } from "./share.js";
import { fromHash, toHash } from "./state.js";
import { element, fillSelect, listed, number, percent, visible } from "./text.js";
import { describeWhat, WhatIfPanel } from "./what_if.js";

const MOST_PINS = 16;
const SECOND = "second";
const CHANGED = "changed";
const PANELS = ["filters", "exit", "generate", "why", "what-if", "race", "most"];
const $ = (id) => document.getElementById(id);
const isFresh = !location.hash; // not opened by a link: start with a default prompt
let state = fromHash(location.hash);
let models = new Map(); // name → its status from the server
let fittedHere = []; // estimators that the server fits
let readings = new Map(); // lens → its trajectory of the text
let second = null; // the trajectory of the second prompt
let changed = null; // the trajectory of the text under the intervention
let refusal = null; // why there is none
let grids = [];
let shownKey = ""; // the requests whose answers are shown
let running = null; // aborts the running requests
let hasTyped = false; // the user has typed a prompt
let panels = null; // the panels that ask the server, once the models are known
let chatBox = null;
let version = "";

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
  fillPrompts();
  show();
});

function withDefaults(parsed) {
  const model = models.has(parsed.model) ? parsed.model : [...models.keys()][0];
  return { ...parsed, model, colour: parsed.colour in MEASURES ? parsed.colour : "probability" };
}

// ── requests ──

// The prompts as the server takes them: a text, or the messages of a chat.
function promptOf(chat, text) {
  return chat ? toMessages(chat) : text;
}

function secondPrompt() {
  if (!state.second) return null;
  return promptOf(state.chat && withLastMessage(state.chat, state.second), state.second);
}

async function show() {
  if (!models.size) return; // the start of the page calls again, with the models
  fillControls();
  const lenses = [...new Set([state.lens, state.other].filter(Boolean))];
  const request = { model: state.model, text: page.text, lenses, tokens: state.pins };
  const others = {
    [SECOND]: state.second ? { ...request, text: page.secondText, lenses: [state.lens], tokens: [] } : null,
    [CHANGED]: state.what ? { ...request, lenses: [state.lens], interventions: panels.whatIf.interventions } : null,
  };
  const key = JSON.stringify([request, others]);
  if (key === shownKey) {
    draw();
    return;
  }
  running?.abort();
  const controller = (running = new AbortController());
  showError("");
  if (!state.text && !state.chat) {
    showStatus("Type a prompt.");
    return;
  }
  try {
    document.body.classList.add("waiting");
    const answer = await answerRequest(request, controller.signal);
    const more = await answerOthers(others, controller.signal);
    if (controller.signal.aborted) return;
    readings = new Map(lenses.map((name) => [name, answer.lenses[name]]));
    ({ second, changed, refusal } = more);
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

// The readings beside the first one. An intervention that is refused leaves the rest of the page as it is.
async function answerOthers({ [SECOND]: ofSecond, [CHANGED]: ofChanged }, signal) {
  const answers = { second: null, changed: null, refusal: null };
  if (ofSecond) answers.second = (await ask("/api/lens", ofSecond, { signal })).lenses[state.lens];
  if (!ofChanged) return answers;
  try {
    answers.changed = (await ask("/api/lens", ofChanged, { signal })).lenses[state.lens];
  } catch (error) {
    if (signal.aborted || !(error instanceof Refused)) throw error;
    answers.refusal = error.message;
  }
  return answers;
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
  place(first);
  const onOpen = () => $("cell").querySelector("button")?.focus();
  const select = (name) => (level, column) => go({ level, column }, { push: false }).then(() => focusOn(name));
  grids = [...readings].map(([name, reading]) => {
    return new Grid(reading, name, { onSelect: select(name), onOpen, onPin: pin, onDrop: second ? patch : null });
  });
  if (second) {
    const onSelect = (level, column) => go({ secondAt: [level, column] }, { push: false }).then(() => focusOn(SECOND));
    const title = `second prompt, ${state.lens}`;
    grids.push(new Grid(second, SECOND, { title, onSelect, onOpen: () => focusOn(state.lens), onPin: pin, isDraggable: true }));
  }
  if (changed) {
    grids.push(new Grid(changed, CHANGED, { title: describeWhat(state.what), onSelect: select(CHANGED), onOpen, onPin: pin }));
    grids.at(-1).compare(first);
  }
  linkScrolling(grids);
  $("grids").replaceChildren(...grids.map((grid) => grid.figure));
  $("grids").classList.toggle("pair", grids.length > 1);
  for (const id of ["reading", "exit", "filters", "legend"]) $(id).hidden = false;
  $("save").disabled = false;
  draw();
  if (focused) focusOn(focused);
  else if (pinButton) $("cell").querySelector(`[data-pin="${CSS.escape(pinButton)}"]`)?.focus();
}

// Select cells that exist and pass the filters.
function place(first) {
  const { rows, columns } = passing(first, state);
  let { level, column, secondAt } = state;
  if (level === null || level >= first.levels.length || column >= first.positions.length) {
    column = columns.at(-1);
    level = first.decided_at[column] ?? first.levels.length - 1;
  }
  if (!columns.includes(column)) column = nearest(columns, column);
  if (!rows.includes(level)) level = nearest(rows, level);
  const isInside = secondAt && second && secondAt[0] < second.levels.length && secondAt[1] < second.positions.length;
  if (second && !isInside) secondAt = [Math.min(level, second.levels.length - 1), second.positions.length - 1];
  if (level === state.level && column === state.column && secondAt === state.secondAt) return;
  state = { ...state, level, column, secondAt };
  history.replaceState(null, "", toHash(state));
}

function nearest(values, wanted) {
  return values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best));
}

function draw() {
  if (!readings.size) return;
  const [first] = readings.values();
  place(first);
  const measure = MEASURES[state.colour];
  const most = measure.most(grids.map((grid) => grid.reading));
  const from = Math.max(...[...readings.values()].map((reading) => reading.fitted_from));
  const showsExits = state.open.includes("exit");
  const { level, column } = state;
  $("savings").replaceChildren();
  for (const grid of grids) {
    grid.paint(measure, most);
    if (grid.name === SECOND) {
      grid.choose(...state.secondAt);
      continue;
    }
    grid.filter(passing(grid.reading, state));
    const exits = exitsOf(grid.reading, state.strength, from);
    grid.ring(showsExits && grid.name !== CHANGED ? exits?.rows : null);
    if (grid.name !== CHANGED) $("savings").append(element("p", { text: describeSavings(grid, exits) }));
    grid.choose(level, column);
  }
  for (const [id, isShown] of Object.entries({
    "ring-key": showsExits, "changed-key": changed, "roles-key": first.roles, "drop-key": second,
  })) $(id).hidden = !isShown;
  const onLeave = () => focusOn(grids[0].name);
  const inCell = new Map(changed ? [...readings, [CHANGED, changed]] : readings);
  drawCell($("cell"), inCell, { level, column, pins: state.pins, pin, onLeave });
  drawPins($("pins"), readings, { level, column, unpin: pin });
  drawPanels(first);
}

function drawPanels(first) {
  const { level, column } = state;
  const words = first.top[level][column].map((id) => visible(first.words[id]));
  $("cell-tokens").replaceChildren(...words.map((value) => element("option", { value })));
  $("why").firstElementChild.textContent = `Why ${words[0]}?`;
  panels.filters.fill(first, state);
  panels.why.show(readings.get(state.lens));
  panels.whatIf.fill(first, second);
  panels.whatIf.show(readings.get(state.lens), changed, refusal);
  panels.race.show(first);
  if (state.open.includes("most")) {
    drawMostRead($("most").lastElementChild, state.lens, first, passing(first, state), { pin });
  }
}

// Put the state of a cell of the second prompt into the first: the dragged cell, or the selected one.
function patch(dragged, column) {
  const [level, from] = dragged ? [dragged.level, dragged.column] : state.secondAt;
  const [first] = readings.values();
  const at = Number(second.levels[level]);
  const what = { kind: "patch", tokens: [], levels: [at, at], positions: [first.positions[column]], source: second.positions[from] };
  go({ what, column, secondAt: [level, from], open: [...new Set([...state.open, "what-if"])] });
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
  const model = models.get(state.model);
  $("completion").setAttribute("aria-pressed", String(!state.chat));
  $("chat-mode").setAttribute("aria-pressed", String(Boolean(state.chat)));
  $("chat-mode").disabled = model?.chat === false && !state.chat;
  $("chat-mode").title = model?.chat === false ? `${state.model} has no chat template` : "";
  $("text").hidden = Boolean(state.chat);
  $("chat").hidden = !state.chat;
  const isPlain = model?.chat && !state.chat;
  $("note").hidden = !isPlain;
  $("note").textContent = isPlain ? `${state.model} is a chat model; the text is read as plain text, without its chat template.` : "";
  $("second-toggle").setAttribute("aria-pressed", String(state.second !== null));
  $("second-part").hidden = state.second === null;
  $("other").disabled = state.second !== null;
  for (const id of PANELS) {
    if ($(id).open === state.open.includes(id)) continue;
    $(id).open = !$(id).open;
    if ($(id).open) reveal($(id));
  }
  panels?.generate.fill(); // null until the models are known
}

// Scroll the panels beside the grid to one of them, which is above the closed ones; the page stays where it is.
function reveal(panel) {
  const column = panel.closest("aside");
  if (column) column.scrollTop = panel.offsetTop - column.offsetTop;
}

// The prompts in the form, from the state.
function fillPrompts() {
  $("text").value = state.text;
  $("second").value = state.second ?? "";
  if (state.chat) chatBox.messages = state.chat;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = readPrompts();
  const isSame = ["text", "chat", "second"].every((name) => JSON.stringify(typed[name]) === JSON.stringify(state[name]));
  go(isSame ? {} : { ...typed, level: null, column: null });
});
for (const id of ["text", "second"]) {
  $(id).addEventListener("input", () => { hasTyped = true; });
  $(id).addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
}

// What the form holds, whether it has run or not.
function readPrompts() {
  return {
    text: $("text").value,
    chat: state.chat ? chatBox.messages : null,
    second: state.second === null ? null : $("second").value,
  };
}

const start = { what: null, level: null, column: null, secondAt: null, positions: null, role: "" }; // of another prompt
$("completion").addEventListener("click", () => {
  if (!state.chat) return;
  const text = state.text || (chatBox.messages.findLast(([role]) => role === "user")?.[1] ?? "");
  go({ ...start, ...readPrompts(), text, chat: null }).then(() => $("text").focus());
  fillPrompts();
});
$("chat-mode").addEventListener("click", () => {
  if (state.chat) return;
  go({ ...start, ...readPrompts(), chat: [["user", $("text").value]] });
  fillPrompts();
});
$("second-toggle").addEventListener("click", () => {
  const isOpen = state.second !== null;
  const typed = readPrompts();
  const what = isOpen && state.what?.kind === "patch" ? null : state.what;
  const text = state.chat ? chatBox.messages.findLast(([role]) => role === "user")?.[1] ?? "" : typed.text;
  go({ ...typed, other: "", what, second: isOpen ? null : text, secondAt: null });
  fillPrompts();
  if (!isOpen) $("second").focus();
});
$("model").addEventListener("change", (event) => {
  // Token ids of another vocabulary are other tokens.
  go({ ...start, ...readPrompts(), model: event.target.value, pins: [], levels: null });
});
for (const name of ["lens", "other", "colour"]) {
  $(name).addEventListener("change", (event) => go({ ...readPrompts(), [name]: event.target.value }));
}
for (const id of PANELS) {
  $(id).addEventListener("toggle", () => {
    if ($(id).open === state.open.includes(id)) return;
    if ($(id).open) reveal($(id));
    go({ open: $(id).open ? [...state.open, id] : state.open.filter((other) => other !== id) }, { push: false });
  });
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

$("save").addEventListener("click", async () => {
  const own = [...readings].map(([name, reading]) => ({ kind: "lens", name, title: null, reading }));
  if (second) own.push({ kind: "second", name: SECOND, title: `second prompt: ${state.second}`, reading: second });
  if (changed) own.push({ kind: "changed", name: CHANGED, title: describeWhat(state.what), reading: changed });
  const isOpen = (name) => state.open.includes(name);
  const { whatIf, why, race } = panels;
  await saveFile({
    model: state.model, version, state, grids: own, theme: root.dataset.theme ?? null,
    prompt: state.chat ? state.chat.map(([role, content]) => `${role}: ${content}`).join("\n") : state.text,
    why: isOpen("why") ? why.answer : null, race: isOpen("race") ? race.answer : null,
    what: changed && whatIf.summary ? { summary: whatIf.summary, ...whatIf.texts } : null,
  });
  showStatus("Saved: the file holds the grids and the open panels, and needs no server.");
});

const page = {
  get state() { return state; },
  get models() { return models; },
  get model() { return models.get(state.model); },
  get prompt() { return state.chat ? promptOf(chatBox.messages, null) : $("text").value; },
  get text() { return promptOf(state.chat, state.text); },
  get secondText() { return secondPrompt(); },
  go: (change) => go(change, { push: false }),
  open(change) { // another prompt
    go(change);
    fillPrompts();
  },
  adopt,
  prepare: (signal) => prepare(state.model, [state.lens], { signal, waiting: () => {} }),
};

// Append generated text to the prompt, as the assistant's message in a chat, and read it all.
function adopt(text) {
  const messages = chatBox.messages;
  const isAnswer = messages.at(-1)?.[0] !== "assistant";
  const chat = isAnswer ? [...messages, ["assistant", text]] : [...messages.slice(0, -1), ["assistant", messages.at(-1)[1] + text]];
  go({ ...start, ...(state.chat ? { chat } : { text: $("text").value + text }) });
  fillPrompts();
}

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
  version = (await ask("/api/healthz")).version;
  const { limits } = answer;
  chatBox = new ChatBox($("chat"), limits.messages, {
    onSubmit: () => $("ask").requestSubmit(), onType: () => { hasTyped = true; },
  });
  panels = {
    filters: new FilterPanel(page),
    generate: new GeneratePanel(page, limits.new_tokens),
    why: new WhyPanel($("why").lastElementChild, page),
    whatIf: new WhatIfPanel($("what-if").lastElementChild, page, limits.strength),
    race: new RacePanel($("race").lastElementChild, page, limits.concepts),
  };
  new Guide($("examples"), $("guide"), page);
  state = withDefaults(state);
  if (!state.text && isFresh) {
    const model = models.get(state.model);
    state.text = model.mask ? `The capital of France is ${model.mask}.` : "The capital of France is the city of";
  }
  if (!hasTyped) fillPrompts();
  go({}, { push: false });
} catch (error) {
  showError(error.message);
}

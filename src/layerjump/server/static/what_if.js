// What if a state were different: swap, steer, ablate or patch, and how the text continues then.

import { follow, Refused } from "./api.js";
import { element, number, running, toToken, visible } from "./text.js";

const NEW_TOKENS = 20;
const KINDS = {
  swap: "exchange two tokens", steer: "steer towards a token", ablate: "remove a token", patch: "take a state of the second prompt",
};

export class WhatIfPanel {
  // `page` has `state`, `text` and `secondText` (as the server takes them), `model` (its status) and `go(change)`.
  constructor(place, page, most) {
    this.page = page;
    this.running = null; // aborts the running generations
    this.key = "";
    this.texts = { original: "", changed: "" };
    this.hasTyped = false;
    this.kind = element("select", { id: "what-kind", children: Object.entries(KINDS).map(([value, text]) => element("option", { value, text })) });
    this.first = element("input", { type: "text", id: "what-first", list: "cell-tokens", maxlength: "200", required: "" });
    this.second = element("input", { type: "text", id: "what-second", list: "cell-tokens", maxlength: "200", required: "" });
    this.strength = element("input", { type: "number", id: "what-strength", min: -most, max: most, step: "0.05", required: "", value: "0.15" });
    this.from = element("input", { type: "number", id: "what-from", min: "0", step: "1", required: "" });
    this.to = element("input", { type: "number", id: "what-to", min: "0", step: "1", required: "" });
    this.positions = element("input", {
      type: "text", id: "what-positions", placeholder: "all", pattern: "\\s*(\\d+(\\s*-\\s*\\d+)?(\\s*,\\s*\\d+(\\s*-\\s*\\d+)?)*)?\\s*",
      title: "Positions that are changed, such as 3, 5-7; empty: all, those of generated tokens too", maxlength: "500",
    });
    this.said = element("p", { className: "quiet" });
    this.parts = {
      second: labelled("and", this.second), strength: labelled("by", this.strength, " of the state’s norm"),
      positions: labelled("positions", this.positions), first: labelled("token", this.first),
    };
    const levels = element("span", { className: "nowrap", children: [labelled("levels", this.from), labelled(" to", this.to)] });
    const run = element("button", { className: "main", type: "submit", text: "Run" });
    this.undo = element("button", { type: "button", id: "undo", text: "Undo" });
    const form = element("form", {
      id: "what-form",
      children: [
        element("div", { className: "controls", children: [this.kind, this.parts.first, this.parts.second, this.parts.strength] }),
        element("div", { className: "controls", children: [levels, this.parts.positions] }),
        this.said,
        element("div", { className: "controls", children: [run, this.undo] }),
      ],
    });
    this.trouble = element("p", { className: "trouble", role: "alert", hidden: "" });
    this.result = element("div", { id: "continuations", role: "status", "aria-live": "polite" });
    place.replaceChildren(form, this.trouble, this.result);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      page.go({ what: this.#read() });
    });
    form.addEventListener("input", () => { this.hasTyped = true; });
    this.kind.addEventListener("change", () => this.#arrange());
    this.undo.addEventListener("click", () => page.go({ what: null }));
  }

  #arrange() {
    const kind = this.kind.value;
    const isPatch = kind === "patch";
    this.parts.first.hidden = isPatch;
    this.parts.second.hidden = kind !== "swap";
    this.parts.strength.hidden = kind !== "steer";
    this.parts.positions.hidden = isPatch;
    for (const [input, part] of [[this.first, "first"], [this.second, "second"], [this.strength, "strength"], [this.positions, "positions"]]) {
      input.disabled = this.parts[part].hidden; // the browser validates hidden fields too
    }
    const { state } = this.page;
    const patchWords = state.second === null ? "Open a second prompt first, and select the cell to take there."
      : `The state at position ${this.sourcePosition ?? "–"} of the second prompt replaces that at position ${this.position} of the first. `
        + "Drag a cell from one grid to the other, or select one in each.";
    const swapWords = "Each level exchanges what it finds, so that two levels can undo each other.";
    this.said.textContent = { patch: patchWords, swap: swapWords }[kind] ?? "";
    this.said.hidden = !this.said.textContent;
  }

  #read() {
    const kind = this.kind.value;
    const levels = [Number(this.from.value), Math.max(Number(this.from.value), Number(this.to.value))];
    if (kind === "patch") return { kind, tokens: [], levels, positions: [this.position], source: this.sourcePosition };
    const tokens = kind === "swap" ? [this.first.value, this.second.value] : [this.first.value];
    const strength = kind === "steer" ? { strength: Number(this.strength.value) } : {};
    return { kind, tokens: tokens.map(toToken), levels, positions: parseNumbers(this.positions.value), ...strength };
  }

  // Fill the form: from the intervention of the state, or from the selected cell until somebody types.
  fill(reading, second) {
    const { state } = this.page;
    const { level, column, what } = state;
    this.position = reading.positions[column];
    this.sourcePosition = second && state.secondAt ? second.positions[state.secondAt[1]] : null;
    const blocks = reading.n_blocks;
    for (const input of [this.from, this.to]) input.max = blocks;
    this.undo.hidden = !what;
    if (what && JSON.stringify(what) !== this.filled) {
      this.filled = JSON.stringify(what);
      this.hasTyped = true;
      this.kind.value = what.kind;
      [this.from.value, this.to.value] = what.levels;
      if (what.kind !== "patch") {
        this.first.value = visible(what.tokens[0] ?? "");
        this.second.value = visible(what.tokens[1] ?? "");
        this.positions.value = (what.positions ?? []).join(", ");
        if (what.kind === "steer") this.strength.value = what.strength ?? 0.3;
      }
    } else if (!this.hasTyped) {
      const [first, next] = reading.top[level][column];
      this.first.value = visible(reading.words[first]);
      this.second.value = next === undefined ? "" : visible(reading.words[next]);
      const here = Number(second && state.secondAt ? second.levels[state.secondAt[0]] : reading.levels[level]);
      this.kind.value = second ? "patch" : "swap";
      this.from.value = second ? here : Math.max(0, here - 4);
      this.to.value = second ? here : Math.min(blocks - 1, here + 2);
    }
    this.#arrange();
  }

  // The interventions of the state, as the server takes them.
  get interventions() {
    const { state, secondText } = this.page;
    return toInterventions(state.what, secondText);
  }

  // Show the effect: the prediction after the text, and both continuations.
  async show(reading, changed, refusal) {
    this.trouble.textContent = refusal ?? "";
    this.trouble.hidden = !refusal;
    if (!changed || refusal) {
      this.running?.abort();
      this.key = "";
      this.result.replaceChildren();
      return;
    }
    const { state, model, text } = this.page;
    const base = { model: state.model, prompt: text, lens: state.lens, exit: "never", max_new_tokens: NEW_TOKENS };
    const key = JSON.stringify([base, this.interventions]);
    if (key === this.key) return;
    this.key = key;
    this.running?.abort();
    const controller = (this.running = new AbortController());
    this.texts = { original: "", changed: "" };
    this.summary = describeEffect(reading, changed);
    this.#draw();
    if (model.cannot_generate) return;
    try {
      await this.#generate("original", base, controller.signal);
      await this.#generate("changed", { ...base, interventions: this.interventions }, controller.signal);
      this.result.querySelector("dl")?.setAttribute("data-done", ""); // both texts are complete
    } catch (error) {
      if (controller.signal.aborted) return;
      if (!(error instanceof Refused)) throw error;
      this.trouble.textContent = error.message;
      this.trouble.hidden = false;
    }
  }

  #generate(name, request, signal) {
    return follow("/api/generate", request, {
      signal,
      each: (line) => {
        if (line.done) this.texts[name] = line.done.text;
        else if (line.text) this.texts[name] += line.text;
        else return;
        this.#draw();
      },
    });
  }

  #draw() {
    drawContinuations(this.result, { summary: this.summary, ...this.texts });
  }
}

export function toInterventions(what, secondText) {
  if (!what) return [];
  const [first, last] = what.levels;
  const levels = Array.from({ length: Math.min(200, last - first + 1) }, (_, index) => first + index);
  const positions = what.positions?.length ? { positions: what.positions } : {};
  if (what.kind === "swap") return [{ kind: "swap", first: what.tokens[0] ?? "", second: what.tokens[1] ?? "", levels, ...positions }];
  if (what.kind === "steer") return [{ kind: "steer", token: what.tokens[0] ?? "", strength: what.strength ?? 0.3, levels, ...positions }];
  if (what.kind === "ablate") return [{ kind: "ablate", tokens: what.tokens, levels, ...positions }];
  return [{ kind: "patch", source: secondText, source_position: what.source, position: what.positions?.[0], levels }];
}

// The intervention in words, as a title.
export function describeWhat(what) {
  const [first, last] = what.levels;
  const where = first === last ? `level ${first}` : `levels ${first} to ${last}`;
  const [one, other] = what.tokens.map(visible);
  const words = {
    swap: `${one} and ${other} exchanged`, steer: `steered towards ${one}`, ablate: `${one} removed`,
    patch: `position ${what.positions?.[0]} from position ${what.source} of the second prompt`,
  };
  return `changed: ${words[what.kind]}, ${where}`;
}

export function drawContinuations(place, { summary, original, changed }) {
  const same = [...original].findIndex((letter, index) => letter !== [...changed][index]);
  const start = same < 0 ? Math.min(original.length, changed.length) : [...original].slice(0, same).join("").length;
  const inLine = (text) => running(text).replaceAll("\n", " ");
  const rows = [["original", original], ["changed", changed]].flatMap(([name, text]) => [
    element("dt", { text: name }),
    element("dd", { dir: "auto", children: [inLine(text.slice(0, start)), element("strong", { text: inLine(text.slice(start)) })] }),
  ]);
  const list = original || changed ? [element("dl", { className: "continuations", children: rows })] : [];
  place.replaceChildren(element("p", { children: summary.map((part) => (part.token ? element("span", { className: "token", dir: "auto", text: part.token }) : part)) }), ...list);
}

// The model's own prediction after the last position, before and after.
function describeEffect(reading, changed) {
  const last = reading.levels.length - 1;
  const column = reading.positions.length - 1;
  const parts = [reading, changed].map((one) => {
    return [{ token: visible(one.words[one.top[last][column][0]]) }, ` ${number(one.probability[last][column][0])}`];
  });
  let cells = 0;
  reading.top.forEach((row, level) => row.forEach((best, at) => {
    if (best[0] !== changed.top[level][at][0]) cells += 1;
  }));
  return ["The model’s prediction: ", ...parts[0], " → ", ...parts[1], `. ${cells} cells have another top token.`];
}

function labelled(text, input, after = "") {
  return element("label", { children: [`${text} `, input, after] });
}

// The numbers of a list such as 3, 5-7; null for an empty one.
export function parseNumbers(text) {
  const entries = text.split(",").map((entry) => entry.trim()).filter(Boolean);
  const numbers = entries.flatMap((entry) => {
    const [first, last = first] = entry.split("-").map(Number);
    return Array.from({ length: Math.max(0, Math.min(1024, last - first + 1)) }, (_, index) => first + index);
  });
  return numbers.length ? [...new Set(numbers)] : null;
}

// The generate panel: its controls, and the running generation.

import { Refused } from "./api.js";
import { CACHES, START } from "./state.js";
import { fillSelect } from "./words.js";
import { clearText, counted, lengthWritten, write } from "./written.js";

const $ = (id) => document.getElementById(id);
const RULES = { never: "never", gap: "by confidence", fixed: "at a fixed level", calibrated: "calibrated" };

export class GeneratePanel {
  // `page` has `state`, `model` (its status from the server), `prompt`, `go(change)` and `prepare(signal)`.
  constructor(page, most) {
    this.page = page;
    this.writing = null; // aborts the running generation
    this.model = null; // the model whose text is shown
    $("count").max = most;
    for (const id of ["count", "rule", "lead", "exit-level", "cache", "lossless"]) {
      $(id).addEventListener("change", (event) => this.#changed(event.target));
    }
    $("write").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.writing) this.stop();
      else this.#write();
    });
  }

  // The settings that this model and lens support: the address may come from another model.
  #supported() {
    const { state, model } = this.page;
    const [kind, value] = state.rule.split(":");
    const missing = kind === "calibrated" && !model.calibrated.includes(state.lens);
    const level = Math.min(Number(value), model.n_blocks - 1);
    const rule = missing ? START.rule : kind === "fixed" ? `fixed:${level}` : state.rule;
    const predicted = state.cache !== "jump" || model.predicting.includes(state.lens);
    return { rule, cache: state.lossless || !predicted ? "exact" : state.cache };
  }

  fill() {
    const { state, model } = this.page;
    if (this.model !== state.model) {
      this.stop();
      clearText();
      this.#say("");
      this.#trouble("");
      this.model = state.model;
    }
    $("generate").hidden = model?.state !== "ready";
    if ($("generate").hidden) return;
    const cannot = model.cannot_generate;
    $("write").hidden = Boolean(cannot);
    $("cannot").hidden = !cannot;
    $("cannot").textContent = cannot ? `Generate: ${cannot}.` : "";
    if (cannot) return;
    const { rule, cache } = this.#supported();
    const [kind, value] = rule.split(":");
    fillSelect($("rule"), without(RULES, "calibrated", model.calibrated.includes(state.lens)), kind);
    fillSelect($("cache"), without(CACHES, "jump", model.predicting.includes(state.lens)), cache);
    $("lead-part").hidden = kind !== "gap";
    $("level-part").hidden = kind !== "fixed";
    $("lead").disabled = kind !== "gap"; // the browser validates hidden fields too
    $("exit-level").disabled = kind !== "fixed";
    if (kind === "gap") $("lead").value = value;
    $("exit-level").max = model.n_blocks - 1;
    if (kind === "fixed") $("exit-level").value = value;
    $("cache").disabled = state.lossless;
    $("lossless").checked = state.lossless;
    $("count").value = state.count;
  }

  #changed(control) {
    if (!control.reportValidity()) return;
    const given = {
      count: () => ({ count: Number(control.value) }),
      rule: () => ({ rule: ruleNamed(control.value, this.page.model.n_blocks) }),
      lead: () => ({ rule: `gap:${Number(Number(control.value).toFixed(4))}` }),
      "exit-level": () => ({ rule: `fixed:${Number(control.value)}` }),
      cache: () => ({ cache: control.value }),
      lossless: () => ({ lossless: control.checked }),
    };
    this.page.go(given[control.id]());
  }

  async #write() {
    const { state, model } = this.page;
    const { rule, cache } = this.#supported();
    const question = {
      model: state.model, prompt: this.page.prompt, lens: state.lens, exit: rule, cache, verify: state.lossless,
      max_new_tokens: state.count,
    };
    const mine = (this.writing = new AbortController());
    this.#trouble(question.prompt ? "" : "Type a prompt first.");
    if (!question.prompt) return this.#ended(mine);
    $("write-button").textContent = "Stop";
    try {
      this.#say("Starting …");
      await this.page.prepare(mine.signal);
      await write(question, model.n_blocks, { signal: mine.signal, say: (words) => this.#say(words) });
    } catch (error) {
      if (mine.signal.aborted) return undefined;
      if (!(error instanceof Refused)) throw error;
      this.#say("");
      this.#trouble(error.message);
    } finally {
      this.#ended(mine);
    }
    return undefined;
  }

  stop() {
    if (!this.writing) return;
    const mine = this.writing;
    mine.abort();
    this.#say(`Stopped after ${counted(lengthWritten())}.`);
    this.#ended(mine);
  }

  #ended(mine) {
    if (this.writing !== mine) return;
    this.writing = null;
    $("write-button").textContent = "Generate";
  }

  #say(words) {
    $("write-status").textContent = words;
    $("write-status").hidden = !words;
  }

  #trouble(words) {
    $("write-trouble").textContent = words.charAt(0).toUpperCase() + words.slice(1);
    $("write-trouble").hidden = !words;
  }
}

function ruleNamed(kind, blocks) {
  if (kind === "gap") return $("lead").value ? `gap:${$("lead").value}` : START.rule;
  if (kind === "fixed") return `fixed:${$("exit-level").value || Math.floor(blocks / 2)}`;
  return kind;
}

// All choices, without the one that is not available.
function without(names, one, there) {
  return Object.entries(names).filter(([name]) => there || name !== one);
}

// The generate panel: its controls, and the running generation.

import { Refused } from "./api.js";
import { CACHES, START } from "./state.js";
import { fillSelect } from "./text.js";
import { clearText, countTokens, generate, generatedText, textLength } from "./generated_text.js";

const $ = (id) => document.getElementById(id);
const RULES = { never: "never", gap: "by confidence", fixed: "at a fixed level", calibrated: "calibrated" };

export class GeneratePanel {
  // `page` has `state`, `model` (its status from the server), `prompt` (as the server takes it), `go(change)`,
  // `prepare(signal)` and `adopt(text)`, which appends a text to the prompt.
  constructor(page, most) {
    this.page = page;
    this.running = null; // aborts the running generation
    this.model = null; // the model whose text is shown
    $("count").max = most;
    for (const id of ["count", "rule", "lead", "exit-level", "cache", "lossless"]) {
      $(id).addEventListener("change", (event) => this.#change(event.target));
    }
    $("adopt").addEventListener("click", () => page.adopt(generatedText()));
    $("write").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.#generate();
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
      $("adopt").hidden = true;
      this.#showStatus("");
      this.#showError("");
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

  #change(control) {
    if (!control.reportValidity()) return;
    const changes = {
      count: () => ({ count: Number(control.value) }),
      rule: () => ({ rule: ruleNamed(control.value, this.page.model.n_blocks) }),
      lead: () => ({ rule: `gap:${Number(Number(control.value).toFixed(4))}` }),
      "exit-level": () => ({ rule: `fixed:${Number(control.value)}` }),
      cache: () => ({ cache: control.value }),
      lossless: () => ({ lossless: control.checked }),
    };
    this.page.go(changes[control.id]());
  }

  async #generate() {
    const { state, model } = this.page;
    const { rule, cache } = this.#supported();
    const request = {
      model: state.model, prompt: this.page.prompt, lens: state.lens, exit: rule, cache, verify: state.lossless,
      max_new_tokens: state.count,
    };
    const controller = (this.running = new AbortController());
    this.#showError(request.prompt.length ? "" : "Type a prompt first.");
    $("adopt").hidden = true;
    if (!request.prompt.length) return this.#finish(controller);
    $("write-button").textContent = "Stop";
    try {
      this.#showStatus("Starting …");
      await this.page.prepare(controller.signal);
      await generate(request, model.n_blocks, { signal: controller.signal, report: (words) => this.#showStatus(words) });
    } catch (error) {
      if (controller.signal.aborted) return undefined;
      if (!(error instanceof Refused)) throw error;
      this.#showStatus("");
      this.#showError(error.message);
    } finally {
      this.#finish(controller);
    }
    return undefined;
  }

  stop() {
    if (!this.running) return;
    const controller = this.running;
    controller.abort();
    this.#showStatus(`Stopped after ${countTokens(textLength())}.`);
    this.#finish(controller);
  }

  #finish(controller) {
    if (this.running !== controller) return;
    this.running = null;
    $("write-button").textContent = "Generate";
    $("adopt").hidden = !textLength();
  }

  #showStatus(words) {
    $("write-status").textContent = words;
    $("write-status").hidden = !words;
  }

  #showError(words) {
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

// The concept race: sets of words, their probabilities level by level, and the level where one takes the lead for good.

import { ask, Refused } from "./api.js";
import { raceChart, raceKeys } from "./chart.js";
import { element } from "./text.js";

const EXAMPLES = ["Paris, France", "Rome, Italy"];

export class RacePanel {
  // `page` has `state`, `text` (as the server takes it) and `go(change)`.
  constructor(place, page, most) {
    this.place = place;
    this.page = page;
    this.most = most;
    this.answer = null;
    this.key = "";
    this.running = null;
    this.fields = element("div", { className: "concepts" });
    this.add = element("button", { type: "button", text: "Add a concept" });
    this.add.addEventListener("click", () => this.#addField("").focus());
    const run = element("button", { className: "main", type: "submit", text: "Race" });
    const form = element("form", { children: [this.fields, element("div", { className: "controls", children: [this.add, run] })] });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      page.go({ race: this.#words() });
    });
    const about = "A concept is a set of words: their probabilities add up, with and without a blank or a capital letter.";
    this.result = element("div", { role: "status", "aria-live": "polite" });
    place.replaceChildren(element("p", { className: "quiet", text: about }), form, this.result);
    this.#fill(page.state.race.length ? page.state.race : ["", ""]);
  }

  #words() {
    return [...this.fields.querySelectorAll("input")].map((input) => input.value.trim()).filter(Boolean);
  }

  #fill(concepts) {
    this.fields.replaceChildren();
    for (const words of concepts) this.#addField(words);
  }

  #addField(words) {
    const index = this.fields.children.length;
    const input = element("input", {
      type: "text", maxlength: "2000", "aria-label": `Concept ${index + 1}`, placeholder: EXAMPLES[index] ?? "words, with commas",
    });
    input.value = words;
    this.fields.append(input);
    this.add.disabled = this.fields.children.length >= this.most;
    return input;
  }

  // Ask for the race of the state, unless its answer is here; draw it at the selected cell.
  async show(reading) {
    const { state } = this.page;
    const concepts = state.race.map((words) => words.split(",").map((word) => word.trim()).filter(Boolean));
    if (concepts.length && JSON.stringify(this.#words()) !== JSON.stringify(state.race)) this.#fill(state.race);
    if (!concepts.length || !state.open.includes("race")) return;
    const listed = concepts.map((words) => ({ name: words[0] ?? "", words }));
    const request = { model: state.model, text: this.page.text, lens: state.lens, concepts: listed };
    const key = JSON.stringify(request);
    if (key !== this.key) {
      this.running?.abort();
      const controller = (this.running = new AbortController());
      this.answer = null;
      this.key = key;
      try {
        const answer = await ask("/api/race", request, { signal: controller.signal });
        if (controller.signal.aborted) return;
        this.answer = answer;
      } catch (error) {
        if (controller.signal.aborted) return;
        if (!(error instanceof Refused)) throw error;
        this.result.replaceChildren(element("p", { className: "trouble", text: error.message }));
        return;
      }
    }
    if (this.answer) this.#draw(reading);
  }

  #draw(reading) {
    const { level, column } = this.page.state;
    if (this.answer.positions.length !== reading.positions.length || level >= this.answer.levels.length) return;
    drawRace(this.result, this.answer, level, column);
  }
}

export function drawRace(place, answer, level, column) {
  const crossing = answer.crossing[column];
  const when = crossing === answer.levels[0] ? "at every level" : `from level ${crossing} on`;
  const words = element("p", { text: `${answer.leader[column]} leads ${when}, after position ${answer.positions[column]}.` });
  place.replaceChildren(words, raceChart(answer, column, level), raceKeys(answer, column, level));
}

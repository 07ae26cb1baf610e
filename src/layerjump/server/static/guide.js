// Guided examples for the bundled model: a prompt, and steps that show what the page does with it.

import { element } from "./text.js";

const FRANCE = "The capital of France is the city of";
const ITALY = "The capital of Italy is the city of";
const CLEAR = { chat: null, second: null, secondAt: null, what: null, race: [], against: "", levels: null, positions: null, role: "", pins: [], other: "" };

// Each step is a sentence and the change of the page's state that shows it.
export const EXAMPLES = [
  {
    name: "Where is the answer decided?",
    text: FRANCE,
    steps: [
      ["Each row is a level, each column a token. In the last column the top token is Paris from level 24 on: the bar marks it.",
        { level: 24, column: 7, open: [] }],
      ["Why Paris? Its logit there is a sum: one bar for each attention and feed-forward part. Most comes from the attention of block 24, "
        + "and there from head 5, which reads “France”.", { level: 24, column: 7, open: ["why"] }],
      ["A race: the words of France against those of Italy. The dashed bar is the level from which one leads for good.",
        { level: 24, column: 7, race: ["Paris, France", "Rome, Italy"], open: ["race"] }],
    ],
  },
  {
    name: "What if it read Rome?",
    text: FRANCE,
    steps: [
      ["The model is about to say Paris. Level 24 is where the lens first reads it.", { level: 24, column: 7, open: [] }],
      ["Now what the lens reads of Paris and of Rome is exchanged at levels 20 to 26, while the model runs. The second grid is the "
        + "changed reading; below, the text goes on with Rome.",
        { open: ["what-if"], what: { kind: "swap", tokens: [" Paris", " Rome"], levels: [20, 26], positions: null } }],
      ["The same at levels 10 to 16: the model still says Paris. The answer is not there yet, so there is nothing to exchange.",
        { open: ["what-if"], what: { kind: "swap", tokens: [" Paris", " Rome"], levels: [10, 16], positions: null } }],
    ],
  },
  {
    name: "Carry a thought over",
    text: FRANCE,
    steps: [
      ["Two prompts side by side: they differ in one token, France and Italy.",
        { second: ITALY, secondAt: [12, 3], level: 12, column: 3, open: ["what-if"] }],
      ["The state of “Italy” at level 12, put in the place of “France” (drag the cell, or press V): the first prompt now goes on with Rome.",
        { what: { kind: "patch", tokens: [], levels: [12, 12], positions: [3], source: 3 }, open: ["what-if"] }],
      ["The same at level 26 changes nothing: by then the last position has read what it needs from “France”.",
        { secondAt: [26, 3], level: 26, what: { kind: "patch", tokens: [], levels: [26, 26], positions: [3], source: 3 }, open: ["what-if"] }],
    ],
  },
];
export const MODEL = "smollm2";

export class Guide {
  // `page` has `state`, `models` and `open(change)`.
  constructor(list, card, page) {
    this.card = card;
    this.page = page;
    list.replaceChildren(...EXAMPLES.map((example) => {
      const button = element("button", { type: "button", text: example.name });
      button.addEventListener("click", () => this.start(example));
      return button;
    }));
  }

  start(example) {
    const { models, state } = this.page;
    this.example = example;
    this.model = models.has(MODEL) ? MODEL : state.model;
    this.#show(0);
  }

  #show(index) {
    const { name, text, steps } = this.example;
    const [sentence, change] = steps[index];
    const close = element("button", { type: "button", text: "Close" });
    const back = element("button", { type: "button", text: "Back" });
    const next = element("button", { type: "button", className: "main", text: "Next" });
    close.addEventListener("click", () => { this.card.hidden = true; });
    back.addEventListener("click", () => this.#show(index - 1));
    next.addEventListener("click", () => this.#show(index + 1));
    back.disabled = index === 0;
    next.disabled = index === steps.length - 1;
    const note = this.model === MODEL ? [] : [
      element("p", { className: "quiet", text: `Written for ${MODEL}; ${this.model} may read something else.` }),
    ];
    const title = element("h2", { text: `${name} (${index + 1} of ${steps.length})` });
    this.card.replaceChildren(
      element("div", { children: [title, element("p", { text: sentence }), ...note] }),
      element("div", { className: "steps", children: [back, next, close] }),
    );
    this.card.hidden = false;
    next.focus({ preventScroll: true });
    // A step shows the same, whatever was tried before it.
    const before = Object.assign({}, ...steps.slice(0, index).map(([, earlier]) => earlier));
    this.page.open({ ...CLEAR, model: this.model, lens: "mat", text, ...before, ...change });
  }
}

// A generated text: tokens as they arrive, coloured by exit level, or by drafter where drafts are verified.

import { follow } from "./api.js";
import { viridis } from "./colours.js";
import { element, number, percent, running, visible } from "./text.js";

const $ = (id) => document.getElementById(id);

// Bright is an early exit. Tokens of the full model have no colour.
function colourOfLevel(level, blocks) {
  return level === blocks ? { background: "", ink: "" } : viridis(1 - level / blocks);
}

// One colour for each drafter, of equal lightness; tokens of the full model itself have none.
const DRAFTERS = {
  lookup: "#8ecae6", recycled: "#b7e4c7", head: "#ffd166", splice: "#f4a3c0", exit: "#cdb4f6",
};

function paint(node, { level, drafter }, blocks) {
  const { background, ink } = drafter ? { background: DRAFTERS[drafter], ink: "#111" } : colourOfLevel(level, blocks);
  node.style.backgroundColor = background;
  node.style.color = ink;
}

// One text, token by token.
class GeneratedText {
  constructor(prompt, blocks) {
    this.blocks = blocks;
    this.tokens = [];
    this.written = "";
    this.counts = new Map(); // level or drafter → its legend entry
    $("given").textContent = typeof prompt === "string" ? running(prompt) : "assistant: ";
    $("tokens").replaceChildren();
    $("exit-levels").replaceChildren();
    $("token-said").textContent = "Point at a token, or move to it with Tab and the arrow keys, to see its exit level.";
    $("written").hidden = false;
  }

  add(token) {
    if (token.rejected) $("tokens").append(this.#rejected(token.rejected));
    const description = this.#describe(token);
    const node = element("span", {
      role: "option", className: "written", tabindex: this.tokens.length ? "-1" : "0", title: description,
      "aria-selected": "false", "aria-label": `${visible(token.text)}, ${description}`, text: running(token.text) || "·",
    });
    paint(node, token, this.blocks);
    this.tokens.push(node);
    this.written += token.text;
    $("tokens").append(node);
    this.#count(token);
  }

  // A draft that the full model replaced by the token that follows: struck through, not part of the text.
  #rejected({ text: draft, drafter }) {
    const node = element("s", { "aria-hidden": "true", title: `rejected draft of ${drafter}`, text: running(draft) || "·" });
    Object.assign(node.style, { color: "inherit", opacity: "0.55", textDecorationColor: DRAFTERS[drafter] });
    node.style.borderBottom = `2px solid ${DRAFTERS[drafter]}`;
    node.style.userSelect = "none";
    return node;
  }

  #describe({ text, level, verified, drafter }) {
    const full = level === this.blocks ? `full model, ${level} blocks` : `exits at level ${level} of ${this.blocks}`;
    const exit = !drafter ? full : drafter === "exit" ? `draft of ${drafter}, ${full}` : `draft of ${drafter}, accepted`;
    const status = verified ? "verified" : level < this.blocks ? "not verified" : "";
    return [exit, status, text ? "" : "part of a character"].filter(Boolean).join(", ");
  }

  #count(token) {
    const key = token.drafter ?? token.level;
    if (!this.counts.has(key)) this.#addEntry(key, token);
    const entry = this.counts.get(key);
    entry.times += 1;
    entry.number.textContent = ` × ${entry.times}`;
  }

  #addEntry(entry, { level, drafter }) {
    const whole = !drafter && level === this.blocks;
    const name = drafter ?? (whole ? `full model (${level})` : `level ${level}`);
    const key = element("span", { className: whole ? "key whole" : "key", text: name });
    paint(key, { level, drafter }, this.blocks);
    const times = element("span", { className: "quiet" });
    const item = element("li", { children: [key, times] });
    // Drafters in the order in which they first drafted, before the levels.
    item.dataset.level = drafter ? -1 : level;
    const above = [...$("exit-levels").children].find((other) => Number(other.dataset.level) > Number(item.dataset.level));
    $("exit-levels").insertBefore(item, above ?? null);
    this.counts.set(entry, { times: 0, number: times });
  }

  choose(node, { focus = false } = {}) {
    for (const other of this.tokens) {
      other.tabIndex = other === node ? 0 : -1;
      other.setAttribute("aria-selected", String(other === node));
    }
    $("token-said").textContent = node.getAttribute("aria-label");
    if (focus) node.focus();
  }

  move(node, key) {
    const at = this.tokens.indexOf(node);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.tokens.length - 1 }[key];
    if (to === undefined) return false;
    this.choose(this.tokens[Math.min(Math.max(to, 0), this.tokens.length - 1)], { focus: true });
    return true;
  }
}

let text = null; // the text that is shown

for (const kind of ["click", "focusin", "mouseover"]) {
  $("tokens").addEventListener(kind, (event) => {
    const node = event.target.closest("[role=option]");
    if (!node) return;
    if (kind === "mouseover") $("token-said").textContent = node.getAttribute("aria-label");
    else text.choose(node, { focus: kind === "click" });
  });
}
$("tokens").addEventListener("keydown", (event) => {
  const node = event.target.closest("[role=option]");
  if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
  if (text.move(node, event.key)) event.preventDefault();
});

export function countTokens(tokens) {
  return `${tokens} token${tokens === 1 ? "" : "s"}`;
}

// The text so far, as it goes on after the prompt.
export function generatedText() {
  return text?.written ?? "";
}

export function textLength() {
  return text?.tokens.length ?? 0;
}

export function clearText() {
  text = null;
  $("written").hidden = true;
}

// Generate, and report progress to `report`. The request is the body of /api/generate.
export async function generate(request, blocks, { signal, report }) {
  clearText();
  let end = null;
  await follow("/api/generate", request, {
    signal,
    each: (line) => {
      if (line.busy) report(line.position ? `Busy, position ${line.position} (${line.doing}) …` : `${line.doing} …`);
      else if (line.done) end = line.done;
      else {
        if (!text) {
          text = new GeneratedText(request.prompt, blocks);
          report("Generating …");
        }
        text.add(line);
        if (line.speedup) report(`Generating … ${number(line.speedup, 2)} times as fast as without drafts`);
      }
    },
  });
  if (text && end) text.written = end.text; // without special tokens
  report(end ? summary(request, end) : "The server closed the connection before the end.");
}

function summary({ lens, verify }, done) {
  const count = done.ids.length;
  const drafts = done.counts.drafts;
  const accepted = `${percent(done.agreement)} of ${drafts} drafts accepted`;
  return [
    `${countTokens(count)} in ${number(done.seconds, 2)} s (${number((1000 * done.seconds) / count, 2)} ms each)`,
    `lens ${lens}`,
    `${percent(Math.round(1000 * done.blocks_saved) / 1000)} of blocks skipped`,
    `${done.counts.unembeddings} unembeddings`,
    verify ? (drafts ? accepted : "no drafts") : "",
    done.counts.steps && done.speedup
      ? `${number(count / done.counts.steps, 2)} tokens a step, ${number(done.speedup, 2)} times as fast as without drafts` : "",
  ].filter(Boolean).join(" · ");
}

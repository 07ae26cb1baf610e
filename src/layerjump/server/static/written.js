// A generated text: tokens as they arrive, coloured by exit level.

import { follow } from "./api.js";
import { viridis } from "./colours.js";
import { element, number, percent, running, visible } from "./words.js";

const $ = (id) => document.getElementById(id);

// Bright is an early exit. Tokens of the full model have no colour.
function colourOfLevel(level, blocks) {
  return level === blocks ? { background: "", ink: "" } : viridis(1 - level / blocks);
}

function paint(place, level, blocks) {
  const { background, ink } = colourOfLevel(level, blocks);
  place.style.backgroundColor = background;
  place.style.color = ink;
}

// One text, token by token.
class Written {
  constructor(prompt, blocks) {
    this.blocks = blocks;
    this.tokens = [];
    this.counts = new Map(); // level → its legend entry
    $("given").textContent = running(prompt);
    $("tokens").replaceChildren();
    $("exit-levels").replaceChildren();
    $("token-said").textContent = "Point at a token, or move to it with Tab and the arrow keys, to see its exit level.";
    $("written").hidden = false;
  }

  add(token) {
    const said = this.#said(token);
    const place = element("span", {
      role: "option", className: "written", tabindex: this.tokens.length ? "-1" : "0", title: said,
      "aria-selected": "false", "aria-label": `${visible(token.text)}, ${said}`, text: running(token.text) || "·",
    });
    paint(place, token.level, this.blocks);
    this.tokens.push(place);
    $("tokens").append(place);
    this.#count(token.level);
  }

  #said({ text, level, verified }) {
    const where = level === this.blocks ? `full model, ${level} blocks` : `exits at level ${level} of ${this.blocks}`;
    const known = verified ? "verified" : level < this.blocks ? "not verified" : "";
    return [where, known, text ? "" : "part of a character"].filter(Boolean).join(", ");
  }

  #count(level) {
    if (!this.counts.has(level)) this.#addLevel(level);
    const entry = this.counts.get(level);
    entry.times += 1;
    entry.number.textContent = ` × ${entry.times}`;
  }

  #addLevel(level) {
    const name = level === this.blocks ? `full model (${level})` : `level ${level}`;
    const key = element("span", { className: level === this.blocks ? "key whole" : "key", text: name });
    paint(key, level, this.blocks);
    const times = element("span", { className: "quiet" });
    const item = element("li", { children: [key, times] });
    item.dataset.level = level;
    const above = [...$("exit-levels").children].find((other) => Number(other.dataset.level) > level);
    $("exit-levels").insertBefore(item, above ?? null);
    this.counts.set(level, { times: 0, number: times });
  }

  choose(place, { focus = false } = {}) {
    for (const other of this.tokens) {
      other.tabIndex = other === place ? 0 : -1;
      other.setAttribute("aria-selected", String(other === place));
    }
    $("token-said").textContent = place.getAttribute("aria-label");
    if (focus) place.focus();
  }

  moved(place, key) {
    const at = this.tokens.indexOf(place);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.tokens.length - 1 }[key];
    if (to === undefined) return false;
    this.choose(this.tokens[Math.min(Math.max(to, 0), this.tokens.length - 1)], { focus: true });
    return true;
  }
}

let text = null; // the text that is shown

for (const kind of ["click", "focusin", "mouseover"]) {
  $("tokens").addEventListener(kind, (event) => {
    const place = event.target.closest("[role=option]");
    if (!place) return;
    if (kind === "mouseover") $("token-said").textContent = place.getAttribute("aria-label");
    else text.choose(place, { focus: kind === "click" });
  });
}
$("tokens").addEventListener("keydown", (event) => {
  const place = event.target.closest("[role=option]");
  if (!place || event.ctrlKey || event.metaKey || event.altKey) return;
  if (text.moved(place, event.key)) event.preventDefault();
});

export function counted(tokens) {
  return `${tokens} token${tokens === 1 ? "" : "s"}`;
}

export function lengthWritten() {
  return text?.tokens.length ?? 0;
}

export function clearText() {
  text = null;
  $("written").hidden = true;
}

// Generate, and report progress to `say`. The question is the body of /api/generate.
export async function write(question, blocks, { signal, say }) {
  clearText();
  let end = null;
  await follow("/api/generate", question, {
    signal,
    each: (line) => {
      if (line.busy) say(line.position ? `Busy, position ${line.position} (${line.doing}) …` : `${line.doing} …`);
      else if (line.done) end = line.done;
      else {
        if (!text) {
          text = new Written(question.prompt, blocks);
          say("Generating …");
        }
        text.add(line);
      }
    },
  });
  say(end ? summary(question, end) : "The server closed the connection before the end.");
}

function summary({ lens, verify }, done) {
  const count = done.ids.length;
  const drafts = done.counts.drafts;
  const accepted = `${percent(done.agreement)} of ${drafts} drafts accepted`;
  return [
    `${counted(count)} in ${number(done.seconds, 2)} s (${number((1000 * done.seconds) / count, 2)} ms each)`,
    `lens ${lens}`,
    `${percent(Math.round(1000 * done.blocks_saved) / 1000)} of blocks skipped`,
    `${done.counts.unembeddings} unembeddings`,
    verify ? (drafts ? accepted : "no drafts") : "",
  ].filter(Boolean).join(" · ");
}

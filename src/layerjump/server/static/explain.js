// Why the selected cell predicts its top token: the parts of the model whose outputs add up to the logit.

import { ask, Refused } from "./api.js";
import { shape } from "./chart.js";
import { LINES } from "./colours.js";
import { element, number, toToken, visible } from "./text.js";

const LISTS = [["parts", "Largest parts"], ["heads", "Attention heads"], ["sources", "Positions that heads read from"]];
const ROWS = 6; // of each list
const PAUSE = 200; // ms: the selection may be on its way to another cell
const WIDTH = 320;
const HEIGHT = 130;
const MARGIN = { left: 30, right: 4, top: 8, bottom: 26 };

export class WhyPanel {
  // `page` has `state`, `text` (as the server takes it) and `go(change)`.
  constructor(place, page) {
    this.page = page;
    this.answer = null;
    this.key = "";
    this.running = null;
    this.against = element("input", { type: "text", list: "cell-tokens", maxlength: "200", placeholder: "no other token", id: "against" });
    this.against.value = page.state.against;
    this.against.addEventListener("change", () => page.go({ against: this.against.value }));
    const label = element("label", { children: ["rather than ", this.against] });
    this.result = element("div", { role: "status", "aria-live": "polite" });
    place.replaceChildren(label, this.result);
  }

  // Explain the selected cell if the panel is open.
  async show(reading) {
    const { state } = this.page;
    this.against.value = state.against;
    if (!state.open.includes("why")) return;
    const { level, column } = state;
    const request = {
      model: state.model, text: this.page.text, lens: state.lens, level: Number(reading.levels[level]),
      position: reading.positions[column], token: reading.top[level][column][0], rows: ROWS,
    };
    if (state.against) request.against = toToken(state.against);
    const key = JSON.stringify(request);
    if (key === this.key) return;
    this.running?.abort();
    const controller = (this.running = new AbortController());
    this.key = key;
    this.result.classList.add("stale");
    try {
      await new Promise((resume) => { setTimeout(resume, PAUSE); });
      if (controller.signal.aborted) return;
      this.answer = await ask("/api/explain", request, { signal: controller.signal });
      if (controller.signal.aborted) return;
      drawWhy(this.result, this.answer);
    } catch (error) {
      if (controller.signal.aborted) return;
      if (!(error instanceof Refused)) throw error;
      this.answer = null;
      this.result.replaceChildren(element("p", { className: "trouble", text: error.message }));
    }
    this.result.classList.remove("stale");
  }
}

export function drawWhy(place, answer) {
  const what = element("p", { children: ["Logit of ", token(answer.token)] });
  if (answer.against !== null) what.append(" less that of ", token(answer.against));
  what.append(` at level ${answer.level}: ${number(answer.reading)}, the sum of`);
  const lists = LISTS.filter(([kind]) => answer[kind].length).flatMap(([kind, heading]) => {
    const rows = [...answer[kind]].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, ROWS);
    const largest = Math.abs(rows[0].value);
    return [element("h3", { text: heading }), element("ul", { className: "why", children: rows.map((row) => contribution(row, largest)) })];
  });
  const notes = ["Norms are frozen at this state", ...answer.notes].join("; ");
  place.replaceChildren(what, ...figure(answer), ...lists, element("p", { className: "quiet", text: `${notes}.` }));
}

function token(text) {
  return element("span", { className: "token", dir: "auto", text: visible(text) });
}

// One bar for every part, block by block: the embedding on the left, constants on the right.
function figure(answer) {
  const blocks = Math.max(0, ...answer.parts.map((row) => row.block ?? 0));
  const kinds = [...new Set(answer.parts.map((row) => kindOf(row)))];
  const ends = [Math.min(0, ...answer.parts.map((row) => row.value)), Math.max(0, ...answer.parts.map((row) => row.value))];
  const slot = (WIDTH - MARGIN.left - MARGIN.right) / (blocks + 2);
  const y = (value) => MARGIN.top + ((ends[1] - value) / (ends[1] - ends[0] || 1)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const label = `Contributions of ${answer.parts.length} parts, block by block; the largest are listed below`;
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const value of new Set([...ends, 0])) {
    svg.append(shape("line", { x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(value), y2: y(value), class: "rule" }));
    svg.append(shape("text", { x: MARGIN.left - 4, y: y(value) + 3, "text-anchor": "end" }, number(value, 2)));
  }
  const places = new Map(); // block → its parts so far
  const inBlock = answer.parts.reduce((most, row) => {
    places.set(row.block, (places.get(row.block) ?? 0) + 1);
    return row.block === null ? most : Math.max(most, places.get(row.block));
  }, 1);
  places.clear();
  for (const row of answer.parts) {
    const place = row.block ?? (row.part === "embedding" ? 0 : blocks + 1);
    const nth = places.get(place) ?? 0;
    places.set(place, nth + 1);
    const width = (0.9 * slot) / inBlock;
    const bar = shape("rect", {
      x: MARGIN.left + place * slot + Math.min(nth, inBlock - 1) * width, width: Math.max(1, width),
      y: Math.min(y(0), y(row.value)), height: Math.max(0.5, Math.abs(y(row.value) - y(0))),
      fill: LINES[kinds.indexOf(kindOf(row)) % LINES.length],
    });
    bar.append(shape("title", {}, `${row.name} ${number(row.value)}`));
    svg.append(bar);
  }
  for (const block of [1, Math.ceil(blocks / 2), blocks].filter((value, index, all) => value && all.indexOf(value) === index)) {
    svg.append(shape("text", { x: MARGIN.left + (block + 0.45) * slot, y: HEIGHT - 14, "text-anchor": "middle" }, String(block)));
  }
  svg.append(shape("text", { x: WIDTH / 2, y: HEIGHT - 2, "text-anchor": "middle" }, "block"));
  const keys = kinds.map((kind, index) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.backgroundColor = LINES[index % LINES.length];
    return element("li", { children: [swatch, element("span", { className: "quiet", text: kind })] });
  });
  return [svg, element("ul", { className: "levels", children: keys })];
}

function kindOf(row) {
  if (row.block === null) return row.part === "embedding" ? "embedding" : "constants";
  return { attn: "attention", ffn: "feed-forward" }[row.part] ?? row.part;
}

function contribution(row, largest) {
  const name = row.source === null ? row.name : `${row.name} from ${row.source} ${visible(row.token)}`;
  const fill = element("span", { className: row.value < 0 ? "fill against" : "fill" });
  fill.style.width = `${(100 * Math.abs(row.value)) / (largest || 1)}%`;
  const bar = element("span", { className: "track", "aria-hidden": "true", children: [fill] });
  const value = `${row.value < 0 ? "−" : "+"}${number(Math.abs(row.value))}`;
  return element("li", { children: [element("span", { text: name }), bar, element("span", { className: "number", text: value })] });
}

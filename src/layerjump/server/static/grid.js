// A grid of levels × positions: rows are levels, the last on top; columns are positions.

import { colourOf, gradient } from "./colours.js";
import { element, number, visible } from "./text.js";

const CELL = "application/x-layerjump-cell"; // what a dragged cell carries
const ROLES = ["system", "user", "assistant", "template"];

export class Grid {
  // Callbacks: `onSelect(level, column)` for a selected cell, `onOpen()` for Enter, `onPin(id)` for P. With `onDrop`, a
  // cell of another grid can be dropped here, or pasted with V: `onDrop({ level, column }, toColumn)`.
  constructor(reading, name, { title = null, onSelect, onOpen, onPin, onDrop = null, isDraggable = false }) {
    this.reading = reading;
    this.name = name;
    this.last = reading.levels.length - 1;
    this.rows = [...reading.levels.keys()];
    this.columns = [...reading.positions.keys()];
    this.isDraggable = isDraggable;
    this.heads = [];
    this.rowNodes = [];
    this.cells = reading.levels.map(() => []);
    this.at = null;
    this.scroll = element("div", { className: "scroll", children: [this.#table()] });
    this.bar = element("span", { className: "bar" });
    this.from = element("span");
    this.to = element("span");
    const scale = element("span", { className: "scale quiet", children: [this.from, this.bar, this.to] });
    const words = title ?? (name === "identity" ? "identity (logit lens)" : name);
    const heading = element("h2", { dir: "auto", text: words, title: words });
    const caption = element("figcaption", { children: [heading, scale] });
    this.figure = element("figure", { className: "grid", "data-lens": name, children: [caption, this.scroll] });
    const table = this.scroll.firstChild;
    table.addEventListener("click", (event) => this.#click(event.target.closest("td"), onSelect));
    table.addEventListener("dblclick", (event) => event.target.closest("td") && onOpen());
    table.addEventListener("mouseover", (event) => this.#hover(event.target.closest("td")));
    table.addEventListener("keydown", (event) => this.#press(event, { onSelect, onOpen, onPin, onDrop }));
    if (isDraggable) table.addEventListener("dragstart", (event) => this.#drag(event));
    if (onDrop) this.#takeDrops(table, onDrop);
  }

  #table() {
    const { reading } = this;
    this.heads = reading.positions.map((position) => {
      const text = visible(reading.tokens[position].text);
      const role = reading.roles?.[position];
      const title = [`${position}: ${text}`, role].filter(Boolean).join(", ");
      return element("th", { scope: "col", dir: "auto", className: role ? `role ${roleClass(role)}` : "", text, title });
    });
    const corner = element("th", { scope: "col", className: "corner", text: "level" });
    const head = element("thead", { children: [element("tr", { children: [corner, ...this.heads] })] });
    const body = element("tbody");
    for (let level = this.last; level >= 0; level -= 1) body.append(this.#row(level));
    const label = `Predictions of ${this.name}, levels by positions`;
    return element("table", { role: "grid", "aria-label": label, children: [head, body] });
  }

  #row(level) {
    const { reading } = this;
    const head = element("th", { scope: "row", text: reading.levels[level] });
    const row = element("tr", { children: [head] });
    reading.positions.forEach((position, column) => {
      const best = reading.top[level][column][0];
      const cell = element("td", { role: "gridcell", tabindex: "-1", dir: "auto", text: visible(reading.words[best]) });
      cell.dataset.at = `${level},${column}`;
      if (this.isDraggable) cell.draggable = true;
      if (best === reading.top[this.last][column][0]) cell.classList.add("own");
      if (reading.decided_at[column] === level) cell.classList.add("decided");
      if (position < reading.fitted_from && level < this.last) cell.classList.add("unfitted");
      this.cells[level][column] = cell;
      row.append(cell);
    });
    this.rowNodes[level] = row;
    return row;
  }

  // Show these rows and columns only.
  filter({ rows, columns }) {
    this.rows = rows;
    this.columns = columns;
    const shown = new Set(columns);
    this.rowNodes.forEach((row, level) => { row.hidden = !rows.includes(level); });
    this.heads.forEach((head, column) => { head.hidden = !shown.has(column); });
    for (const row of this.cells) row.forEach((cell, column) => { cell.hidden = !shown.has(column); });
  }

  // Outline the cells whose top token is another than in the original.
  compare(original) {
    this.cells.forEach((row, level) => row.forEach((cell, column) => {
      const isOther = original.top[level][column][0] !== this.reading.top[level][column][0];
      cell.classList.toggle("changed", isOther);
    }));
  }

  paint(measure, most) {
    this.cells.forEach((row, level) => row.forEach((cell, column) => {
      const colour = colourOf(measure, measure.value(this.reading, level, column) ?? 0, most);
      cell.style.backgroundColor = colour.background;
      cell.style.color = colour.ink;
    }));
    this.bar.style.backgroundImage = gradient(measure);
    this.bar.title = measure.about;
    this.from.textContent = `${measure.title} 0`;
    this.to.textContent = `${number(most, 2)}${measure.end}`;
  }

  // Rings around the cells where positions would exit; a position that runs all blocks has none.
  ring(levels) {
    for (const cell of this.scroll.querySelectorAll(".leaves")) cell.classList.remove("leaves");
    levels?.forEach((level, column) => {
      if (level !== null && level < this.last) this.cells[level][column].classList.add("leaves");
    });
  }

  choose(level, column, { focus = false } = {}) {
    if (this.at) {
      this.at.removeAttribute("aria-selected");
      this.at.tabIndex = -1;
    }
    const cell = this.cells[level][column];
    cell.setAttribute("aria-selected", "true");
    cell.setAttribute("aria-label", this.describe(level, column));
    cell.tabIndex = 0;
    this.at = cell;
    if (focus) cell.focus({ preventScroll: true });
    this.#reveal(cell);
  }

  describe(level, column) {
    const { reading } = this;
    const token = visible(reading.tokens[reading.positions[column]].text);
    const best = reading.top[level][column][0];
    const marks = [
      best === reading.top[this.last][column][0] ? "the model’s prediction" : "",
      this.cells[level][column].classList.contains("leaves") ? "would exit here" : "",
      this.cells[level][column].classList.contains("unfitted") ? "not fitted" : "",
    ].filter(Boolean);
    const role = reading.roles?.[reading.positions[column]];
    if (role) marks.push(role === "template" ? "chat template" : role);
    const facts = `probability ${number(reading.probability[level][column][0])}`;
    return [`${visible(reading.words[best])}, ${facts}`, `level ${reading.levels[level]} after ${token}`, ...marks].join("; ");
  }

  // Scroll the grid, not the page.
  #reveal(cell) {
    const { scroll } = this;
    const head = scroll.querySelector(".corner");
    const left = cell.offsetLeft - head.offsetWidth;
    const right = cell.offsetLeft + cell.offsetWidth - scroll.clientWidth;
    const top = cell.offsetTop - head.offsetHeight;
    const bottom = cell.offsetTop + cell.offsetHeight - scroll.clientHeight;
    scroll.scrollLeft = Math.max(right, Math.min(left, scroll.scrollLeft));
    scroll.scrollTop = Math.max(bottom, Math.min(top, scroll.scrollTop));
  }

  #click(cell, onSelect) {
    if (cell) onSelect(...coordinates(cell));
  }

  #hover(cell) {
    if (cell && !cell.title) cell.title = this.describe(...coordinates(cell));
  }

  #drag(event) {
    const cell = event.target.closest("td");
    if (!cell) return;
    const [level, column] = coordinates(cell);
    event.dataTransfer.setData(CELL, JSON.stringify({ level, column }));
    event.dataTransfer.effectAllowed = "copy";
  }

  #takeDrops(table, onDrop) {
    const mark = (cell) => {
      for (const other of table.querySelectorAll(".target")) other.classList.remove("target");
      cell?.classList.add("target");
    };
    table.addEventListener("dragover", (event) => {
      const cell = event.target.closest("td");
      if (!cell || !event.dataTransfer.types.includes(CELL)) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = "copy";
      mark(cell);
    });
    table.addEventListener("dragleave", () => mark(null));
    table.addEventListener("drop", (event) => {
      const cell = event.target.closest("td");
      mark(null);
      if (!cell || !event.dataTransfer.types.includes(CELL)) return;
      event.preventDefault();
      onDrop(JSON.parse(event.dataTransfer.getData(CELL)), coordinates(cell)[1]);
    });
  }

  #press(event, { onSelect, onOpen, onPin, onDrop }) {
    const cell = event.target.closest("td");
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const [level, column] = coordinates(cell);
    const { rows, columns } = this;
    const up = rows.indexOf(level);
    const right = columns.indexOf(column);
    const moves = {
      ArrowUp: [up + 1, right], ArrowDown: [up - 1, right], ArrowLeft: [up, right - 1], ArrowRight: [up, right + 1],
      Home: [up, 0], End: [up, columns.length - 1], PageUp: [rows.length - 1, right], PageDown: [0, right],
    };
    if (event.key in moves) {
      const [toRow, toColumn] = moves[event.key];
      onSelect(rows[clamp(toRow, rows.length - 1)], columns[clamp(toColumn, columns.length - 1)]);
    } else if (event.key === "Enter" || event.key === " ") onOpen();
    else if (event.key === "p" || event.key === "P") onPin(this.reading.top[level][column][0]);
    else if (onDrop && (event.key === "v" || event.key === "V")) onDrop(null, column);
    else return;
    event.preventDefault();
  }
}

// Two grids scroll together.
export function linkScrolling(grids) {
  for (const grid of grids) {
    grid.scroll.addEventListener("scroll", () => {
      for (const other of grids) {
        if (other === grid) continue;
        other.scroll.scrollLeft = grid.scroll.scrollLeft;
        other.scroll.scrollTop = grid.scroll.scrollTop;
      }
    });
  }
}

function roleClass(role) {
  return ROLES.includes(role) ? role : "other";
}

function coordinates(cell) {
  return cell.dataset.at.split(",").map(Number);
}

function clamp(value, most) {
  return Math.min(Math.max(value, 0), most);
}

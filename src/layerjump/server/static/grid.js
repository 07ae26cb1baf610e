// A grid of levels × positions: rows are levels, the last on top; columns are positions.

import { colourOf, gradient } from "./colours.js";
import { element, number, visible } from "./text.js";

export class Grid {
  // Callbacks: `onSelect(level, column)` for a selected cell, `onOpen()` for Enter, `onPin(id)` for P.
  constructor(reading, name, { onSelect, onOpen, onPin }) {
    this.reading = reading;
    this.name = name;
    this.last = reading.levels.length - 1;
    this.cells = reading.levels.map(() => []);
    this.at = null;
    this.scroll = element("div", { className: "scroll", children: [this.#table()] });
    this.bar = element("span", { className: "bar" });
    this.from = element("span");
    this.to = element("span");
    const scale = element("span", { className: "scale quiet", children: [this.from, this.bar, this.to] });
    const title = element("h2", { text: `${name === "identity" ? "identity (logit lens)" : name}` });
    const caption = element("figcaption", { children: [title, scale] });
    this.figure = element("figure", { className: "grid", "data-lens": name, children: [caption, this.scroll] });
    const table = this.scroll.firstChild;
    table.addEventListener("click", (event) => this.#click(event.target.closest("td"), onSelect));
    table.addEventListener("dblclick", (event) => event.target.closest("td") && onOpen());
    table.addEventListener("mouseover", (event) => this.#hover(event.target.closest("td")));
    table.addEventListener("keydown", (event) => this.#press(event, onSelect, onOpen, onPin));
  }

  #table() {
    const { reading } = this;
    const headers = reading.positions.map((position) => {
      const text = reading.tokens[position].text;
      return element("th", { scope: "col", dir: "auto", text: visible(text), title: `${position}: ${visible(text)}` });
    });
    const corner = element("th", { scope: "col", className: "corner", text: "level" });
    const head = element("thead", { children: [element("tr", { children: [corner, ...headers] })] });
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
      if (best === reading.top[this.last][column][0]) cell.classList.add("own");
      if (reading.decided_at[column] === level) cell.classList.add("decided");
      if (position < reading.fitted_from && level < this.last) cell.classList.add("unfitted");
      this.cells[level][column] = cell;
      row.append(cell);
    });
    return row;
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

  #press(event, onSelect, onOpen, onPin) {
    const cell = event.target.closest("td");
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const [level, column] = coordinates(cell);
    const right = this.reading.positions.length - 1;
    const moves = {
      ArrowUp: [level + 1, column], ArrowDown: [level - 1, column],
      ArrowLeft: [level, column - 1], ArrowRight: [level, column + 1],
      Home: [level, 0], End: [level, right], PageUp: [this.last, column], PageDown: [0, column],
    };
    if (event.key in moves) {
      const [toLevel, toColumn] = moves[event.key];
      onSelect(clamp(toLevel, this.last), clamp(toColumn, right));
    } else if (event.key === "Enter" || event.key === " ") onOpen();
    else if (event.key === "p" || event.key === "P") onPin(this.reading.top[level][column][0]);
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

function coordinates(cell) {
  return cell.dataset.at.split(",").map(Number);
}

function clamp(value, most) {
  return Math.min(Math.max(value, 0), most);
}

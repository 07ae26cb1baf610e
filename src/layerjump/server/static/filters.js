// Filters: which levels and positions of a reading the grids show and the most-read tokens count.

import { fillSelect } from "./text.js";

const $ = (id) => document.getElementById(id);

// The rows and columns of a reading that pass.
export function passing(reading, { levels, positions, role }) {
  const inside = (range, value) => !range || (value >= range[0] && value <= range[1]);
  const hasRole = (position) => !role || !reading.roles || reading.roles[position] === role;
  const rows = [...reading.levels.keys()].filter((row) => inside(levels, Number(reading.levels[row])));
  const columns = [...reading.positions.keys()].filter((column) => {
    const position = reading.positions[column];
    return inside(positions, position) && hasRole(position);
  });
  // A filter of another text may let nothing pass: then it does not count.
  return { rows: rows.length ? rows : [...reading.levels.keys()], columns: columns.length ? columns : [...reading.positions.keys()] };
}

export class FilterPanel {
  constructor(page) {
    for (const name of ["levels", "positions"]) {
      for (const side of ["from", "to"]) $(`${name}-${side}`).addEventListener("change", () => page.go({ [name]: this.#range(name) }));
    }
    $("role").addEventListener("change", (event) => page.go({ role: event.target.value }));
    $("unfilter").addEventListener("click", () => page.go({ levels: null, positions: null, role: "" }));
  }

  #range(name) {
    const [from, to] = ["from", "to"].map((side) => $(`${name}-${side}`));
    const [least, most] = [Number(from.min), Number(from.max)];
    const read = (input, blank) => Math.min(most, Math.max(least, input.value === "" ? blank : Math.round(Number(input.value))));
    const first = read(from, least);
    const last = Math.max(first, read(to, most));
    return first === least && last === most ? null : [first, last];
  }

  fill(reading, { levels, positions, role }) {
    const ends = { levels: reading.levels.map(Number), positions: reading.positions };
    for (const [name, range] of Object.entries({ levels, positions })) {
      const [least, most] = [ends[name][0], ends[name].at(-1)];
      ["from", "to"].forEach((side, index) => {
        const input = $(`${name}-${side}`);
        input.min = least;
        input.max = most;
        input.value = range ? range[index] : [least, most][index];
      });
    }
    $("role-part").hidden = !reading.roles;
    const roles = [...new Set(reading.roles ?? [])];
    fillSelect($("role"), [["", "all"], ...roles.map((name) => [name, name])], roles.includes(role) ? role : "");
    $("unfilter").disabled = !levels && !positions && !role;
    $("filters-said").textContent = levels || positions || role ? " (active)" : "";
  }
}

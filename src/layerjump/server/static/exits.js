// The exit rule of layerjump.generation.rules.SoftmaxGap: exit at the first level, from 1 on, where the gap between
// the two largest probabilities exceeds 0.9 λ + 0.1 exp(−4 t / N).

const DECAY = 4;

// The row at which each position exits, from (levels × positions) gaps and 0-based positions.
export function exitRows(levels, confidence, positions, strength) {
  const length = positions.reduce((sum, t) => sum + t + 1, 0) / positions.length; // N
  const last = confidence.length - 1;
  return positions.map((t, column) => {
    const enough = 0.9 * strength + 0.1 * Math.exp((-DECAY * t) / length);
    for (let row = 0; row < last; row += 1) if (levels[row] >= 1 && confidence[row][column] > enough) return row;
    return last;
  });
}

// The rule on the fitted positions of a reading: rows (null where not fitted), blocks saved, agreement.
export function exitsOf(reading, strength, from) {
  const columns = [...reading.positions.keys()].filter((column) => reading.positions[column] >= from);
  if (!columns.length) return null;
  const levels = reading.levels.map(Number); // a lens may lack some levels
  const leads = reading.confidence.map((row) => columns.map((column) => row[column]));
  const found = exitRows(levels, leads, columns.map((column) => reading.positions[column]), strength);
  const last = levels.length - 1;
  const rows = reading.positions.map(() => null);
  let saved = 0;
  let agree = 0;
  found.forEach((row, i) => {
    const column = columns[i];
    rows[column] = row;
    saved += levels[last] - levels[row];
    if (reading.top[row][column][0] === reading.top[last][column][0]) agree += 1;
  });
  const count = columns.length;
  return { rows, count, saved: saved / count, share: saved / count / levels[last], agreement: agree / count };
}

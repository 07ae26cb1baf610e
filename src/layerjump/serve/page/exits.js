// The exit rule, as layerjump.decode.rules.SoftmaxGap has it: stop at the first level, from 1 on, where the best
// probability leads the second best by more than 0.9 λ + 0.1 exp(−4 t / N).

const DECAY = 4;

// Where each position stops: (levels × positions) leads and 0-based positions → a level for each.
export function leavingLevels(confidence, positions, strength) {
  const length = positions.reduce((sum, t) => sum + t + 1, 0) / positions.length; // N
  const last = confidence.length - 1;
  return positions.map((t, column) => {
    const enough = 0.9 * strength + 0.1 * Math.exp((-DECAY * t) / length);
    for (let level = 1; level < last; level += 1) if (confidence[level][column] > enough) return level;
    return last;
  });
}

// The rule on the fitted positions of a reading: levels (null where not fitted), blocks saved, agreement.
export function exitsOf(reading, strength, from) {
  const columns = [...reading.positions.keys()].filter((column) => reading.positions[column] >= from);
  if (!columns.length) return null;
  const leads = reading.confidence.map((row) => columns.map((column) => row[column]));
  const found = leavingLevels(leads, columns.map((column) => reading.positions[column]), strength);
  const last = reading.levels.length - 1;
  const levels = reading.positions.map(() => null);
  let saved = 0;
  let agree = 0;
  found.forEach((level, i) => {
    const column = columns[i];
    levels[column] = level;
    saved += last - level;
    if (reading.top[level][column][0] === reading.top[last][column][0]) agree += 1;
  });
  const count = columns.length;
  return { levels, count, saved: saved / count, share: saved / count / last, agreement: agree / count };
}

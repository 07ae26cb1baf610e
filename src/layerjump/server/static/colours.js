// Colours of cells: Viridis, which is readable with colour blindness, and text in a contrasting colour.

const VIRIDIS = [
  [68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140],
  [34, 168, 132], [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37],
];

// Okabe and Ito's colours, in the report's order.
export const LINES = ["#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F858D"];

// Bright is always good: probable, confident, close to the model.
export const MEASURES = {
  probability: {
    title: "probability",
    about: "probability of the top token",
    bright: "high",
    value: (reading, level, column) => reading.probability[level][column][0],
    most: () => 1,
    end: "",
  },
  entropy: {
    title: "entropy",
    about: "entropy, nats",
    bright: "low",
    value: (reading, level, column) => reading.entropy[level][column],
    end: "+",
    most: mostly("entropy"),
  },
  kl: {
    title: "KL to the model",
    about: "KL divergence from the model’s own distribution, nats",
    bright: "low",
    value: (reading, level, column) => reading.kl[level][column],
    end: "+",
    most: mostly("kl"),
  },
};

// One scale for all grids. It ends at the 90th percentile of the fitted cells: a few outliers would leave all others
// in one colour. Level L, where all lenses agree, does not count.
function mostly(name) {
  return (readings) => {
    const values = [];
    for (const reading of readings) {
      reading.positions.forEach((position, column) => {
        if (position < reading.fitted_from) return;
        for (const row of reading[name].slice(0, -1)) values.push(row[column] ?? 0);
      });
    }
    values.sort((a, b) => a - b);
    return values[Math.floor(0.9 * (values.length - 1))] || 1;
  };
}

export function colourOf(measure, value, most) {
  const share = Math.min(1, Math.max(0, value / most));
  return viridis(measure.bright === "high" ? share : 1 - share);
}

export function viridis(share) {
  const place = share * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const rgb = VIRIDIS[low].map((start, i) => Math.round(start + (place - low) * (VIRIDIS[low + 1][i] - start)));
  return { background: `rgb(${rgb})`, ink: luminance(rgb) > 0.18 ? "#000" : "#fff" };
}

// Relative luminance (WCAG): black text is more readable than white above 0.18.
function luminance(rgb) {
  const [red, green, blue] = rgb.map((part) => {
    const c = part / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

export function gradient(measure) {
  const stops = Array.from({ length: 11 }, (_, i) => colourOf(measure, i / 10, 1).background);
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

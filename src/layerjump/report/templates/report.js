"use strict";
// Draws the figures from the JSON next to them, and switches between light and dark.

const figures = [...document.querySelectorAll(".figure")];
const hasMouse = matchMedia("(pointer: fine)").matches;
const settings = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage", "resetScale2d"]],
  showSendToCloud: false,
};

for (const figure of figures) {
  const { data, layout } = JSON.parse(document.getElementById(figure.id + "-data").textContent);
  if (hasMouse) layout.dragmode = "zoom";
  Plotly.newPlot(figure, data, layout, settings);
}

// A legend entry shows or hides its traces in all figures of its panel.
for (const key of document.querySelectorAll(".key")) {
  key.addEventListener("click", () => {
    const shown = key.getAttribute("aria-pressed") === "false";
    key.setAttribute("aria-pressed", String(shown));
    for (const figure of key.closest(".block").querySelectorAll(".figure")) {
      const traces = figure.data.flatMap((trace, index) => (trace.legendgroup === key.dataset.name ? [index] : []));
      if (traces.length) Plotly.restyle(figure, { visible: shown }, traces);
    }
  });
}

// Paper is narrower than the screen: redraw at the width of a printed column.
function fitToPage(printing) {
  document.documentElement.classList.toggle("printing", printing);
  for (const figure of figures) {
    const width = parseFloat(getComputedStyle(figure.parentElement).gridTemplateColumns);
    Plotly.relayout(figure, printing ? { autosize: false, width } : { autosize: true, width: null });
  }
}
addEventListener("beforeprint", () => fitToPage(true));
addEventListener("afterprint", () => fitToPage(false));

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
});

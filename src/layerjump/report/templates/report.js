"use strict";
// Draws the figures, whose data stand beside them as JSON, and switches between light and dark.

const figures = [...document.querySelectorAll(".figure")];
const mouse = matchMedia("(pointer: fine)").matches;
const settings = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage", "resetScale2d"]],
  showSendToCloud: false,
};

for (const place of figures) {
  const { data, layout } = JSON.parse(document.getElementById(place.id + "-data").textContent);
  if (mouse) layout.dragmode = "zoom";
  Plotly.newPlot(place, data, layout, settings);
}

// A key shows or hides its lines in all figures of its panel.
for (const key of document.querySelectorAll(".key")) {
  key.addEventListener("click", () => {
    const shown = key.getAttribute("aria-pressed") === "false";
    key.setAttribute("aria-pressed", String(shown));
    for (const place of key.closest(".block").querySelectorAll(".figure")) {
      const mine = place.data.flatMap((trace, index) => (trace.legendgroup === key.dataset.name ? [index] : []));
      if (mine.length) Plotly.restyle(place, { visible: shown }, mine);
    }
  });
}

// Paper is narrower than the screen: redraw at the width that a column has there.
function fit(printing) {
  document.documentElement.classList.toggle("printing", printing);
  for (const place of figures) {
    const width = parseFloat(getComputedStyle(place.parentElement).gridTemplateColumns);
    Plotly.relayout(place, printing ? { autosize: false, width } : { autosize: true, width: null });
  }
}
addEventListener("beforeprint", () => fit(true));
addEventListener("afterprint", () => fit(false));

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
});

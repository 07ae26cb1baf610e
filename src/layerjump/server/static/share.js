// Save what the page shows as one HTML file that needs no server: the readings, and the modules that draw them.

const MODULES = ["text.js", "colours.js", "chart.js", "exits.js", "api.js", "explain.js", "what_if.js", "race.js", "filters.js",
  "most_read.js", "grid.js", "panel.js", "shared_view.js"]; // each after those that it imports
const STYLES = ["colours.css", "style.css"];
const POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

export async function saveFile(snapshot) {
  const read = async (name) => (await fetch(`/page/${name}`)).text();
  const [styles, modules] = await Promise.all([Promise.all(STYLES.map(read)), Promise.all(MODULES.map(read))]);
  const page = build(snapshot, styles.join("\n"), bundle(modules));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  link.download = `layerjump-${snapshot.model.replace(/[^\w.-]+/g, "-")}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// One script: each module is a function that returns its exports.
function bundle(sources) {
  const parts = sources.map((source, index) => {
    const names = [...source.matchAll(/^export (?:async )?(?:function|class|const) (\w+)/gm)].map((match) => match[1]);
    const body = source
      .replace(/^import \{([^}]+)\} from "\.\/([\w.]+)";$/gm, "const {$1} = modules[\"$2\"];")
      .replace(/^export /gm, "");
    return `modules["${MODULES[index]}"] = (() => {\n${body}\nreturn { ${names.join(", ")} };\n})();`;
  });
  return `const modules = {};\n${parts.join("\n")}\nmodules["shared_view.js"].showSnapshot();`;
}

function build(snapshot, style, script) {
  const data = JSON.stringify(snapshot).replaceAll("<", "\\u003c"); // nothing in it ends the script element
  return `<!doctype html>
<html lang="en"${snapshot.theme ? ` data-theme="${snapshot.theme}"` : ""}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="${POLICY}">
<title>layerjump</title>
<style>
${style}
</style>
</head>
<body>
<header><h1 class="brand">layerjump</h1><p class="about" id="about"></p></header>
<p id="prompt" dir="auto"></p>
<main id="reading">
  <div id="grids"></div>
  <aside><section id="cell" class="card"></section><section id="why" class="card" hidden></section><section id="what-if" class="card" hidden></section><section id="race" class="card" hidden></section><section id="most" class="card" hidden></section><section id="pins" class="card" hidden></section></aside>
</main>
<footer class="quiet"><p>Arrow keys move, Esc returns to the grid; bold cells agree with the model, a bar marks the level from which the prediction no longer changes.</p></footer>
<script type="application/json" id="snapshot">${data}</script>
<script type="module">
${script}
</script>
</body>
</html>
`;
}

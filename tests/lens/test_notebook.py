"""Objects in notebooks: the page's grid as a widget, and tables where widgets do not run."""

import json

import pytest

import layerjump as lj
from layerjump.lens.render.widget import widget_module

TEXT = "Once upon a time, there was a little <b>girl"


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def jumps(model, study_text):
    return lj.fit(model, study_text, tokens=2_000)


@pytest.fixture(scope="module")
def trajectory(model, jumps):
    return lj.Lens(model, jumps)(TEXT, k=4)


def test_a_trajectory_is_a_widget_with_a_table_to_fall_back_on(trajectory):
    bundle = trajectory._repr_mimebundle_()
    assert bundle["text/html"] == trajectory._repr_html_()
    assert bundle["text/plain"] == repr(trajectory)
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_the_kernel_computes_the_ranks_of_pinned_tokens(trajectory):
    widget = trajectory.widget()
    assert widget.reading == trajectory.to_dict()
    pinned = int(trajectory.top[-1, -1, 1])
    widget.pins = [pinned]
    (followed,) = widget.reading["followed"]
    assert followed["id"] == pinned
    assert followed["rank"] == trajectory.track(pinned).rank.tolist()
    widget.pins = []
    assert widget.reading["followed"] == []


HOST = """
const context = {{ el: document.getElementById("cell"), model: {{
  values: {{ reading: {reading}, pins: [] }}, saved: [],
  get(name) {{ return this.values[name]; }}, set(name, value) {{ this.values[name] = value; }},
  save_changes() {{ this.saved.push(this.values.pins); window.saved = this.saved; }}, on() {{}}, off() {{}},
}} }};
const {{ default: widget }} = await import(URL.createObjectURL(new Blob([{module}], {{ type: "text/javascript" }})));
await widget.render(context);
window.ready = true;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_grid_of_the_page_is_drawn_in_a_notebook(browser, trajectory, scheme, tmp_path):
    """In Chromium, as anywidget does it: the module from a Blob, `render` with a model and an element."""
    page = browser.new_page(color_scheme=scheme)
    errors = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    reading = json.dumps(trajectory.to_dict()).replace("</", "<\\/")
    module = json.dumps(widget_module()).replace("</", "<\\/")
    script = HOST.format(reading=reading, module=module)
    file = tmp_path / "notebook.html"
    file.write_text(f'<p>A notebook</p><div id="cell"></div><script type="module">{script}</script>', encoding="utf-8")
    page.goto(file.as_uri())
    page.wait_for_function("window.ready")
    cells = page.locator("#cell td")
    assert cells.count() == len(trajectory.levels) * len(trajectory.positions)
    best = trajectory.decode(trajectory.top[-1, :, 0].tolist())
    assert cells.first.inner_text().replace("␣", " ") == best[0]
    cells.first.click()
    assert "Level 4, after" in page.locator("#cell h2").nth(1).inner_text()
    page.locator("#cell .pin").first.click()
    assert page.evaluate("window.saved") == [[int(trajectory.top[-1, 0, 0])]]
    page.select_option("#cell select", "kl")
    page.screenshot(path=tmp_path / "notebook.png")
    assert page.evaluate("getComputedStyle(document.body).margin") == "8px"  # the notebook's own style is untouched
    assert errors == []
    page.close()


def test_tables_of_models_and_jumps(model, jumps):
    html = model._repr_html_()
    for part in ("GPT2LMHeadModel", "causal", "levels 0 to 4", "80", "full"):
        assert part in html
    html = jumps._repr_html_()
    assert html.count("<tr>") == 1 + len(jumps)
    assert f"{jumps.info[2, 4].r2[0]:.3f}" in html
    assert "<b>" not in html


def test_generated_text_is_coloured_by_exit_level(model, jumps):
    generated = lj.generate(model, jumps, "Once upon a", exit="gap:0.3", max_new_tokens=8)
    html = generated._repr_html_()
    assert html.count("<span") == generated.n_tokens
    for level in generated.exit_levels[0]:
        assert f'title="level {level} of 4"' in html
    assert "".join(generated.tokens[0]).strip() == generated.text[0].strip()

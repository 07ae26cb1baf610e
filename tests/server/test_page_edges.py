"""The page in Chromium: hostile and long text, first use, small and dark screens."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import browser_page
from helpers.browser_page import LAPTOP, PHONE, TEXT, ask, reading, wait_read
from helpers.server_process import serving
from helpers.story_text import stories

import layerjump as lj
from layerjump.generation.exit_rules import SoftmaxGap

opened = browser_page.opened  # a fixture

SCRIPT = '<script>document.title="broken"</script>'
IMAGE = "<img src=x onerror='document.title=\"broken\"'>"
TURNED = "\u202edlrow\u0007"


@pytest.fixture(scope="module")
def hostile(data_folder, tmp_path_factory):
    """The tiny model with three more tokens, of the worst kind; it predicts them wherever it predicted a full stop."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "hostile"
    tokenizer = AutoTokenizer.from_pretrained(data_folder / "tiny-gpt2")
    model = AutoModelForCausalLM.from_pretrained(data_folder / "tiny-gpt2")
    tokenizer.add_tokens([SCRIPT, IMAGE, TURNED])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    stop = tokenizer.encode(".")[0]
    with torch.no_grad():
        table = model.get_output_embeddings().weight
        for place, scale in enumerate((1.03, 1.02, 1.01), start=len(tokenizer) - 3):
            table[place] = scale * table[stop]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(data_folder, hostile, tmp_path_factory):
    models = [data_folder / "tiny-gpt2", data_folder / "tiny-bert", hostile]
    some = tmp_path_factory.mktemp("jumps") / "some"
    lj.fit(lj.load(models[0]), stories(60), pairs="1:4,3:4").save_pretrained(some)
    home = tmp_path_factory.mktemp("home")
    with serving(*models, "--jumps", f"some={some}", home=home) as running:
        running.fit("tiny-gpt2", ["mat", "affine", "ridge"])
        yield running


@pytest.mark.parametrize("strength", [0.05, 0.3])
def test_a_lens_of_some_levels_shows_and_exits_at_these(opened, server, strength):
    page = opened("model=tiny-gpt2&lens=some&open=exit")
    ask(page, TEXT, "some")
    assert page.locator("tbody th").all_inner_texts() == ["4", "3", "1"]
    page.locator("#strength").fill(str(strength))
    wanted = reading(server, TEXT, "some")
    lead = torch.full((5, len(wanted["positions"]) - 1), -1.0, dtype=torch.float64)
    lead[[1, 3, 4]] = torch.tensor(wanted["confidence"], dtype=torch.float64)[:, 1:]
    position = torch.arange(1, lead.shape[1] + 1)
    rule = SoftmaxGap(strength, float((position + 1).double().mean()))
    levels = rule.replay(lead, position).tolist()
    assert {1, 3} & set(levels)
    ringed = page.evaluate("[...document.querySelectorAll('td.leaves')].map(cell => cell.dataset.at)")
    rows = {1: 0, 3: 1}
    assert sorted(ringed) == sorted(f"{rows[level]},{c}" for c, level in enumerate(levels, 1) if level < 4)
    saved = 4 - sum(levels) / len(levels)
    said = page.inner_text("#savings")
    assert f"would save {float(f'{saved:.2g}'):g} of 4 blocks" in said
    assert f"({float(f'{25 * saved:.3g}'):g} %)" in said


@pytest.mark.parametrize(
    "text",
    [
        f"Lily said {SCRIPT} and {IMAGE} to {TURNED}.",
        "\"Quotes\", 'more' & `others` </td></table> &amp; %00 #hash?x=1&text=2",
        "👩‍👩‍👧 🎈 مرحبا بالعالم שלום\n\n\tnew line\u0000\u0085",
        " ",
    ],
    ids=["markup", "quotes", "scripts", "blank"],
)
def test_hostile_text_is_never_markup(opened, server, text):
    page = opened("model=hostile&lens=identity")
    ask(page, text, "identity")
    title = "document.title === 'layerjump' && !document.querySelector('main img, main script, td *')"
    assert page.evaluate(title)
    wanted = reading(server, text, "identity", model="hostile")
    assert page.locator("thead th").count() == len(wanted["positions"]) + 1
    if SCRIPT in text:
        assert SCRIPT in [head.replace("␣", " ") for head in page.locator("thead th").all_inner_texts()]
        assert SCRIPT in page.evaluate("document.getElementById('grids').innerText").replace("␣", " ")
        assert "⟨202E⟩" in page.inner_text("thead")
    address = page.url
    page.reload()
    wait_read(page, text, "identity")
    assert page.url == address


@pytest.mark.parametrize("asked", [False, True], ids=["typed", "asked"])
def test_a_prompt_typed_before_the_server_answers_stays(opened, asked):
    held = []

    def hold(route):
        held.append(route)

    page = opened(before=lambda page: page.route("**/api/models", hold))
    page.fill("#text", TEXT)
    if asked:
        page.press("#text", "Enter")
    else:  # whatever else is moved meanwhile
        page.evaluate("document.getElementById('strength').dispatchEvent(new Event('input', {bubbles: true}))")
    for _ in range(1000):
        if held:
            break
        page.wait_for_timeout(20)
    held.pop().continue_()
    if not asked:
        wait_read(page, "The capital of France is the city of")
        assert page.input_value("#text") == TEXT
        page.press("#text", "Enter")
    wait_read(page, TEXT)
    assert page.input_value("#text") == TEXT


def test_too_long_a_text_is_refused_with_its_length(opened):
    page = opened(refused=422)
    ask(page)
    text = "word " * 2_000
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.wait_for_selector("#trouble:not([hidden])")
    assert "tokens, and at most 128 are read" in page.inner_text("#trouble")
    ask(page, "Tom saw a dog.")
    assert page.is_hidden("#trouble")


def test_first_use_fits_with_a_progress_bar(opened):
    page = opened(f"model=tiny-bert&lens=mat&text={'Lily saw a [MASK] dog.'}")
    page.wait_for_selector("#fitting:not([hidden]) progress")
    assert "Fitting mat, affine and ridge for tiny-bert" in page.inner_text("#fitting-words")
    wait_read(page, "Lily saw a [MASK] dog.")
    assert page.is_hidden("#fitting")
    assert page.locator("thead th").all_inner_texts() == ["level", "[MASK]"]
    assert page.input_value("#model") == "tiny-bert"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_the_page_fits_the_screen_in_light_and_dark(opened, size, scheme):
    page = opened("with=identity", size, scheme)
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    colour = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(colour)
    page.click("#theme")
    assert (first == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.evaluate(colour) != first
    page.reload()
    assert page.evaluate(colour) != first


def test_text_has_enough_contrast_on_every_colour(opened):
    """WCAG asks for a contrast of 4.5 between text and background."""
    page = opened()
    contrasts = page.evaluate("""async () => {
        const { viridis } = await import('/page/colours.js');
        const light = (rgb) => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        return Array.from({ length: 201 }, (_, i) => viridis(i / 200)).map(({ background, ink }) => {
            const [a, b] = [light(background.match(/\\d+/g).map(Number)), ink === '#000' ? 0 : 1];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        });
    }""")
    assert min(contrasts) >= 4.5


def test_the_list_of_routes_needs_no_network(opened, server):
    page = opened()
    page.goto(server.url + "api/docs")
    page.wait_for_selector("section.card")
    _, described = server.ask("/api/openapi.json")
    for path in described["paths"]:
        assert page.locator("h2", has_text=path).count() >= 1
    assert json.dumps(lj.__version__) in json.dumps(described["info"])

"""The page in a real Chromium, on a real server: what is typed, clicked, pinned and shared does what it says."""

from __future__ import annotations

import json

import pytest
import torch
from serving import serving

import layerjump as lj
from layerjump.decode.rules import SoftmaxGap

LAPTOP, PHONE = {"width": 1366, "height": 768}, {"width": 390, "height": 844}
TEXT = "Once upon a time, there was a little girl named Lily. One day, Lily went to the"
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
    with serving(*models, home=tmp_path_factory.mktemp("home")) as running:
        running.fit("tiny-gpt2", ["mat", "affine", "ridge"])
        yield running


@pytest.fixture
def opened(browser, server):
    """A function: address after #, size and scheme → the page. At the end: no errors, nothing fetched elsewhere."""
    contexts, errors, requests, expected = [], [], [], []

    def open_page(state="", size=LAPTOP, scheme="light", *, refused=None):
        expected.append(refused)
        context = browser.new_context(viewport=size, color_scheme=scheme)
        context.set_default_timeout(240_000)  # a loaded machine may pause anything
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(server.url + (f"#{state}" if state else ""))
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A refused question is logged by the browser itself; a test that asks one says so.
    statuses = [f"status of {refused}" for refused in expected if refused]
    assert [error for error in errors if not any(status in error for status in statuses)] == []
    assert [url for url in requests if not url.startswith(server.url)] == []


def wait_read(page, text=TEXT, lens="mat"):
    """Wait until the grid shows this reading."""
    page.wait_for_function(
        "([text, lens]) => new URLSearchParams(location.hash.slice(1)).get('text') === text"
        " && document.querySelector(`figure[data-lens=${lens}] td[aria-selected]`)"
        " && !document.body.classList.contains('waiting')",
        arg=[text, lens],
    )


def ask(page, text=TEXT, lens="mat"):
    page.fill("#text", text)
    page.press("#text", "Enter")
    wait_read(page, text, lens)


def reading(server, text=TEXT, lens="mat", **more):
    body = {"model": "tiny-gpt2", "text": text, "lenses": [lens]} | more
    status, answer = server.patiently("/api/lens", body)
    assert status == 200, answer
    return answer["lenses"][lens]


def cell(page, level, column, lens="mat"):
    return page.locator(f'figure[data-lens={lens}] td[data-at="{level},{column}"]')


def test_a_prompt_becomes_a_grid(opened, server):
    page = opened()
    ask(page)
    wanted = reading(server)
    rows, columns = len(wanted["levels"]), len(wanted["positions"])
    assert page.locator("td[role=gridcell]").count() == rows * columns
    shown = cell(page, 2, 3).inner_text()
    assert shown == wanted["words"][str(wanted["top"][2][3][0])].replace(" ", "␣").replace(
        "\n", "↵"
    )
    assert page.locator("thead th").nth(1).inner_text() == wanted["tokens"][0]["text"]
    marked = page.evaluate(
        "[...document.querySelectorAll('td.decided')].map(cell => cell.dataset.at)"
    )
    assert sorted(marked) == sorted(f"{level},{c}" for c, level in enumerate(wanted["decided_at"]))
    own = {f"{r},{c}" for r in range(rows) for c in range(columns) if _same(wanted, r, c)}
    assert own == set(
        page.evaluate("[...document.querySelectorAll('td.own')].map(cell => cell.dataset.at)")
    )


def _same(wanted, level, column):
    return wanted["top"][level][column][0] == wanted["top"][-1][column][0]


def test_a_click_shows_the_cells_best_tokens(opened, server):
    page = opened()
    ask(page)
    wanted = reading(server)
    cell(page, 1, 4).click()
    assert "Level 1" in page.inner_text("#cell h2")
    numbers = [float(text) for text in page.locator("#cell .number").all_inner_texts()]
    assert numbers == pytest.approx(wanted["probability"][1][4], rel=6e-3)
    widths = page.evaluate(
        "[...document.querySelectorAll('#cell .fill')].map(bar => parseFloat(bar.style.width))"
    )
    assert widths == pytest.approx([100 * p for p in wanted["probability"][1][4]], rel=1e-3)
    assert "at=1%2C4" in page.url


def test_pinned_tokens_are_followed_through_the_levels(opened, server):
    page = opened()
    ask(page)
    cell(page, 4, 5).click()
    page.locator("#cell .pin").nth(4).click()
    page.wait_for_selector("#pins polyline", state="attached")
    cell(page, 0, 5).click()
    best = reading(server)["top"][4][5][4]
    followed = reading(server, tokens=[best])["followed"][0]
    assert f"rank {followed['rank'][0][5] + 1}," in page.inner_text("#pins .pinned")
    heights = [
        float(point.split(",")[1])
        for point in page.get_attribute("#pins polyline", "points").split()
    ]
    ranks = [row[5] for row in followed["rank"]]
    assert len(heights) == len(ranks)
    assert sorted(range(5), key=lambda i: (heights[i], i)) == sorted(
        range(5), key=lambda i: (ranks[i], i)
    )
    page.locator("#pins .pin").click()
    page.wait_for_selector("#pins polyline", state="detached")
    assert "pin=" not in page.url


def test_two_lenses_side_by_side_move_together(opened):
    page = opened()
    ask(page)
    page.select_option("#other", "identity")
    wait_read(page, lens="identity")
    cell(page, 2, 6, "identity").click()
    selected = "[...document.querySelectorAll('td[aria-selected]')].map(cell => cell.dataset.at)"
    assert page.evaluate(selected) == ["2,6", "2,6"]
    assert page.locator("#cell h3").all_inner_texts() == ["mat", "identity"]
    boxes = [page.locator("figure.grid").nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.set_viewport_size(PHONE)
    boxes = [page.locator("figure.grid").nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]


@pytest.mark.parametrize("strength", [0.05, 0.3, 0.62, 1.12])
def test_the_slider_is_the_exit_rule(opened, server, strength):
    page = opened()
    ask(page)
    page.locator("#strength").fill(str(strength))
    wanted = reading(server)
    lead = torch.tensor(wanted["confidence"], dtype=torch.float64)[:, 1:]
    position = torch.arange(1, lead.shape[1] + 1)
    rule = SoftmaxGap(strength, float((position + 1).double().mean()))
    levels = rule.replay(lead, position).tolist()
    ringed = page.evaluate(
        "[...document.querySelectorAll('td.leaves')].map(cell => cell.dataset.at)"
    )
    assert sorted(ringed) == sorted(
        f"{level},{c}" for c, level in enumerate(levels, 1) if level < 4
    )
    agree = sum(_same(wanted, level, column) for column, level in enumerate(levels, 1)) / len(
        levels
    )
    said = page.inner_text("#savings")
    assert f"of {len(levels)} positions" in said
    assert f"would save {float(f'{4 - sum(levels) / len(levels):.2g}'):g} of 4 blocks" in said
    assert f"on {float(f'{100 * agree:.3g}'):g} %" in said
    assert ("exit=" in page.url) == (strength != 0.9)


def test_colours_follow_the_measure(opened, server):
    page = opened()
    ask(page)
    wanted = reading(server)
    light = "element => getComputedStyle(element).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    page.select_option("#colour", "kl")
    assert (
        cell(page, 4, 5).evaluate(light) == 253 + 231 + 37
    )  # the model itself: no distance, brightest
    flat = [
        (wanted["kl"][r][c], r, c) for r in range(5) for c in range(1, len(wanted["positions"]))
    ]
    _, level, column = max(flat)
    assert cell(page, level, column).evaluate(light) == 68 + 1 + 84
    assert "colour=kl" in page.url


def test_back_forward_and_reload_keep_the_state(opened):
    page = opened()
    ask(page)
    page.select_option("#other", "identity")
    wait_read(page, lens="identity")
    cell(page, 1, 7).click()
    ask(page, "Tom saw a big dog.")
    page.select_option("#colour", "entropy")
    page.go_back()
    page.wait_for_function("document.getElementById('colour').value === 'probability'")
    page.go_back()
    wait_read(page, TEXT, "identity")
    assert page.input_value("#text") == TEXT
    assert page.get_attribute("figure[data-lens=mat] td[aria-selected]", "data-at") == "1,7"
    page.go_forward()
    page.go_forward()
    wait_read(page, "Tom saw a big dog.", "identity")
    assert page.input_value("#colour") == "entropy"
    address = page.url
    page.reload()
    wait_read(page, "Tom saw a big dog.", "identity")
    assert page.url == address
    assert page.input_value("#text") == "Tom saw a big dog."
    assert page.input_value("#colour") == "entropy"
    assert page.input_value("#other") == "identity"


def test_the_keyboard_is_enough(opened, server):
    page = opened()
    ask(page)
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('td')"):
            break
    for key in ("Home", "PageDown", "ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    here = "document.activeElement.dataset.at"
    assert page.evaluate(here) == "1,2"
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert "level 1 after" in label
    assert "probability" in label
    page.keyboard.press("p")
    page.wait_for_selector("#pins polyline", state="attached")
    best = reading(server)["top"][1][2][0]
    assert f"pin={best}" in page.url
    assert page.evaluate(here) == "1,2"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.matches('#cell .pin')")
    page.keyboard.press("Escape")
    assert page.evaluate(here) == "1,2"


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
def test_hostile_text_is_only_ever_text(opened, server, text):
    page = opened("model=hostile&lens=identity")
    ask(page, text, "identity")
    title = (
        "document.title === 'layerjump' && !document.querySelector('main img, main script, td *')"
    )
    assert page.evaluate(title)
    wanted = reading(server, text, "identity", model="hostile")
    assert page.locator("thead th").count() == len(wanted["positions"]) + 1
    if SCRIPT in text:
        assert SCRIPT in [
            head.replace("␣", " ") for head in page.locator("thead th").all_inner_texts()
        ]
        assert SCRIPT in page.evaluate("document.getElementById('grids').innerText").replace(
            "␣", " "
        )
        assert "⟨202E⟩" in page.inner_text("thead")
    address = page.url
    page.reload()
    wait_read(page, text, "identity")
    assert page.url == address


def test_ten_thousand_characters_are_refused_in_words(opened):
    page = opened(refused=422)
    ask(page)
    text = "word " * 2_000
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.wait_for_selector("#trouble:not([hidden])")
    assert "tokens, and up to 128 can be read" in page.inner_text("#trouble")
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


def test_text_stands_out_from_every_colour(opened):
    """WCAG asks for a contrast of 4.5 between text and what is behind it."""
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

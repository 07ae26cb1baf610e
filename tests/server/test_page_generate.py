"""The generate panel in Chromium: tokens arrive, coloured by exit level, and only as text."""

from __future__ import annotations

import re
from urllib.parse import urlencode

import pytest
from helpers.http_generation import calibrated_jumps, slow_model
from helpers.server_process import serving

import layerjump as lj

LAPTOP, PHONE = {"width": 1366, "height": 768}, {"width": 390, "height": 844}
PROMPT = "Once upon a time, there was a little girl named"
MARKUP = "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return calibrated_jumps(model, tmp_path_factory.mktemp("jumps"))


@pytest.fixture(scope="module")
def server(data_folder, folder, tmp_path_factory):
    tiny = data_folder / "tiny-gpt2"
    slow = slow_model(tiny, tmp_path_factory.mktemp("models") / "slow")
    models = [tiny, data_folder / "tiny-bert", slow]
    home = tmp_path_factory.mktemp("home")
    with serving(*models, "--jumps", f"own={folder}", home=home) as running:
        yield running


@pytest.fixture
def opened(browser, server):
    """A function: more of the address, size → the page with its panel. At the end: no errors in the console."""
    contexts, errors, expected = [], [], []

    def open_page(size=LAPTOP, scheme="light", *, refused=None, **more):
        expected.append(refused)
        context = browser.new_context(viewport=size, color_scheme=scheme)
        context.set_default_timeout(120_000)  # a loaded machine may pause anything
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        state = {"model": "tiny-gpt2", "lens": "own", "text": PROMPT, "open": "generate"} | more
        page.goto(f"{server.url}#{urlencode(state)}")
        page.wait_for_selector("#generate:not([hidden])")
        return page

    yield open_page
    for context in contexts:
        context.close()
    statuses = [f"status of {refused}" for refused in expected if refused]
    assert [error for error in errors if not any(status in error for status in statuses)] == []


def generate(page):
    """Press the button, and wait for the numbers."""
    page.click("#write-button")
    page.wait_for_function("() => / ms each/.test(document.getElementById('write-status').textContent)")
    return page.inner_text("#write-status")


def colours(page):
    return page.evaluate(
        "[...document.querySelectorAll('#tokens [role=option]')].map(token => token.style.backgroundColor)"
    )


def test_tokens_are_coloured_by_exit_level(opened, model, folder):
    page = opened(rule="gap:0.3", new=24)
    said = generate(page)
    jumps = lj.Jumps.from_pretrained(folder)
    made = lj.generate(model, jumps, PROMPT, exit="gap:0.3", max_new_tokens=24, do_sample=False)
    levels = made.exit_levels[0]
    assert len(set(levels)) > 2
    shown = colours(page)
    by_level = dict(zip(levels, shown, strict=True))
    assert shown == [by_level[level] for level in levels]
    assert len(set(by_level.values())) == len(by_level)
    assert by_level[4] == ""  # the whole model: no colour
    text = page.evaluate("document.getElementById('tokens').textContent")
    assert text.replace("↵", "") == made.text[0]
    assert page.inner_text("#given") == PROMPT
    legend = page.locator("#exit-levels li").all_inner_texts()
    assert [re.sub(r"\s+", " ", entry) for entry in legend] == [
        f"{f'level {level}' if level < 4 else 'full model (4)'} × {levels.count(level)}"
        for level in sorted(set(levels))
    ]
    assert said.startswith(f"{len(levels)} tokens in ")
    assert f"{made.counts.unembeddings} unembeddings" in said
    assert f"{float(f'{100 * made.blocks_saved:.3g}'):g} % of blocks skipped" in said


def test_lossless_text_is_verified_and_states_the_acceptance_rate(opened, model, folder):
    page = opened(rule="fixed:2", new=24)
    page.check("#lossless")
    assert page.is_disabled("#cache")
    said = generate(page)
    full = lj.generate(model, None, PROMPT, max_new_tokens=24, do_sample=False)
    text = page.evaluate("[...document.querySelectorAll('#tokens > [role=option]')].map(t => t.textContent).join('')")
    assert text.replace("↵", "") == full.text[0]
    share, n_drafts = re.search(r"([\d.]+) % of (\d+) drafts accepted", said).groups()
    assert re.search(r"[\d.]+ tokens a step, [\d.]+ times as fast as without drafts", said)
    titles = page.evaluate("[...document.querySelectorAll('#tokens > [role=option]')].map(token => token.title)")
    assert all(title.endswith("verified") and "not verified" not in title for title in titles)
    # Accepted drafts are named in the legend, rejected ones struck through before the token in their place.
    accepted = sum(title.startswith("draft of exit, exits at level 2 of 4") for title in titles)
    assert accepted == round(float(share) / 100 * int(n_drafts)) > 0
    assert f"exit × {accepted}" in " ".join(page.inner_text("#exit-levels").split())
    rejected = page.evaluate("[...document.querySelectorAll('#tokens > s')].map(draft => draft.title)")
    assert rejected == ["rejected draft of exit"] * (int(n_drafts) - accepted)
    assert "lossless=yes" in page.url


def test_controls_offer_what_the_lens_supports(opened):
    page = opened()
    names = "[...document.querySelectorAll('#rule option')].map(option => option.value)"
    assert page.evaluate(names) == ["never", "gap", "fixed", "calibrated"]
    page.select_option("#rule", "fixed")
    assert page.is_visible("#exit-level")
    assert page.is_hidden("#lead")
    page.fill("#exit-level", "3")
    page.press("#exit-level", "Tab")
    assert "rule=fixed%3A3" in page.url
    page.select_option("#cache", "jump")
    page.reload()
    page.wait_for_selector("#generate:not([hidden])")
    assert (page.input_value("#exit-level"), page.input_value("#cache")) == ("3", "jump")
    generate(page)
    page.select_option("#rule", "calibrated")
    generate(page)
    page.select_option("#lens", "identity")
    page.wait_for_selector("figure[data-lens=identity]")
    assert page.evaluate(names) == ["never", "gap", "fixed"]
    assert page.input_value("#cache") == "exact"
    generate(page)


def test_hover_and_arrow_keys_show_a_tokens_exit_level(opened):
    page = opened(rule="fixed:2", new=6)
    generate(page)
    tokens = page.locator("#tokens [role=option]")
    tokens.nth(3).hover()
    assert "exits at level 2 of 4, not verified" in page.inner_text("#token-said")
    assert "exits at level 2 of 4, not verified" in tokens.nth(3).get_attribute("title")
    page.focus("#write-button")
    page.keyboard.press("Tab")
    here = "[...document.querySelectorAll('#tokens > *')].indexOf(document.activeElement)"
    assert page.evaluate(here) == 0
    for key, place in (("ArrowRight", 1), ("End", 5), ("ArrowLeft", 4), ("Home", 0)):
        page.keyboard.press(key)
        assert page.evaluate(here) == place
        assert page.locator("#tokens [aria-selected=true]").count() == 1


def test_stop_keeps_the_tokens_so_far(opened, server):
    page = opened(model="slow", lens="identity", new=256, rule="never", text="a")
    page.wait_for_selector("figure[data-lens=identity]")
    page.click("#write-button")
    page.wait_for_function("() => document.querySelectorAll('#tokens > *').length > 2")
    assert page.inner_text("#write-button") == "Stop"
    page.click("#write-button")
    assert page.inner_text("#write-button") == "Generate"
    count = page.locator("#tokens [role=option]").count()
    assert 2 < count < 200
    assert page.inner_text("#write-status") == f"Stopped after {count} tokens."
    assert server.seconds_until_free("slow") < 3
    page.fill("#count", "3")
    assert generate(page).startswith("3 tokens in")


def test_a_masked_model_says_why_it_does_not_generate(opened):
    page = opened(model="tiny-bert", lens="identity", text="Lily saw a [MASK] dog.")
    assert page.is_hidden("#write")
    assert page.inner_text("#cannot").startswith("Generate: tiny-bert is a masked model")
    page.select_option("#model", "tiny-gpt2")
    page.wait_for_selector("#write:not([hidden])")
    assert page.is_hidden("#cannot")


def test_generated_tokens_are_read_as_well(opened):
    page = opened(rule="never", new=5)
    generate(page)
    text = page.evaluate("document.getElementById('tokens').textContent").replace("↵", "")
    before = page.locator("thead th").count()
    page.click("#adopt")
    page.wait_for_function("before => document.querySelectorAll('thead th').length === before + 5", arg=before)
    assert page.input_value("#text") == PROMPT + text


def test_errors_are_one_line_in_the_panel(opened):
    page = opened(refused=422, new=200)
    page.click("#write-button")
    page.wait_for_selector("#write-trouble:not([hidden])")
    assert "ask for fewer" in page.inner_text("#write-trouble")
    page.fill("#count", "4")
    generate(page)
    assert page.is_hidden("#write-trouble")


def test_markup_in_prompt_and_tokens_is_only_text(opened):
    page = opened(text=f"{MARKUP} \u202eabc", new=4)
    generate(page)
    assert page.evaluate("document.title === 'layerjump' && !document.querySelector('#generate img')")
    assert MARKUP in page.inner_text("#given")
    assert "⟨202E⟩" in page.inner_text("#given")
    shown = page.evaluate("""async () => {
        const { generate } = await import('/page/generated_text.js');
        const real = window.fetch;
        const lines = [{ token: 1, text: '<img src=x onerror=alert(1)>', level: 1, verified: false }];
        window.fetch = async () => new Response(lines.map(line => JSON.stringify(line) + '\\n').join(''));
        await generate({ prompt: 'a' }, 4, { report: () => {} });
        window.fetch = real;
        return [document.getElementById('tokens').textContent, document.querySelectorAll('#generate img').length];
    }""")
    assert shown == ["<img src=x onerror=alert(1)>", 0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_the_panel_fits_the_screen(opened, size, scheme):
    page = opened(size, scheme, rule="gap:0.3", new=40)
    generate(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_a_long_text_is_read_in_full_and_its_end_is_shown(opened, server):
    text = "a b c d e " * 60
    page = opened(model="slow", lens="identity", text=text)
    page.wait_for_function("() => document.querySelectorAll('thead th').length > 100")
    assert page.locator("thead th").count() == 257
    _, answer = server.patiently("/api/lens", {"model": "slow", "text": text, "k": 1})
    reading = answer["lenses"]["identity"]
    length = len(reading["tokens"])
    assert length > 256
    assert reading["positions"] == list(range(length - 256, length))
    said = page.inner_text("#status")
    assert said.startswith(f"The last 256 of {length} positions × 65 levels")

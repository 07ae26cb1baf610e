"""The page in Chromium: why, what if, two prompts, chats, concepts, filters, a saved file and the guided examples."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

import pytest
from helpers import browser_page, fitted_gpt2
from helpers.browser_page import LAPTOP, PHONE, TEXT, ask, cell, reading, wait_read
from helpers.http_generation import talking_model
from helpers.server_process import serving

import layerjump as lj

opened = browser_page.opened  # a fixture
model = fitted_gpt2.model  # a fixture

OTHER = "Once upon a time, there was a little boy named Tim. One day, Tim went to the"
CHAT = [["system", "Be kind."], ["user", "Tell me of Lily."]]
ALL_OPEN = ["why", "what-if", "race", "most", "filters", "exit", "generate"]


@pytest.fixture(scope="module")
def server(data_folder, tmp_path_factory):
    talking = talking_model(data_folder / "tiny-gpt2", tmp_path_factory.mktemp("models") / "talking")
    with serving(data_folder / "tiny-gpt2", talking, home=tmp_path_factory.mktemp("home")) as running:
        yield running


def address(**state):
    """The address of a state; the lens needs no fit."""
    return urlencode({"model": "tiny-gpt2", "lens": "identity", "text": TEXT} | state, doseq=True)


def visible(text):
    return text.replace(" ", "␣").replace("\n", "↵")


def test_a_cell_says_why_and_in_contrast_to_what(opened, server):
    page = opened(address(at="3,5", open="why"))
    page.wait_for_selector("#why .why")
    body = {"model": "tiny-gpt2", "text": TEXT, "level": 3, "position": 5}
    status, answer = server.patiently("/api/explain", body | {"rows": 6})
    assert status == 200
    largest = sorted(answer["parts"], key=lambda row: -abs(row["value"]))[:6]
    names = page.locator("#why .why").first.locator("li > span:first-child").all_inner_texts()
    assert names == [row["name"] for row in largest]
    bars = page.locator("#why svg rect")
    assert bars.count() == len(answer["parts"])
    titles = page.evaluate("[...document.querySelectorAll('#why svg title')].map(title => title.textContent)")
    assert [title.rsplit(" ", 1)[0] for title in titles] == [row["name"] for row in answer["parts"]]
    heights = page.evaluate("[...document.querySelectorAll('#why rect')].map(bar => +bar.getAttribute('height'))")
    order = [abs(row["value"]) for row in answer["parts"]]
    assert max(range(len(order)), key=order.__getitem__) == max(range(len(order)), key=heights.__getitem__)
    page.fill("#against", "␣the")
    page.press("#against", "Enter")
    page.wait_for_function("() => document.querySelector('#why').innerText.includes('less that of')")
    _, contrast = server.patiently("/api/explain", body | {"against": " the"})
    value = float(f"{contrast['reading']:.3g}")
    assert f"{value:g}".replace("-", "−") in page.inner_text("#why")
    before = page.inner_text("#why")
    cell(page, 1, 5, "identity").click()
    page.wait_for_function("before => document.querySelector('#why').innerText !== before", arg=before)
    assert "at level 1" in page.inner_text("#why")


def continuations(page):
    """Wait for both texts."""
    page.wait_for_selector("#continuations dl[data-done]")
    return [text.replace("↵ ", "\n") for text in page.locator("#continuations dd").all_text_contents()]


def test_a_swap_shows_the_changed_text_under_the_original(opened, model):
    page = opened(address(at="3,5", open="what-if"))
    page.wait_for_selector("#what-form")
    page.fill("#what-first", "␣the")
    page.fill("#what-second", "␣a")
    page.fill("#what-from", "3")
    page.fill("#what-to", "3")
    page.click("#what-form button.main")
    page.wait_for_selector("figure[data-lens=changed]")
    lens = lj.Lens(model)
    options = {"max_new_tokens": 20, "do_sample": False}
    plain = lj.generate(model, None, TEXT, **options).text[0]
    with lj.swap(lens, " the", " a", levels=[3]):
        expected, changed = lens(TEXT), lj.generate(model, None, TEXT, **options).text[0]
    assert continuations(page) == [plain, changed]
    assert plain != changed
    tops = [visible(text) for text in expected.decode(expected.top[3, :, 0].tolist())]
    shown = page.locator("figure[data-lens=changed] tbody tr").nth(1).locator("td").all_inner_texts()
    assert shown == tops
    outlined = page.evaluate("[...document.querySelectorAll('td.changed')].map(cell => cell.dataset.at)")
    differ = (expected.top[:, :, 0] != lens(TEXT).top[:, :, 0]).nonzero().tolist()
    assert sorted(outlined) == sorted(f"{level},{column}" for level, column in differ)
    page.reload()  # the address holds the intervention
    page.wait_for_selector("figure[data-lens=changed]")
    assert continuations(page)[1] == changed
    page.click("#undo")
    page.wait_for_selector("figure[data-lens=changed]", state="detached")
    assert "what=" not in page.url


@pytest.mark.parametrize("kind", ["steer", "ablate"])
def test_steering_and_ablation_take_positions(opened, model, kind):
    page = opened(address(at="3,5", open="what-if"))
    page.wait_for_selector("#what-form")
    page.select_option("#what-kind", kind)
    assert page.is_hidden("#what-second")
    page.fill("#what-first", "␣the")
    page.fill("#what-from", "2")
    page.fill("#what-to", "3")
    page.fill("#what-positions", "4, 17-19")
    places = {"levels": [2, 3], "positions": [4, 17, 18, 19]}
    lens = lj.Lens(model)
    if kind == "steer":
        page.fill("#what-strength", "0.8")
        context = lj.steer(lens, " the", strength=0.8, **places)
    else:
        context = lj.ablate(lens, [" the"], **places)
    page.click("#what-form button.main")
    page.wait_for_selector("figure[data-lens=changed]")
    with context:
        expected = lens(TEXT)
    shown = page.locator("figure[data-lens=changed] tbody tr").first.locator("td").all_inner_texts()
    assert shown == [visible(text) for text in expected.decode(expected.top[4, :, 0].tolist())]


@pytest.mark.parametrize(
    ("first", "level", "words"),
    [("no single token at all", "3", "Expected the text of one token"), ("␣the", "4000", None)],
)
def test_refused_interventions_say_why_in_one_line(opened, first, level, words):
    page = opened(address(at="3,5", open="what-if"), refused=422)
    page.wait_for_selector("#what-form")
    page.fill("#what-first", first)
    page.fill("#what-to", level)
    page.click("#what-form button.main")
    if words is None:  # the browser itself holds back what cannot be
        assert page.evaluate("document.getElementById('what-to').validity.rangeOverflow")
        return
    page.wait_for_selector("#what-if .trouble:not([hidden])")
    assert words.lower() in page.inner_text("#what-if .trouble").lower()
    assert page.locator("figure[data-lens=identity] td").count() > 0
    assert page.locator("figure[data-lens=changed]").count() == 0


@pytest.mark.parametrize("way", ["drag", "keys", "form"])
def test_a_state_of_the_second_prompt_is_put_into_the_first(opened, model, way):
    page = opened(address(at="2,9", open="what-if"))
    page.wait_for_selector("figure[data-lens=identity]")
    page.click("#second-toggle")
    page.fill("#second", OTHER)
    page.press("#second", "Enter")
    page.wait_for_function("() => document.querySelector('figure[data-lens=second] thead')?.innerText.includes('boy')")
    assert page.is_disabled("#other")
    if way == "drag":
        cell(page, 2, 9, "second").drag_to(cell(page, 0, 9, "identity"))
    else:
        cell(page, 2, 9, "second").click()
        cell(page, 1, 9, "identity").click()
    if way == "keys":
        page.keyboard.press("v")
    elif way == "form":
        page.select_option("#what-kind", "patch")
        page.fill("#what-from", "2")
        page.fill("#what-to", "2")
        page.click("#what-form button.main")
    page.wait_for_selector("figure[data-lens=changed]")
    lens = lj.Lens(model)
    with lj.patch(lens, lens(OTHER), levels=[2], positions=[9]):
        expected = lens(TEXT)
        text = lj.generate(model, None, TEXT, max_new_tokens=20, do_sample=False).text[0]
    shown = page.locator("figure[data-lens=changed] tbody tr").first.locator("td").all_inner_texts()
    assert shown == [visible(text) for text in expected.decode(expected.top[4, :, 0].tolist())]
    assert continuations(page)[1] == text
    page.click("#second-toggle")
    page.wait_for_selector("figure[data-lens=second]", state="detached")
    page.wait_for_selector("figure[data-lens=changed]", state="detached")


def test_a_chat_is_rendered_and_its_roles_are_marked(opened, server):
    page = opened(address(model="talking", chat=json.dumps(CHAT)))
    page.wait_for_selector("figure[data-lens=identity]")
    body = {"model": "talking", "text": [{"role": role, "content": content} for role, content in CHAT]}
    _, answer = server.patiently("/api/lens", body)
    wanted = answer["lenses"]["identity"]
    assert page.locator("thead th").count() == len(wanted["tokens"]) + 1
    roles = page.evaluate("[...document.querySelectorAll('thead th.role')].map(head => head.className.split(' ')[1])")
    assert roles == wanted["roles"]
    assert {"system", "user", "template"} <= set(roles)
    assert page.is_hidden("#text")
    page.click("#add-message")
    page.keyboard.type("Lily was")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('thead th.assistant')")
    assert json.dumps([*CHAT, ["assistant", "Lily was"]], separators=(",", ":")) in page.evaluate(
        "new URLSearchParams(location.hash.slice(1)).get('chat')"
    )
    page.evaluate("document.getElementById('filters').open = true")
    page.select_option("#role", "user")
    page.wait_for_function("() => [...document.querySelectorAll('thead th.role')].filter(h => !h.hidden).length > 0")
    heads = "[...document.querySelectorAll('thead th.role')].filter(h => !h.hidden).map(h => h.innerText).join('')"
    assert page.evaluate(heads).replace("␣", " ") == CHAT[1][1]
    page.click("#completion")
    page.wait_for_selector("thead th.role", state="detached")
    assert page.is_visible("#text")


def test_a_model_without_a_template_offers_no_chat(opened):
    page = opened(address())
    page.wait_for_selector("figure[data-lens=identity]")
    assert page.is_disabled("#chat-mode")
    assert page.get_attribute("#chat-mode", "title") == "tiny-gpt2 has no chat template"
    assert page.is_hidden("#note")
    page.select_option("#model", "talking")
    page.wait_for_selector("#note:not([hidden])")
    assert "without its chat template" in page.inner_text("#note")
    page.click("#chat-mode")
    page.wait_for_selector("thead th.role")
    assert page.is_hidden("#note")


def test_concepts_race_over_the_levels(opened, model):
    page = opened(address(at="2,9", open="race"))
    page.wait_for_selector("#race input")
    for index, words in enumerate(["girl, Lily", "boy, Tim"]):
        page.locator("#race input").nth(index).fill(words)
    page.click("#race button.main")
    page.wait_for_selector("#race svg")
    race = lj.Lens(model)(TEXT).race({"girl": ["girl", "Lily"], "boy": ["boy", "Tim"]}, 9)
    said = page.inner_text("#race")
    when = "at every level" if race.crossing_level == "0" else f"from level {race.crossing_level} on"
    assert f"{race.leaders[-1]} leads {when}" in said
    points = page.get_attribute("#race polyline >> nth=0", "points").split()
    heights = [float(point.split(",")[1]) for point in points]
    assert [(160 - height) / 150 for height in heights] == pytest.approx(race.probability[:, 0].tolist(), abs=2e-3)
    page.keyboard.press("Escape")
    cell(page, 2, 4, "identity").click()
    page.wait_for_function("() => document.querySelector('#race').innerText.includes('after position 4')")


def test_an_empty_concept_is_refused_in_one_line(opened):
    page = opened(address(open="race"), refused=422)
    page.wait_for_selector("#race input")
    page.locator("#race input").nth(0).fill("girl")
    page.locator("#race input").nth(1).fill(",")
    page.click("#race button.main")
    page.wait_for_selector("#race .trouble")
    assert "expected a concept as a list of words" in page.inner_text("#race .trouble")


def test_filters_narrow_the_grid_and_the_most_read_tokens(opened, server):
    page = opened(address(open=["filters", "most"]))
    page.wait_for_selector("#most .best")
    wanted = reading(server, lens="identity")

    def expected(rows, columns):
        counts = {}
        for row in rows:
            for column in columns:
                token = wanted["top"][row][column][0]
                cells, probability = counts.get(token, (0, 0.0))
                counts[token] = cells + 1, probability + wanted["probability"][row][column][0]
        ranked = sorted(counts, key=lambda token: (-counts[token][0], -counts[token][1]))[:10]
        return [f"{visible(wanted['words'][str(token)])} {counts[token][0]} ×" for token in ranked]

    def shown():
        entries = page.evaluate("[...document.querySelectorAll('#most li')].map(item => item.innerText)")
        return [re.sub(r"\s+", " ", entry.replace("☆", "")).strip() for entry in entries]

    assert shown() == expected(range(5), range(len(wanted["positions"])))
    for name, value in {"levels-from": 1, "levels-to": 3, "positions-from": 4, "positions-to": 9}.items():
        page.fill(f"#{name}", str(value))
        page.press(f"#{name}", "Tab")
    assert shown() == expected(range(1, 4), range(4, 10))
    assert page.locator("td:visible").count() == 3 * 6
    assert "levels=1-3" in page.url
    page.locator("td[aria-selected]").focus()
    for key in ("Home", "PageDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.at") == "1,4"
    page.click("#unfilter")
    assert page.locator("td:visible").count() == 5 * len(wanted["positions"])


def test_a_saved_file_needs_no_server(opened, browser, tmp_path):
    what = {"kind": "swap", "tokens": [" the", " a"], "levels": [3, 3], "positions": None}
    state = address(
        at="3,5",
        open=["why", "race", "most", "what-if"],
        race=["girl, Lily", "boy, Tim"],
        pin=5,
        second=OTHER,
        what=json.dumps(what),
    )
    page = opened(state)
    page.wait_for_selector("#why .why")
    page.wait_for_selector("#race svg")
    texts = continuations(page)
    with page.expect_download() as download:
        page.click("#save")
    path = tmp_path / "saved.html"
    download.value.save_as(path)
    context = browser.new_context(viewport=LAPTOP, offline=True)
    saved, errors, requests = context.new_page(), [], []
    saved.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    saved.on("pageerror", lambda error: errors.append(str(error)))
    saved.on("request", lambda request: requests.append(request.url))
    saved.goto(path.as_uri())
    for lens in ("identity", "changed", "second"):
        cells = f"figure[data-lens={lens}] td"
        assert saved.locator(cells).all_inner_texts() == page.locator(cells).all_inner_texts()
    for part in ("#why .why", "#race svg", "#most .best", "#pins svg"):
        assert saved.locator(part).count() == page.locator(part).count()
    assert [text.replace("↵ ", "\n") for text in saved.locator("#what-if dd").all_text_contents()] == texts
    cell(saved, 1, 4, "identity").click()
    cell(page, 1, 4, "identity").click()
    assert saved.locator("#cell .number").all_inner_texts() == page.locator("#cell .number").all_inner_texts()
    saved.keyboard.press("ArrowRight")
    assert saved.evaluate("document.activeElement.dataset.at") == "1,5"
    assert errors == []
    assert requests == [path.as_uri()]
    context.close()


def test_a_saved_file_holds_hostile_text_as_text(opened, browser, tmp_path):
    text = "</script><script>document.title='broken'</script><!-- $& $1 \\u003c"
    page = opened(address(text=text, second=text))
    page.wait_for_selector("figure[data-lens=second]")
    with page.expect_download() as download:
        page.click("#save")
    path = tmp_path / "saved.html"
    download.value.save_as(path)
    context = browser.new_context()
    saved = context.new_page()
    saved.goto(path.as_uri())
    saved.wait_for_selector("figure[data-lens=second] td")
    assert saved.title() == "layerjump"
    assert saved.inner_text("#prompt") == text
    context.close()


@pytest.mark.parametrize("example", [0, 1, 2])
def test_guided_examples_lead_through_the_page(opened, example):
    """On another model than the bundled one, which they are written for; they say so."""
    page = opened(address(text="Lily saw"), refused=422)
    page.wait_for_selector("figure[data-lens=identity]")
    page.locator("#examples button").nth(example).click()
    wait_read(page, "The capital of France is the city of")
    for step in (2, 3):
        page.click("#guide button.main")
        assert f"({step} of 3)" in page.inner_text("#guide h2")
    assert "Written for smollm2" in page.inner_text("#guide")
    assert page.input_value("#text") == "The capital of France is the city of"
    page.locator("#guide button").last.click()
    assert page.is_hidden("#guide")
    ask(page, "Tom saw a big dog.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_all_panels_fit_the_screen(opened, size, scheme):
    what = {"kind": "patch", "tokens": [], "levels": [2, 2], "positions": [9], "source": 9}
    state = {
        "open": ALL_OPEN,
        "race": ["girl, Lily", "boy, Tim"],
        "second": OTHER,
        "what": json.dumps(what),
        "pin": [5, 6],
    }
    page = opened(address(**state), size, scheme)
    page.wait_for_selector("#why .why")
    page.wait_for_selector("#race svg")
    page.wait_for_selector("#continuations dd")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    for panel in ALL_OPEN:
        inside = "id => { const p = document.getElementById(id); return p.scrollWidth <= p.clientWidth + 1; }"
        assert page.evaluate(inside, panel), panel


@pytest.mark.parametrize(
    "broken", ["what=%7B", "what=%5B%5D", "chat=%7B%7D", "levels=9-1", "open=nothing", "second-at=99,99&second=Tom"]
)
def test_an_address_that_makes_no_sense_is_read_as_far_as_it_does(opened, broken):
    page = opened(f"{address()}&{broken}")
    page.wait_for_selector("figure[data-lens=identity] td[aria-selected]")

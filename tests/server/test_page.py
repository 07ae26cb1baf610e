"""The page in Chromium, on a real server: prompts, clicks, pins and links."""

from __future__ import annotations

import pytest
import torch
from helpers import browser_page
from helpers.browser_page import PHONE, TEXT, ask, cell, reading, wait_read
from helpers.server_process import serving

from layerjump.generation.exit_rules import SoftmaxGap

opened = browser_page.opened  # a fixture


@pytest.fixture(scope="module")
def server(data_folder, tmp_path_factory):
    with serving(data_folder / "tiny-gpt2", home=tmp_path_factory.mktemp("home")) as running:
        running.fit("tiny-gpt2", ["mat", "affine", "ridge"])
        yield running


def test_a_prompt_fills_the_grid(opened, server):
    page = opened()
    ask(page)
    wanted = reading(server)
    rows, columns = len(wanted["levels"]), len(wanted["positions"])
    assert page.locator("td[role=gridcell]").count() == rows * columns
    shown = cell(page, 2, 3).inner_text()
    assert shown == wanted["words"][str(wanted["top"][2][3][0])].replace(" ", "␣").replace("\n", "↵")
    assert page.locator("thead th").nth(1).inner_text() == wanted["tokens"][0]["text"]
    marked = page.evaluate("[...document.querySelectorAll('td.decided')].map(cell => cell.dataset.at)")
    assert sorted(marked) == sorted(f"{level},{c}" for c, level in enumerate(wanted["decided_at"]))
    own = {f"{r},{c}" for r in range(rows) for c in range(columns) if _same(wanted, r, c)}
    assert own == set(page.evaluate("[...document.querySelectorAll('td.own')].map(cell => cell.dataset.at)"))


def _same(wanted, level, column):
    return wanted["top"][level][column][0] == wanted["top"][-1][column][0]


def test_a_click_shows_the_top_tokens_of_a_cell(opened, server):
    page = opened()
    ask(page)
    wanted = reading(server)
    cell(page, 1, 4).click()
    assert "Level 1" in page.inner_text("#cell h2")
    numbers = [float(text) for text in page.locator("#cell .number").all_inner_texts()]
    assert numbers == pytest.approx(wanted["probability"][1][4], rel=6e-3)
    widths = page.evaluate("[...document.querySelectorAll('#cell .fill')].map(bar => parseFloat(bar.style.width))")
    assert widths == pytest.approx([100 * p for p in wanted["probability"][1][4]], rel=1e-3)
    assert "at=1%2C4" in page.url


def test_pinned_tokens_are_tracked_through_the_levels(opened, server):
    page = opened()
    ask(page)
    cell(page, 4, 5).click()
    page.locator("#cell .pin").nth(4).click()
    page.wait_for_selector("#pins polyline", state="attached")
    cell(page, 0, 5).click()
    best = reading(server)["top"][4][5][4]
    followed = reading(server, tokens=[best])["followed"][0]
    assert f"rank {followed['rank'][0][5] + 1}," in page.inner_text("#pins .pinned")
    heights = [float(point.split(",")[1]) for point in page.get_attribute("#pins polyline", "points").split()]
    ranks = [row[5] for row in followed["rank"]]
    assert len(heights) == len(ranks)
    assert sorted(range(5), key=lambda i: (heights[i], i)) == sorted(range(5), key=lambda i: (ranks[i], i))
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
def test_the_slider_sets_the_exit_threshold(opened, server, strength):
    page = opened("open=exit")
    ask(page)
    page.locator("#strength").fill(str(strength))
    wanted = reading(server)
    lead = torch.tensor(wanted["confidence"], dtype=torch.float64)[:, 1:]
    position = torch.arange(1, lead.shape[1] + 1)
    rule = SoftmaxGap(strength, float((position + 1).double().mean()))
    levels = rule.replay(lead, position).tolist()
    ringed = page.evaluate("[...document.querySelectorAll('td.leaves')].map(cell => cell.dataset.at)")
    assert sorted(ringed) == sorted(f"{level},{c}" for c, level in enumerate(levels, 1) if level < 4)
    agree = sum(_same(wanted, level, column) for column, level in enumerate(levels, 1)) / len(levels)
    said = page.inner_text("#savings")
    assert f"of {len(levels)} positions" in said
    assert f"would save {float(f'{4 - sum(levels) / len(levels):.2g}'):g} of 4 blocks" in said
    assert f"on {float(f'{100 * agree:.3g}'):g} %" in said
    assert "exit=" in page.url


def test_colours_follow_the_measure(opened, server):
    page = opened()
    ask(page)
    wanted = reading(server)
    light = "element => getComputedStyle(element).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    page.select_option("#colour", "kl")
    assert cell(page, 4, 5).evaluate(light) == 253 + 231 + 37  # the model itself: no distance, brightest
    flat = [(wanted["kl"][r][c], r, c) for r in range(5) for c in range(1, len(wanted["positions"]))]
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


def test_the_grid_works_with_the_keyboard(opened, server):
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

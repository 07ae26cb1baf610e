"""The report in a real Chromium: everything is drawn, nothing is fetched, nothing overflows."""

from __future__ import annotations

import pytest
from helpers.study_results import small_run, with_more

from layerjump.report.write_report import write_comparison, write_report
from layerjump.studies.runner import results_from_json

LAPTOP, PHONE = {"width": 1366, "height": 768}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def pages(data_folder, tmp_path_factory):
    results = small_run(data_folder / "tiny-gpt2", tmp_path_factory.mktemp("run"))
    results, more = results_from_json(results), results_from_json(with_more(results))
    folder = tmp_path_factory.mktemp("pages")
    return {
        "report": write_report(results, folder / "report")[0],
        "hostile": write_report(more, folder / "hostile")[0],
        "comparison": write_comparison([results, more], folder / "comparison")[0],
    }


@pytest.fixture
def opened(browser):
    """A function: path, size and scheme → the open page, its console errors and its requests."""
    contexts = []

    def open_page(path, size=LAPTOP, scheme="light"):
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        contexts.append(context)
        page, errors, requests = context.new_page(), [], []
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function(_ALL_DRAWN)
        return page, errors, requests

    yield open_page
    for context in contexts:
        context.close()


_ALL_DRAWN = """() => [...document.querySelectorAll('.figure')].every(place =>
    place.classList.contains('js-plotly-plot')
    && place.querySelector('.main-svg')
    && place.querySelector('.scatterlayer .trace, .heatmaplayer image, .barlayer .trace, canvas'))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("name", ["report", "hostile", "comparison"])
def test_everything_is_drawn_and_nothing_is_fetched(opened, pages, name, size, scheme):
    page, errors, requests = opened(pages[name], size, scheme)
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.locator(".js-plotly-plot").count() > 15
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert page.locator("img").count() == 0


def test_the_button_switches_between_light_and_dark(opened, pages):
    page, _, _ = opened(pages["report"], scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.click("#theme")
    light = page.evaluate(colour)
    page.click("#theme")
    assert light == "rgb(255, 255, 255)" != dark == page.evaluate(colour)


def test_a_key_hides_its_lines_in_the_whole_panel(opened, pages):
    page, errors, _ = opened(pages["report"])
    block = page.locator("#predictions .block").first
    shown = block.locator(".scatterlayer .trace").count()
    block.locator(".key", has_text="identity").click()
    assert block.locator(".scatterlayer .trace").count() < shown
    assert errors == []


def test_a_csv_file_is_saved_on_a_click(opened, pages, tmp_path):
    page, _, _ = opened(pages["report"])
    with page.expect_download() as waiting:
        page.locator("#early_exit a.data").first.click()
    waiting.value.save_as(tmp_path / "saved.csv")
    assert (tmp_path / "saved.csv").read_text().startswith("lens,kind,at,blocks,agreement")
    assert waiting.value.suggested_filename == "tiny-gpt2-early_exit-curves.csv"


def test_figures_fit_the_paper_and_the_screen_again(opened, pages):
    page, errors, _ = opened(pages["report"])
    widths = """() => [...document.querySelectorAll('.figure')].map(place =>
        Number(place.querySelector('.main-svg').getAttribute('width')))"""
    before = page.evaluate(widths)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert max(page.evaluate(widths)) <= 680
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_timeout(300)
    assert page.evaluate(widths) == pytest.approx(before, abs=20)
    assert errors == []

"""The report shows exactly what results.json holds, by itself, whatever strings are in it."""

import base64
import csv
import html
import io
import json
import re
from html.parser import HTMLParser

import pytest
from helpers.study_results import ANY_TABLES, HOSTILE, small_run, with_more
from typer.testing import CliRunner

from layerjump.cli.main import app
from layerjump.io import write_json
from layerjump.report.write_report import label_runs, panels, share_y_axes, write_comparison, write_report
from layerjump.studies.formatting import number, percent
from layerjump.studies.results import to_json
from layerjump.studies.runner import MAIN, STUDIES, results_from_json, study_named

_LINK = re.compile(r'<a class="data" download="([^"]+)" href="data:text/csv;charset=utf-8;base64,([^"]+)"')


@pytest.fixture(scope="session")
def results(data_folder, tmp_path_factory):
    return small_run(data_folder / "tiny-gpt2", tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def page(results, tmp_path_factory):
    paths = write_report(results_from_json(results), tmp_path_factory.mktemp("page"))
    assert [path.name for path in paths] == ["report.html", "summary.md"]
    return paths[0].read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def hostile_page(results, tmp_path_factory):
    paths = write_report(results_from_json(with_more(results)), tmp_path_factory.mktemp("hostile"))
    return paths[0].read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Every element and attribute a browser would make of a page, scripts apart."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.words = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.lasttag != "script":
            self.words.append(data)


def files_of(text):
    return {
        html.unescape(name): list(csv.reader(io.StringIO(base64.b64decode(data).decode())))
        for name, data in _LINK.findall(text)
    }


def parsed(cell, like):
    if like is None:
        return cell or None
    return json.loads(cell) if isinstance(like, int | float | list) else cell


def test_the_csv_of_every_table_holds_the_same_numbers(results, page):
    files = files_of(page)
    for name, study in results["studies"].items():
        for table, rows in study["tables"].items():
            head, *body = files[f"tiny-gpt2-{name}-{table.replace(' ', '-')}.csv"]
            assert head == list(rows[0])
            again = [
                {key: parsed(cell, row[key]) for key, cell in zip(head, line, strict=True)}
                for row, line in zip(rows, body, strict=True)
            ]
            assert again == rows


def test_every_figure_has_a_sentence_data_and_the_command(results, page):
    blocks = page.split('<article class="panel">')[1:]
    assert len(blocks) == sum(len(panels(study)) for study in results_from_json(results).studies.values())
    for block in blocks:
        reading = re.search(r'<p class="reading">([^<]+)</p>', block)[1]
        assert reading.endswith(".")
        assert re.search(r"\d", reading)
        assert "nan" not in reading.lower()
        assert _LINK.search(block)
        assert "<code>layerjump study tiny --tokens 6000</code>" in block


def test_the_page_loads_nothing_and_holds_plotly_once(page):
    assert page.count("plotly.js v") == 1
    for tag, attributes in Elements(page).found:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:text/csv"))
    assert "url(" not in page.split("<style>")[1].split("</style>")[0]


def test_the_contents_lead_to_every_study(page):
    found = Elements(page).found
    anchors = {attributes.get("id") for _, attributes in found}
    targets = [a["href"][1:] for tag, a in found if tag == "a" and a["href"].startswith("#")]
    assert {*MAIN, "made"} <= set(targets) <= anchors


def test_model_text_settings_machine_and_notes_are_told(results, page):
    words = html.unescape(page)
    assert results["machine"] in words
    assert results["model"]["fingerprint"] in words
    assert results["text"]["sha256"] in words
    for study in results["studies"].values():
        assert all(note in words for note in study["notes"])
    assert "test positions: " in words


def test_hostile_strings_stay_text(page, hostile_page):
    benign, found = Elements(page), Elements(hostile_page)
    made = {tag for tag, _ in found.found}
    assert made <= {tag for tag, _ in benign.found} | {"p"}
    assert not [a for _, a in found.found for name in a if name.startswith("on")]
    assert sum(tag == "script" and "type" not in a for tag, a in found.found) == 2
    assert HOSTILE in "".join(found.words)  # shown, as text
    for block in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', hostile_page):
        json.loads(block)
        assert "<" not in block


def test_a_skipped_study_is_shown_with_its_reason(hostile_page):
    assert "Skipped: no heads &lt;/script&gt;" in hostile_page


def test_summary_says_the_headline_numbers_of_the_results(results, tmp_path):
    text = write_report(results_from_json(results), tmp_path)[-1].read_text(encoding="utf-8")
    saved = results["studies"]["early_exit"]["tables"]["saved"]
    for lens in ("mat", "identity"):
        (row,) = [r for r in saved if r["lens"] == lens and r["kind"] == "exact"]
        assert number(row["blocks_saved"]) in text
        assert percent(row["share"]) in text
    for name, study in results["studies"].items():
        for key, value in study["headline"].items():
            assert f"| {name} | {key.replace('_', ' ')} | {number(value, 4)} |" in text
    level = results["studies"]["predictions"]["headline"]["half_right_from_level_mat"]
    assert f"from: level {level} of {results['model']['blocks']}**" in text


def test_summary_tells_what_was_skipped_and_breaks_no_table(results, tmp_path):
    text = write_report(results_from_json(with_more(results)), tmp_path)[-1].read_text(encoding="utf-8")
    assert "- attention_heads: skipped, no heads" in text
    assert "<" not in text.replace("&lt;", "")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}


def test_a_comparison_shows_both_runs_side_by_side(results, tmp_path):
    other = with_more(results)
    other["model"]["name"] = "folder/other-model"
    del other["studies"]["linearity"]
    paths = write_comparison([results_from_json(run) for run in (results, other)], tmp_path)
    assert [path.name for path in paths] == ["report.html", "summary.md"]
    text = paths[0].read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    assert text.count("<h4>tiny-gpt2</h4>") == text.count("<h4>other-model</h4>")
    assert "Not measured in this run." in text
    assert {"tiny-gpt2-r2-pairs-mat.csv", "other-model-r2-pairs-mat.csv"} <= set(files_of(text))
    assert "| study | number | tiny-gpt2 | other-model |" in paths[1].read_text(encoding="utf-8")


def test_line_charts_that_are_compared_have_the_same_y_axis(results):
    study = results_from_json(results).studies["linearity"]
    one, two = panels(study)[1], panels(study)[1]
    two.figures[0].data[0].y = [10 * value for value in two.figures[0].data[0].y]
    share_y_axes([one, two])
    ranges = [panel.figures[0].layout.yaxis.range for panel in (one, two)]
    assert ranges[0] == ranges[1]
    assert ranges[0][0] == 0
    assert ranges[0][1] > max(two.figures[0].data[0].y)


def test_runs_of_the_same_name_are_told_apart(results):
    other = with_more(results) | {"model": results["model"]}
    one, two = results_from_json(results).run, results_from_json(other).run
    assert len(set(label_runs([one, two]))) == 2
    assert label_runs([one, one]) == ["tiny-gpt2 on pydoc (1)", "tiny-gpt2 on pydoc (2)"]


def test_every_table_of_a_main_study_is_shown(results):
    for name, study in results_from_json(results).studies.items():
        shown = {table for panel in STUDIES[name].figures(study) for table in panel.tables}
        assert shown == set(to_json(study.tables))


def test_a_study_of_another_version_is_shown_as_tables(results):
    shown = panels(study_named("unknown").from_json(with_more(results)["studies"]["unknown"]))
    assert [panel.title for panel in shown] == [name for name, rows in ANY_TABLES.items() if rows]
    assert all("<table>" in panel.html and not panel.figures for panel in shown)
    assert "<td>yes</td>" in shown[-1].html


def test_heat_maps_cut_the_colour_but_not_the_number(results):
    rows = [{"from": 0, "to": 1, "r2": -3.0, "r2_identity": -9.0}]
    rows = [row | {"r2_weighted": 0.5, "r2_weighted_identity": 0.1} for row in rows]
    saved = results["studies"]["r2"] | {"tables": {"pairs mat": rows}}
    figure = panels(STUDIES["r2"].from_json(saved))[0].figures[0]
    assert figure.data[0].z[0][0] == 0
    assert figure.data[0].customdata[0][0] == -3


def test_the_report_command_makes_one_page_or_a_comparison(results, tmp_path):
    write_json(tmp_path / "results.json", results)
    for given, title in (([tmp_path], "<h1>tiny-gpt2</h1>"), ([tmp_path] * 2, "<h2>Headlines</h2>")):
        out = tmp_path / "out"
        done = CliRunner().invoke(app, ["report", *map(str, given), "-o", str(out)])
        assert done.exit_code == 0, done.output
        assert title in (out / "report.html").read_text(encoding="utf-8")

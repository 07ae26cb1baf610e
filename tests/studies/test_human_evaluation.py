"""`human_evaluation`: the sheet is blinded and shuffled, and a marked sheet scores as it was marked."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
from helpers.story_text import stories
from helpers.study_results import check_figures

from layerjump.errors import BadArtifact
from layerjump.models.loading import load
from layerjump.studies import human_evaluation
from layerjump.studies.human_evaluation import (
    KEY,
    SHEET,
    Item,
    comparison,
    read_marks,
    shares,
    shares_by_level,
    write_key,
    write_sheet,
)
from layerjump.studies.runner import run_studies, select_studies
from layerjump.studies.setup import Setup, StudySettings

LEVELS = 5


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-bert"])
def setup(data_folder, request):
    return Setup(load(data_folder / request.param), stories(120), StudySettings(n_test_positions=50))


@pytest.fixture(scope="module")
def study(setup, tmp_path_factory):
    """The output directory of a run."""
    folder = tmp_path_factory.mktemp("study")
    run_studies(setup, select_studies("human_evaluation"), folder)
    return folder


@pytest.fixture
def copy(study, tmp_path):
    """A fresh copy of the folder, and a function that rewrites its sheet row by row."""
    for name in (SHEET, KEY):
        (tmp_path / name).write_bytes((study / name).read_bytes())

    def rewrite(change, *, delimiter=",", bom=True, keep=lambda rows: rows):
        rows = list(csv.DictReader(io.StringIO((study / SHEET).read_text("utf-8-sig"))))
        out = io.StringIO()
        writer = csv.DictWriter(out, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(keep([row | change(row) for row in rows]))
        (tmp_path / SHEET).write_text(out.getvalue(), "utf-8-sig" if bom else "utf-8")
        return tmp_path

    return rewrite


def key_of(folder):
    items = json.loads((folder / KEY).read_text())["items"]
    return {str(item["item"]): item for item in items}


def truth(item):
    """A simulated annotator: accepts the map from level 2 on, the identity from level 3 on in even sentences."""
    if item["lens"] == "mat":
        return item["level"] >= 2
    return item["level"] >= 3 and item["sentence"] % 2 == 0


def test_items_cover_every_sentence_level_and_lens_once(study):
    items = key_of(study).values()
    readings = {(item["sentence"], item["level"], item["lens"]) for item in items}
    sentences = {item["sentence"] for item in items}
    assert len(readings) == len(items) == len(sentences) * LEVELS * 2
    assert len(sentences) == 12  # a tenth of 120 documents


def test_sheet_is_blinded_and_results_do_not_contain_the_key(study):
    text = (study / SHEET).read_text("utf-8-sig")
    assert text.splitlines()[0] == "item,context,best 1,best 2,best 3,best 4,best 5,plausible"
    assert "identity" not in text
    assert "mat" not in {row["best 1"] for row in csv.DictReader(io.StringIO(text))}
    assert "level" not in text.splitlines()[0]
    saved = json.loads((study / "results.json").read_text())["studies"]["human_evaluation"]
    check_figures(human_evaluation.STUDY, saved)
    assert list(saved["tables"]) == ["sheet"]
    assert saved["tables"]["sheet"][0]["items"] == 120
    assert "files" not in saved
    assert "digest" not in json.dumps(saved)


def test_items_are_shuffled_by_the_seed(setup, study, tmp_path):
    order = [(item["sentence"], item["level"]) for item in key_of(study).values()]
    assert order != sorted(order)
    assert order[:10] != sorted(order)[:10]
    run_studies(setup, select_studies("human_evaluation"), tmp_path)
    assert (tmp_path / SHEET).read_bytes() == (study / SHEET).read_bytes()
    other = setup.with_empty_cache(settings=StudySettings(n_test_positions=50, seed=1))
    run_studies(other, select_studies("human_evaluation"), tmp_path)
    assert (tmp_path / SHEET).read_bytes() != (study / SHEET).read_bytes()


def test_masked_position_is_shown_as_a_gap(setup, study):
    rows = list(csv.DictReader(io.StringIO((study / SHEET).read_text("utf-8-sig"))))
    assert all(("____" in row["context"]) == setup.model.masked for row in rows)
    assert all(row["plausible"] == "" for row in rows)


def test_at_the_last_level_both_lenses_agree(study):
    key = key_of(study)
    rows = csv.DictReader(io.StringIO((study / SHEET).read_text("utf-8-sig")))
    tokens_of = {}
    for row in rows:
        item = key[row["item"]]
        if item["level"] == LEVELS - 1:
            tokens_of.setdefault(item["sentence"], set()).add(tuple(row.values())[1:7])
    assert all(len(tokens) == 1 for tokens in tokens_of.values())


@pytest.mark.parametrize("marks", [("1", "0"), ("yes", "No"), ("Y", "n"), ("TRUE", "False")])
@pytest.mark.parametrize("spreadsheet", [{}, {"delimiter": ";", "bom": False}, {"delimiter": "\t"}])
def test_marked_sheet_scores_as_it_was_marked(copy, study, marks, spreadsheet):
    key = key_of(study)
    folder = copy(
        lambda row: {"plausible": marks[not truth(key[row["item"]])]}, keep=lambda rows: rows[::-1], **spreadsheet
    )
    read = read_marks(folder)
    by_lens = shares(read)
    assert list(by_lens) == ["mat", "identity"]
    assert by_lens["mat"].share == pytest.approx(3 / 5)
    assert by_lens["mat"].low == pytest.approx(3 / 5)  # all sentences alike
    assert by_lens["identity"].share == pytest.approx(2 / 5 * 6 / 12)
    assert by_lens["identity"].low < 0.2 < by_lens["identity"].high
    cases = {case: share.share for case, share in comparison(read).items()}
    assert cases["identity only"] == 0
    assert cases["both"] == pytest.approx(2 / 5 / 2)
    assert cases["mat only"] == pytest.approx(3 / 5 - 2 / 5 / 2)
    assert sum(cases.values()) == pytest.approx(1)
    levels = {key: share.share for key, share in shares_by_level(read).items()}
    assert [levels["mat", level] for level in range(LEVELS)] == [0, 0, 1, 1, 1]
    assert [levels["identity", level] for level in range(LEVELS)] == [0, 0, 0, 0.5, 0.5]


def only(number, **change):
    return lambda row: {"plausible": "1"} | (change if row["item"] == number else {})


@pytest.mark.parametrize(
    ("change", "keep", "message"),
    [
        (only("3", plausible=" "), list, "item 3 is not marked"),
        (only("3", plausible="maybe"), list, "'maybe'"),
        (only("3", item="333"), list, "'333'"),
        (only("3", item="4"), list, "does not match the key"),
        (only("3", context="“other”"), list, "does not match the key"),
        (only("3"), lambda rows: [*rows, rows[5]], "occurs twice"),
        (only("3"), lambda rows: rows[:-2], "lacks 2 of 120 items"),
    ],
)
def test_invalid_sheets_raise_one_line(copy, change, keep, message):
    with pytest.raises(BadArtifact, match=message) as error:
        read_marks(copy(change, keep=keep))
    assert "\n" not in str(error.value)


def test_other_files_raise(study, tmp_path):
    with pytest.raises(BadArtifact, match="does not exist"):
        read_marks(tmp_path)
    (tmp_path / KEY).write_text('{"kind": "something else"}')
    with pytest.raises(BadArtifact, match="not the key"):
        read_marks(tmp_path / SHEET)
    (tmp_path / KEY).write_bytes((study / KEY).read_bytes())
    (tmp_path / SHEET).write_bytes("item;context;caf\xe9".encode("latin-1"))
    with pytest.raises(BadArtifact, match="UTF-8"):
        read_marks(tmp_path / SHEET)
    (tmp_path / SHEET).write_text("item,context\n1,2\n")
    with pytest.raises(BadArtifact, match="no column 'best 1'"):
        read_marks(tmp_path / SHEET)


def test_empty_rows_at_the_end_are_ignored(copy):
    folder = copy(only("none"))
    with (folder / SHEET).open("a") as file:
        file.write(",,,,,,,\r\n,,,,,,,\r\n")
    assert len(read_marks(folder)) == 120


def test_the_command(setup, copy):
    if setup.model.masked:
        pytest.skip("one sheet is enough")
    folder = copy(only("none"))

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "layerjump", "human-eval", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )

    moved = folder / "marked.csv"
    (folder / SHEET).rename(moved)
    scored = json.loads(run(moved, "--key", folder / KEY, "--json").stdout)
    assert [row["share"] for row in scored["lenses"]] == [1, 1]
    assert list(scored) == ["lenses", "cases", "levels"]
    failed = run(folder)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
    assert len(failed.stderr.splitlines()) == 1


def test_cells_are_quoted_on_one_line(tmp_path):
    tokens = ("\n", "=1+1", "3-4", '"', ";")
    items = [Item("a\nb\tc", tokens, "mat", 0, 0), Item("=x", tokens, "identity", 0, 0)]
    sheet = write_sheet(items)
    assert len(sheet.splitlines()) == 3
    rows = list(csv.reader(io.StringIO(sheet.removeprefix("\ufeff"))))
    assert all(cell.startswith("“") for row in rows[1:] for cell in row[1:7])
    (tmp_path / SHEET).write_text(sheet.replace(",\n", ",1\n"), "utf-8")
    (tmp_path / KEY).write_text(write_key(items, "model"))
    assert [mark.lens for mark in read_marks(tmp_path)] == ["mat", "identity"]

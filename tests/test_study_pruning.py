"""`pruning` on small trained models: what must hold whatever the numbers are, and the figure made from them."""

from __future__ import annotations

import json

import pytest

from layerjump.show.figures import panels
from layerjump.studies import pruning
from layerjump.studies.pruning import counts, methods_of


@pytest.fixture(scope="module")
def result(study_setup):
    return pruning.run(study_setup)


def test_every_method_and_number_is_there(study_setup, result):
    rows = result.tables["pruned"]
    methods = methods_of(study_setup.model)
    expected = [("whole model", 0)] + [(m, n) for n in (1,) for m in methods]
    assert [(row["method"], row["dropped"]) for row in rows] == expected
    assert methods == (
        ["remove", "linear"]
        if study_setup.model.masked
        else ["remove", "linear", "replaceme", "fold"]
    )
    assert set(result.settings["stay"]) == {"1", "4"}
    assert json.dumps(result.as_json())


def test_ratios_parameters_and_front_agree(result):
    whole, *rows = result.tables["pruned"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["perplexity"] / whole["perplexity"], rel=1e-6)
        assert row["ratio low"] <= row["ratio"] <= row["ratio high"]
        assert row["parameters"] < whole["parameters"]
    assert whole["front"] or any(row["loss"] <= whole["loss"] for row in rows)
    for row in rows:
        if not row["front"]:
            assert any(
                other["loss"] <= row["loss"] and other["parameters"] <= row["parameters"]
                for other in (whole, *rows)
                if other is not row
            )


def test_it_has_a_figure_and_a_sentence(result):
    (panel,) = panels("pruning", result.as_json())
    assert "perplexity is" in panel.reading
    assert len(panel.figures) == 2
    assert {trace.name for trace in panel.figures[1].data} >= {"whole model", "remove", "linear"}


def test_how_many_blocks_are_dropped():
    assert counts(free=27, blocks=30) == [1, 3, 6, 9]
    assert counts(free=2, blocks=4) == [1]
    assert counts(free=0, blocks=2) == []

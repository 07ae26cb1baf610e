"""The studies against reference numbers of a separate, plain script (`golden/make.py`), on the same sentences.

The model runs in float64, as there. Jumps are stored in float32, and what is read through them agrees as far as that
allows: in BERT, where a layer norm leaves one direction of almost constant size, weights are large and cancel.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.study_results import tables_of

import layerjump as lj
from layerjump.generation.exit_rules import SoftmaxGap
from layerjump.studies import early_exit, linearity, predictions, r2
from layerjump.studies.setup import Setup, StudySettings

GOLDEN = Path(__file__).parents[1] / "golden"
EXAMPLES = json.loads((GOLDEN / "examples.json").read_text(encoding="utf-8"))
STORED = {"gpt2": 2e-6, "bert": 5e-5}
"""Relative precision of what is read through one stored jump."""


@dataclass
class Case:
    name: str
    golden: dict[str, Any]
    setup: Setup


@pytest.fixture(scope="module", params=["gpt2", "bert"])
def case(request, data_folder):
    name, of = request.param, EXAMPLES[request.param]
    model = lj.load(data_folder / f"tiny-{name}", dtype="float64")
    paper = name == "bert"  # one position a sentence; there all but the first
    settings = StudySettings(
        positions="one" if paper else "all", split=of["split"], n_test_positions=10**9, paper=paper
    )
    setup = Setup(model, lj.load_text(EXAMPLES["documents"]), settings, level_pairs="all")
    return Case(name, json.loads((GOLDEN / f"{name}.json").read_text()), setup)


def close(wanted, relative=1e-9):
    return pytest.approx(wanted, rel=relative, abs=1e-9)


def test_both_see_the_same_documents_and_positions(case):
    of = EXAMPLES[case.name]
    for part in ("fit", "test"):
        assert list(case.setup.documents(part)) == of[part]
    if case.name == "bert":
        for batch in case.setup.batches():
            wanted = [of["position"][document] for document in batch.document.tolist()]
            assert batch.position.tolist() == wanted


def test_r2(case):
    result = r2.run(case.setup)
    assert result.settings["n_fit"] == case.golden["n_fit"]
    assert result.settings["n_test"] == case.golden["n_test"]
    for found, wanted in zip(tables_of(result)["pairs mat"], case.golden["r2"], strict=True):
        assert found == close(wanted)
    for found, wanted in zip(tables_of(result)["composed mat"], case.golden["composed"], strict=True):
        assert {name: found[name] for name in wanted} == close(wanted, 20 * STORED[case.name])


@pytest.mark.parametrize("lens", ["identity", "mat"])
def test_predictions(case, lens):
    rows = tables_of(predictions.run(case.setup))["levels"]
    found = [row for row in rows if row["lens"] == lens]
    for row, wanted in zip(found, case.golden["predictions"][lens], strict=True):
        for name, value in wanted.items():
            counted = name.startswith("p@")
            precision = 1e-12 if counted else 1e-9 if lens == "identity" else STORED[case.name]
            assert row[name] == close(value, precision), (row["level"], name)


def assert_exits(result, wanted):
    for lens, rows in wanted.items():
        found = [
            {name: row[name] for name in ("at", "blocks", "agreement")}
            for row in tables_of(result)["curves"]
            if row["lens"] == lens and row["kind"] == "dynamic"
        ]
        assert len(found) == len(rows)
        for row, value in zip(found, rows, strict=True):
            assert row == close(value, 1e-12), lens


def test_exits(case):
    """BERT's t is 3, as in the authors' code, in their protocol; elsewhere an example's own position."""
    result = early_exit.run(case.setup)
    assert result.settings["N"] == close(case.golden["N"])
    assert_exits(result, case.golden["exits at t = 3" if case.name == "bert" else "exits"])
    at_3 = replace(case.setup, settings=replace(case.setup.settings, exit_position=3))
    assert_exits(early_exit.run(at_3), case.golden["exits at t = 3"])


def test_exits_at_an_examples_own_position(case):
    readings = case.setup.lens_scores()
    for place, lens in enumerate(readings.lenses):
        for row in case.golden["exits"][lens]:
            rule = SoftmaxGap(row["at"], case.golden["N"])
            stops = rule.replay(readings.confidence[place], readings.position)
            assert float(stops.double().mean()) == close(row["blocks"], 1e-12)


@pytest.fixture(scope="module")
def linear(case):
    return linearity.run(case.setup)


def test_linearity(case, linear):
    known = case.golden["linearity"]
    assert linear.settings["n_fit"] == known["n_fit"]
    assert linear.settings["n_test"] == known["n_test"]
    for which in ("", " without position 0"):
        rows = zip(tables_of(linear)["blocks"], known[f"blocks{which}"], strict=True)
        for found, wanted in rows:
            for name, value in wanted.items():
                assert found[f"{name}{which}"] == close(value), (found["block"], name)


def test_sizes_of_steps(case, linear):
    if linear.settings["sampled"] < case.golden["linearity"]["n_test"] - len(EXAMPLES[case.name]["test"]):
        pytest.skip("a sample of the positions was taken, and which is not for a plain script to know")
    for found, wanted in zip(tables_of(linear)["blocks"], case.golden["linearity"]["why"], strict=True):
        assert {name: found[name] for name in wanted} == close(wanted, 1e-6)
    for row in tables_of(linear)["angles"]:
        wanted = case.golden["linearity"]["angles"][row["from"]][row["to"]]
        assert row["angle"] == close(wanted, 1e-6)


def test_shapes_of_levels(case, linear):
    rows = zip(tables_of(linear)["levels"], case.golden["linearity"]["levels"], strict=True)
    for found, wanted in rows:
        assert found["anisotropy"] == close(wanted["anisotropy"])
        assert found["mean norm"] == close(wanted["mean norm"])
        if case.name == "gpt2":  # BERT's rows are more than the sample takes
            assert found["intrinsic dimension"] == close(wanted["intrinsic dimension"], 1e-4)


def test_in_float32_the_numbers_are_the_same_to_four_digits(case, data_folder):
    model = lj.load(data_folder / f"tiny-{case.name}")
    setup = case.setup.with_empty_cache(model=model)
    rows = [row for row in tables_of(predictions.run(setup))["levels"] if row["lens"] == "mat"]
    for row, wanted in zip(rows, case.golden["predictions"]["mat"], strict=True):
        assert row["kl"] == pytest.approx(wanted["kl"], rel=1e-3, abs=1e-6)
        assert row["p@1"] == pytest.approx(wanted["p@1"], abs=0.01)
    blocks = tables_of(linearity.run(setup))["blocks"]
    for found, wanted in zip(blocks, case.golden["linearity"]["blocks"], strict=True):
        assert found["without residual"] == pytest.approx(wanted["without residual"], abs=1e-4)


def test_the_state_before_the_final_norm_is_the_last_level(case):
    """Reading the golden sentences one by one gives what batches of them give."""
    model, part = case.setup.model, EXAMPLES[case.name]["test"]
    text = EXAMPLES["documents"][part[0]]
    (ids,) = model.tokenization.encode([text])
    (found,) = lj.capture_states(
        model, [lj.batch_from_ids(model.tokenization.wrap(ids))], [model.n_blocks], logits=True
    )
    own = model.hf(torch.tensor([model.tokenization.wrap(ids)])).logits[0]
    torch.testing.assert_close(found.logits, own)
    torch.testing.assert_close(model.logits(found[model.n_blocks]), own)

"""Files written before the packages got their present names still load, and give the same numbers.

`fixtures/saved-before-0.1` was written by that version from `fixtures/tiny-gpt2`: a jumps folder with a calibration
file, second moments, and the results of a study; `expected.json` holds what that version computed from them.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.cli import run

import layerjump as lj
from layerjump.generation.calibration.calibration_file import load_calibration
from layerjump.jumps.fit import solve_jumps
from layerjump.report.page import slug
from layerjump.studies.results import Result
from layerjump.studies.runner import STUDIES, load_results


@pytest.fixture(scope="module")
def saved(data_folder):
    return data_folder / "saved-before-0.1"


@pytest.fixture(scope="module")
def expected(saved):
    return json.loads((saved / "expected.json").read_text())


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def jumps(saved, model):
    return lj.Jumps.from_pretrained(saved / "jumps", model=model)


STATE = torch.linspace(-1, 1, 80)


def test_jumps(jumps, expected):
    outputs = {f"{a}:{b}": jumps[a, b](STATE)[:4].tolist() for a, b in jumps}
    assert outputs == {pair: pytest.approx(values) for pair, values in expected["jumps"].items()}
    assert {f"{a}:{b}": jumps.info[a, b].r2[0] for a, b in jumps} == expected["r2"]


def test_second_moments(saved, expected):
    moments = lj.SplitMoments.load(saved / "moments" / "moments.safetensors")
    solved = solve_jumps(moments, "mat")
    assert [moments.fit.n, moments.validation.n, moments.test.n] == expected["moments"]["n"]
    assert solved[1, 4](STATE)[:4].tolist() == pytest.approx(expected["moments"]["map"])
    assert solved.info[1, 4].r2[0] == pytest.approx(expected["moments"]["r2"], abs=1e-12)


def test_calibration_file(saved, model, jumps, expected):
    calibration = load_calibration(saved / "jumps", model=model)
    assert expected["calibration"]["agreement"] in str(calibration)
    generated = lj.generate(model, jumps, "Once upon a time, there was", exit=calibration.exit, max_new_tokens=12)
    assert [int(token) for token in generated.ids[0]] == expected["generated"]["ids"]
    assert [int(level) for level in generated.exit_levels[0]] == expected["generated"]["levels"]


def test_study_results(saved, tmp_path):
    """The report of an old run shows each of its studies, and the summary each of its headline numbers."""
    shutil.copy(saved / "results.json", tmp_path / "results.json")
    done = run("report", str(tmp_path), "-o", str(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    page = next((tmp_path / "report").rglob("*.html")).read_text()
    studies = load_results(saved).studies
    assert len(studies) == len(json.loads((saved / "results.json").read_text())["studies"])
    assert set(studies) <= set(STUDIES)  # also those that had another name then
    ran = [name for name, outcome in studies.items() if isinstance(outcome, Result)]
    assert all(f'id="{slug(name)}"' in page for name in ran)

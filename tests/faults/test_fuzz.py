"""Damaged files of every format load or are refused in one line; and what long runs found stays mended."""

import json
import os
import pickle
import time
from pathlib import Path
from random import Random

import pytest
import torch

import layerjump as lj
from faults import formats, fuzz, mutate, mutate_pickles
from faults.formats import FORMATS, Format
from layerjump import io
from layerjump.errors import BadArtifact, BadForeignLens, BadMoments, LayerjumpError, NewerFormat
from layerjump.generation.calibration import calibration_file
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.moments_of_splits import SplitMoments
from layerjump.report.write_report import write_report
from layerjump.studies.runner import STUDIES, load_results

INPUTS = {"results": 12, "model": 40, "gguf": 60, "unfinished-refine": 60}
"""Of formats whose reading takes long; of all others 200."""


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_loads_or_is_refused_in_one_line(name):
    tally = fuzz.fuzz(name, inputs=INPUTS.get(name, 200))
    assert tally.findings == []
    assert tally.refused > 0


# The fuzzer sees what is wrong


def _write_example(folder: Path) -> None:
    (folder / "a.json").write_text('{"a": 1, "b": [2, 3]}')


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda path: json.loads("{") or None, "JSONDecodeError"),
        (lambda path: os.kill(os.getpid(), 11), "crash: the process ended with -11"),
        (lambda path: time.sleep(60), "hang"),
        (lambda path: bytearray(3 << 30), "MemoryError"),
        (lambda path: Path(mutate_pickles.CANARY).mkdir(), "code of the file was run"),
    ],
    ids=["error", "crash", "hang", "memory", "code"],
)
def test_every_kind_of_failure_is_a_finding_of_one_input(monkeypatch, read, expected):
    chosen = Format(_write_example, lambda path: None, {".json": mutate.JSON})
    damaged = Format(_write_example, lambda path: path.parts[0] == "good" or read(path), chosen.ways)
    monkeypatch.setitem(FORMATS, "example", damaged)
    monkeypatch.setattr(fuzz, "SECONDS", 1.0)
    tally = fuzz.fuzz("example", inputs=2)
    assert tally.inputs == 2
    assert [number for number, _ in tally.findings] == [0, 1]
    assert all(expected in finding for _, finding in tally.findings)


def test_the_same_seed_makes_the_same_damage():
    good = b'{"a": [1, 2, {"b": null}], "c": "d"}'
    for way in mutate.JSON:
        assert way(Random("1"), good) == way(Random("1"), good)
    assert len({mutate.json_changed(Random(seed), good) for seed in range(50)}) > 30


def test_the_planted_call_runs_in_a_plain_unpickler(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(mutate_pickles.PLANTED + b"N.")
    assert Path(mutate_pickles.CANARY).is_dir()


# Findings of long runs


def test_a_pickle_with_a_huge_memo_is_refused_before_memory_is_allocated(tmp_path):
    path = tmp_path / "0_3.pickle"
    path.write_bytes(b"\x80\x04Nr\xff\xff\xff\x7f.")
    with pytest.raises(BadForeignLens, match="has a memo number 2147483647"):
        lj.import_lens(path, formats.model())


def test_moments_without_run_information_are_refused(tmp_path):
    path = tmp_path / "moments.safetensors"
    FORMATS["moments"].make(tmp_path)
    tensors, metadata = io.read_tensors(path)
    head = json.loads(metadata["head"])
    for about in (
        {key: value for key, value in head["about"].items() if key != "fingerprint"},
        head["about"] | {"n_blocks": "2"},
        head["about"] | {"max_length": None},
        [],
    ):
        header = json.dumps(head | {"about": about})
        io.write_tensors(path, tensors, metadata | {"head": header})
        with pytest.raises(BadArtifact):
            SplitMoments.load(path)
    io.write_tensors(path, {}, metadata)
    with pytest.raises(BadArtifact, match="no sums"):
        SplitMoments.load(path)
    none = json.dumps(head | {"n": dict.fromkeys(head["n"], 0)})
    io.write_tensors(path, {}, metadata | {"head": none})
    with pytest.raises(BadMoments, match="no positions"):
        solve_jumps(SplitMoments.load(path), "mat")


@pytest.mark.parametrize(
    "change",
    [
        {"rule": {"kind": "two-stage", "levels": [1, 2], "worth": 0.5, "threshold": 2.0}},
        {"rule": {"kind": "none", "levels": [1, 2], "worth": 0.5, "threshold": 0.9}},
        {"rule": {"kind": "two-stage", "levels": [2, 1], "worth": 0.5, "threshold": 0.9}},
        {"rule": {"kind": "two-stage", "levels": [1], "worth": 0.5, "threshold": 0.9}},
        {"unverified": 0},
        {"test": {}},
        {"test": dict.fromkeys(("agreement", "low", "high", "blocks_saved", "cost"), 10**400)},
        {"lossless": None},
    ],
)
def test_an_impossible_exit_rule_is_refused(tmp_path, change):
    FORMATS["exit"].make(tmp_path)
    tensors, metadata = io.read_tensors(tmp_path / calibration_file.FILE_NAME)
    about = json.loads(metadata["exit"]) | change
    io.write_tensors(tmp_path / calibration_file.FILE_NAME, tensors, {"exit": json.dumps(about)})
    with pytest.raises(BadArtifact, match="is not a valid calibration file"):
        calibration_file.load_calibration(tmp_path)


def test_a_format_version_of_any_length_is_refused_in_one_line(tmp_path):
    FORMATS["exit"].make(tmp_path)
    tensors, metadata = io.read_tensors(tmp_path / calibration_file.FILE_NAME)
    about = json.loads(metadata["exit"]) | {"format_version": "a" * 2_000}
    io.write_tensors(tmp_path / calibration_file.FILE_NAME, tensors, {"exit": json.dumps(about)})
    with pytest.raises(NewerFormat) as refused:
        calibration_file.load_calibration(tmp_path)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("change", [{"step": "3"}, {"step": 51}, {"history": []}, {"history": [[0.5]]}, {"best": None}])
def test_an_unfinished_refinement_that_cannot_resume_is_refused(tmp_path, change):
    tuning = formats.a_tuning()
    tuning.save(tmp_path, "same")
    path = tmp_path / formats.UNFINISHED
    torch.save(torch.load(path, weights_only=True) | change, path)
    with pytest.raises(BadArtifact, match="is damaged"):
        formats.a_tuning().restore(tmp_path, "same")
    path.write_bytes(b"no zip at all")
    with pytest.raises(BadArtifact, match="remove it to start anew"):
        formats.a_tuning().restore(tmp_path, "same")


def test_an_unfinished_refinement_needs_finite_steps(tmp_path):
    """Settings of the optimiser are not read from the file; its state must be numbers."""
    tuning = formats.a_tuning()
    tuning.save(tmp_path, "same")
    path = tmp_path / formats.UNFINISHED
    state = torch.load(path, weights_only=True)
    del state["optimiser"]["param_groups"][0]["betas"]
    torch.save(state, path)
    FORMATS["unfinished-refine"].read(path)
    for step in (2j, -3.0, torch.nan):
        state["optimiser"]["state"][0]["step"] = torch.tensor(step)
        torch.save(state, path)
        with pytest.raises(BadArtifact, match="step is not"):
            formats.a_tuning().restore(tmp_path, "same")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": []}, "pairs is .*at least 1 item"),
        ({"reservoir": 10**9}, "reservoir is 1000000000"),
        ({"n": {"fit": 10**400, "select": 0, "test": 0}}, "n.fit is 1"),
        ({"pairs": [["a" * 2000, "1"]]}, "names no site"),
    ],
)
def test_a_moments_header_that_makes_no_sense_is_refused(tmp_path, change, message):
    FORMATS["moments"].make(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    tensors, metadata = io.read_tensors(path)
    head = json.dumps(json.loads(metadata["head"]) | change)
    io.write_tensors(path, tensors, metadata | {"head": head})
    with pytest.raises(LayerjumpError, match=message) as refused:
        SplitMoments.load(path)
    assert len(str(refused.value)) < 500


def test_a_shift_of_the_wrong_width_is_refused(tmp_path):
    FORMATS["moments"].make(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    tensors, head = io.read_tensors(path)
    wide = {name: torch.zeros(10**6) for name in tensors if "|shift/" in name}
    io.write_tensors(path, tensors | wide, head)
    with pytest.raises(BadArtifact, match="not those of its pairs"):
        SplitMoments.load(path)


def test_incomplete_results_are_refused(tmp_path):
    results = {"kind": "layerjump results", "studies": {}, "command": "", "model": {}, "text": {}}
    io.write_json(tmp_path / "results.json", results)
    with pytest.raises(BadArtifact, match="expected the key 'layerjump'"):
        load_results(tmp_path)
    study = {"tables": {"levels": [3]}, "skipped": None, "headline": {}, "settings": {}}
    with pytest.raises(BadArtifact, match="predictions, levels, item 1: expected LevelRow, got '3'"):
        STUDIES["predictions"].from_json(study)
    empty = study | {"tables": {"levels": []}, "notes": []}
    empty["headline"] = {"levels_where_map_beats_identity": 0}
    old = Path(__file__).parents[1] / "fixtures" / "saved-before-0.1" / "results.json"
    results = json.loads(old.read_text()) | {"studies": {"predictions": empty}}
    io.write_json(tmp_path / "results.json", results)
    with pytest.raises(BadArtifact, match="the study predictions cannot be shown"):
        write_report(load_results(tmp_path), tmp_path / "report")
    io.write_json(tmp_path / "results.json", results | {"format": "new"})
    with pytest.raises(BadArtifact, match="expected a number as format, got 'new'"):
        load_results(tmp_path)

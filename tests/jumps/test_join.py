"""Jumps of several runs joined to one set: the same bytes as one run's, and what does not belong together refused."""

import dataclasses

import pytest
import torch
from helpers import fitted_gpt2
from helpers.cli import run
from helpers.comparisons import same_bytes

import layerjump as lj
from layerjump.errors import BadJumps, WrongModel

model = fitted_gpt2.model  # fixture


def test_levels_of_two_runs_join_to_the_bytes_of_one(model, study_text, tmp_path):
    whole = lj.fit(model, study_text, tokens=4_000)
    parts = [lj.fit(model, study_text, pairs=pairs, tokens=4_000) for pairs in ("0:4,2:4", "1:4,3:4")]
    lj.Jumps.join(parts).save_pretrained(tmp_path / "joined")
    whole.save_pretrained(tmp_path / "whole")
    assert same_bytes(tmp_path / "whole", tmp_path / "joined")


def test_temperatures_of_all_levels_are_joined(model, study_text):
    settings = {"estimator": "calibrated", "tokens": 4_000}
    parts = [lj.fit(model, study_text, pairs=pairs, **settings) for pairs in ("0:final,1:final", "2:final,3:final")]
    joined = lj.Jumps.join(parts)
    assert list(joined.provenance.settings["temperature"]) == ["0", "1", "2", "3"]


def test_what_does_not_belong_together_is_refused(model, study_text):
    one = lj.fit(model, study_text, pairs="0:4", tokens=4_000)
    other = lj.fit(model, study_text, pairs="1:4", tokens=4_000)

    def changed(**changes):
        return lj.Jumps(dict.fromkeys(other, other[1, 4]), other.info, dataclasses.replace(other.provenance, **changes))

    with pytest.raises(BadJumps, match=r"0 → 4 is in more than one"):
        lj.Jumps.join([one, other, one])
    with pytest.raises(WrongModel, match="different weights"):
        lj.Jumps.join([one, changed(fingerprint="f" * 64)])
    for name, value in {"seed": 1, "estimator": "affine", "text_sha256": "0" * 64, "settings": {"rank": 3}}.items():
        with pytest.raises(BadJumps, match=f"different runs: {name} is"):
            lj.Jumps.join([one, changed(**{name: value})])
    with pytest.raises(BadJumps, match="join them, then refine"):
        lj.Jumps.join([one, changed(settings=other.provenance.settings | {"refine": {}})])
    with pytest.raises(BadJumps, match="at least one"):
        lj.Jumps.join([])


def test_the_command_writes_one_folder(model, study_text, tmp_path):
    for name, pairs in (("a", "0:4,2:4"), ("b", "1:4")):
        lj.fit(model, study_text, pairs=pairs, tokens=4_000).save_pretrained(tmp_path / name)
    command = ["merge", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "c")]
    done = run(*command)
    assert "3 jumps" in done.stdout, done.stderr
    joined = lj.Jumps.from_pretrained(tmp_path / "c", model=model)
    part = lj.Jumps.from_pretrained(tmp_path / "b")
    assert torch.equal(joined[1, 4].weight, part[1, 4].weight)

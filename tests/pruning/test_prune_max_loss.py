"""Pruning within a loss: as many blocks as may go."""

import pytest
from helpers.story_text import stories

import layerjump as lj
from layerjump.errors import BadPruning

TEXT = stories(200)


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


def test_runs_that_are_not_there_are_passed_over(model):
    asked = {"max_loss": 50.0, "method": "remove", "tokens": 6_000, "protect": [2]}
    assert lj.prune(model, TEXT, criterion="angle", **asked).dropped == (3, 4)


def test_a_way_to_choose_that_there_is_not_is_named(model):
    with pytest.raises(BadPruning, match="got 'luck'"):
        lj.prune(model, TEXT, max_loss=2.0, criterion="luck", tokens=6_000)

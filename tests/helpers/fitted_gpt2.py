"""The small trained GPT-2 of tests/fixtures, a text, and jumps fitted on stories: fixtures for a file to take."""

from __future__ import annotations

import pytest

import layerjump as lj
from helpers.story_text import stories


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=300)


@pytest.fixture(scope="module")
def jumps(model):
    return lj.fit(model, stories(300), tokens=6_000)

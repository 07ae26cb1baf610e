"""The examples run, and fit on a screen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.story_text import stories

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "stories.txt"
    path.write_text("\n\n".join(stories(900).documents))
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, text, data_folder, tmp_path):
    assert len(path.read_text().splitlines()) <= 40
    given = [str(data_folder / "tiny-gpt2"), str(text), str(tmp_path / "made")]
    done = subprocess.run(
        [sys.executable, str(path), *given],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"LAYERJUMP_HOME": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_five():
    assert len(EXAMPLES) == 5

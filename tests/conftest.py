"""Shared by all tests: no network, no user cache, real checkpoints where they are to be had."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

# A loaded machine may pause any test: how long an example takes says nothing about the code.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_folder():
    """A function: name → folder of a real checkpoint beside the repository; skips where it is absent."""

    def find(name: str) -> Path:
        folder = SHARED / "models" / name
        if not folder.is_dir():
            pytest.skip(
                f"the real checkpoint {name} is not beside this repository (../shared/models)"
            )
        return folder

    return find


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Small trained checkpoints that are part of the repository."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def study_text():
    """A text small enough to study in a moment."""
    import layerjump as lj

    return lj.read("pydoc", limit=200)


@pytest.fixture(scope="session", params=["tiny-gpt2", "tiny-bert"])
def study_setup(request, data_folder, study_text):
    """A small run of studies, of a causal and of a masked model; what it has made is shared."""
    import layerjump as lj
    from layerjump.studies.setup import Setup, settings_of

    settings = settings_of("ours", tokens=6_000, score=120)
    model = lj.load(data_folder / request.param)
    return Setup(model, study_text, settings, level_pairs="all")

"""Shared by all tests: no network, no user cache, real checkpoints where they are to be had."""

from __future__ import annotations

import os
import shutil
import subprocess
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
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",  # Chromium refuses to run as root otherwise
    "--headless=new",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_folder():
    """A function: name → folder of a real checkpoint beside the repository; skips where it is absent."""

    def find(name: str) -> Path:
        folder = SHARED / "models" / name
        if not folder.is_dir():
            pytest.skip(f"the real checkpoint {name} is not beside this repository (../shared/models)")
        return folder

    return find


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Small trained checkpoints that are part of the repository."""
    return ROOT / "tests" / "fixtures"


@pytest.fixture(scope="session")
def study_text():
    """A text small enough to study in a moment."""
    import layerjump as lj

    return lj.load_text("pydoc", limit=200)


@pytest.fixture(scope="session", params=["tiny-gpt2", "tiny-bert"])
def study_setup(request, data_folder, study_text):
    """A small run of studies, of a causal and of a masked model; what it has made is shared."""
    import layerjump as lj
    from layerjump.studies.setup import Setup, make_settings

    settings = make_settings("ours", tokens=6_000, n_test_positions=120)
    model = lj.load(data_folder / request.param)
    return Setup(model, study_text, settings, level_pairs="all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip simulated devices next to other tests: autograd counts the devices once, at the first gradient."""
    simulated = [item for item in items if "device_guard" in getattr(item, "fixturenames", ())]
    if len(simulated) < len(items):
        for item in simulated:
            item.add_marker(pytest.mark.skip(reason="needs a process of its own: pytest tests/test_simulated_cuda.py"))


@pytest.fixture(scope="session")
def device_guard() -> None:
    """What simulated devices need of torch, compiled once."""
    from helpers.simulated_cuda import NoCompiler, load_guard

    try:
        load_guard()
    except NoCompiler as error:
        pytest.skip(str(error))


def missing(what):
    if os.environ.get("LAYERJUMP_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{what}, but LAYERJUMP_REQUIRE_BROWSER=1 asks for the browser tests")
    pytest.skip(what)


@pytest.fixture(scope="module")
def browser():
    """A real Chromium: the one that CHROMIUM names, or one on the path."""
    given = os.environ.get("CHROMIUM")
    program = shutil.which(given) if given else next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        missing(f"there is no Chromium ({given or ', '.join(BROWSERS)})")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    # Lazily, because what was read from it may still be mapped into memory.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)

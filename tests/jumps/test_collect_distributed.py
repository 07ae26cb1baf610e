"""The pass over text in several processes."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from helpers import fitted_gpt2
from helpers.comparisons import assert_same_predictions, same_bytes

import layerjump as lj

model = fitted_gpt2.model  # a fixture


def torchrun(n: int, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return subprocess.run(
        [*command, "-m", "layerjump", "fit", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("n", [2, 3])
def test_several_processes_give_the_same_jumps(n, model, data_folder, tmp_path):
    folder = str(data_folder / "tiny-gpt2")
    lj.fit(model, "pydoc", pairs="adjacent").save_pretrained(tmp_path / "one")
    done = torchrun(n, folder, "--pairs", "adjacent", "-o", str(tmp_path / "many"))
    assert done.returncode == 0, done.stderr
    one, many = (lj.Jumps.from_pretrained(tmp_path / name) for name in ("one", "many"))
    assert json.loads((tmp_path / "many" / "jumps.json").read_text())["provenance"]["n_fit"] > 0
    assert_same_predictions(many, one, model, lj.load_text("pydoc"))
    for pair in one:
        assert one.info[pair].r2 == pytest.approx(many.info[pair].r2, abs=1e-5)


def test_a_process_that_dies_ends_the_run_and_resume_completes_it(data_folder, tmp_path):
    settings = (str(data_folder / "tiny-gpt2"), "--pairs", "all", "--positions", "all", "--checkpoint-seconds", "0")
    assert torchrun(2, *settings, "-o", str(tmp_path / "whole")).returncode == 0
    folder = tmp_path / "broken"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.Popen(
        [*command, "-m", "layerjump", "fit", *settings, "-o", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while len(list(folder.glob("unfinished-*-of-2.safetensors"))) < 2:
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.02)
    for child in psutil.Process(run.pid).children(recursive=True):
        if child.environ().get("RANK") == "1":
            child.kill()
    _, error = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "--resume" in error
    assert not (folder / "jumps.json").exists()
    resumed = torchrun(2, *settings, "-o", str(folder), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert same_bytes(tmp_path / "whole", folder)
    assert list(folder.glob("unfinished-*")) == []

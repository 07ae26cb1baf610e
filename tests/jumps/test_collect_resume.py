"""The pass over text, killed and stopped: it goes on and ends in the same bytes."""

import random
import signal
import subprocess
import sys
import time

import pytest
from helpers import fitted_gpt2
from helpers.comparisons import same_bytes

from layerjump.errors import BadArtifact
from layerjump.jumps.collect_moments import Checkpoint, plan_run
from layerjump.jumps.moments import SplitMoments

model, text = fitted_gpt2.model, fitted_gpt2.text  # fixtures

RUN = """
import sys, layerjump as lj
from pathlib import Path
from layerjump.jumps.collect_moments import Checkpoint
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.fit import solve_jumps
model, out, every = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
checkpoint = Checkpoint(out, every, resume=True)
run = plan_run(lj.load(model), "pydoc", pairs="all", positions="all", max_length=64)
out.mkdir(exist_ok=True)
(out / "began").touch()
solve_jumps(run.run(checkpoint=checkpoint), "affine").save_pretrained(out)
checkpoint.clear()
"""


def start(model, out, every=0.0):
    code = [sys.executable, "-c", RUN, str(model), str(out), str(every)]
    return subprocess.Popen(code, stderr=subprocess.PIPE, text=True)


def test_killed_at_twenty_random_moments_it_ends_byte_identical(data_folder, tmp_path):
    """Sums are saved after every batch, so kills hit the middle of batches and of saves alike."""
    folder, moments, kills = data_folder / "tiny-gpt2", random.Random(0), 0
    whole = start(folder, tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    finished = tmp_path / "killed-0"
    while kills < 20:
        process = start(folder, finished)
        # Its pid file says that the pass begins; before that there would be nothing to lose.
        while not (finished / "began").is_file() and process.poll() is None:
            time.sleep(0.01)
        (finished / "began").unlink(missing_ok=True)
        time.sleep(moments.uniform(0, 1.0))
        if process.poll() is None:
            process.kill()
            kills += 1
        if process.wait() == 0:  # it got to its end: begin another
            assert same_bytes(tmp_path / "whole", finished)
            finished = tmp_path / f"killed-{kills}"
    process = start(folder, finished)
    assert process.wait() == 0, process.stderr.read()
    assert same_bytes(tmp_path / "whole", finished)
    assert [path.name for path in finished.iterdir() if path.name.startswith("unfinished")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_and_says_how_to_go_on(number, data_folder, tmp_path):
    command = [sys.executable, "-m", "layerjump", "fit", str(data_folder / "tiny-gpt2"), "--pairs", "all"]
    command += ["--positions", "all", "--checkpoint-seconds", "0", "-o"]
    subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True)
    folder = tmp_path / "stopped"
    process = subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (folder / "unfinished-0-of-1.safetensors").is_file():  # it is in the middle of the pass
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.strip().splitlines()[-1].endswith("run the same command with --resume to continue")
    assert not (folder / "jumps.safetensors").exists()
    done = subprocess.run([*command, str(folder), "--resume"], capture_output=True, text=True, check=True)
    assert "R²" in done.stdout
    assert same_bytes(tmp_path / "whole", folder)


def test_resuming_with_other_settings_is_refused(model, text, tmp_path):
    run = plan_run(model, text)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(SplitMoments(**run.moments, info=run.info), dict.fromkeys(run.batches, 0))
    again = plan_run(model, text, seed=1)
    with pytest.raises(BadArtifact, match="other settings .*seed 0 → 1"):
        again.run(checkpoint=Checkpoint(tmp_path, resume=True))


def test_resuming_with_other_features_is_refused(model, text, tmp_path):
    run = plan_run(model, text, pairs="to-final", features="both")
    Checkpoint(tmp_path).save(SplitMoments(**run.moments, info=run.info), dict.fromkeys(run.batches, 0))
    again = plan_run(model, text, pairs="to-final", features="rms")
    with pytest.raises(BadArtifact, match="other settings .*features both → rms"):
        again.run(checkpoint=Checkpoint(tmp_path, resume=True))

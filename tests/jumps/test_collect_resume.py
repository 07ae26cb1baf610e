"""The pass over text, killed and stopped: it goes on and ends in the same bytes."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
from helpers import fitted_gpt2
from helpers.comparisons import same_bytes

from layerjump.errors import BadArtifact, RunStopped
from layerjump.io import read_tensors, write_tensors
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.moments_checkpoint import Checkpoint, PartialSums
from layerjump.jumps.moments_of_splits import SplitMoments, read_header
from layerjump.models.sites import Site

model, text = fitted_gpt2.model, fitted_gpt2.text  # fixtures

RUN = """
import sys, layerjump as lj
from pathlib import Path
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.moments_checkpoint import Checkpoint
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


def save_unstarted(run, folder):
    moments = SplitMoments(**run.moments, info=run.info)
    Checkpoint(folder).save([PartialSums(moments, dict.fromkeys(run.batches, 0))])


def stop_after(run, n_batches, checkpoint):
    """Stop a run as Ctrl-C does."""
    calls = []

    def progress(done, total):
        calls.append(done)
        if len(calls) == n_batches:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunStopped, match="the sums are saved"):
        run.run(progress=progress, checkpoint=checkpoint)


def test_a_resumed_calibrated_run_ends_in_the_same_bytes(model, text, tmp_path):
    """Its products are float32: in float64 after the resume, the sums would differ in their seventh digit."""

    def plan():
        return plan_run(model, text, estimator="calibrated", tokens=20_000)

    plan().run().save(tmp_path / "whole")
    stop_after(plan(), 4, Checkpoint(tmp_path))
    plan().run(checkpoint=Checkpoint(tmp_path, resume=True)).save(tmp_path / "resumed")
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_parts_that_were_saved_at_different_batches_catch_up(model, text, tmp_path):
    """As processes leave them that are killed while some have saved and others have not."""

    def plan():
        return plan_run(model, text, estimator="calibrated", tokens=20_000)

    plan().run().save(tmp_path / "whole")
    file = tmp_path / "unfinished-0-of-1.safetensors"
    for n_batches, sources, name in ((4, [Site(0), Site(2)], "0-of-2"), (7, [Site(1)], "1-of-2")):
        stop_after(plan(), n_batches, Checkpoint(tmp_path))
        header = read_header(file)
        part = SplitMoments.load_sources(file, sources)
        part.save(tmp_path / f"{name}.part", progress=header.done)
        file.unlink()
    for name in ("0-of-2", "1-of-2"):
        (tmp_path / f"{name}.part").rename(tmp_path / f"unfinished-{name}.safetensors")
    plan().run(checkpoint=Checkpoint(tmp_path, every=0, resume=True)).save(tmp_path / "resumed")
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
    assert [path.name for path in tmp_path.glob("unfinished-*")] == [file.name]  # the others' when theirs are in it


def test_sums_of_an_older_version_are_refused(model, text, tmp_path):
    """They do not say in which precision their products were formed, nor which of the batches they hold."""
    run = plan_run(model, text)
    save_unstarted(run, tmp_path)
    path = tmp_path / "unfinished-0-of-1.safetensors"
    tensors, metadata = read_tensors(path)
    header = json.loads(metadata["head"])
    del header["products"]
    write_tensors(path, tensors, metadata | {"head": json.dumps(header)})
    with pytest.raises(BadArtifact, match="older layerjump"):
        plan_run(model, text).run(checkpoint=Checkpoint(tmp_path, resume=True))
    assert path.exists()


def test_resuming_with_other_settings_is_refused(model, text, tmp_path):
    run = plan_run(model, text)
    save_unstarted(run, tmp_path)
    again = plan_run(model, text, seed=1)
    with pytest.raises(BadArtifact, match="other settings .*seed 0 → 1"):
        again.run(checkpoint=Checkpoint(tmp_path, resume=True))


def test_resuming_with_other_features_is_refused(model, text, tmp_path):
    run = plan_run(model, text, pairs="to-final", features="both")
    save_unstarted(run, tmp_path)
    again = plan_run(model, text, pairs="to-final", features="rms")
    with pytest.raises(BadArtifact, match="other settings .*features both → rms"):
        again.run(checkpoint=Checkpoint(tmp_path, resume=True))

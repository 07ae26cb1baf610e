"""One process writes an output folder at a time; the lock of a killed process does not block others."""

import os
import signal
import time

import pytest
import torch
from helpers.processes import end_of, in_child, start
from transformers import AutoTokenizer
from typer.testing import CliRunner

from layerjump.cli.main import app
from layerjump.errors import BadArtifact
from layerjump.io import only_writer, replace_folder, writing
from layerjump.jumps.moments_of_splits import SplitMoments
from layerjump.training.trainer import COMPLETE_MARK, RUN_FILE, find_checkpoint, remove_training_folder


def hold(folder, replaced):
    """A child that holds a folder until it is killed."""

    def wait():
        with only_writer(folder, replaced=replaced):
            (folder.parent / "held").touch()
            time.sleep(60)

    child = start(wait)
    while not (folder.parent / "held").exists():
        time.sleep(0.01)
    return child


@pytest.mark.parametrize("replaced", [False, True])
def test_a_second_writer_is_refused_unless_the_first_was_killed(replaced, tmp_path):
    folder = tmp_path / "out"
    child = hold(folder, replaced)
    with pytest.raises(BadArtifact, match="another run is writing .*out; wait"), only_writer(folder, replaced=replaced):
        pytest.fail("two writers at once")
    with only_writer(tmp_path / "other", replaced=replaced):
        pass
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL
    with only_writer(folder, replaced=replaced):
        pass
    assert [path.name for path in tmp_path.rglob("*lock")] == []


@pytest.mark.parametrize(
    ("command", "replaced"),
    [
        ("calibrate {model} --jumps {folder}", False),
        ("import lens.pt --model {model} -o {folder}", False),
        ("export jumps --model {model} --format mat -o {folder}", True),
    ],
)
def test_a_command_is_refused_while_another_writes(command, replaced, data_folder, tmp_path):
    folder = tmp_path / "out"
    words = command.format(model=data_folder / "tiny-gpt2", folder=folder).split()
    child = hold(folder, replaced)
    done = CliRunner().invoke(app, ["--debug", *words])
    os.kill(child, signal.SIGKILL)
    end_of(child)
    assert isinstance(done.exception, BadArtifact)
    assert "another run is writing" in str(done.exception)


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="bad"), only_writer(tmp_path / "new"):
        raise ValueError("bad")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with only_writer(tmp_path / "mine"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_kill_between_two_names_is_put_right(tmp_path, monkeypatch):
    """The old folder has lost its name, the new one has not got it yet."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("old")
    rename = os.replace

    def killed_after(source, target):
        rename(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    def export():
        monkeypatch.setattr(os, "replace", killed_after)
        replace_folder(folder, lambda new: (new / "weights").touch(), force=True)

    assert in_child(export) == -signal.SIGKILL
    assert not folder.exists()
    with only_writer(folder, replaced=True):
        assert (folder / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_checkpoints_of_an_unknown_training_are_not_gone_on_from(tmp_path):
    place = tmp_path / "checkpoint-3"
    place.mkdir()
    (place / COMPLETE_MARK).touch()
    with pytest.raises(BadArtifact, match=RUN_FILE):
        find_checkpoint(tmp_path, {"seed": 0})


def test_a_training_that_is_half_forgotten_starts_anew(tmp_path, monkeypatch):
    folder = tmp_path / "training"
    for step in (3, 6):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / COMPLETE_MARK).touch()
    assert find_checkpoint(tmp_path / "none", {"seed": 0}) is None

    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def end():
        monkeypatch.setattr("shutil.rmtree", killed)
        remove_training_folder(folder)

    assert in_child(end) == -signal.SIGKILL
    assert find_checkpoint(folder, {"seed": 1}) is None


def test_what_tokenizers_cannot_write_is_one_line(data_folder, tmp_path):
    """They raise a plain Exception, with the system's number in its words."""
    tokenizer = AutoTokenizer.from_pretrained(data_folder / "tiny-gpt2").backend_tokenizer
    with pytest.raises(BadArtifact, match="cannot be written: the disk is full"), writing(tmp_path / "tokenizer.json"):
        tokenizer.save("/dev/full")


def test_what_torch_cannot_write_is_one_line(tmp_path):
    """It raises a RuntimeError of its own, and names no reason."""
    with (
        pytest.raises(BadArtifact, match="cannot be written: .* free some space") as caught,
        writing(tmp_path / "state.pt"),
    ):
        torch.save({"big": torch.zeros(100_000)}, "/dev/full")
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="another"), writing(tmp_path / "state.pt"):
        raise RuntimeError("another")


# Results are not overwritten without --force


@pytest.mark.parametrize(
    ("command", "left", "said"),
    [
        ("fit {model}", "jumps.safetensors", "holds jumps already"),
        ("fit {model}", "unfinished-0-of-1.safetensors", "which --resume continues"),
        ("fit {model} --refine", "unfinished-refine.pt", "which --resume continues"),
        ("study {model} r2", "results.json", "which --resume adds to"),
        ("fit {model} --resume", "jumps.safetensors", "holds jumps already"),
        ("import lens.pt --model {model}", "jumps.safetensors", "holds jumps already"),
        ("export jumps --model {model} --format mat", "anything", "would be overwritten"),
    ],
)
def test_results_are_not_overwritten_without_force(command, left, said, data_folder, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / left).write_text("precious")
    words = command.format(model=data_folder / "tiny-gpt2").split()
    done = CliRunner().invoke(app, ["--debug", *words, "-o", str(folder)])
    assert isinstance(done.exception, BadArtifact)
    assert said in str(done.exception)
    assert "--force" in str(done.exception)
    assert [path.name for path in folder.iterdir()] == [left]
    assert (folder / left).read_text() == "precious"


def test_force_overwrites(data_folder, tmp_path):
    words = ["fit", str(data_folder / "tiny-gpt2"), "--tokens", "2000", "-o", str(tmp_path / "out")]
    assert CliRunner().invoke(app, words).exit_code == 0
    first = (tmp_path / "out" / "jumps.safetensors").read_bytes()
    assert CliRunner().invoke(app, [*words, "--seed", "1"]).exit_code == 1
    assert (tmp_path / "out" / "jumps.safetensors").read_bytes() == first
    assert CliRunner().invoke(app, [*words, "--seed", "1", "--force"]).exit_code == 0
    assert (tmp_path / "out" / "jumps.safetensors").read_bytes() != first


def test_the_advice_of_error_messages_works(data_folder, tmp_path):
    words = ["fit", str(data_folder / "tiny-gpt2"), "--tokens", "2000", "-o", str(tmp_path / "out")]
    assert CliRunner().invoke(app, words).exit_code == 0
    jumps = tmp_path / "out" / "jumps.safetensors"
    sums = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "sums"), "--save-moments"])
    assert sums.exit_code == 0
    # As a run of another seed would leave it that was stopped.
    collected = SplitMoments.load(tmp_path / "sums" / "moments.safetensors")
    jumps.unlink()
    collected.save(tmp_path / "out" / "unfinished-0-of-1.safetensors", progress={"fit": 1})
    other = CliRunner().invoke(app, ["--debug", *words, "--seed", "3", "--resume"])
    assert "use the same, or --force instead of --resume" in str(other.exception)
    anew = CliRunner().invoke(app, [*words, "--seed", "3", "--force"])
    assert anew.exit_code == 0
    assert jumps.exists()
    assert list(jumps.parent.glob("unfinished-*")) == []

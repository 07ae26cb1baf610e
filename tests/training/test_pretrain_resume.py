"""Pretraining resumes after a kill, stops when it diverges, and refuses bad settings before it starts."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from helpers.cli import refused
from helpers.pretraining import HELD_OUT, SMALL, TEXT
from helpers.processes import end_of, start

import layerjump as lj
from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadArtifact, BadText, BadTraining, Diverged, TextTooShort
from layerjump.training.build_model import ModelShape
from layerjump.training.packed_rows import pack_rows
from layerjump.training.pretrain import pretrain


@pytest.mark.parametrize(("arch", "penalty"), [("llama", "cosine"), ("bert", "none")])
def test_a_killed_run_resumes_to_the_same_bytes(arch, penalty, tmp_path):
    recipe = replace(SMALL, arch=arch, penalty=penalty, steps=24, eval_every=6)
    whole = pretrain(TEXT, tmp_path / "whole", recipe, eval_text=HELD_OUT, device="cpu")
    killed, work = tmp_path / "killed", tmp_path / "killed-training"
    child = start(lambda: pretrain(TEXT, killed, recipe, eval_text=HELD_OUT, device="cpu"))
    while not (work / "checkpoint-6" / "whole").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL
    assert not killed.exists()
    (work / "checkpoint-23").mkdir()  # a truncated checkpoint
    (work / "checkpoint-23" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(BadArtifact, match="learning_rate"):
        pretrain(TEXT, killed, replace(recipe, learning_rate=1e-3), eval_text=HELD_OUT)
    record = pretrain(TEXT, killed, recipe, eval_text=HELD_OUT, device="cpu")
    weights = [tmp_path / name / "model.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [row["step"] for row in record.tables.steps] == [0, 6, 12, 18, 24]
    assert record.tables == whole.tables
    losses = [[row["lm_loss"] for row in record.log] for record in (whole, record)]
    assert losses[0] == losses[1]
    assert not work.exists()


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    recipe = replace(SMALL, steps=400, eval_every=2, learning_rate=20.0)
    with pytest.raises(Diverged, match="learning_rate below 20") as stopped:
        pretrain(TEXT, tmp_path / "out", recipe, eval_text=HELD_OUT, device="cpu")
    assert not (tmp_path / "out").exists()
    checkpoint = Path(str(stopped.value).split("checkpoint is ")[1].split(";")[0])
    good = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert all(bool(weight.isfinite().all()) for weight in good.parameters())
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    rows = pack_rows(TEXT.documents[:50], Tokenization.of(tokenizer, max_positions=16), 16).long()
    assert float(good(rows, labels=rows).loss.detach()) < 2 * math.log(300)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 100_000}, BadTraining, "gives only"),
        ({"vocab_size": 10}, BadTraining, "at least 257"),
        ({"length": 32}, BadTraining, "max_positions=32"),
        ({"batch_size": 9}, BadTraining, "multiple of 2"),
        ({"arch": "rnn"}, BadTraining, "no model type of transformers"),
        ({"penalty": "l1"}, BadTraining, "none, cosine"),
        ({"levels": (3,)}, BadTraining, "1 to 2"),
        ({"steps": 0}, BadTraining, "1 or more"),
        ({"penalty_weight": float("nan")}, BadTraining, "0 or more"),
        ({"learning_rate": 0.0}, BadTraining, "above 0"),
    ],
)
def test_bad_settings_are_refused(changes, error, message, tmp_path):
    def train():
        recipe = replace(SMALL, **changes)
        pretrain(TEXT, tmp_path / "out", recipe, eval_text=HELD_OUT, micro_batches=2, device="cpu")

    with pytest.raises(error, match=message):
        train()
    assert not (tmp_path / "out").exists()


def test_a_finished_training_is_not_repeated(tmp_path):
    record = pretrain(TEXT, tmp_path / "out", SMALL, eval_text=HELD_OUT, device="cpu", keep_checkpoints=True)
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = pretrain(TEXT, tmp_path / "out", SMALL, eval_text=HELD_OUT, device="cpu", force=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    assert again.tables == record.tables


def test_a_failed_run_does_not_block_the_next(tmp_path):
    with pytest.raises(BadTraining):
        pretrain(TEXT, tmp_path / "out", replace(SMALL, vocab_size=50_000), eval_text=HELD_OUT)
    record = pretrain(TEXT, tmp_path / "out", replace(SMALL, steps=1, eval_every=1), eval_text=HELD_OUT)
    assert record.settings.vocab_size == len(lj.load(tmp_path / "out").tokenization.tokenizer) == 300


def test_bad_shapes_and_texts(tmp_path):
    with pytest.raises(BadTraining, match="multiple, such as 18"):
        ModelShape(hidden_size=16, heads=3)
    with pytest.raises(BadTraining, match="even size"):
        ModelShape(hidden_size=15, heads=3)
    with pytest.raises(BadTraining, match="layers of 1 or more, got 0"):
        ModelShape(layers=0)
    with pytest.raises(BadText, match="another"):
        pretrain(TEXT, tmp_path / "out", SMALL, eval_text=TEXT)
    with pytest.raises(TextTooShort):
        pretrain(lj.Corpus("one", ("Tom.",), ""), tmp_path / "out", SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "empty.txt"], "only whitespace"),
        (["--text", "some.txt", "--heads", "3"], "does not divide"),
        (["--text", "some.txt", "--penalty-levels", "two"], "expected numbers"),
        (["--text", "some.txt", "--vocab-size", "90000"], "gives only"),
        (["--text", "some.txt", "--device", "tpu"], "cpu or cuda"),
    ],
)
def test_bad_options_give_one_line_on_the_command_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("some.txt").write_text("\n".join(TEXT.documents))
    assert message in refused(monkeypatch, capsys, "pretrain", *arguments, "-o", "out")
    assert not Path("out").exists()

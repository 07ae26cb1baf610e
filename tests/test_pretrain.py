"""Pretraining: no strength is no penalty, how batches are dealt out does not matter, and a kill costs nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from children import end_of, start
from stories import stories

import layerjump as lj
from layerjump.errors import BadArtifact, BadText, BadTraining, Diverged, TextTooShort
from layerjump.inputs.tokens import Tokens
from layerjump.train.architectures import ARCHITECTURES, VARIED, Shape, new_model
from layerjump.train.loop import arguments, train
from layerjump.train.packing import Rows, pack
from layerjump.train.pretrain import pretrain
from layerjump.train.profile import profile
from layerjump.train.recipe import Recipe
from layerjump.train.vocabulary import train_tokenizer

TEXT, HELD_OUT = stories(300), stories(60, seed=1, name="others")
SMALL = Recipe(
    shape=Shape(layers=2, hidden=16, heads=2, positions=16),
    vocabulary=300,
    length=16,
    steps=8,
    batch=8,
    every=4,
    learning_rate=3e-3,
)


@pytest.fixture(scope="module")
def tokenizers():
    return {
        masked: train_tokenizer(TEXT.documents, 300, 16, masked=masked) for masked in (False, True)
    }


def trained(recipe, tokenizers, folder, *, accumulate=1, dtype=torch.float32):
    masked = recipe.architecture.masked
    tokenizer = tokenizers[masked]
    rows = pack(TEXT.documents, Tokens.of(tokenizer, max_positions=16, masked=masked), 16)
    hf = new_model(recipe.architecture, recipe.shape, tokenizer, seed=recipe.seed).to(dtype)
    settings = arguments(recipe, folder, accumulate=accumulate, device="cpu")
    log = train(hf, tokenizer, rows, recipe, settings)
    return hf.state_dict(), log


def same(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_no_strength_is_plain_training_bit_for_bit(tokenizers, tmp_path):
    """Beside a Trainer of Hugging Face's own, with the model's own loss."""
    recipe = replace(SMALL, penalty="cosine", strength=0.0)
    ours, log = trained(recipe, tokenizers, tmp_path / "ours")
    rows = pack(TEXT.documents, Tokens.of(tokenizers[False], max_positions=16), 16)
    plain = new_model(recipe.architecture, recipe.shape, tokenizers[False], seed=0)
    transformers.Trainer(
        plain,
        arguments(recipe, tmp_path / "plain", device="cpu"),
        train_dataset=Rows(rows, 64, seed=0),
    ).train()
    assert same(ours, plain.state_dict())
    penalised, more = trained(replace(recipe, strength=0.5), tokenizers, tmp_path / "penalised")
    assert not same(penalised, ours)
    assert log[-1]["penalty"] == 0 < more[-1]["penalty"]


@pytest.mark.parametrize(("arch", "penalty"), [("llama", "cosine"), ("bert", "mse")])
def test_a_batch_may_be_run_in_parts(arch, penalty, tokenizers, tmp_path):
    """Float64, because Adam makes a whole step of a gradient that is rounding alone."""
    recipe = replace(SMALL, arch=arch, penalty=penalty, strength=0.5)
    whole, one = trained(recipe, tokenizers, tmp_path / "whole", dtype=torch.float64)
    parts, four = trained(recipe, tokenizers, tmp_path / "parts", accumulate=4, dtype=torch.float64)
    for name, weight in whole.items():
        assert torch.allclose(weight, parts[name], atol=1e-5), name
    for ours, theirs in zip(four, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["penalty"] == pytest.approx(theirs["penalty"], rel=1e-4)


@pytest.mark.parametrize("penalty", ["cosine", "mse", "jump"])
def test_a_strong_penalty_ends_lower_than_a_weak_one(penalty, tokenizers, tmp_path):
    ends = []
    for strength in (1e-3, 3.0):
        recipe = replace(SMALL, steps=20, every=20, penalty=penalty, strength=strength)
        _, log = trained(recipe, tokenizers, tmp_path / str(strength))
        ends.append(log[-1]["penalty"] / strength)
    assert ends[1] < 0.8 * ends[0]


@pytest.mark.parametrize(("arch", "penalty"), [("llama", "cosine"), ("bert", "none")])
def test_a_killed_run_ends_as_if_it_had_not_been(arch, penalty, tmp_path):
    recipe = replace(SMALL, arch=arch, penalty=penalty, steps=24, every=6)
    whole = pretrain(TEXT, tmp_path / "whole", recipe, held_out=HELD_OUT, device="cpu")
    killed, work = tmp_path / "killed", tmp_path / "killed-training"
    child = start(lambda: pretrain(TEXT, killed, recipe, held_out=HELD_OUT, device="cpu"))
    while not (work / "checkpoint-6" / "whole").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL
    assert not killed.exists()
    (work / "checkpoint-23").mkdir()  # a checkpoint that the kill cut short
    (work / "checkpoint-23" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(BadArtifact, match="learning_rate"):
        pretrain(TEXT, killed, replace(recipe, learning_rate=1e-3), held_out=HELD_OUT)
    record = pretrain(TEXT, killed, recipe, held_out=HELD_OUT, device="cpu")
    weights = [tmp_path / name / "model.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [row["step"] for row in record["tables"]["steps"]] == [0, 6, 12, 18, 24]
    assert record["tables"] == whole["tables"]
    losses = [[row["lm_loss"] for row in made["log"]] for made in (whole, record)]
    assert losses[0] == losses[1]
    assert not work.exists()


def test_two_processes_are_one_and_write_one_model(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXT.documents))
    options = (
        "--layers 2 --hidden 16 --heads 2 --vocab 300 --length 16 --steps 8 --batch 8 --every 4"
    )
    options += " --learning-rate 3e-3 --penalty jump --device cpu --json"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = f"torch.distributed.run --nproc-per-node 2 --master-port {port} -m layerjump pretrain"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *f"{program} --text {text} {options} -o {tmp_path / 'two'}".split(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    recipe = replace(SMALL, penalty="jump")
    found = {
        "one": pretrain(lj.read(text), tmp_path / "one", recipe, device="cpu"),
        "two": json.loads(done.stdout),
    }
    assert found["two"]["processes"] == 2
    for ours, theirs in zip(found["two"]["log"], found["one"]["log"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in found]
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits = [model(ids).logits for model in models]
    assert torch.allclose(*logits, atol=1e-2)
    page = (tmp_path / "two" / "training.html").read_text()
    assert "From step to step" in page
    assert "Block by block" in page


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_folder_is_a_plain_checkpoint(arch, tmp_path):
    recipe = replace(SMALL, arch=arch, steps=2, every=2)
    record = pretrain(TEXT, tmp_path / "made", recipe, held_out=HELD_OUT, device="cpu")
    with pytest.raises(BadArtifact, match="--force"):
        pretrain(TEXT, tmp_path / "made", recipe, held_out=HELD_OUT)
    model = lj.load(tmp_path / "made")
    assert model.n_blocks == 2
    assert model.tokens.tokenizer.model_max_length == 16
    again = profile(model, HELD_OUT).row()
    last = record["tables"]["steps"][-1]
    for name, value in again.items():
        assert value == pytest.approx(last[name], rel=1e-3, abs=1e-3), name
    card = (tmp_path / "made" / "README.md").read_text()
    assert str(tmp_path) not in card + json.dumps(record["settings"])
    auto = transformers.AutoModelForMaskedLM if model.masked else transformers.AutoModelForCausalLM
    assert auto.from_pretrained(tmp_path / "made").num_parameters() == record["parameters"]


@pytest.mark.parametrize(
    ("what", "variant"), [(what, variant) for what in VARIED for variant in VARIED[what]]
)
def test_every_architecture_passes_the_self_check(what, variant, tokenizers):
    kind = VARIED[what][variant]
    hf = new_model(kind, Shape(2, 16, 2, 16), tokenizers[False], seed=0)
    model = lj.Model.wrap(hf, tokenizers[False])
    assert (model.n_blocks, model.width, model.max_positions) == (2, 16, 16)
    hf.train()
    dropped = [part for part in hf.modules() if isinstance(part, torch.nn.Dropout) and part.p]
    assert not dropped


def test_a_profiles_loss_is_the_models_own(data_folder):
    model, text = lj.load(data_folder / "tiny-gpt2"), stories(40)
    losses = []
    for ids in model.tokens.encode(text.documents):
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = model.hf(row).logits[0, 1:-1]  # position 0 is left out
        losses += torch.nn.functional.cross_entropy(logits, row[0, 2:], reduction="none").tolist()
    found = profile(model, text)
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.levels[-1] == {
        "level": 4,
        "r2": 1.0,
        "agreement map": 1.0,
        "agreement identity": 1.0,
    }
    assert len(found.blocks) == 4
    assert found.mean("agreement map") > found.mean("agreement identity")


def test_a_run_that_diverges_stops_and_keeps_what_was_good(tmp_path):
    recipe = replace(SMALL, steps=400, every=2, learning_rate=20.0)
    with pytest.raises(Diverged, match="--learning-rate below 20") as stopped:
        pretrain(TEXT, tmp_path / "out", recipe, held_out=HELD_OUT, device="cpu")
    assert not (tmp_path / "out").exists()
    kept = Path(str(stopped.value).split("checkpoint is ")[1].split(";")[0])
    good = transformers.AutoModelForCausalLM.from_pretrained(kept)
    assert all(bool(weight.isfinite().all()) for weight in good.parameters())
    tokenizer = transformers.AutoTokenizer.from_pretrained(kept)
    rows = pack(TEXT.documents[:50], Tokens.of(tokenizer, max_positions=16), 16).long()
    assert float(good(rows, labels=rows).loss.detach()) < 2 * math.log(300)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"vocabulary": 100_000}, BadTraining, "gives only"),
        ({"vocabulary": 10}, BadTraining, "at least 257"),
        ({"length": 32}, BadTraining, "--positions 32"),
        ({"batch": 9}, BadTraining, "multiple of 2"),
        ({"arch": "rnn"}, BadTraining, "llama, mistral"),
        ({"penalty": "l1"}, BadTraining, "none, cosine"),
        ({"levels": (3,)}, BadTraining, "1 to 2"),
        ({"steps": 0}, BadTraining, "1 or more"),
        ({"strength": float("nan")}, BadTraining, "0 or more"),
        ({"learning_rate": 0.0}, BadTraining, "above 0"),
    ],
)
def test_bad_settings_say_what_was_wanted(changes, error, said, tmp_path):
    def asked():
        recipe = replace(SMALL, **changes)
        pretrain(TEXT, tmp_path / "out", recipe, held_out=HELD_OUT, accumulate=2, device="cpu")

    with pytest.raises(error, match=said):
        asked()
    assert not (tmp_path / "out").exists()


def test_a_run_killed_while_it_wrote_its_model_has_nothing_left_to_train(tmp_path):
    made = pretrain(TEXT, tmp_path / "out", SMALL, held_out=HELD_OUT, device="cpu", keep=True)
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = pretrain(TEXT, tmp_path / "out", SMALL, held_out=HELD_OUT, device="cpu", force=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    assert again["tables"] == made["tables"]


def test_a_run_that_came_to_nothing_is_in_nobodys_way(tmp_path):
    with pytest.raises(BadTraining):
        pretrain(TEXT, tmp_path / "out", replace(SMALL, vocabulary=50_000), held_out=HELD_OUT)
    made = pretrain(TEXT, tmp_path / "out", replace(SMALL, steps=1, every=1), held_out=HELD_OUT)
    assert made["settings"]["vocabulary"] == len(lj.load(tmp_path / "out").tokens.tokenizer) == 300


def test_bad_shapes_and_texts(tmp_path):
    with pytest.raises(BadTraining, match="multiple, such as 18"):
        Shape(hidden=16, heads=3)
    with pytest.raises(BadTraining, match="even size"):
        Shape(hidden=15, heads=3)
    with pytest.raises(BadTraining, match="layers given is 0"):
        Shape(layers=0)
    with pytest.raises(BadText, match="another"):
        pretrain(TEXT, tmp_path / "out", SMALL, held_out=TEXT)
    with pytest.raises(TextTooShort):
        pretrain(lj.Corpus("one", ("Tom.",), ""), tmp_path / "out", SMALL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "empty.txt"], "nothing but blanks"),
        (["--text", "some.txt", "--heads", "3"], "does not divide"),
        (["--text", "some.txt", "--levels", "two"], "give numbers"),
        (["--text", "some.txt", "--vocab", "90000"], "gives only"),
        (["--text", "some.txt", "--device", "tpu"], "cpu or cuda"),
    ],
)
def test_on_the_command_line_bad_input_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    from layerjump.cli import main

    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("some.txt").write_text("\n".join(TEXT.documents))
    monkeypatch.setattr(sys, "argv", ["layerjump", "pretrain", *arguments, "-o", "out"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.strip().splitlines()[-1].startswith("error: ")
    assert not Path("out").exists()

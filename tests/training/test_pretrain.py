"""Pretraining: weight zero is plain training, batches can be split, the result is an ordinary checkpoint."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from helpers.pretraining import HELD_OUT, SMALL, TEXT
from helpers.story_text import stories

import layerjump as lj
from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadArtifact
from layerjump.training.build_model import ARCHITECTURES, VARIANTS, ModelShape, build_model
from layerjump.training.linearity_profile import LevelProfile, measure_profile
from layerjump.training.packed_rows import PackedRows, pack_rows
from layerjump.training.pretrain import PretrainingRecord, pretrain, train_model, training_arguments
from layerjump.training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return {masked: train_tokenizer(TEXT.documents, 300, 16, masked=masked) for masked in (False, True)}


def train(recipe, tokenizers, folder, *, accumulate=1, dtype=torch.float32):
    masked = recipe.architecture.masked
    tokenizer = tokenizers[masked]
    rows = pack_rows(TEXT.documents, Tokenization.of(tokenizer, max_positions=16, masked=masked), 16)
    hf = build_model(recipe.architecture, recipe, tokenizer, seed=recipe.seed).to(dtype)
    settings = training_arguments(recipe, folder, micro_batches=accumulate, device="cpu")
    log = train_model(hf, tokenizer, rows, recipe, settings)
    return hf.state_dict(), log


def equal_weights(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_penalty_weight_zero_is_plain_training_bit_for_bit(tokenizers, tmp_path):
    """Compared with a plain Hugging Face Trainer and the model's own loss."""
    recipe = replace(SMALL, penalty="cosine", penalty_weight=0.0)
    ours, log = train(recipe, tokenizers, tmp_path / "ours")
    rows = pack_rows(TEXT.documents, Tokenization.of(tokenizers[False], max_positions=16), 16)
    plain = build_model(recipe.architecture, recipe, tokenizers[False], seed=0)
    transformers.Trainer(
        plain, training_arguments(recipe, tmp_path / "plain", device="cpu"), train_dataset=PackedRows(rows, 64, seed=0)
    ).train()
    assert equal_weights(ours, plain.state_dict())
    penalised, more = train(replace(recipe, penalty_weight=0.5), tokenizers, tmp_path / "penalised")
    assert not equal_weights(penalised, ours)
    assert log[-1]["penalty"] == 0 < more[-1]["penalty"]


@pytest.mark.parametrize(("arch", "penalty"), [("llama", "cosine"), ("bert", "mse")])
def test_gradient_accumulation_gives_the_same_model(arch, penalty, tokenizers, tmp_path):
    """In float64, because Adam amplifies gradients that are rounding errors."""
    recipe = replace(SMALL, arch=arch, penalty=penalty, penalty_weight=0.5)
    whole, one = train(recipe, tokenizers, tmp_path / "whole", dtype=torch.float64)
    parts, four = train(recipe, tokenizers, tmp_path / "parts", accumulate=4, dtype=torch.float64)
    for name, weight in whole.items():
        assert torch.allclose(weight, parts[name], atol=1e-5), name
    for ours, theirs in zip(four, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["penalty"] == pytest.approx(theirs["penalty"], rel=1e-4)


@pytest.mark.parametrize("penalty", ["cosine", "mse", "jump"])
def test_a_large_weight_lowers_the_penalty(penalty, tokenizers, tmp_path):
    penalties = []
    for weight in (1e-3, 3.0):
        recipe = replace(SMALL, steps=20, eval_every=20, penalty=penalty, penalty_weight=weight)
        _, log = train(recipe, tokenizers, tmp_path / str(weight))
        penalties.append(log[-1]["penalty"] / weight)
    assert penalties[1] < 0.8 * penalties[0]


def test_two_processes_train_the_same_model_as_one(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXT.documents))
    options = "--layers 2 --hidden-size 16 --heads 2 --vocab-size 300 --length 16"
    options += " --steps 8 --batch-size 8 --eval-every 4 --learning-rate 3e-3 --penalty jump --device cpu --json"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = f"torch.distributed.run --nproc-per-node 2 --master-port {port} -m layerjump pretrain"
    done = subprocess.run(
        [sys.executable, "-m", *f"{program} --text {text} {options} -o {tmp_path / 'two'}".split()],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    recipe = replace(SMALL, penalty="jump")
    profile = {
        "one": pretrain(lj.load_text(text), tmp_path / "one", recipe, device="cpu").to_json(),
        "two": json.loads(done.stdout),
    }
    assert profile["two"]["processes"] == 2
    for ours, theirs in zip(profile["two"]["log"], profile["one"]["log"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in profile]
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits = [model(ids).logits for model in models]
    assert torch.allclose(*logits, atol=1e-2)
    page = (tmp_path / "two" / "training.html").read_text()
    assert "From step to step" in page
    assert "Block by block" in page


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_folder_is_an_ordinary_checkpoint(arch, tmp_path):
    recipe = replace(SMALL, arch=arch, steps=2, eval_every=2)
    record = pretrain(TEXT, tmp_path / "model", recipe, eval_text=HELD_OUT, device="cpu")
    with pytest.raises(BadArtifact, match="force=True"):
        pretrain(TEXT, tmp_path / "model", recipe, eval_text=HELD_OUT)
    model = lj.load(tmp_path / "model")
    assert model.n_blocks == 2
    assert model.tokenization.tokenizer.model_max_length == 16
    again = measure_profile(model, HELD_OUT).summary_row()
    last = record.tables.steps[-1]
    for name, value in again.items():
        assert value == pytest.approx(last[name], rel=1e-3, abs=1e-3), name
    card = (tmp_path / "model" / "README.md").read_text()
    assert str(tmp_path) not in card + json.dumps(record.to_json()["settings"])
    auto = transformers.AutoModelForMaskedLM if model.masked else transformers.AutoModelForCausalLM
    assert auto.from_pretrained(tmp_path / "model").num_parameters() == record.parameters


@pytest.mark.parametrize(("what", "variant"), [(what, variant) for what in VARIANTS for variant in VARIANTS[what]])
def test_every_architecture_passes_the_self_check(what, variant, tokenizers):
    kind = VARIANTS[what][variant]
    hf = build_model(kind, ModelShape(2, 16, 2, 16), tokenizers[False], seed=0)
    model = lj.Model.wrap(hf, tokenizers[False])
    assert (model.n_blocks, model.d_model, model.max_positions) == (2, 16, 16)
    hf.train()
    dropped = [part for part in hf.modules() if isinstance(part, torch.nn.Dropout) and part.p]
    assert not dropped


def test_the_loss_of_a_profile_is_the_models_own(data_folder):
    model, text = lj.load(data_folder / "tiny-gpt2"), stories(40)
    losses = []
    for ids in model.tokenization.encode(text.documents):
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = model.hf(row).logits[0, 1:-1]  # position 0 is left out
        losses += torch.nn.functional.cross_entropy(logits, row[0, 2:], reduction="none").tolist()
    profile = measure_profile(model, text)
    assert profile.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert profile.perplexity == pytest.approx(math.exp(profile.loss))
    assert profile.levels[-1] == LevelProfile(4, r2=1.0, agreement_map=1.0, agreement_identity=1.0)
    assert len(profile.blocks) == 4
    assert profile.mean("agreement map") > profile.mean("agreement identity")


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-bert"])
def test_records_of_earlier_versions_load_unchanged(name, data_folder):
    content = json.loads((data_folder / name / "training.json").read_text())
    assert PretrainingRecord.load(data_folder / name).to_json() == content

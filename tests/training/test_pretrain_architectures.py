"""Any causal model type of transformers can be trained: its own configuration made small, its own initialisation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from helpers.pretraining import HELD_OUT, SMALL, TEXT

import layerjump as lj
from layerjump.errors import BadTraining
from layerjump.training.build_model import ARCHITECTURES, ModelShape, build_model, find_architecture
from layerjump.training.pretrain import Recipe, pretrain
from layerjump.training.tokenizer import train_tokenizer

RECIPE = replace(SMALL, layers=2, hidden_size=64, heads=4, steps=6, eval_every=6, penalty="none")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT.documents, 300, 16, masked=False)


@pytest.mark.parametrize(
    ("arch", "loader"),
    [
        ("qwen3_moe", "AutoModelForCausalLM"),
        ("lfm2", "AutoModelForCausalLM"),
        ("gemma3", "AutoModelForCausalLM"),
        ("llava", "AutoModelForImageTextToText"),
    ],
)
def test_a_model_of_any_type_is_trained_and_loads_again(arch, loader, tmp_path):
    record = pretrain(TEXT, tmp_path / "model", replace(RECIPE, arch=arch), eval_text=HELD_OUT, device="cpu")
    steps = record.tables.steps
    assert steps[-1]["loss"] < steps[0]["loss"]
    model = lj.load(tmp_path / "model")
    assert (model.model_type, model.n_blocks, model.d_model, model.max_positions) == (arch, 2, 64, 16)
    assert model.structure.vocab_size == len(model.tokenizer) == 300
    text = model.text_config
    assert text.eos_token_id in (0, None)
    assert f"`{loader}.from_pretrained" in (tmp_path / "model" / "README.md").read_text()
    again = getattr(transformers, loader).from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model.hf(input_ids=ids).logits)
    assert json.loads((tmp_path / "model" / "training.json").read_text())["settings"]["arch"] == arch


def test_the_weights_are_those_of_the_class_and_of_the_seed(tokenizer):
    shape = ModelShape(2, 64, 4, 16)
    first, again, other = (
        build_model(find_architecture("qwen3_moe"), shape, tokenizer, seed=seed).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())
    norms = [weight for name, weight in first.items() if "norm" in name]
    assert norms
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in norms)
    experts = next(weight for name, weight in first.items() if name.endswith("experts.down_proj"))
    assert float(experts.std()) == pytest.approx(0.02, rel=0.05)


def test_no_dropout_in_any_part(tokenizer):
    hf = build_model(find_architecture("opt"), ModelShape(2, 64, 4, 16), tokenizer, seed=0).train()
    ids = torch.arange(3, 15)[None]
    assert torch.equal(hf(input_ids=ids).logits, hf(input_ids=ids).logits)
    assert hf.config.dropout == hf.config.layerdrop == 0


def test_the_named_architectures_are_built_as_before():
    assert all(find_architecture(name).listed is None for name in ("llama", "mistral", "gpt2", "bert"))
    assert list(ARCHITECTURES) == ["llama", "mistral", "gpt2", "bert"]


@pytest.mark.parametrize(
    ("arch", "message"),
    [("mixtrall", "did you mean mixtral"), ("t5", "a seq2seq model"), ("distilbert", "a masked model")],
)
def test_other_types_are_refused(arch, message):
    with pytest.raises(BadTraining, match=f"expected arch .*{message}"):
        Recipe(arch=arch)


def test_a_type_that_reads_both_ways_is_refused(tmp_path):
    with pytest.raises(BadTraining, match="xlnet, whose states depend on later tokens"):
        pretrain(TEXT, tmp_path / "model", replace(RECIPE, arch="xlnet"), eval_text=HELD_OUT, device="cpu")


def test_a_type_that_does_not_read_text_is_refused(tokenizer):
    with pytest.raises(BadTraining, match="pi0 cannot be trained on text: .* robot"):
        build_model(find_architecture("pi0"), ModelShape(2, 64, 4, 16), tokenizer, seed=0)


def test_a_type_with_more_kinds_of_blocks_gets_as_many_blocks(tmp_path):
    record = pretrain(TEXT, tmp_path / "model", replace(RECIPE, arch="nemotron_h"), eval_text=HELD_OUT, device="cpu")
    assert record.settings.layers == lj.load(tmp_path / "model").n_blocks == 4

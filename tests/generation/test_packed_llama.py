"""Packed blocks and unembedding: the same numbers as Hugging Face's, and used for plain Llamas alone."""

from __future__ import annotations

from itertools import product

import torch
from helpers.tiny_models import tiny_model

import layerjump as lj
from layerjump.generation.block_runner import BlockRunner, HuggingFaceBlocks
from layerjump.generation.packed_llama import PackedLlamaBlocks, choose_blocks, pack_unembedding


def test_packed_blocks_and_unembedding_equal_hugging_faces():
    hf = tiny_model("llama", dtype=torch.float32)
    model = lj.Model.wrap(hf)
    assert isinstance(choose_blocks(model), PackedLlamaBlocks)
    ids = torch.randint(3, 61, (2, 29))
    padded = torch.tensor([[0] * 3 + [1] * 26, [1] * 29])
    # A prompt, short or long, one token, several: with and without a mask.
    for mask, lengths in product((None, padded), ((5, 6, 29), (22, 23, 29))):
        whole = torch.ones_like(ids) if mask is None else mask
        position = (whole.cumsum(-1) - 1).clamp_min(0)
        found = []
        for blocks in (PackedLlamaBlocks(model), HuggingFaceBlocks(model)):
            runner = BlockRunner(model, blocks, mask, position)
            with torch.no_grad():
                for length in lengths:
                    states = runner.extend(ids[:, :length])
                    for block in range(1, 4):
                        states = runner.run(block)
                found.append((states, *runner.cache.get(2)))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one[1], other[1], rtol=1e-4, atol=1e-5)
            assert torch.allclose(one[0, ..., -3:, :], other[0, ..., -3:, :], rtol=1e-4, atol=1e-5)
    states = torch.randn(1, 3, 32)
    for rows in (states, states[:, :1], torch.randn(2, 20, 32)):
        assert torch.allclose(pack_unembedding(model).logits(rows), model.logits(rows), rtol=1e-4, atol=1e-5)


def test_other_models_run_on_hugging_faces_blocks():
    for family, variant in (("llama", "biased"), ("mistral", ""), ("gpt2", "")):
        model = lj.Model.wrap(tiny_model(family, variant, dtype=torch.float32))
        assert isinstance(choose_blocks(model), HuggingFaceBlocks)
    assert isinstance(choose_blocks(lj.Model.wrap(tiny_model("llama"))), HuggingFaceBlocks)
    hooked = lj.Model.wrap(tiny_model("llama", dtype=torch.float32))
    handle = hooked.structure.blocks[1].mlp.register_forward_hook(lambda *_: None)
    assert isinstance(choose_blocks(hooked), HuggingFaceBlocks)
    handle.remove()
    assert isinstance(choose_blocks(hooked), PackedLlamaBlocks)


def test_changed_weights_are_packed_again():
    model = lj.Model.wrap(tiny_model("llama", dtype=torch.float32))
    state = torch.randn(1, 32)
    before = pack_unembedding(model).logits(state)
    with torch.no_grad():
        model.structure.unembedding.weight.mul_(2)
    assert torch.allclose(pack_unembedding(model).logits(state), 2 * before, rtol=1e-5)

"""Linear maps in place of sub-modules and blocks, in every family; the model is restored afterwards."""

from __future__ import annotations

import pytest
import torch
from helpers import synthetic_jumps
from helpers.tiny_models import CASES, tiny_model

from layerjump.errors import BadModel
from layerjump.interventions.linearize import PARTS, linearize, replace_blocks, skip_blocks, submodule_pairs
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.jumps.jumps import JumpInfo, Jumps
from layerjump.jumps.maps import Affine
from layerjump.models.discovery import discover
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample
from layerjump.models.sites import Site
from layerjump.pruning.drop_blocks import cannot_drop, without_blocks

EXACT = 1e-10


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def model(request: pytest.FixtureRequest) -> Model:
    hf = tiny_model(*request.param)
    return Model(hf, discover(hf), "-".join(request.param))


def jumps_of(model: Model, pairs: list, scale: float = 0.2) -> Jumps:
    """Random affine maps between sites, in float64."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, dtype=torch.float64, generator=draw)

    d = model.d_model
    maps = {pair: Affine.of(normal(d, d), bias=normal(d)) for pair in pairs}
    infos = {pair: JumpInfo(*pair, "affine") for pair in pairs}
    provenance = synthetic_jumps.provenance(width=d, n_blocks=model.n_blocks)
    return Jumps.from_maps(maps, infos, provenance).double()


def levels(model: Model) -> list:
    blocks = range(1, model.n_blocks + 1)
    return [(Site(a - 1), Site(b)) for a in blocks for b in blocks if a <= b]


def last_level(model: Model, batch) -> torch.Tensor:
    (found,) = capture_states(model, [batch], [model.n_blocks])
    return found[model.n_blocks]


def hooks_and_forwards(model: Model) -> list:
    return [(list(m._forward_hooks), list(m._forward_pre_hooks), "forward" in m.__dict__) for m in model.hf.modules()]


def test_replacing_no_block_changes_no_bit(model):
    batch, jumps = sample(model), jumps_of(model, levels(model))
    before = last_level(model, batch)
    for parts in (*PARTS, "block"):
        with linearize(model, jumps, parts=parts, blocks=[]):
            assert torch.equal(last_level(model, batch), before)


def test_skip_blocks_is_the_map_and_then_the_later_blocks(model):
    batch, jumps = sample(model), jumps_of(model, levels(model))
    rerun = Rerun(model, batch)
    for i, j in ((0, 1), (1, 2), (0, model.n_blocks), (1, model.n_blocks)):
        with torch.no_grad(), skip_blocks(model, jumps, i, j):
            found = last_level(model, batch)
        with torch.no_grad():
            expected = rerun.from_level(j, jumps[i, j](rerun.levels[i]))
        assert torch.allclose(found, rerun.pick(expected), rtol=0, atol=EXACT)


def test_replacing_every_block_is_a_chain_of_maps(model):
    batch, jumps = sample(model), jumps_of(model, levels(model))
    rerun = Rerun(model, batch)
    with torch.no_grad(), linearize(model, jumps, parts="block"):
        found = last_level(model, batch)
        expected = rerun.levels[0]
        for block in range(1, model.n_blocks + 1):
            expected = jumps[block - 1, block](expected)
    assert torch.allclose(found, rerun.pick(expected), rtol=0, atol=EXACT)


def test_the_model_is_restored_after_success_and_after_an_exception(model):
    batch, jumps = sample(model), jumps_of(model, levels(model))
    before, whole = hooks_and_forwards(model), last_level(model, batch)
    with skip_blocks(model, jumps, 0, 2):
        assert not torch.allclose(last_level(model, batch), whole, atol=1e-3)
    with pytest.raises(KeyError), linearize(model, jumps, parts="block", blocks=[1]):
        raise KeyError
    assert hooks_and_forwards(model) == before
    assert torch.equal(last_level(model, batch), whole)


PROMPTS = ([5, 9, 17, 23, 31, 8], [41, 12, 33])
SETTINGS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def generated(model: Model) -> list[list[int]]:
    """Greedy tokens for both prompts in one batch, the shorter one padded on the left, with a KV cache."""
    if model.hf.config.model_type in ("bloom", "gemma2"):
        # These give NaN for padded rows in float64 as they are: one prompt at a time, then.
        return one_by_one(model, use_cache=True)
    ids = torch.tensor([PROMPTS[0], [0, 0, 0, *PROMPTS[1]]])
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    return model.hf.generate(ids, attention_mask=mask, **SETTINGS)[:, 6:].tolist()


def one_by_one(model: Model, use_cache: bool = False) -> list[list[int]]:
    """The same for each prompt alone, without padding and without a KV cache."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.hf.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use_cache, **SETTINGS)
        found.append(made[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("parts", ["attn", "ffn", "norms", "block"])
def test_generation_with_a_kv_cache_equals_generation_without(model, parts):
    """With the first block replaced: masks are as long as the first layer of the KV cache."""
    if model.task != "causal":
        pytest.skip("does not generate by itself")
    pairs = levels(model) if parts == "block" else submodule_pairs(model, 1, parts)
    if not pairs:
        pytest.skip("no such part")
    jumps = jumps_of(model, pairs)
    plain = generated(model)
    with linearize(model, jumps, parts=parts, blocks=[1]):
        assert generated(model) == one_by_one(model)
    assert generated(model) == plain


def test_skip_blocks_generates_with_a_kv_cache_as_without(model):
    if model.task != "causal":
        pytest.skip("does not generate by itself")
    jumps = jumps_of(model, levels(model))
    for i, j in ((0, 2), (1, 2)):
        with skip_blocks(model, jumps, i, j):
            assert generated(model) == one_by_one(model)


def test_replacing_blocks_by_the_identity_equals_dropping_them(model):
    if cannot_drop(model):
        pytest.skip("no block can be taken out")
    batch = sample(model)
    for gone in ([2], [1, 2]):
        shorter = without_blocks(model, gone)
        expected = last_level(shorter, batch)
        with replace_blocks(model, {(gone[0] - 1, gone[-1]): torch.nn.Identity()}):
            assert torch.allclose(last_level(model, batch), expected, rtol=0, atol=EXACT)
        if model.task == "causal":
            assert generated(shorter) == one_by_one(shorter)


@pytest.fixture(scope="module")
def gpt2() -> Model:
    hf = tiny_model("gpt2")
    return Model(hf, discover(hf), "gpt2")


def test_linearized_attention_is_the_fitted_map(gpt2):
    (pair,) = submodule_pairs(gpt2, 2, "attn")
    jumps = jumps_of(gpt2, [pair])
    batch = sample(gpt2)
    (exact,) = capture_states(gpt2, [batch], [pair[0]])
    with torch.no_grad(), linearize(gpt2, jumps, parts="attn", blocks=[2]):
        # The map reads the input of attention, and its output is added to the residual stream.
        (found,) = capture_states(gpt2, [batch], ["2.mid", 1])
        assert torch.allclose(found["2.mid"], found[1] + jumps[pair](exact[pair[0]]), atol=EXACT)


def test_bad_parts_and_blocks_are_refused(gpt2):
    jumps = jumps_of(gpt2, levels(gpt2))
    for settings, message in (
        ({"parts": "mlp"}, "of attn"),
        ({"parts": "xattn"}, "no xattn"),
        ({"parts": "block", "blocks": [4]}, "blocks 1 to 3"),
    ):
        with pytest.raises(BadModel, match=message), linearize(gpt2, jumps, **settings):
            pass
    with pytest.raises(BadModel, match="levels from 0 to 3"), skip_blocks(gpt2, jumps, 2, 2):
        pass

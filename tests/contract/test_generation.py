"""Early exit on every kind of architecture: verified text is the model's own, or the model is refused with a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import layerjump as lj
from layerjump.errors import BadExit
from layerjump.generation.combine_drafters import FREE, DraftConfig, SpliceJump
from layerjump.generation.drafters import HeadJump
from layerjump.generation.exit_rules import Never
from layerjump.generation.exit_self_check import check_exits, require_exits
from layerjump.generation.generate import generate
from layerjump.models.model import Model
from layerjump.models.sites import EMBEDDING, FINAL, Site, parse_source
from layerjump.models.small_models import build, list_architectures, small_config, small_model

EXACT_KINDS = (
    # mixtures of experts; latent attention; two attentions in a block; sparse attention (DeepSeek V3.2's selects
    # among equal scores, so that its own text depends on how many tokens it reads at once)
    *("causal:qwen3_moe", "causal:mixtral", "causal:gpt_oss", "causal:deepseek_v3", "causal:olmoe", "causal:phimoe"),
    *("causal:longcat_flash", "causal:minimax_m3_vl_text"),
    # sliding and chunked attention among full attention
    *("causal:cohere2", "causal:olmo3", "causal:llama4_text", "causal:gemma4_text", "causal:exaone4"),
    # sandwich norms, scaled residuals, parallel blocks, ALiBi, several residual streams with shared keys and values
    *("causal:glm4", "causal:granite", "causal:minicpm3", "causal:cohere", "causal:mpt", "causal:gemma3n_text"),
    # image–text models that read text alone, two with positions of several axes
    *("image-text:gemma3", "image-text:qwen2_vl", "image-text:qwen3_vl", "image-text:llava", "image-text:internvl"),
)
ARCHITECTURES = {str(architecture): architecture for architecture in list_architectures()}
NEW = 10


class Hashed:
    """Exits pseudo-randomly, as the digits of the state decide: the same state always exits."""

    levels = None

    def should_exit(self, reading):
        return (reading.states.abs().sum(-1) * 1e4 % 1) < 0.6


def prompts(rows: int) -> dict[str, torch.Tensor]:
    """Prompts of unequal length, padded on the left."""
    ids = torch.randint(5, 128, (rows, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row - 1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_text_is_the_models(model: Model) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
    for inputs in (prompts(1), prompts(3)):
        theirs = model.hf.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :].tolist()
        theirs = [row[: row.index(1) + 1] if 1 in row else row for row in theirs]
        verified = generate(model, None, inputs, exit=Hashed(), verify=True, max_draft_tokens=3, **settings)
        assert verified.ids == theirs
        assert verified.counts.drafts > 0
        assert verified.counts.rollbacks > 0 or verified.agreement == 1
        assert generate(model, None, inputs, exit=Never(), **settings).ids == theirs
        for drafts in every_drafter(model):
            drafted = generate(model, None, inputs, exit=Hashed(), verify=True, drafts=drafts, **settings)
            assert drafted.ids == theirs
            assert drafted.counts.drafts > 0


def every_drafter(model: Model) -> tuple[DraftConfig, ...]:
    """All drafters with random maps; a splice and exit drafts run the same blocks, so they take turns."""
    torch.manual_seed(0)
    late = model.n_blocks - 1
    final, at_late, embedding = (model.structure.width(site) for site in (FINAL, Site(late), EMBEDDING))
    head = nn.Linear(final + at_late + embedding, final)
    splice = nn.Linear(2 * at_late, at_late)
    jumps = {
        "head": (HeadJump(head, (FINAL, Site(late)), 1),),
        "splice": SpliceJump(splice, parse_source(f"1+{late}@-1"), late),
    }
    others = ("lookup", "recycled", "head")
    return tuple(DraftConfig((*others, last), 3, costs=FREE, **jumps) for last in ("splice", "exit"))


@pytest.mark.parametrize("name", EXACT_KINDS)
def test_verified_text_is_the_models(name):
    assert_text_is_the_models(small_model(ARCHITECTURES[name]))


@pytest.mark.parametrize("cache", ["copy", "exact"])
@pytest.mark.parametrize("name", ["causal:longcat_flash", "causal:deepseek_v32", "causal:gemma3n_text"])
def test_blocks_with_more_than_one_plain_attention_store_all_that_they_need(name, cache):
    """A token that exits leaves something in every cache layer, so that later tokens attend to as many tokens."""
    model = small_model(ARCHITECTURES[name])
    generated = generate(model, None, prompts(3), exit="fixed:2", cache=cache, max_new_tokens=6, eos_token_id=None)
    assert [len(row) for row in generated.ids] == [6, 6, 6]
    assert {level for row in generated.exit_levels for level in row} == {2}


def test_blocks_that_read_the_keys_and_values_of_earlier_ones():
    architecture = ARCHITECTURES["causal:gemma4_text"]
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "sliding", "full")]
    config = small_config("gemma4_text", n_blocks=6, num_kv_shared_layers=3, layer_types=kinds)
    model = Model.wrap(build(architecture, config))
    assert check_exits(model).difference < 1e-4
    assert_text_is_the_models(model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("causal:mamba", "keep a recurrent state, which cannot wait for later tokens"),
        ("causal:falcon_h1", "keep a recurrent state, which cannot wait for later tokens"),
        ("causal:qwen3_next", "keep a recurrent state, which cannot wait for later tokens"),
        ("causal:minimax", "keep a recurrent state, which cannot wait for later tokens"),
        ("causal:recurrent_gemma", "keep a recurrent state, which cannot wait for later tokens"),
        ("causal:xlnet", "depend on later tokens"),
        ("image-text:paligemma", "depend on later tokens"),
        ("causal:glm_moe_dsa", "hand more than the residual stream to the next block"),
        ("causal:openai-gpt", "take no cache of keys and values"),
        ("image-text:blip-2", "further inputs besides tokens"),
    ],
)
def test_a_model_that_cannot_exit_early_is_refused_with_the_reason(name, reason):
    model = small_model(ARCHITECTURES[name])
    for rule in ("fixed:2", "never"):
        with pytest.raises(BadExit, match=rf"cannot exit early: .*{reason}.*lens, fit and studies"):
            generate(model, None, prompts(1), exit=rule, max_new_tokens=2)


def test_a_model_that_cannot_exit_early_with_padding_generates_without():
    model = small_model(ARCHITECTURES["causal:git"])
    settings = {"exit": Hashed(), "verify": True, "max_new_tokens": 4, "eos_token_id": None}
    assert len(generate(model, None, prompts(1), **settings).ids[0]) == 4
    with pytest.raises(BadExit, match="cannot exit early with padding: the proof failed"):
        generate(model, None, prompts(3), **settings)


class ReadsTheTokenBefore(nn.Module):
    """A feed-forward part that also reads the token before, and stores nothing: causal, but not with a cache."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
        return self.mlp(states + 0.1 * before)


def test_the_proof_finds_what_the_structure_does_not_show():
    hf = build(ARCHITECTURES["causal:mistral"], small_config("mistral"))
    require_exits(Model.wrap(hf))
    hf.model.layers[2].mlp = ReadsTheTokenBefore(hf.model.layers[2].mlp)
    model = Model.wrap(hf)  # the self-check passes
    with pytest.raises(BadExit, match="the proof failed: .*relative difference"):
        lj.generate(model, None, prompts(1), max_new_tokens=2)


def test_a_model_is_proven_once():
    model, calls = small_model(ARCHITECTURES["causal:granite"]), []
    handle = model.hf.register_forward_hook(lambda *_: calls.append(1))
    require_exits(model)
    n_calls = len(calls)
    require_exits(model, padded=True)
    generate(model, None, prompts(1), max_new_tokens=2)
    handle.remove()
    assert len(calls) == n_calls > 0

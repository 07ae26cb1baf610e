"""Dropping blocks and folding maps in mixtures of experts, hybrids and other kinds of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from layerjump.errors import BadModel, BadPruning
from layerjump.interventions.linearize import replace_blocks
from layerjump.models.discovery import main_output
from layerjump.models.model import capture_states
from layerjump.models.self_check import sample
from layerjump.models.sites import Site
from layerjump.models.small_models import list_architectures, small_model
from layerjump.pruning.block_config import select_blocks
from layerjump.pruning.checkpoint import _require_same_logits, save_checkpoint
from layerjump.pruning.drop_blocks import cannot_drop, without_blocks
from layerjump.pruning.output_weights import cannot_fold, folded_output, output_weights
from layerjump.pruning.rotate_stream import can_scale, transform_stream

ALL = {str(architecture): architecture for architecture in list_architectures()}


def build(name: str):
    return small_model(ALL[name if ":" in name else f"causal:{name}"])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return main_output(model.run_whole(sample(model)))


@pytest.mark.parametrize(
    ("name", "site", "n_weights"),
    [
        ("qwen3_moe", "ffn.out", 1),  # stacked experts
        ("qwen2_moe", "ffn.out", 2),  # and a shared expert
        ("gpt_oss", "ffn.out", 2),  # experts with biases
        ("deepseek_v3", "ffn.out", 1),  # block 1 is dense
        ("granitemoehybrid", "ffn.out", 1),  # scaled residual; experts and shared expert are two writes
        ("nemotron_h", None, None),  # one part a block: mixer, experts, attention, feed-forward
        ("mamba2", "mixer.out", 1),
        ("cohere", "ffn.out", 1),  # parallel
        ("longcat_flash", None, None),  # two attentions and two feed-forwards: only the last is not read again
    ],
)
def test_a_folded_map_maps_what_a_block_writes_last(name, site, n_weights):
    model = build(name)
    assert cannot_fold(model) is None
    for block in range(1, model.n_blocks + 1):
        copy = without_blocks(model, [])
        part, weights, gain = folded_output(copy, block)
        if site is not None:
            assert part == site
        if n_weights is not None and block > 1:
            assert len(weights.weights) >= n_weights
        matrix = torch.randn(model.d_model, model.d_model, generator=torch.Generator().manual_seed(block)) / 8
        weights.fold(matrix)
        sites = [Site.parse(f"{block}.{part}"), Site(block)]
        (before,) = capture_states(model, [sample(model)], sites)
        (after,) = capture_states(copy, [sample(model)], sites)
        expected = before[sites[0]] @ matrix.T
        scale = after[Site(block)].abs().max()
        assert torch.allclose(after[sites[0]], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        change = ((expected - before[sites[0]]) * gain.float()).reshape(before[Site(block)].shape)
        assert torch.allclose(after[Site(block)] - before[Site(block)], change, rtol=0, atol=float(1e-4 * scale))


def test_all_experts_are_mapped_and_the_router_is_not():
    model = build("qwen2_moe")
    write = next(write for write in model.structure.writes(2) if write.is_routed)
    names = {id(parameter): name for name, parameter in model.hf.named_parameters()}
    written = {
        names[id(weight)].rpartition("mlp.")[2]: axis for weight, axis in output_weights(model, 2, write).weights
    }
    assert written == {"experts.down_proj": 1, "shared_expert.down_proj.weight": 0}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "a norm follows the feed-forward output"),
        ("olmo2", "a norm follows the feed-forward output"),
        ("rwkv", "is not linear in any of its weights"),  # a gate after its output layer
        ("hrm_text", "run several times"),
        ("deepseek_v4", "parts of deepseek_v4 blocks are unknown"),
    ],
)
def test_what_cannot_be_folded_is_refused_with_the_reason(name, reason):
    assert reason in cannot_fold(build(name))


@pytest.mark.parametrize("name", ["qwen2_moe", "granitemoehybrid", "nemotron_h", "lfm2", "cohere"])
def test_a_scaled_stream_gives_the_same_logits(name):
    model = build(name)
    assert can_scale(model)
    copy = without_blocks(model, [])
    for module in copy.hf.modules():  # the ε of a norm is not scaled; the padding's embedding is zero
        for attribute in ("eps", "variance_epsilon", "layer_norm_epsilon"):
            if hasattr(module, attribute):
                setattr(module, attribute, 1e-12)
    before = logits(copy)
    copy.structure.blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: ((2 * args[0], *args[1:]), kwargs), with_kwargs=True
    )
    transform_stream(copy, 0, None, 2.0)
    assert torch.allclose(logits(copy), before, rtol=0, atol=1e-3 * float(before.abs().max()))


@pytest.mark.parametrize("name", ["olmo2", "modernbert-decoder", "zamba"])
def test_a_stream_that_parts_read_without_a_norm_cannot_be_scaled(name):
    assert not can_scale(build(name))


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("qwen3_moe", [2]),
        ("deepseek_v3", [1]),  # the one dense block: first_k_dense_replace
        ("lfm2", [2]),  # layer_types
        ("bamba", [1, 2]),  # attn_layer_indices
        ("falcon_h1", [3]),
        ("jamba", [1]),  # periods and offsets
        ("nemotron_h", [2]),  # layers_block_type
        ("llama4_text", [2]),  # moe_layers, no_rope_layers
        ("gpt_neo", [1]),  # attention_types
        ("mamba2", [2]),
        ("recurrent_gemma", [2]),  # holds states of its last forward pass
        ("xlstm", [2]),  # num_blocks
        ("kimi_linear", [2]),
        ("image-text:gemma3", [3]),  # a configuration inside a configuration
        ("image-text:qwen2_vl", [1]),
    ],
)
def test_a_model_without_blocks_is_the_model_that_skips_them_and_loads_again(name, dropped, tmp_path):
    model = build(name)
    assert cannot_drop(model) is None
    shorter = without_blocks(model, dropped)
    assert shorter.n_blocks == model.n_blocks - len(dropped)
    with replace_blocks(model, {(block - 1, block): nn.Identity() for block in dropped}):
        skipped = logits(model)
    assert torch.allclose(logits(shorter), skipped, rtol=0, atol=1e-5 * float(skipped.abs().max()))
    assert not torch.allclose(skipped, logits(model), atol=1e-3)
    save_checkpoint(shorter, tmp_path)
    again = type(shorter.hf).from_pretrained(tmp_path).eval()
    batch = sample(model)
    with torch.no_grad():
        theirs = again(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    assert torch.allclose(theirs, logits(shorter), rtol=0, atol=1e-5 * float(theirs.abs().max()))
    _require_same_logits(shorter, tmp_path, is_linear=False)


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("diffllama", 2),  # a factor that depends on the number of the block
        ("minicpm3", 2),  # a factor that depends on the number of blocks
        ("jamba", 3),  # no period gives the remaining kinds of blocks
        ("modernbert-decoder", 1),  # the first block has no norm
    ],
)
def test_a_checkpoint_that_would_differ_is_refused(name, dropped, tmp_path):
    shorter = without_blocks(build(name), [dropped])
    save_checkpoint(shorter, tmp_path)
    with pytest.raises(BadPruning, match=f"configuration of {name} does not describe .*; drop other blocks"):
        _require_same_logits(shorter, tmp_path, is_linear=False)


@pytest.mark.parametrize(("name", "dropped"), [("rwkv", 1), ("gemma4_text", 2)])
def test_blocks_that_others_depend_on_cannot_be_dropped(name, dropped):
    with pytest.raises(BadModel, match=f"does not run without block {dropped}"):
        without_blocks(build(name), [dropped])


def test_blocks_that_run_several_times_cannot_be_dropped():
    assert "run several times" in cannot_drop(build("hrm_text"))


def test_every_form_of_a_configuration_is_shortened():
    config = PretrainedConfig(
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "sliding_attention"],
        hybrid_override_pattern="M*-E",
        attn_layer_indices=[1, 3],
        first_k_dense_replace=2,
        num_kv_shared_layers=2,
        eos_token_id=[5, 6, 7, 8],
        linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16},
        mrope_section=[1, 2, 3, 4],
    )
    select_blocks(config, [1, 3, 4], 4)
    assert config.num_hidden_layers == 3
    assert config.layer_types == ["conv", "conv", "sliding_attention"]
    assert config.hybrid_override_pattern == "M-E"
    assert config.attn_layer_indices == [2]
    assert config.first_k_dense_replace == 1
    assert config.num_kv_shared_layers == 2
    assert config.eos_token_id == [5, 6, 7, 8]
    assert config.linear_attn_config["full_attn_layers"] == [3]
    assert config.mrope_section == [1, 2, 3, 4]

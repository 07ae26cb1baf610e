"""Jumps and hidden states next to other tools, with their real packages; each is skipped where it is not installed.

Tested with nnsight 0.8.1, nnsight 0.5.15 with nnterp 1.2.2, and TransformerLens 4.3.0 (`pip install nnsight
transformer-lens`). Their packages are no dependencies of layerjump.
"""

import pytest
import torch

import layerjump as lj

TEXT = "Once upon a time there was"
NAMES = {
    "blocks.0.hook_resid_pre": "0",
    "blocks.1.hook_resid_post": "2",
    "blocks.3.hook_resid_post": "4",
    "blocks.1.hook_resid_mid": "2.mid",
    "blocks.1.hook_attn_out": "2.attn.out",
    "blocks.1.hook_mlp_out": "2.ffn.out",
    "blocks.1.ln1.hook_out": "2.attn.in",
    "blocks.1.ln2.hook_out": "2.ffn.in",
    "blocks.1.attn.hook_z": "2.heads",
    "ln_final.hook_out": "final",
}
"""TransformerBridge's names of activations of tiny-gpt2, and ours."""


@pytest.fixture
def model(data_folder):
    """A model of its own for each test: other tools change the modules of a model."""
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def jumps(data_folder):
    return lj.fit(lj.load(data_folder / "tiny-gpt2"), lj.load_text("pydoc", limit=200), tokens=2_000)


@pytest.fixture
def ids(model):
    return torch.tensor([model.tokenization.wrap(model.tokenization.encode([TEXT])[0])])


def states(model, ids, sites):
    (captured,) = lj.capture_states(model, [lj.batch_from_ids(ids[0].tolist())], sites)
    return {site: captured[site] for site in sites}


def close(found, wanted):
    torch.testing.assert_close(found.reshape(wanted.shape), wanted, atol=2e-5, rtol=1e-4)


def double(module, inputs, output):
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


# nnsight


@pytest.fixture
def traced(model):
    nnsight = pytest.importorskip("nnsight")
    return nnsight.LanguageModel(model.hf, tokenizer=model.tokenizer)


def test_a_jump_inside_an_nnsight_trace(model, traced, jumps, ids):
    """Its levels are ours, and a jump put in for the last blocks gives the lens' logits."""
    wanted = states(model, ids, [2, 4])
    with traced.trace(ids):
        output = traced.transformer.h[1].output
        level = (output[0] if isinstance(output, tuple) else output).save()
        predicted = jumps[2, 4](level).save()
    close(level, wanted[2])
    close(predicted, jumps[2, 4](wanted[2]))
    with traced.trace(ids):
        output = traced.transformer.h[1].output
        source = output[0] if isinstance(output, tuple) else output
        last = traced.transformer.h[3].output
        (last[0] if isinstance(last, tuple) else last)[:] = jumps[2, 4](source)
        logits = traced.lm_head.output.save()
    close(logits, lj.Lens(model, jumps).logits(2, wanted[2]))


def test_an_intervention_of_ours_holds_inside_a_trace(model, traced, jumps, ids):
    plain = model.hf(ids).logits
    with lj.steer(lj.Lens(model, jumps), 300, levels=[2], strength=0.5):
        wanted = model.hf(ids).logits
        with traced.trace(ids):
            logits = traced.lm_head.output.save()
    close(logits, wanted)
    assert (wanted - plain).abs().max() > 0.1


def test_the_model_is_as_before_a_trace(model, traced, ids):
    before = states(model, ids, [0, 2, 4])
    with traced.trace(ids):
        output = traced.transformer.h[1].output
        (output[0] if isinstance(output, tuple) else output)[:] = 0
        logits = traced.lm_head.output.save()
    assert (logits[0] - model.logits(before[4])).abs().max() > 0.1
    for site, wanted in states(model, ids, [0, 2, 4]).items():
        assert torch.equal(wanted, before[site])


def test_levels_in_nnterp(model, jumps, ids):
    nnterp = pytest.importorskip("nnterp", exc_type=ImportError)
    standardized = nnterp.StandardizedTransformer(model.hf, tokenizer=model.tokenizer)
    wanted = states(model, ids, [2, 4])
    with standardized.trace(ids):
        level = standardized.layers_output[1].save()
        predicted = jumps[2, 4](level).save()
    close(level, wanted[2])
    close(predicted, jumps[2, 4](wanted[2]))


# TransformerLens


@pytest.fixture
def bridge(model, data_folder):
    bridges = pytest.importorskip("transformer_lens.model_bridge")
    boot = bridges.TransformerBridge.boot_transformers
    return boot(str(data_folder / "tiny-gpt2"), hf_model=model.hf, tokenizer=model.tokenizer)


def test_activations_of_the_bridge_are_ours_by_name(data_folder, bridge, jumps, ids):
    logits, cache = bridge.run_with_cache(ids)
    ours = lj.load(data_folder / "tiny-gpt2")
    wanted = states(ours, ids, list(NAMES.values()))
    for name, site in NAMES.items():
        close(cache[name], wanted[site])
    close(logits, ours.logits(wanted["4"]))
    close(jumps[2, 4](cache["blocks.1.hook_resid_post"]), jumps[2, 4](wanted["2"]))


def test_hooks_of_the_bridge_are_respected(model, bridge, ids):
    """A model wrapped after the bridge captures what its hooks leave; so does the lens."""
    wrapped = lj.Model.wrap(bridge.original_model, model.tokenizer)
    before = states(wrapped, ids, [1, 2, 4])
    with bridge.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda value, hook: 2 * value)]):
        logits = bridge(ids)
        after = states(wrapped, ids, [1, 2, 4])
    close(after[1], before[1])
    close(after[2], 2 * before[2])
    close(logits, wrapped.logits(after[4]))
    for site, value in states(wrapped, ids, [1, 2, 4]).items():
        close(value, before[site])


# Any tool


def test_plain_hooks_are_respected(model, jumps, ids):
    before = states(model, ids, [1, 2, 4])
    handle = model.hf.transformer.h[1].register_forward_hook(double)
    try:
        after = states(model, ids, [1, 2, 4])
        close(model.hf(ids).logits, model.logits(after[4])[None])
        trajectory = lj.Lens(model, jumps)(TEXT)
    finally:
        handle.remove()
    close(after[2], 2 * before[2])
    close(after[1], before[1])
    assert not torch.equal(trajectory.entropy, lj.Lens(model, jumps)(TEXT).entropy)

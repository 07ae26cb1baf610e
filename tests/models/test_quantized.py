"""Models with quantised weights: what works as it stands, and that no weight of codes is ever edited."""

from __future__ import annotations

import copy

import pytest
import torch
from faults.checkpoints import make_gguf
from helpers.greedy_generation import GREEDY, theirs
from helpers.small_llama import save_small_llama
from helpers.story_text import stories
from helpers.tiny_models import tiny_model, wrapped

import layerjump as lj
from layerjump.errors import BadModel, BadPruning
from layerjump.evaluation.perplexity import perplexity
from layerjump.generation.packed_llama import PackedLlamaBlocks, can_pack, choose_blocks
from layerjump.jumps.estimators.jacobian import fit_jacobian
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model
from layerjump.models.self_check import self_check
from layerjump.models.weight_forms import describe_storage, quantized_weights, require_gradients
from layerjump.pruning.draft_model import make_draft_model
from layerjump.pruning.drop_blocks import without_blocks
from layerjump.pruning.output_weights import OutputWeights, cannot_fold
from layerjump.pruning.rotate_stream import cannot_rotate, fold_input_map

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
FORMATS = ("int8", "nf4", "fp4", "torchao-int8")
IDS = torch.arange(2, 14)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def load(folder):
    """A function: format → the model in it, loaded once."""
    models: dict[str, Model] = {}

    def get(quantization: str) -> Model:
        if quantization not in models:
            models[quantization] = lj.load(folder, quantization=quantization)
        return models[quantization]

    return get


@torch.no_grad()
def logits(model: Model) -> torch.Tensor:
    return model.hf(IDS).logits


@pytest.mark.parametrize("method", ["replaceme", "fold", "rotation", "refit"])
@pytest.mark.parametrize("quantization", FORMATS)
def test_nothing_is_folded_into_quantised_weights(load, quantization, method):
    """Folding multiplied packed codes: perplexity 22 became 7,829 without an error."""
    model = load(quantization)
    before, identity = logits(model), fingerprint(model.hf)
    with pytest.raises(
        BadPruning, match=f"{method} is not possible: the weight .*(down|o)_proj.weight is quantised"
    ) as caught:
        lj.prune(model, stories(60), drop=1, method=method)
    assert "use linear or remove" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(logits(model), before)
    assert fingerprint(model.hf) == identity


@pytest.mark.parametrize("quantization", FORMATS)
def test_no_edit_reaches_quantised_weights(load, quantization):
    model = load(quantization)
    layer = model.structure.blocks[1].mlp.down_proj
    assert cannot_fold(model)
    assert cannot_rotate(model)
    with pytest.raises(BadModel, match="is quantised"):
        OutputWeights.of_layer(layer).fold(torch.eye(64, dtype=torch.float64))
    with pytest.raises(BadModel, match="is quantised"):
        fold_input_map(layer, torch.eye(128, dtype=torch.float64))


def test_codes_in_a_floating_point_type_are_quantised_too(folder):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    hf = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    weight = hf.model.layers[0].mlp.down_proj.weight
    assert weight.dtype == torch.bfloat16
    assert "is quantised" in describe_storage(weight)


def test_a_gpt2_that_scales_attention_by_its_number_is_not_scaled_in_codes():
    model = wrapped(tiny_model("gpt2", "scaled", dtype=torch.float32))
    for block in model.hf.transformer.h:
        block.attn.c_attn.weight = torch.nn.Parameter(block.attn.c_attn.weight.to(torch.float8_e4m3fn), False)
    with pytest.raises(BadModel, match="attn.c_attn of block 3.*is quantised"):
        without_blocks(model, [2])


def test_weights_of_two_modules_are_not_folded_into():
    hf = tiny_model("llama", dtype=torch.float32)
    hf.model.layers[2].mlp.down_proj.weight = hf.model.layers[0].mlp.down_proj.weight
    assert "down_proj.weight is shared with another module" in cannot_fold(wrapped(hf))


@pytest.mark.parametrize("quantization", FORMATS)
def test_fit_lens_generate_and_evaluate(load, folder, quantization):
    model, plain, text = load(quantization), lj.load(folder), stories(120)
    assert quantized_weights(model.hf)
    jumps = lj.fit(model, text, tokens=3_000)
    reference = lj.fit(plain, text, tokens=3_000)
    for pair, info in jumps.info.items():
        # Other weights, but not by much: int8 rounds to a hundredth, four bits to a tenth.
        assert info.r2[0] == pytest.approx(reference.info[pair].r2[0], abs=0.02 if "int8" in quantization else 0.1)
    assert lj.fit(model, text, tokens=3_000, estimator="calibrated").provenance.fingerprint == fingerprint(model.hf)
    prompt = "One day, Tom went to the"
    for rule, verify in (("never", False), ("gap:0.2", False), ("fixed:2", True)):
        generated = lj.generate(model, jumps, prompt, exit=rule, verify=verify, **GREEDY)
        if rule == "never" or verify:
            assert generated.ids == theirs(model, [prompt]).tolist()
    losses = [perplexity(each, " ".join(text.documents[:20]), window=64).loss for each in (model, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize("method", ["remove", "linear"])
@pytest.mark.parametrize("quantization", FORMATS)
def test_blocks_are_dropped_and_saved(load, tmp_path, quantization, method):
    model = load(quantization)
    before = logits(model)
    pruned = lj.prune(model, stories(120), drop=1, method=method, criterion="influence", tokens=3_000)
    expected = logits(pruned.model)
    pruned.save(tmp_path / "pruned")
    assert torch.equal(logits(pruned.model), expected)  # saving reorders codes, and damaged them
    assert torch.equal(logits(model), before)
    loaded = lj.load(tmp_path / "pruned")
    assert loaded.n_blocks == 3
    assert quantized_weights(loaded.hf)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_a_draft_model_keeps_its_codes(load):
    """The jump goes into the unembedding, which is not quantised."""
    model = load("nf4")
    draft = make_draft_model(model, stories(120), 2, tokens=3_000)
    assert draft.model.n_blocks == 2
    assert draft.loss.loss_after < 2 * draft.loss.loss_before


@pytest.mark.parametrize("quantization", FORMATS)
def test_the_fingerprint_covers_codes_and_scales(folder, load, quantization):
    fresh = lj.load(folder, quantization=quantization).hf
    identity = fingerprint(fresh)
    assert identity == fingerprint(load(quantization).hf)
    assert identity == fingerprint(copy.deepcopy(fresh))
    assert identity != fingerprint(lj.load(folder).hf)
    with torch.no_grad():  # bitsandbytes reorders 4-bit codes at the first use
        fresh(IDS)
    assert identity == fingerprint(fresh)


def test_quantised_weights_of_other_sizes_have_other_fingerprints(tmp_path):
    """Scaled weights have the same codes; their scales differ."""
    save_small_llama(tmp_path)
    hf = lj.load(tmp_path).hf
    with torch.no_grad():
        hf.model.layers[1].mlp.up_proj.weight *= 1.5
    hf.save_pretrained(tmp_path / "scaled")
    for quantization in FORMATS:
        models = [lj.load(folder, quantization=quantization) for folder in (tmp_path, tmp_path / "scaled")]
        assert fingerprint(models[0].hf) != fingerprint(models[1].hf)


def test_the_order_of_codes_for_the_cpu_does_not_count(folder):
    from bitsandbytes.functional import _convert_weight_packed_for_cpu
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    for nested in (False, True):
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)
        hf = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        before = fingerprint(hf)
        for module in hf.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                weight = module.weight
                weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
        assert fingerprint(hf) == before


def test_int8_is_proven_within_its_own_tolerance(load):
    """Its outliers are columns of the whole batch, so a later token changes earlier states by rounding."""
    checks = {check.name: check for check in self_check(load("int8"))}
    assert all(check.passed for check in checks.values())
    assert checks["causality"].difference > 1e-4


def test_a_layer_whose_sizes_the_fast_kernel_does_not_take_runs(tmp_path):
    folder = save_small_llama(tmp_path, hidden_size=72, intermediate_size=136)
    model = lj.load(folder, quantization="nf4")
    assert model.structure.degree == "full"


def test_gradients_are_refused_where_a_kernel_has_none(load):
    model = load("nf4")
    logits(model)
    layer = model.structure.blocks[0].mlp.up_proj
    if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
        with pytest.raises(BadModel, match="Linear4bit.* have no gradients on cpu"):
            fit_jacobian(model, stories(20), tokens=200)
    else:
        require_gradients(model.hf)
    for quantization in ("int8", "torchao-int8"):
        require_gradients(load(quantization).hf)


def test_only_plain_tensors_are_packed(load):
    model = load("torchao-int8")
    weight = model.structure.blocks[0].mlp.down_proj.weight
    assert weight.dtype == torch.float32
    assert not can_pack([weight])
    assert not isinstance(choose_blocks(model), PackedLlamaBlocks)


def test_a_format_that_quantises_nothing_is_refused(data_folder):
    with pytest.raises(BadModel, match="quantization='torchao-int8' quantises no weight"):
        lj.load(data_folder / "tiny-gpt2", quantization="torchao-int8")


def test_a_gguf_file_is_read_to_plain_weights(tmp_path):
    make_gguf(tmp_path)
    model = lj.load(tmp_path / "tiny.gguf")
    assert not quantized_weights(model.hf)
    assert all(weight.dtype == torch.float32 for weight in model.hf.parameters())

"""Models whose weights accelerate reads from the disk or the host for every call: the same results as in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from helpers.comparisons import same_bytes
from helpers.greedy_generation import GREEDY, theirs
from helpers.processes import printed_by
from helpers.small_llama import save_small_llama
from helpers.story_text import stories
from transformers import AutoModelForCausalLM

import layerjump as lj
from layerjump.errors import BadModel, BadPruning
from layerjump.jumps.estimators.jacobian import fit_jacobian
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model
from layerjump.models.weight_forms import is_offloaded, module_weight, small_stand_ins
from layerjump.pruning.draft_model import make_draft_model
from layerjump.pruning.drop_blocks import without_blocks

IN_MEMORY = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
MIXED = {f"model.layers.{block}": "disk" for block in range(1, 4)} | dict.fromkeys(IN_MEMORY, "cpu")
PLACES = {"disk": "disk", "mixed": MIXED}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return save_small_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=request.param)


@pytest.fixture(scope="module", params=[*PLACES, "cpu_offload", "disk_offload"])
def offloaded(request, folder, tmp_path_factory) -> Model:
    if request.param in PLACES:
        return lj.load(folder, device_map=PLACES[request.param], offload_folder=tmp_path_factory.mktemp("offload"))
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    device = torch.device("cpu")
    if request.param == "cpu_offload":
        hf = cpu_offload(hf, device)
    else:
        hf = disk_offload(hf, tmp_path_factory.mktemp("offload"), device)
    return Model.wrap(hf, lj.load(folder).tokenizer, name=str(folder))


@pytest.fixture(scope="module")
def plain(folder) -> Model:
    return lj.load(folder)


def test_it_is_the_same_model(offloaded, plain):
    assert is_offloaded(offloaded.hf)
    assert offloaded.device == torch.device("cpu")
    assert offloaded.structure.degree == "full"
    assert fingerprint(offloaded.hf) == fingerprint(plain.hf)
    weights = [module_weight(model.structure.unembedding) for model in (offloaded, plain)]
    assert torch.equal(*weights)


@pytest.mark.parametrize("estimator", ["mat", "calibrated"])
def test_jumps_are_bit_identical(offloaded, plain, estimator):
    ours, theirs = (lj.fit(model, stories(60), estimator=estimator, tokens=2_000) for model in (offloaded, plain))
    assert ours.info == theirs.info
    assert ours.provenance == theirs.provenance
    for pair in theirs:
        assert all(map(torch.equal, ours[pair].parameters(), theirs[pair].parameters()))
    assert is_offloaded(offloaded.hf)  # nothing stays in memory


def test_text_is_the_same(offloaded, plain):
    jumps = lj.fit(plain, stories(60), tokens=2_000)
    prompt = "One day, Tom went to the"
    for rule, verify in (("never", False), ("gap:0.2", False), ("fixed:2", True)):
        texts = [lj.generate(m, jumps, prompt, exit=rule, verify=verify, **GREEDY).ids for m in (offloaded, plain)]
        assert texts[0] == texts[1]
        if verify or rule == "never":
            assert texts[0] == theirs(plain, [prompt]).tolist()


@pytest.mark.parametrize("method", ["remove", "linear"])
def test_blocks_are_dropped_and_saved(offloaded, plain, tmp_path, method):
    settings = {"drop": 1, "method": method, "criterion": "influence", "tokens": 2_000}
    pruned, reference = (lj.prune(model, stories(60), **settings) for model in (offloaded, plain))
    assert pruned.spans == reference.spans
    assert pruned.loss == reference.loss
    if hasattr(offloaded.hf, "hf_device_map"):  # otherwise transformers cannot save it
        pruned.save(tmp_path / "pruned")
        loaded = lj.load(tmp_path / "pruned")
        assert fingerprint(loaded.hf, attached=False) == fingerprint(reference.model.hf, attached=False)


def test_copies_share_the_weights(offloaded):
    shorter = without_blocks(offloaded, [2])
    ours, copied = (model.structure.blocks[0].mlp.down_proj._hf_hook for model in (offloaded, shorter))
    assert copied is not ours
    assert copied.weights_map is ours.weights_map


@pytest.mark.parametrize("method", ["replaceme", "fold", "rotation"])
def test_nothing_is_folded_into_weights_that_are_not_there(offloaded, method):
    """Folding into them did nothing, and was reported as done."""
    with pytest.raises(BadPruning, match=f"{method} is not possible: the weight .* is not in memory"):
        lj.prune(offloaded, stories(60), drop=1, method=method)


def test_a_draft_model_and_gradients_are_refused(offloaded):
    if module_weight(offloaded.structure.unembedding) is not offloaded.structure.unembedding.weight:
        with pytest.raises(BadPruning, match="cannot be folded into the unembedding.*not in memory"):
            make_draft_model(offloaded, stories(60), 2)
    with pytest.raises(BadModel, match="gradients need all weights in memory"):
        fit_jacobian(offloaded, stories(20), tokens=200)


def test_discovery_reads_no_weights(offloaded, monkeypatch):
    """The trace of a pass keeps every tensor alive, and the model may not fit into memory."""
    names = [name for name, weight in offloaded.hf.named_parameters() if weight.is_meta]
    forwards = [vars(module).get("forward") for module in offloaded.hf.modules()]
    with small_stand_ins(offloaded.hf):
        weights = dict(offloaded.hf.named_parameters())
        for name in names:
            if name in weights:
                assert weights[name].untyped_storage().nbytes() < weights[name].nbytes or weights[name].dim() == 1
        offloaded.hf(torch.arange(2, 9)[None])
    assert [name for name, weight in offloaded.hf.named_parameters() if weight.is_meta] == names
    assert [vars(module).get("forward") for module in offloaded.hf.modules()] == forwards


def test_weights_that_nothing_loads_have_no_fingerprint(plain):
    with pytest.raises(BadModel, match="not in memory"):
        fingerprint(copy.deepcopy(plain.hf).to("meta"))


LIMITED = """
import resource
from pathlib import Path
from helpers.processes import in_child
from helpers.story_text import stories
import layerjump as lj

folder, size = Path({folder!r}), {size}

def fit(name, **loading):
    status = Path("/proc/self/status").read_text()
    data = 1024 * int(status.split("VmData:")[1].split()[0])
    model = lj.load(folder, **loading)  # maps the whole file for a moment, without reading it
    resource.setrlimit(resource.RLIMIT_DATA, (data + size // 2,) * 2)
    lj.fit(model, stories(12), **{settings}).save_pretrained(folder / name)

lj.load({small!r})  # what a first use imports and allocates
print(in_child(lambda: fit("plain")), in_child(lambda: fit("offloaded", device_map="disk")))
"""


def test_a_model_larger_than_its_memory_is_fitted(tmp_path):
    """Of the size of the weights, half is left to the process: for them, for states and for sums."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 40, "initializer_range": 0.05}
    folder = save_small_llama(tmp_path / "model", **sizes)
    small = save_small_llama(tmp_path / "small")
    # In parts, because reading a weight maps the whole file that it is in.
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="8MB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    settings = {"pairs": "0:40,20:40", "tokens": 400, "max_length": 32}
    code = LIMITED.format(folder=str(folder), size=size, settings=settings, small=str(small))
    assert printed_by(code).split() == ["1", "0"]  # as it is, it does not fit
    lj.fit(lj.load(folder), stories(12), **settings).save_pretrained(folder / "whole")
    assert same_bytes(folder / "whole", folder / "offloaded")

"""Models written as GGUF files: read back by transformers and by `lj.load`, with the same logits and tokens."""

from __future__ import annotations

import pytest
import torch
from helpers.story_text import numbers, stories
from helpers.tiny_models import tiny_model, wrapped
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Qwen3Config

import layerjump as lj
from layerjump.cli import main
from layerjump.errors import BadArtifact, BadModel
from layerjump.models.write_gguf import write_gguf
from layerjump.pruning.drop_blocks import without_blocks

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IDS = torch.tensor([[5, 9, 17, 23, 31, 8, 44, 12]])


def build(kind: str) -> lj.Model:
    """A model with the settings of its family that transformers reads from a GGUF file."""
    configs = {
        "llama": lambda: AutoConfig.for_model("llama", **SIZES),
        "llama-tied": lambda: AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True, rope_theta=5e4),
        "qwen2": lambda: AutoConfig.for_model("qwen2", **SIZES),
        "qwen3": lambda: Qwen3Config(**SIZES, head_dim=128),
        "gemma2": lambda: Gemma2Config(**SIZES, head_dim=8),
        "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=8),
    }
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(configs[kind]()).float().eval()
    with torch.no_grad():
        for weight in hf.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return wrapped(hf)


def read_back(path) -> torch.Tensor:
    hf = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        return hf(IDS).logits


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_pruned_model_is_read_back_with_its_logits(kind, tmp_path):
    pruned = without_blocks(build(kind), [2])
    write_gguf(pruned, tmp_path / "model.gguf")
    with torch.no_grad():
        ours = pruned.hf(IDS).logits
    theirs = read_back(tmp_path / "model.gguf")
    if kind.startswith("gemma"):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-4 * float(ours.abs().max()))
    else:
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def trained(real_folder, tmp_path_factory):
    """A real Llama without one block, as a folder and as a GGUF file written by the command line."""
    folder = tmp_path_factory.mktemp("gguf")
    model = lj.load(real_folder("stories260K"))
    pruned = lj.prune(model, stories(100), drop=1, method="fold", criterion="deepest", tokens=3_000)
    pruned.save(folder / "smaller")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv",
            ["layerjump", "export", str(folder / "smaller"), "--format", "gguf", "-o", str(folder / "smaller.gguf")],
        )
        with pytest.raises(SystemExit) as stopped:
            main()
    assert not stopped.value.code
    return pruned.model, lj.load(folder / "smaller.gguf")


def test_load_reads_model_and_tokenizer(trained):
    pruned, again = trained
    assert again.n_blocks == pruned.n_blocks
    with torch.no_grad():
        assert torch.equal(pruned.hf(IDS).logits, again.hf(IDS).logits)
    texts = list(stories(20).documents)
    assert again.tokenization.encode(texts) == pruned.tokenization.encode(texts)


def test_other_families_and_settings_are_refused(tmp_path, data_folder):
    with pytest.raises(BadArtifact, match="ends in .gguf"):
        write_gguf(build("llama"), tmp_path / "model.bin")
    with pytest.raises(BadModel, match="got gpt2; save other families as a folder"):
        write_gguf(lj.load(data_folder / "tiny-gpt2"), tmp_path / "model.gguf")
    unusual = wrapped(tiny_model("qwen3").float())  # a head size that transformers does not read
    with pytest.raises(BadModel, match=r"GGUF"):
        write_gguf(unusual, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_attached_maps_are_refused(tmp_path):
    model = wrapped(tiny_model("llama"), words=True)
    pruned = lj.prune(model, numbers(60), drop=1, method="linear", criterion="deepest")
    with pytest.raises(BadModel, match="attached maps"):
        write_gguf(pruned.model, tmp_path / "model.gguf")

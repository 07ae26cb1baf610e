"""Write a model of the Llama, Qwen or Gemma families as a GGUF file, which llama.cpp and transformers read.

Names of tensors are those of the `gguf` package, and values are float32. Two families are stored otherwise than
Hugging Face holds them: the rows of Llama's queries and keys are in another order (rotary embeddings turn neighbouring
instead of distant coordinates), and Gemma's norms include the one that Gemma adds to them. A file is read back by
transformers and must give the model's logits: settings that transformers does not read from GGUF (scaled rotary
embeddings, unusual head sizes) are refused that way.
"""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerjump.errors import BadArtifact, BadModel, one_line
from layerjump.io import replace_file
from layerjump.models.hooks import attached_maps
from layerjump.models.loading import quiet_transformers
from layerjump.models.model import Model
from layerjump.models.self_check import sample
from layerjump.models.weight_forms import require_plain

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3"}
"""Hugging Face's `model_type` → GGUF's architecture."""
_TOLERANCE = 1e-4
"""Largest difference of logits after reading back, relative to the largest; Gemma's norms are rounded."""


def write_gguf(model: Model, path: str | Path) -> None:
    """Write a model with its tokenizer as a GGUF file.

    Raises `BadModel` if the family has no such form, or if transformers reads another model back from it.
    """
    path = Path(path).expanduser()
    if path.suffix != ".gguf":
        raise BadArtifact(f"expected a file that ends in .gguf, got {path}")
    if model.model_type not in ARCHITECTURES:
        raise BadModel(
            f"expected a model of one of {', '.join(ARCHITECTURES)}, got {model.model_type}; save other families "
            f"as a folder"
        )
    if next(attached_maps(model.hf), None) is not None:
        raise BadModel(
            f"expected a model whose weights are all that it computes with, got {model.name} with attached maps; prune "
            f"with fold, rotation or refit"
        )

    def write(temporary: Path) -> None:
        _write(model, temporary)
        _require_same_logits(model, temporary)

    replace_file(path, write)


@torch.no_grad()
def _write(model: Model, path: Path) -> None:
    import gguf

    config, name = model.text_config, ARCHITECTURES[model.model_type]
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer = gguf.GGUFWriter(path, name)
    writer.add_name(Path(model.name).name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if name.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if model.tokenizer is not None:
        _add_tokenizer(writer, model)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for hf_name, weight in model.hf.named_parameters():
        require_plain(weight, hf_name)
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise BadModel(f"the weight {hf_name} has no place in a GGUF file of {name}; save the model as a folder")
        writer.add_tensor(gguf_name, _as_stored(weight, hf_name, name, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_base(config: Any) -> float:
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:  # one for each kind of attention
        parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", 10_000.0)))


def _as_stored(weight: Tensor, name: str, architecture: str, config: Any) -> Any:
    """The values of a weight as GGUF holds them."""
    values = weight.detach().cpu().float()
    if architecture == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        shape = values.shape
        values = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        values = values + 1
    return np.ascontiguousarray(values.numpy())


def _add_tokenizer(writer: Any, model: Model) -> None:
    """Add a byte-level BPE as GGUF's `gpt2`, and a BPE with byte fallback (SentencePiece) as its `llama`."""
    import gguf

    tokenizer: Any = model.tokenizer
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe = content["model"]
    if bpe["type"] != "BPE":
        raise BadModel(f"expected a BPE tokenizer, got {bpe['type']}, which is not written to GGUF files")
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    size = model.text_config.vocab_size
    texts = [tokens.get(index, f"[PAD{index}]") for index in range(size)]

    def kind(index: int) -> int:
        if index not in tokens:
            return int(gguf.TokenType.UNUSED)
        if index in special:
            return int(gguf.TokenType.UNKNOWN if texts[index] == bpe.get("unk_token") else gguf.TokenType.CONTROL)
        is_byte = bpe["byte_fallback"] and re.fullmatch(r"<0x[0-9A-F]{2}>", texts[index])
        return int(gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL)

    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    writer.add_tokenizer_model("llama" if bpe["byte_fallback"] else "gpt2")
    if not bpe["byte_fallback"]:
        writer.add_tokenizer_pre(_pre_tokenizer(content))
    writer.add_token_list(texts)
    if bpe["byte_fallback"]:
        # SentencePiece merges the pair with the highest score; ours are ordered by the first merge that makes a token.
        order: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            order.setdefault(merge.replace(" ", ""), rank)
        writer.add_token_scores([-float(order[text]) if text in order else -1e6 for text in texts])
    writer.add_token_types([kind(index) for index in range(size)])
    writer.add_token_merges(merges)
    for name, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("unk_token_id", writer.add_unk_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        if (index := getattr(tokenizer, name, None)) is not None:
            add(index)
    adds_bos = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(adds_bos)
    if template := getattr(tokenizer, "chat_template", None):
        writer.add_chat_template(template)


def _pre_tokenizer(content: dict[str, Any]) -> str:
    """llama.cpp's name of a byte-level pre-tokenizer, told by how it treats digits."""
    rules = json.dumps(content["pre_tokenizer"])
    if "{1,3}" in rules:
        return "llama-bpe"
    if "Digits" in rules:
        return "smollm"
    return "qwen2" if "p{N}" in rules else "gpt-2"


@torch.no_grad()
def _require_same_logits(model: Model, path: Path) -> None:
    batch = sample(model)
    try:
        with quiet_transformers(), redirect_stderr(io.StringIO()):  # a progress bar
            hf_class: Any = type(model.hf)
            saved = hf_class.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
        theirs = saved.eval()(batch.input_ids).logits.double()
    except Exception as error:  # of whichever library
        raise BadModel(f"transformers cannot read the GGUF file of {model.name} ({one_line(error)})") from error
    ours = model.hf(batch.input_ids.to(model.device)).logits.double().cpu()
    difference = float((ours - theirs).abs().max() / ours.abs().max())
    if not difference <= _TOLERANCE:
        raise BadModel(
            f"{model.name} has settings that transformers does not read from GGUF: its logits differ by "
            f"{difference:.2g} of the largest; save the model as a folder"
        )

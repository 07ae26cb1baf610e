"""Tiny models of every family, from configurations: three blocks, d 32, float64, seeded, no zeros that hide faults."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from helpers.family_table import FAMILIES
from helpers.tokenizers import llama as llama_words
from layerjump.models.discovery import discover
from layerjump.models.hugging_face_config import auto_class
from layerjump.models.model import Model

# Common names; each configuration translates them to its own.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Where a family's own names or defaults stand in the way of a tiny model.
QUIRKS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "gemma": {"head_dim": 8, "num_key_value_heads": 2},
    "gemma2": {"head_dim": 8, "num_key_value_heads": 2, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "num_key_value_heads": 2, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "t5": {"d_kv": 8, "d_ff": 48, "num_decoder_layers": 3, "decoder_start_token_id": 0},
    "bart": {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_layers": 3, "decoder_attention_heads": 4},
}
# Variants that a family's row or masks depend on: family → name → what to change.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {"scaled": {"scale_attn_by_inverse_layer_idx": True}},
    "gpt_neox": {"sequential": {"use_parallel_residual": False}},
    "opt": {
        "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
        "projected": {"word_embed_proj_dim": 16},
        "no-final-norm": {"_remove_final_layer_norm": True},
    },
    "falcon": {
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "new-one-norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "rw": {"parallel_attn": False, "alibi": True, "multi_query": False, "bias": True},
    },
    "llama": {"biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}},
    "mistral": {"no-window": {"sliding_window": None}},
    "qwen2": {
        "mixed": {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        }
    },
    "gemma3_text": {
        "mixed": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "softcap": {"final_logit_softcapping": 3.0},
    },
    "gemma2": {"mixed": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}},
    "phi3": {"window": {"sliding_window": 4}},
    "bert": {"untied": {"tie_word_embeddings": False}},
    "electra": {"square": {"embedding_size": 32}},
    "albert": {"groups": {"num_hidden_groups": 3}, "inner": {"inner_group_num": 2}},
    "t5": {
        "gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "wide-heads": {"d_kv": 12},
        "short-encoder": {"num_hidden_layers": 2},
    },
    "bart": {"scaled": {"scale_embedding": True}, "short-encoder": {"num_hidden_layers": 2}},
}
CASES = [(family, "") for family in FAMILIES] + [
    (family, variant) for family, variants in VARIANTS.items() for variant in variants
]


def tiny_config(family: str, variant: str = "", **changes: Any) -> Any:
    """The tiny configuration of a family, or of one of its variants."""
    settings = SIZES | QUIRKS.get(family, {})
    if variant:
        settings = settings | VARIANTS[family][variant]
    known = AutoConfig.for_model(family)
    for field, value in (("intermediate_size", 48), ("max_position_embeddings", 40)):
        if hasattr(known, field):
            settings.setdefault(field, value)
    if getattr(known, "layer_types", None) is not None and "layer_types" not in settings:
        settings["layer_types"] = known.layer_types[:3]
    return AutoConfig.for_model(family, **(settings | changes))


def tiny_model(
    family: str, variant: str = "", *, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    """A tiny model with seeded weights; biases and norm weights are randomised too."""
    config = tiny_config(family, variant, **changes)
    auto = getattr(transformers, auto_class(config))
    torch.manual_seed(0)
    model = auto.from_config(config).to(torch.float64).eval()
    for parameter in model.parameters():
        scale = 0.3 if parameter.dim() > 1 else 0.5
        offset = 1.0 if parameter.dim() == 1 and parameter.abs().min() == 1 else 0.0
        with torch.no_grad():
            parameter.normal_(offset, scale)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.normal_()
    return model.to(dtype)


def silent_gpt2() -> PreTrainedModel:
    """A tiny GPT-2 whose attention and feed-forward add constants: from level to level all is affine."""
    model = tiny_model("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()
    return model


def wrapped(hf: PreTrainedModel, words: bool = False) -> Model:
    """Not checked, as `Model.wrap` would; with a tokenizer of numbers where words are wanted."""
    return Model(hf, discover(hf), "tiny", llama_words() if words else None)

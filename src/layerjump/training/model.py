"""Small models to train from scratch, built from Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from layerjump.errors import BadTraining, argument
from layerjump.models.families import FAMILIES
from layerjump.models.loading import CLASSES


@dataclass(frozen=True)
class ModelShape:
    """The size of a model."""

    layers: int = 4
    hidden_size: int = 128
    """Width of the residual stream."""
    heads: int = 4
    max_positions: int = 128
    """Number of tokens in the longest sequence that the model takes."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise BadTraining(f"expected {argument(name)} of 1 or more, got {value}")
        head_dim, rest = divmod(self.hidden_size, self.heads)
        if rest:
            multiple = 2 * self.heads * max(1, round(self.hidden_size / (2 * self.heads)))
            raise BadTraining(
                f"{argument('hidden_size', self.hidden_size)} does not divide into {self.heads} heads; pass a "
                f"multiple, such as {multiple}"
            )
        if head_dim % 2:
            raise BadTraining(
                f"{argument('hidden_size', self.hidden_size)} and {self.heads} heads give {head_dim} dimensions a "
                "head, but rotary embeddings rotate pairs of dimensions; pass heads of an even size"
            )


@dataclass(frozen=True)
class Architecture:
    """A model family and the configuration values that make it this architecture; `ModelShape` adds the size."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    window_share: float | None = None
    """Sliding attention window as a share of the positions; None for full attention."""

    @property
    def masked(self) -> bool:
        return FAMILIES[self.family].task == "masked"


ARCHITECTURES = {
    "llama": Architecture("llama"),
    "mistral": Architecture("mistral"),
    "gpt2": Architecture("gpt2"),
    "bert": Architecture("bert", {"initializer_range": 0.05}),
}
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
_OPT = {"activation_function": "gelu", "layerdrop": 0.0}
_NO_SOFT_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
VARIANTS: dict[str, dict[str, Architecture]] = {
    # All share LayerNorm, GELU, biases and pre-norm.
    "positions": {
        "learned": Architecture("gpt2"),
        "rotary": Architecture(
            "gpt_neox", {"use_parallel_residual": False, "rope_parameters": _ROTARY, "tie_word_embeddings": True}
        ),
        "ALiBi": Architecture("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    },
    # Both share rotary embeddings, RMSNorm and a gated feed-forward network.
    "attention": {
        "full": Architecture("mistral", {"sliding_window": None}),
        "local": Architecture("mistral", window_share=1 / 8),
    },
    # Pre and post differ in one flag of one family. Sandwich is Gemma 2 without its soft-caps, next to Gemma.
    "norms": {
        "pre": Architecture("opt", {**_OPT, "do_layer_norm_before": True}),
        "post": Architecture("opt", {**_OPT, "do_layer_norm_before": False}),
        "pre (RMS)": Architecture("gemma"),
        "sandwich (RMS)": Architecture("gemma2", _NO_SOFT_CAPS),
    },
}
"""Property that varies → variant → architecture, for the study `architecture`."""
_FFN_WIDTH_NAMES = ("intermediate_size", "ffn_dim")
_GATED_FAMILIES = ("llama", "mistral", "gemma", "gemma2")


def build_model(
    architecture: Architecture, shape: ModelShape, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> PreTrainedModel:
    """Build an untrained model for a tokenizer; the same seed gives the same weights."""
    config = AutoConfig.for_model(architecture.family, **_config_values(architecture, shape, tokenizer))
    torch.manual_seed(seed)
    auto_class = getattr(transformers, CLASSES[FAMILIES[architecture.family].task])
    hf: PreTrainedModel = auto_class.from_config(config)
    if architecture.family == "bert":
        _initialize_bert(hf)
    return hf


@torch.no_grad()
def _initialize_bert(hf: Any) -> None:
    """Start with sinusoidal positions and queries equal to keys, so that heads attend to near positions.

    From random weights a small BERT stays at the loss of a unigram model for hundreds of steps.
    """
    embeddings = hf.bert.embeddings.position_embeddings.weight
    length, width = embeddings.shape
    angles = torch.arange(length)[:, None] * length ** -torch.linspace(0, 1, (width + 1) // 2)
    embeddings.copy_(0.07 * torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width])
    for layer in hf.bert.encoder.layer:
        attention = layer.attention.self
        attention.key.weight.copy_(attention.query.weight.normal_(std=1.8 * width**-0.5))


def _config_values(architecture: Architecture, shape: ModelShape, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    defaults = AutoConfig.for_model(architecture.family)
    head_dim = shape.hidden_size // shape.heads
    # Four times the width. A gated network has a third matrix, so two thirds of that, a multiple of eight.
    gated = architecture.family in _GATED_FAMILIES
    ffn_width = 8 * max(1, round(shape.hidden_size / 3)) if gated else 4 * shape.hidden_size
    values: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    values |= {name: ffn_width for name in _FFN_WIDTH_NAMES if hasattr(defaults, name)}
    where_settable = {
        "num_key_value_heads": shape.heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "word_embed_proj_dim": shape.hidden_size,
        "layer_types": ["full_attention"] * shape.layers,
    }
    for name, value in where_settable.items():
        # Falcon computes head_dim in a property.
        if hasattr(defaults, name) and not isinstance(getattr(type(defaults), name, None), property):
            values[name] = value
    # Dropout would make a run depend on how its batches are split over processes.
    for name, value in vars(defaults).items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            values[name] = 0.0
    values |= architecture.config
    if architecture.window_share is not None:
        values["sliding_window"] = max(1, int(shape.max_positions * architecture.window_share))
    return values

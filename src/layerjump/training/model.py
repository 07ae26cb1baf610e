"""Small models to train from scratch, from Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from layerjump.errors import BadTraining
from layerjump.models.families import FAMILIES
from layerjump.models.loading import CLASSES


@dataclass(frozen=True)
class ModelShape:
    """How large a model is."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    max_positions: int = 128
    """The longest sequence it takes."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise BadTraining(f"{name} given is {value}; give 1 or more")
        if self.hidden % self.heads:
            raise BadTraining(
                f"hidden {self.hidden} does not divide into {self.heads} heads; give a multiple, such as "
                f"{2 * self.heads * max(1, round(self.hidden / (2 * self.heads)))}"
            )
        if self.hidden // self.heads % 2:
            raise BadTraining(
                f"hidden {self.hidden} and {self.heads} heads make heads of {self.hidden // self.heads}, but rotary "
                "positions turn pairs of coordinates; give heads of an even size"
            )


@dataclass(frozen=True)
class Architecture:
    """A family with the settings that make it this architecture; the size comes from a `Shape`."""

    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)

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
_NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
VARIANTS: dict[str, dict[str, Architecture]] = {
    # Within each, all else is alike: LayerNorm, GELU, biases, norms before the parts.
    "positions": {
        "learned": Architecture("gpt2"),
        "rotary": Architecture(
            "gpt_neox",
            {
                "use_parallel_residual": False,
                "rope_parameters": _ROTARY,
                "tie_word_embeddings": True,
            },
        ),
        "ALiBi": Architecture(
            "falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}
        ),
    },
    # Rotary positions, RMSNorm, gated feed-forward.
    "attention": {
        "full": Architecture("mistral", {"sliding_window": None}),
        "local": Architecture("mistral", {"sliding_window": "an eighth"}),
    },
    # Pre and post: one family, one flag. Sandwich: Gemma 2 without its soft-caps, beside its predecessor.
    "norms": {
        "pre": Architecture("opt", {**_OPT, "do_layer_norm_before": True}),
        "post": Architecture("opt", {**_OPT, "do_layer_norm_before": False}),
        "pre (RMS)": Architecture("gemma"),
        "sandwich (RMS)": Architecture("gemma2", _NO_CAPS),
    },
}
"""What varies → variant → architecture, for the study `architecture`."""
_FEED_FORWARD = ("intermediate_size", "ffn_dim")
_GATED = ("llama", "mistral", "gemma", "gemma2")


def build_model(
    kind: Architecture, shape: ModelShape, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> PreTrainedModel:
    """An untrained model for this tokenizer; the same seed gives the same weights."""
    config = AutoConfig.for_model(kind.family, **_settings(kind, shape, tokenizer))
    torch.manual_seed(seed)
    made: PreTrainedModel = getattr(transformers, CLASSES[FAMILIES[kind.family].task]).from_config(
        config
    )
    if kind.family == "bert":
        _look_near(made)
    return made


@torch.no_grad()
def _look_near(bert: Any) -> None:
    """Let heads begin by looking at near positions: positions start as waves, queries equal to keys.

    With random ones a small BERT was still at the loss of a unigram model after hundreds of steps.
    """
    places = bert.bert.embeddings.position_embeddings.weight
    length, width = places.shape
    angles = torch.arange(length)[:, None] * length ** -torch.linspace(0, 1, (width + 1) // 2)
    places.copy_(0.07 * torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width])
    for layer in bert.bert.encoder.layer:
        attention = layer.attention.self
        attention.key.weight.copy_(attention.query.weight.normal_(std=1.8 * width**-0.5))


def _settings(
    kind: Architecture, shape: ModelShape, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    known = AutoConfig.for_model(kind.family)
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    for name in _FEED_FORWARD:
        if hasattr(known, name):
            settings[name] = _feed_forward(kind, shape)
    more = {
        "num_key_value_heads": shape.heads,
        "head_dim": shape.hidden // shape.heads,
        "query_pre_attn_scalar": shape.hidden // shape.heads,
        "word_embed_proj_dim": shape.hidden,
        "layer_types": ["full_attention"] * shape.layers,
    }
    settings |= {name: value for name, value in more.items() if _settable(known, name)}
    # Dropout would make a run depend on how its batches are cut and dealt out.
    settings |= {name: 0.0 for name, value in vars(known).items() if _drops(name, value)}
    settings |= kind.settings
    if settings.get("sliding_window") == "an eighth":
        settings["sliding_window"] = max(1, shape.max_positions // 8)
    return settings


def _feed_forward(kind: Architecture, shape: ModelShape) -> int:
    """Four times the width; a gated one has a third product, so two thirds of that, in eights."""
    return 8 * max(1, round(shape.hidden / 3)) if kind.family in _GATED else 4 * shape.hidden


def _settable(known: Any, name: str) -> bool:
    """Falcon works its heads' size out itself."""
    return hasattr(known, name) and not isinstance(getattr(type(known), name, None), property)


def _drops(name: str, value: object) -> bool:
    return ("dropout" in name or "pdrop" in name) and isinstance(value, float)

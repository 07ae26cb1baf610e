"""Small models to train from scratch, built from Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any

import torch
import transformers
from pydantic import Field
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from layerjump.errors import BadTraining, UnsupportedModel, argument, one_line
from layerjump.models import small_models
from layerjump.models.hugging_face_config import auto_class


@dataclass(frozen=True)
class ModelShape:
    """The size of a model; the aliases are the keys of `training.json`."""

    layers: Annotated[int, Field(alias="shape_layers")] = 4
    hidden_size: Annotated[int, Field(alias="shape_hidden")] = 128
    """Width of the residual stream."""
    heads: Annotated[int, Field(alias="shape_heads")] = 4
    max_positions: Annotated[int, Field(alias="shape_positions")] = 128
    """Number of tokens in the longest sequence that the model takes."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "heads", "max_positions"):
            if (value := getattr(self, name)) < 1:
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
class TrainingArchitecture:
    """A model family and the configuration values that make it this architecture; `ModelShape` adds the size."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    window_share: float | None = None
    """Sliding attention window as a share of the positions; None for full attention."""
    listed: small_models.Architecture | None = None
    """The class of transformers, for an architecture whose configuration is its own default made small."""

    @property
    def masked(self) -> bool:
        return self.listed is None and auto_class(AutoConfig.for_model(self.family)) == "AutoModelForMaskedLM"

    @property
    def loader(self) -> str:
        """The auto class that loads its checkpoints."""
        if self.listed is None:
            return auto_class(AutoConfig.for_model(self.family))
        return "AutoModelForCausalLM" if self.listed.task == "causal" else "AutoModelForImageTextToText"


ARCHITECTURES = {name: TrainingArchitecture(name) for name in ("llama", "mistral", "gpt2")}
ARCHITECTURES["bert"] = TrainingArchitecture("bert", {"initializer_range": 0.05})
"""Architectures with the same sizes and window-free attention, so that they compare; `find_architecture` has more."""
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
_OPT = {"activation_function": "gelu", "layerdrop": 0.0}
_NO_SOFT_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
VARIANTS: dict[str, dict[str, TrainingArchitecture]] = {
    # All share LayerNorm, GELU, biases and pre-norm.
    "positions": {
        "learned": TrainingArchitecture("gpt2"),
        "rotary": TrainingArchitecture(
            "gpt_neox", {"use_parallel_residual": False, "rope_parameters": _ROTARY, "tie_word_embeddings": True}
        ),
        "ALiBi": TrainingArchitecture(
            "falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}
        ),
    },
    # Both share rotary embeddings, RMSNorm and a gated feed-forward network.
    "attention": {
        "full": TrainingArchitecture("mistral", {"sliding_window": None}),
        "local": TrainingArchitecture("mistral", window_share=1 / 8),
    },
    # Pre and post differ in one flag of one family. Sandwich is Gemma 2 without its soft-caps, next to Gemma.
    "norms": {
        "pre": TrainingArchitecture("opt", {**_OPT, "do_layer_norm_before": True}),
        "post": TrainingArchitecture("opt", {**_OPT, "do_layer_norm_before": False}),
        "pre (RMS)": TrainingArchitecture("gemma"),
        "sandwich (RMS)": TrainingArchitecture("gemma2", _NO_SOFT_CAPS),
    },
}
"""Property that varies → variant → architecture, for the study `architecture`."""
_FFN_WIDTH_NAMES = ("intermediate_size", "ffn_dim")
_GATED_FAMILIES = ("llama", "mistral", "gemma", "gemma2")


def find_architecture(name: str) -> TrainingArchitecture:
    """The architecture of a name in `ARCHITECTURES`, or of any causal or image–text model type of transformers."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    listed = small_models.list_architectures()
    causal = {kind.model_type: kind for task in ("image-text", "causal") for kind in listed if kind.task == task}
    if name in causal:
        return TrainingArchitecture(name, listed=causal[name])
    other = next((kind for kind in listed if kind.model_type == name), None)
    near = get_close_matches(name, [*ARCHITECTURES, *causal], n=1)
    reason = f"a {other.task} model" if other else "no model type of transformers"
    raise BadTraining(
        f"expected {argument('arch')} to be bert or a causal model type of transformers, such as llama or qwen3_moe, "
        f"got {name!r}, which is {reason}{f'; did you mean {near[0]}?' if near and not other else ''}"
    )


def build_model(
    architecture: TrainingArchitecture, shape: ModelShape, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> PreTrainedModel:
    """Build an untrained model for a tokenizer; the same seed gives the same weights."""
    if architecture.listed is not None:
        return _build_listed(architecture.listed, shape, tokenizer, seed=seed)
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
    config = AutoConfig.for_model(architecture.family, **values)
    torch.manual_seed(seed)
    language_model = getattr(transformers, auto_class(config))
    hf: PreTrainedModel = language_model.from_config(config)
    if architecture.family == "bert":
        _initialize_bert(hf)
    return hf


def _build_listed(
    kind: small_models.Architecture, shape: ModelShape, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> PreTrainedModel:
    """A model of any listed class from its small configuration, with the class's own initialisation."""
    try:
        config = small_models.small_config(
            kind.model_type,
            n_blocks=shape.layers,
            d_model=shape.hidden_size,
            n_heads=shape.heads,
            vocab_size=len(tokenizer),
            n_positions=shape.max_positions,
        )
        for part in _text_configs(config):
            _suit_training(part, shape, tokenizer)
        return small_models.build(kind, config, seed=seed, perturb=False)
    except UnsupportedModel as error:
        raise BadTraining(f"{kind.model_type} cannot be trained on text: {one_line(error)}") from error
    except Exception as error:  # sizes that do not suit the type, in whatever library
        raise BadTraining(
            f"{kind.model_type} cannot be built with {shape.layers} blocks, width {shape.hidden_size}, {shape.heads} "
            f"heads: {type(error).__name__}: {one_line(error)}; pass {argument('hidden_size')} of 64 or more with 16 "
            f"or more dimensions a head"
        ) from error


def _text_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """A configuration and all configurations inside it."""
    inner = [getattr(config, name, None) for name in config.sub_configs]
    parts = [part for part in inner if isinstance(part, PretrainedConfig)]
    return [config, *(deeper for part in parts for deeper in _text_configs(part))]


def _suit_training(config: PretrainedConfig, shape: ModelShape, tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokenizer's special tokens, no dropout, and windows of half the positions."""
    for name, value in list(vars(config).items()):
        is_noise = any(part in name for part in ("dropout", "pdrop", "layerdrop", "drop_path", "jitter"))
        if is_noise and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name in ("sliding_window", "attention_chunk_size") and value == small_models.WINDOW:
            setattr(config, name, max(small_models.WINDOW, shape.max_positions // 2))
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id") and value is not None:
            setattr(config, name, getattr(tokenizer, name))


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

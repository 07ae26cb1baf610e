"""What discovery cannot see of a model family: which class loads it, and facts about its training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from layerjump.errors import UnsupportedModel, argument
from layerjump.models.structure import Task

AUTO_CLASSES = {
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
"""Auto class → model type → class, in the order in which they are tried."""


@dataclass(frozen=True)
class Override:
    """What discovery cannot find by itself; every field is optional."""

    task: Task | None = None
    """What the model predicts, where its class does not tell."""
    blocks: str | None = None
    """Path of the list of blocks, where discovery takes another chain of modules for the blocks."""
    logits: Callable[[Any], Tensor] | None = None
    """The model's output → its logits, where they are not `output.logits`, the output itself or its first entry."""


OVERRIDES: dict[str, Override] = {}
"""Model type → its override."""


def auto_class(config: Any) -> str:
    """The name of the auto class that loads a checkpoint with its prediction head.

    The checkpoint's own class decides. A checkpoint of a bare body, or without the name of its class, is loaded as the
    language model of its type, without a trained head.
    """
    remote = getattr(config, "auto_map", None) or {}
    for name in AUTO_CLASSES:
        if name in remote:
            return name
    for name, classes in AUTO_CLASSES.items():
        known = {entry for value in classes.values() for entry in ([value] if isinstance(value, str) else value)}
        if known & set(config.architectures or ()):
            return name
    if {*modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values()} & set(config.architectures or ()):
        raise UnsupportedModel(
            f"expected a model that reads text, got the speech model {config.architectures[0]}, which reads sound; "
            f"load it with transformers and wrap it: lj.Model.wrap(hf, tokenizer, extra_inputs=...)"
        )
    is_encoder = not getattr(config, "is_decoder", False)
    language_models = {
        "AutoModelForSeq2SeqLM": getattr(config, "is_encoder_decoder", False),
        "AutoModelForMaskedLM": is_encoder,
        "AutoModelForCausalLM": True,
        "AutoModelForImageTextToText": True,
    }
    for name, is_possible in language_models.items():
        if is_possible and config.model_type in AUTO_CLASSES[name]:
            return name
    raise UnsupportedModel(
        f"expected a model type that transformers has a language model for, got {config.model_type!r}; for a model "
        f"with its own code pass {argument('trust_remote_code')}, or wrap it in memory: lj.Model.wrap(hf, tokenizer)"
    )


def text_config(hf: nn.Module) -> Any:
    """The configuration of the text model: a part of an image–text model's configuration; None if there is none."""
    config = getattr(hf, "config", None)
    try:
        return config.get_text_config(decoder=True) if isinstance(config, PretrainedConfig) else config
    except ValueError:  # several text models
        return config


def input_embeddings(hf: nn.Module) -> nn.Module | None:
    """The token embedding of a Hugging Face model; None where the model does not name it."""
    if not isinstance(hf, PreTrainedModel):
        return None
    try:
        return hf.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def reserved_positions(hf: nn.Module) -> int:
    """Rows of the position table that no token can use: a table with a padding row begins to count after it."""
    size = getattr(getattr(hf, "config", None), "max_position_embeddings", None)
    tokens = input_embeddings(hf)
    tables = [module for module in hf.modules() if isinstance(module, nn.Embedding) and module is not tokens]
    paddings = [table.padding_idx for table in tables if table.num_embeddings == size]
    return next((padding + 1 for padding in paddings if padding is not None), 0)

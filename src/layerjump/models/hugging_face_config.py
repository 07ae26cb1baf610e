"""Facts that Hugging Face classes and configurations tell: auto class, task, vocabulary, arguments of `forward`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from layerjump.errors import UnsupportedModel, argument
from layerjump.models.anatomy import Task

AUTO_CLASSES = {
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
"""Auto class → model type → class, in the order in which they are tried."""


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


def task_of(hf: nn.Module) -> Task:
    """What a model predicts: the next token, a masked token, an encoder–decoder's next token, or labels."""
    config = getattr(hf, "config", None)
    forward = inspect.signature(hf.forward).parameters
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in forward:
        return "seq2seq"
    name = type(hf).__name__
    if name.endswith(("ForMaskedLM", "ForPreTraining")):
        return "masked"
    if name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return "classification"
    return "causal"


def example_tokens(hf: nn.Module, rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Random tokens (rows, length), the same at every call; no padding and no special token among them."""
    special = _special_tokens(hf)
    n_tokens = vocabulary_size(hf)
    ordinary = [token for token in range(min(n_tokens, 4096)) if token not in special] or [0]
    picks = torch.randint(0, len(ordinary), (rows, length), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(ordinary)[picks]


def vocabulary_size(hf: nn.Module) -> int:
    """The number of tokens that a model can read."""
    if isinstance(size := getattr(text_config(hf), "vocab_size", None), int):
        return size
    embedding = input_embeddings(hf)
    if embedding is not None and isinstance(getattr(embedding, "weight", None), Tensor):
        return int(embedding.get_parameter("weight").shape[0])
    tables = [table.num_embeddings for table in hf.modules() if isinstance(table, nn.Embedding)]
    if not tables:
        raise UnsupportedModel("expected a model that reads tokens, got one without a token embedding")
    return max(tables)


def _special_tokens(hf: nn.Module) -> set[int]:
    tokens: set[int] = set()
    config = getattr(hf, "config", None)
    for settings in filter(None, (config, getattr(config, "text_config", None))):
        for name, value in vars(settings).items():
            if "token" in name or name.endswith(("_id", "_index")):
                tokens.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if type(v) is int)
    return tokens


def forward_arguments(
    hf: nn.Module,
    task: Task,
    ids: Tensor,
    mask: Tensor | None = None,
    source_ids: Tensor | None = None,
    source_mask: Tensor | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The keyword arguments of a forward pass, of those that the model's `forward` takes."""
    parameters = inspect.signature(hf.forward).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments: dict[str, Any]
    if task == "seq2seq":
        arguments = {
            "input_ids": source_ids,
            "attention_mask": source_mask,
            "decoder_input_ids": ids,
            "decoder_attention_mask": mask,
        }
    else:
        arguments = {"input_ids": ids, "attention_mask": mask}
    if task in ("causal", "seq2seq") or (task == "classification" and "use_cache" in parameters):
        arguments["use_cache"] = False
    if task == "seq2seq" and "input_ids" not in parameters:  # its encoder reads no tokens (Whisper)
        del arguments["input_ids"], arguments["attention_mask"]
    arguments |= options
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if "input_ids" not in parameters and not takes_all and task != "seq2seq":
        first = next(iter(parameters))
        arguments[first] = arguments.pop("input_ids")
    if task == "seq2seq" and "input_ids" not in parameters:  # its encoder reads images or sound
        arguments = {name: value for name, value in arguments.items() if name not in ("input_ids", "attention_mask")}
    return {name: value for name, value in arguments.items() if name in parameters or takes_all}

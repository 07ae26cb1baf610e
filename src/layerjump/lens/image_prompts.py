"""Prompts that are more than text: a text with images, through the model's processor, or the inputs of `forward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerjump.errors import BadModel, BadText, argument, one_line
from layerjump.lens.trajectory import Prompt
from layerjump.models.model import Model

_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Fields of a configuration that hold the id of the token at whose positions an image's states stand."""


def process_images(model: Model, texts: Sequence[str], images: Sequence[Any]) -> list[Prompt]:
    """The prompts of texts with images, one entry of `images` for each text: an image, or a list of images."""
    if model.processor is None:
        reason = f", whose processor cannot be loaded: {model.no_processor}" if model.no_processor else ", without one"
        raise BadModel(
            f"expected a model with a processor for {argument('images')}, got {model.name}{reason}; pass one to "
            f"Model.wrap(hf, tokenizer, processor=...), or pass the arguments of forward, {argument('inputs')}"
        )
    if len(images) != len(texts):
        raise BadText(
            f"expected one entry of {argument('images')} for each of {len(texts)} texts, got {len(images)}; for a text "
            f"with several images, pass a list"
        )
    return [_process(model, text, as_list(entry)) for text, entry in zip(texts, images, strict=True)]


def as_list(images: Any) -> list[Any]:
    """One image or a list of images as a list."""
    return list(images) if isinstance(images, (list, tuple)) else [images]


def _process(model: Model, text: str, images: list[Any]) -> Prompt:
    processor = model.processor
    assert processor is not None
    try:
        inputs = dict(processor(text=text, images=images, return_tensors="pt"))
    except Exception as error:  # each family's processor has its own
        n_places = text.count(_placeholder(model))
        advice = "pass PIL images or arrays" if n_places == len(images) else _placeholder_advice(model)
        raise BadText(
            f"the processor of {model.name} cannot read the text with {len(images)} images: {type(error).__name__}: "
            f"{one_line(error)}; {advice}"
        ) from error
    prompt = prompt_from_inputs(model, inputs)
    if getattr(processor, "image_token_id", None) is not None and not prompt.image_positions:
        raise BadText(
            f"expected the text to hold the place of {len(images)} images, got none in {text[:40]!r}; "
            f"{_placeholder_advice(model)}"
        )
    return prompt


def _placeholder(model: Model) -> str:
    """What a text holds where an image belongs."""
    tokens = (getattr(model.processor, name, None) for name in ("boi_token", "image_token"))
    return next((token for token in tokens if isinstance(token, str)), "<image>")


def _placeholder_advice(model: Model) -> str:
    return (
        f"write {_placeholder(model)} in the text where each image belongs, or make the text by "
        f"model.processor.apply_chat_template(messages, add_generation_prompt=True)"
    )


def prompt_from_inputs(model: Model, inputs: Mapping[str, Any]) -> Prompt:
    """The prompt of the keyword arguments of `forward` for one text.

    The tokens that are read are `input_ids`; those of an encoder–decoder are `decoder_input_ids`.
    """
    name = "decoder_input_ids" if model.task == "seq2seq" else "input_ids"
    arrays = {key: _as_tensor(value) for key, value in inputs.items()}
    ids = arrays.pop(name, None)
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise BadText(
            f"expected token ids as {name!r} in {argument('inputs')}, got {', '.join(map(repr, inputs)) or 'nothing'}"
        )
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or not ids.numel():
        raise BadText(
            f"expected {name!r} of one text, (1, positions), got {tuple(ids.shape)}; read several texts one by one"
        )
    (tokens,) = ids.tolist()
    if len(tokens) > model.max_positions:
        raise BadText(f"expected at most {model.max_positions:,} tokens, which {model.name} reads, got {len(tokens):,}")
    mask = arrays.get("decoder_attention_mask" if model.task == "seq2seq" else "attention_mask")
    is_read = [True] * len(tokens)
    if isinstance(mask, Tensor) and mask.dim() <= 2:
        if mask.numel() != len(tokens):
            raise BadText(f"expected an attention mask of {len(tokens)} positions, got {tuple(mask.shape)}")
        is_read = mask.flatten().bool().tolist()
    positions = tuple(position for position, read in enumerate(is_read) if read)
    if model.pooled is not None:
        positions = positions[:1] if model.pooled == "first" else positions[-1:]
    return Prompt(tuple(tokens), positions, _image_positions(model, tokens), arrays)


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) or (isinstance(value, list) and value and isinstance(value[0], (int, list))):
        return torch.as_tensor(value)
    return value


def _image_positions(model: Model, tokens: list[int]) -> tuple[int, ...]:
    # The configuration first: a processor's image token may be what stands for an image in the text (Gemma 3).
    for settings in (getattr(model.hf, "config", None), model.processor):
        placeholders = {getattr(settings, name, None) for name in _PLACEHOLDERS} - {None}
        if placeholders:
            return tuple(position for position, token in enumerate(tokens) if token in placeholders)
    return ()

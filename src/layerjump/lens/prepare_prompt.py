"""What a lens reads: a text, a text with images through the model's processor, or the inputs of `forward`.

Each becomes a `Prompt`: the token ids, and the positions at which predictions are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerjump.data.chat import Message, render_chat
from layerjump.errors import BadModel, BadText, argument, one_line
from layerjump.models.model import Model

BATCH_TOKENS = 4096
"""Tokens of a batch, padding included; a longer text is a batch of its own."""
PROMPT, GENERATED = "prompt", "generated"
"""The roles of tokens of a text that the model continued, and of those it said."""
_EXCERPT = 20  # characters of a text in an error message
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Fields of a configuration that hold the id of the token at whose positions an image's states stand."""


@dataclass(frozen=True)
class Prompt:
    """One tokenized text with its special tokens, and the positions to read."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    image_positions: tuple[int, ...] = ()
    """The positions at which the states of images stand in place of tokens."""
    roles: tuple[str, ...] = ()
    """The role of each token of a chat, `template`, `prompt` or `generated`; empty for a plain text."""
    inputs: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    """The other arguments of the model's `forward`, such as pixels; None for a text alone."""


def tokenize_prompts(model: Model, texts: Sequence[str], last: int | None = None) -> list[Prompt]:
    """Tokenize texts and select the positions to read.

    They are all positions of a causal model, the masked positions of a masked model, or all if none is masked, and the
    one position that a classification head reads. With `last`, only this many of them, the last ones. The encoder of an
    encoder–decoder reads the text, and its decoder the token that it starts with.
    """
    if model.task == "encoder" or (model.task == "seq2seq" and model.extra_inputs is not None):
        raise BadModel(
            f"expected a model that predicts tokens from a text, got {model.name}, whose encoder reads none; pass the "
            f"arguments of forward, {argument('inputs')}"
        )
    tokenization = model.tokenization
    mask = tokenization.mask if model.masked else None
    prompts = []
    for text, bare_ids in zip(texts, tokenization.encode(list(texts)), strict=True):
        ids = tuple(tokenization.wrap_prompt(bare_ids))
        excerpt = repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…")
        if len(ids) > tokenization.max_length:
            raise BadText(
                f"the text {excerpt} has {len(ids):,} tokens, but the model reads at most "
                f"{tokenization.max_length:,}; shorten it"
            )
        if not ids:
            raise BadText(f"the text {excerpt} has no tokens; pass at least one word")
        if tokenization.start is not None:
            source = torch.tensor([ids])
            started = (tokenization.start, *tokenization.prefix)
            inputs = {"input_ids": source, "attention_mask": torch.ones_like(source)}
            prompts.append(Prompt(started, tuple(range(len(started))), inputs=inputs))
            continue
        masked = tuple(position for position, token in enumerate(ids) if token == mask)
        positions = masked or tuple(range(len(ids)))
        if model.pooled is not None:
            positions = positions[:1] if model.pooled == "first" else positions[-1:]
        prompts.append(Prompt(ids, positions if last is None else positions[-last:]))
    return prompts


def chat_prompt(model: Model, messages: Sequence[Message], last: int | None = None) -> Prompt:
    """The prompt of a chat, rendered by the model's chat template; with `last`, read its last positions only."""
    if model.task != "causal":
        raise BadText(f"expected a causal model for a chat, got {model.name}; pass a text")
    chat = render_chat(model.name, model.tokenizer, messages)
    if len(chat.ids) > model.tokenization.max_length:
        raise BadText(
            f"the chat has {len(chat.ids):,} tokens, but the model reads at most {model.tokenization.max_length:,}; "
            f"shorten it"
        )
    prefix = model.tokenization.prefix
    if prefix and chat.ids[: len(prefix)] != prefix:
        (missing, *_) = model.token_texts(prefix)
        warnings.warn(
            f"the chat template of {model.name} does not begin with {missing!r}, which its texts begin with; the chat "
            f"is read as the template renders it",
            UserWarning,
            stacklevel=2,
        )
    positions = tuple(range(len(chat.ids)))
    return Prompt(chat.ids, positions if last is None else positions[-last:], roles=chat.roles)


@torch.no_grad()
def continue_prompt(model: Model, prompt: Prompt, n: int) -> Prompt:
    """The prompt with up to n more tokens that the model itself says, greedily; they are read too."""
    if n < 0:
        raise BadText(f"expected {argument('new_tokens')} of 0 or more, got {n}")
    if n == 0:
        return prompt
    generate = getattr(model.hf, "generate", None)
    if model.task not in ("causal", "seq2seq") or generate is None:
        raise BadModel(
            f"expected a model that generates text for {argument('new_tokens')}, got {model.name}; leave them out"
        )
    if len(prompt.ids) + n > model.max_positions:
        raise BadText(
            f"expected at most {model.max_positions:,} tokens, which {model.name} reads, got {len(prompt.ids):,} and "
            f"{n:,} new ones; ask for fewer"
        )
    ids = torch.tensor([prompt.ids], device=model.device)
    inputs = {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in _inputs(prompt)}
    if model.task == "seq2seq":
        inputs["decoder_input_ids"] = ids
    else:
        inputs = {"attention_mask": torch.ones_like(ids)} | inputs | {"input_ids": ids}
    (sequence,) = generate(**inputs, max_new_tokens=n, do_sample=False, pad_token_id=_pad(model)).tolist()
    new = sequence[len(prompt.ids) :]
    return replace(
        prompt,
        ids=(*prompt.ids, *new),
        positions=(*prompt.positions, *range(len(prompt.ids), len(sequence))),
        roles=(*(prompt.roles or [PROMPT] * len(prompt.ids)), *[GENERATED] * len(new)),
    )


def _inputs(prompt: Prompt) -> list[tuple[str, Any]]:
    return [] if prompt.inputs is None else list(prompt.inputs.items())


def _pad(model: Model) -> int:
    return 0 if model.tokenizer is None else model.tokenization.pad


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
    return Prompt(tuple(tokens), positions, _image_positions(model, tokens), inputs=arrays)


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

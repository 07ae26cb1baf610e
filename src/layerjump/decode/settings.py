"""Settings of generation that cannot be had with early exit, or not at all: each is an error of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import GenerationConfig

from layerjump.errors import BadExit
from layerjump.inputs.models import Model


def check_ranges(generation: Mapping[str, Any]) -> None:
    """Numbers out of range, before Hugging Face meets them."""
    new, temperature, top_p = (
        generation.get(name) for name in ("max_new_tokens", "temperature", "top_p")
    )
    if new is not None and new < 1:
        raise BadExit(f"max_new_tokens given is {new}; give 1 or more")
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise BadExit(f"the temperature given is {temperature:g}; give more than 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise BadExit(f"top_p given is {top_p:g}; give more than 0 and at most 1")


def check_room(model: Model, prompt: int, most: int) -> None:
    """A table of positions has an end; families that compute positions may go on behind it."""
    tables = [module for module in model.stack.modules() if isinstance(module, nn.Embedding)]
    learned = any(table is not model.hf.get_input_embeddings() for table in tables)
    if learned and most > model.max_positions:
        raise BadExit(
            f"{most - prompt:,} more tokens were asked for, but {model.name} has {model.max_positions:,} positions, "
            f"and the prompt takes {prompt:,}; ask for fewer, or shorten the prompt"
        )


def refuse_unsupported(config: GenerationConfig, given: Mapping[str, Any]) -> None:
    """What early exit cannot do is an error, not something else that is done instead."""
    reasons = {
        f"num_beams is {config.num_beams}; give 1": (config.num_beams or 1) > 1,
        "use_cache is off; leave it on": not given.get("use_cache", True),
        "inputs_embeds were given; give input_ids": given.get("inputs_embeds") is not None,
        "a cache with tokens in it was given; give none": _holds_tokens(given),
        "scores, logits, attentions or hidden states were asked for; ask for the tokens alone": any(
            getattr(config, f"output_{name}")
            for name in ("scores", "logits", "attentions", "hidden_states")
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise BadExit(f"early exit does not go with these settings: {reason}")


def _holds_tokens(given: Mapping[str, Any]) -> bool:
    cache = given.get("past_key_values")
    return cache is not None and int(cache.get_seq_length()) > 0

"""Calibration text that the model itself writes: its continuations of the openings of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from layerjump.data.corpus import Corpus
from layerjump.errors import BadPruning
from layerjump.models.model import Model

OPENING = 16
"""Tokens of a document that the model continues."""
MAX_NEW_TOKENS = 240
ROWS = 16
"""Documents that are continued at once."""


@torch.no_grad()
def continue_documents(
    model: Model, text: Corpus, documents: Sequence[int], *, tokens: int | None, seed: int
) -> Corpus:
    """Return the text with some documents replaced by their openings and what the model samples after them.

    A continuation is at most as long as the document was. `tokens` is the number of tokens after which the remaining
    documents stay as they are.
    """
    if model.task != "causal":
        raise BadPruning(f"expected a causal model to write text, got a {model.task} model; calibrate on documents")
    hf: Any = model.hf
    tokenization, tokenizer = model.tokenization, cast(PreTrainedTokenizerBase, model.tokenizer)
    contents = list(text.documents)
    n_tokens = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(documents), ROWS):
            group = documents[start : start + ROWS]
            encoded = tokenization.encode([text.documents[index] for index in group])
            room = max(max(map(len, encoded)) - OPENING, 1)
            inputs = tokenization.left_padded([tokenization.wrap(ids[:OPENING]) for ids in encoded])
            written = hf.generate(
                **{name: tensor.to(model.device) for name, tensor in inputs.items()},
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=min(MAX_NEW_TOKENS, room, tokenization.max_length - OPENING - tokenization.n_added),
                pad_token_id=tokenization.pad,
            )
            for index, ids, row in zip(
                group, encoded, written[:, inputs["input_ids"].shape[1] :].tolist(), strict=True
            ):
                new = row[: max(len(ids) - OPENING, 0)]
                words = str(tokenizer.decode([*ids[:OPENING], *new], skip_special_tokens=True))
                contents[index] = words if words.strip() else text.documents[index]
                n_tokens += len(ids[:OPENING]) + len(new)
            if tokens is not None and n_tokens >= tokens:
                break
    return replace(text, name=f"{text.name}, self-generated", documents=tuple(contents))

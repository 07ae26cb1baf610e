"""Text that the model writes itself: what an exit rule meets in generation, which real documents do not show.

Behind its own tokens a model is surer, and its early levels are right more often, than behind real text: a threshold
found on documents is stricter there than it need be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerjump.decode.generate import generate
from layerjump.errors import BadExit
from layerjump.inputs.batches import Batch
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model

OPENING = 12
"""Tokens of a document that the model goes on with."""
TOGETHER = 16
"""Texts that are written side by side."""


def own_text(
    model: Model,
    corpus: Corpus,
    documents: Sequence[int],
    *,
    tokens: int,
    picks: int,
    seed: int = 0,
) -> list[Batch]:
    """Documents' first tokens and what the model says next, greedily; so many picks a document where it predicts."""
    room = model.tokens.max_length - len(model.tokens.wrap([])) - OPENING
    if not 1 <= tokens <= room:
        raise BadExit(
            f"{tokens} tokens of the model's own were asked for behind each opening; give 1 to {room}, which is what "
            f"its context holds"
        )
    starts = range(0, len(documents), TOGETHER)
    return [
        _written(model, corpus, documents[start : start + TOGETHER], tokens, picks, seed)
        for start in starts
    ]


def _written(
    model: Model, corpus: Corpus, documents: Sequence[int], tokens: int, picks: int, seed: int
) -> Batch:
    texts = model.tokens.encode([corpus.documents[document] for document in documents])
    openings = [model.tokens.wrap(ids[:OPENING]) for ids in texts]
    prompts = model.tokens.left_padded(openings)
    said = generate(
        model,
        None,
        prompts,
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=model.tokens.pad,
    ).ids
    rows = [opening + new for opening, new in zip(openings, said, strict=True)]
    ids = _right_padded(rows, model.tokens.pad)
    attention = _right_padded([[1] * len(row) for row in rows], 0)
    row, position = [], []
    for place, new in enumerate(said):
        # The state at a position tells the next token, so the first is the opening's last.
        first, draw = len(openings[place]) - 1, np.random.default_rng([seed, documents[place]])
        drawn = draw.choice(len(new), size=min(picks, len(new)), replace=False)
        row += [place] * len(drawn)
        position += (first + np.sort(drawn)).tolist()
    rows_at, positions = torch.tensor(row), torch.tensor(position)
    document = torch.tensor(documents)[rows_at]
    return Batch(ids, attention, rows_at, positions, document, ids[rows_at, positions])


def _right_padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

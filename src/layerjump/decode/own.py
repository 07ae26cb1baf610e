"""Text that the model writes itself: what an exit rule meets in generation, which real documents do not show.

Behind its own tokens a model is surer, and its early levels are right more often, than behind real text: a threshold
found on documents is stricter there than it need be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerjump.decode.generate import generate
from layerjump.errors import BadExit
from layerjump.inputs.batches import Batch
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model

OPENING = 12
"""Tokens of a document that the model goes on with."""
TOGETHER = 64
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
    """Documents' first tokens and what the model says next, greedily; so many picks a document where it predicts.

    Where to look is drawn first, and no document is gone on with further than that.
    """
    room = model.tokens.max_length - len(model.tokens.wrap([])) - OPENING
    if not 1 <= tokens <= room:
        raise BadExit(
            f"{tokens} tokens of the model's own were asked for behind each opening; give 1 to {room}, which is what "
            f"its context holds"
        )
    orders = {each: np.random.default_rng([seed, each]).permutation(tokens) for each in documents}
    lengths = {each: 1 + int(order[:picks].max()) for each, order in orders.items()}
    queue = sorted(documents, key=lambda each: lengths[each])
    groups = [queue[start : start + TOGETHER] for start in range(0, len(queue), TOGETHER)]
    return [
        _written(
            model,
            corpus,
            {each: orders[each] for each in group},
            most=lengths[group[-1]],
            picks=picks,
        )
        for group in groups
    ]


def _written(
    model: Model, corpus: Corpus, orders: Mapping[int, NDArray[np.int64]], *, most: int, picks: int
) -> Batch:
    texts = model.tokens.encode([corpus.documents[document] for document in orders])
    openings = [model.tokens.wrap(ids[:OPENING]) for ids in texts]
    said = generate(
        model,
        None,
        model.tokens.left_padded(openings),
        do_sample=False,
        max_new_tokens=most,
        pad_token_id=model.tokens.pad,
    ).ids
    rows = [opening + new for opening, new in zip(openings, said, strict=True)]
    ids = _right_padded(rows, model.tokens.pad)
    attention = _right_padded([[1] * len(row) for row in rows], 0)
    row, position = [], []
    for place, (new, order) in enumerate(zip(said, orders.values(), strict=True)):
        # The first of an order that fall into a text which ended early are as random as if drawn from it alone.
        drawn = np.sort(order[order < len(new)][:picks])
        row += [place] * len(drawn)
        # The state at a position tells the next token, so the first is the opening's last.
        position += (len(openings[place]) - 1 + drawn).tolist()
    rows_at, positions = torch.tensor(row), torch.tensor(position)
    document = torch.tensor(list(orders))[rows_at]
    return Batch(ids, attention, rows_at, positions, document, ids[rows_at, positions])


def _right_padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

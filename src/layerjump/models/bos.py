"""Measure whether a causal model needs BOS before a text, where its tokenizer has one and does not add it.

A model that was always trained with BOS reads it as its attention sink: without BOS, Gemma loses 3 nats a token and
more. A model that was trained on packed documents hardly notices: about 0.1 nats a token, in either direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from layerjump.data.tokenization import Tokenization

if TYPE_CHECKING:
    from layerjump.models.model import Model

PASSAGE = (
    "The old lighthouse stands at the end of a narrow road. In summer, visitors climb its stairs to look at the sea, "
    "and in winter nobody comes for weeks. The keeper does not mind. He repairs the lamp, writes letters to his "
    "sister, and counts the ships that pass in the evening. Once a month a boat brings bread, coffee and the "
    "newspapers, which he reads slowly, one page a day."
)
MARGIN = 1.0
"""Nats a token that BOS must save: ten times what it changes in models that do not need it, a third of the least
that is known of a model that does."""
MIN_TOKENS = 32
"""Fewer tokens are no measurement: one token can differ by five nats."""
MAX_TOKENS = 64


@dataclass(frozen=True)
class BosLosses:
    """Mean losses on the passage in nats a token, of the same tokens in both."""

    without: float
    with_bos: float
    chance: float
    """The loss of a uniform prediction."""

    @property
    def needs_bos(self) -> bool:
        """Whether BOS saves more than the margin, and the model then predicts the passage better than chance.

        A model with random weights predicts at chance level, whatever BOS changes in it; NaN never counts as better.
        """
        return self.without - self.with_bos > MARGIN and self.with_bos < self.chance


def needs_bos(model: Model, tokenization: Tokenization) -> bool:
    """Whether the model needs a BOS that its tokenizer has but does not add."""
    losses = measure_bos(model, tokenization)
    return losses is not None and losses.needs_bos


def measure_bos(model: Model, tokenization: Tokenization) -> BosLosses | None:
    """Measure the loss without BOS and with it, in two short forward passes.

    None where there is nothing to decide or no way to measure it: masked models and encoder–decoders, models that
    predict no tokens, tokenizers without BOS or that add it, and tokenizers that know too little of the passage.
    """
    tokenizer = tokenization.tokenizer
    bos = tokenizer.bos_token_id
    if model.task != "causal" or model.no_predictions or bos is None or bos in tokenization.prefix:
        return None
    length = min(MAX_TOKENS, tokenization.max_length - len(tokenization.prefix) - 1)
    ids = tokenization.encode([PASSAGE])[0][:length]
    # The first token is predicted only where something precedes it.
    scored = [index for index, token in enumerate(ids) if index and token != tokenizer.unk_token_id]
    n_embeddings = len(cast(nn.Embedding, model.hf.get_input_embeddings()).weight)
    if len(scored) < MIN_TOKENS or max(bos, *ids) >= n_embeddings:
        return None
    prefix = list(tokenization.prefix)
    return BosLosses(
        without=_mean_loss(model, prefix, ids, scored),
        with_bos=_mean_loss(model, [bos, *prefix], ids, scored),
        chance=math.log(n_embeddings),
    )


@torch.no_grad()
def _mean_loss(model: Model, prefix: Sequence[int], ids: Sequence[int], scored: Sequence[int]) -> float:
    """The mean loss of the scored tokens of a text after a prefix."""
    row = torch.tensor([[*prefix, *ids]], device=model.device)
    with _evaluation_mode(model.hf):
        logits = model.hf(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0]
    positions = torch.tensor(scored) + len(prefix)
    return float(cross_entropy(logits[positions - 1].float(), row[0, positions].to(logits.device)))


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch off dropout: a model in training would draw random numbers."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True

"""Self-generated text to fit and to choose drafters on: a draft head in closed form, and what usually follows a token.

Drafts are judged by what the model writes, so drafters are fitted on continuations of the openings of documents, with
the final states (the inputs of the unembedding) that predicted every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.data.corpus import Corpus
from layerjump.generation.calibration.dataset import generate_text
from layerjump.generation.drafters import HeadJump
from layerjump.generation.exit_rules import Shortlist
from layerjump.jumps.maps import Affine, to_module
from layerjump.models.model import Model, capture_states
from layerjump.models.sites import FINAL, Site
from layerjump.models.structure import can_restrict

HEAD_STRENGTH = 1e-2
"""Regularisation of the draft head; each of its inputs counts in units of its own mean variance."""
HEAD_DEPTH = 4
"""Drafts of a step for which a draft head has a jump of its own."""
HEAD_TOKENS = 4096
"""Tokens that a draft head may propose; a larger vocabulary costs more than its rare tokens gain."""


@dataclass(frozen=True)
class Continuation:
    """An opening and what the model wrote after it."""

    tokens: list[int]
    n_opening: int
    states: Mapping[Site, Tensor]
    """(new tokens, d) by site: the states at the position that predicted each new token."""


@torch.no_grad()
def continue_openings(
    model: Model, corpus: Corpus, documents: Sequence[int], sites: Sequence[Site], *, tokens: int, seed: int = 0
) -> list[Continuation]:
    """Continue the openings of documents greedily, with the states of these sites."""
    batches = generate_text(model, corpus, documents, tokens=tokens, picks=tokens, seed=seed)
    continuations = []
    for captured in capture_states(model, batches, sites):
        batch = captured.batch
        lengths = batch.attention_mask.sum(1).tolist()
        for row in range(len(batch.input_ids)):
            of_row = batch.row == row
            if bool(of_row.any()):
                first = int(batch.position[of_row][0])  # the opening's last position
                ids = batch.input_ids[row, : lengths[row]].tolist()
                states = {site: captured[site].cpu()[of_row] for site in sites}
                continuations.append(Continuation(ids, first + 1, states))
    return continuations


def head_sites(model: Model) -> tuple[Site, ...]:
    """What a draft head reads of the last position: the final state, and two levels that know more of what follows."""
    levels = sorted({max(1, model.n_blocks // 2), max(1, 5 * model.n_blocks // 6)})
    return (FINAL, *map(Site, levels))


@torch.no_grad()
def fit_head(
    model: Model, text: Sequence[Continuation], sites: Sequence[Site], strength: float = HEAD_STRENGTH
) -> tuple[HeadJump, ...]:
    """Ridge maps [states of the sites, embeddings of the tokens since] → final state at the newest, one a depth.

    Inputs are scaled to the same mean variance. A penalty in units of all of them together would all but remove the
    embeddings, whose variance is small.
    """
    states = {site: torch.cat([part.states[site] for part in text]).double() for site in sites}
    tokens = torch.tensor([token for part in text for token in part.tokens[part.n_opening :]])
    embedded = model.structure.embed(tokens.to(model.device)).cpu().double()
    lengths = torch.tensor([len(part.tokens) - part.n_opening for part in text])
    left = torch.cat([torch.arange(n, 0, -1) for n in lengths.tolist()])  # new tokens from each one on
    jumps = []
    for depth in range(1, HEAD_DEPTH + 1):
        rows = (left > depth).nonzero()[:, 0]
        if len(rows) < 2:
            break
        inputs = [states[site][rows] for site in sites] + [embedded[rows + lag] for lag in range(depth)]
        scales = torch.cat([part.new_full((part.shape[1],), float(part.var(0).mean()) ** -0.5) for part in inputs])
        x, y = torch.cat(inputs, -1) * scales, states[FINAL][rows + depth]
        mean_x, mean_y = x.mean(0), y.mean(0)
        x -= mean_x
        gram = x.mT @ x
        gram.diagonal().add_(strength * float(gram.diagonal().mean()))
        weight = torch.linalg.solve(gram, x.mT @ (y - mean_y)).mT  # (d, inputs)
        jump = to_module(Affine.of(weight * scales, bias=mean_y - weight @ mean_x))
        jumps.append(HeadJump(jump, tuple(sites), depth))
    return tuple(jumps)


def count_followers(model: Model, text: Sequence[Continuation]) -> Tensor:
    """(V,) the token that the model most often wrote after each token; −1 where it never wrote one."""
    vocab_size = model.structure.vocab_size
    pairs = torch.tensor(
        [
            pair
            for part in text
            for pair in zip(part.tokens[part.n_opening - 1 :], part.tokens[part.n_opening :], strict=False)
        ]
    )
    followers = torch.full((vocab_size,), -1)
    unique, counts = torch.unique(pairs, dim=0, return_counts=True)
    order = counts.argsort(stable=True)  # later writes win: the most frequent last
    for before, after in unique[order].tolist():
        followers[before] = after
    return followers


def head_shortlist(
    model: Model, corpus: Corpus, documents: Sequence[int], text: Sequence[Continuation]
) -> Shortlist | None:
    """The most frequent tokens of documents and of what the model wrote; None where all can be read as cheaply."""
    vocab_size = model.structure.vocab_size
    if not can_restrict(model.structure) or vocab_size <= 2 * HEAD_TOKENS:
        return None
    counts = torch.zeros(vocab_size)
    for ids in model.tokenization.encode([corpus.documents[index] for index in documents]):
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
    counts /= counts.sum().clamp_min(1)
    written = torch.bincount(
        torch.tensor([token for part in text for token in part.tokens[part.n_opening :]]), minlength=vocab_size
    )
    counts += written / written.sum()
    return Shortlist(counts.argsort(descending=True, stable=True)[:HEAD_TOKENS].sort().values)

"""Drafters: propose the next token before the full model has run, each with evidence of how likely it is right.

Lookup      what followed the same tokens earlier in the prompt or text, the longest match first
Recycled    what the model itself predicted the last time that it read the same token, rejected drafts included
DraftHead   affine maps [states of the last position, embeddings of the tokens since] → final state, one a depth
Splice      the first blocks, a jump from there and from the last position to a late level, and the last blocks

A drafter has one method, `propose`. It sees every row's tokens, drafts so far included, so a chain of drafts is a chain
of calls and drafters can take turns in it. Drafters do not estimate probabilities: they name what their proposal rests
on (`evidence`: the length of a match, a bucket of confidence), and `drafting.Acceptance` counts how often proposals
with the same evidence were right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from layerjump.generation.block_runner import BlockRunner
from layerjump.generation.exit_rules import Shortlist
from layerjump.generation.packed_llama import pack_unembedding
from layerjump.jumps.maps import apply_map
from layerjump.models.model import Model
from layerjump.models.sites import EMBEDDING, FINAL, JointSource, Site, Term

MATCH_LENGTHS = (1, 2, 3, 4, 6, 10, 16)
"""Buckets of the length of a match: evidence i stands for at least MATCH_LENGTHS[i] tokens."""
_INDEXED = (4, 3, 2, 1)  # n-grams in the index of a lookup, the longest first
_CONFIDENCES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # borders of the draft head's buckets
_MAX_DEPTH = 3  # deeper drafts of a draft head share their evidence


class Proposal(NamedTuple):
    """A drafted token."""

    token: int
    evidence: int
    """What the proposal rests on; proposals with the same evidence are equally likely to be right."""
    probs: Tensor | None = None
    """What the token was sampled from, (V,); None: the drafter would always propose this token."""
    level: int = 0
    """The level that the newest token had reached when it was drafted from."""


@dataclass
class DraftContext:
    """What drafters see: one entry per row of the batch."""

    tokens: list[list[int]]
    """The tokens so far, without padding; final tokens, then drafts."""
    n_final: list[int]
    """How many of them are final."""
    states_before: Mapping[Site, Tensor] = field(default_factory=dict)
    """Site → (rows, d), its states at the position that predicted each row's last final token; `final` is the input of
    the unembedding. Empty before the first step."""
    ids: Tensor | None = None
    """(rows, T) all tokens so far with padding, for drafters that run blocks."""


class Drafter(Protocol):
    """Proposes next tokens. Objects are made anew for every generation."""

    name: str
    sites: frozenset[Site]
    """The sites whose states it reads from the context."""

    def propose(self, context: DraftContext, rows: Sequence[int]) -> dict[int, Proposal]:
        """A next token for some or all of these rows, by row."""


class Lookup:
    """Proposes what followed the longest earlier match of the newest tokens, the latest of several."""

    name = "lookup"
    sites: frozenset[Site] = frozenset()

    def __init__(self) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {}
        """Row → n-gram → the index of the token after its latest occurrence."""
        self._n_indexed: dict[int, int] = {}

    def propose(self, context: DraftContext, rows: Sequence[int]) -> dict[int, Proposal]:
        proposals = {}
        for row in rows:
            tokens = context.tokens[row]
            ends = self._index(row, tokens, context.n_final[row])
            end = next(
                (e for n in _INDEXED if n <= len(tokens) and (e := ends.get(tuple(tokens[-n:]))) is not None), None
            )
            if end is not None:
                proposals[row] = Proposal(tokens[end], _match_bucket(tokens, end))
        return proposals

    def _index(self, row: int, tokens: list[int], n_final: int) -> dict[tuple[int, ...], int]:
        ends = self._ends.setdefault(row, {})
        for end in range(self._n_indexed.get(row, 1), n_final):
            for n in _INDEXED:
                if n <= end:
                    ends[tuple(tokens[end - n : end])] = end
        self._n_indexed[row] = max(n_final, 1)
        return ends


def _match_bucket(tokens: list[int], end: int) -> int:
    """The bucket of the number of tokens before `end` that equal the newest tokens."""
    length, most = 1, min(end, MATCH_LENGTHS[-1])
    while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return sum(length >= border for border in MATCH_LENGTHS) - 1


class Recycled:
    """Proposes what the model predicted when it last read the newest two tokens, or the newest one.

    A step computes predictions after every drafted token, rejected ones too; those would otherwise be lost.
    """

    name = "recycled"
    sites: frozenset[Site] = frozenset()

    def __init__(self, candidates: Tensor | None = None) -> None:
        """`candidates`, (V,): the token that usually follows each token, −1 where none is known."""
        self._usual: list[int] = [] if candidates is None else candidates.tolist()
        self._after: dict[int | tuple[int, int], int] = {}

    def observe(self, tokens: Sequence[int], predictions: Sequence[int]) -> None:
        """Remember the model's top tokens after the last of these tokens, one prediction each."""
        first = len(tokens) - len(predictions)
        for at, prediction in enumerate(predictions, start=first):
            self._after[tokens[at]] = prediction
            if at:
                self._after[tokens[at - 1], tokens[at]] = prediction

    def propose(self, context: DraftContext, rows: Sequence[int]) -> dict[int, Proposal]:
        proposals = {}
        for row in rows:
            tokens = context.tokens[row]
            newest = tokens[-1]
            pair = (tokens[-2], newest) if len(tokens) > 1 else None
            if pair in self._after:
                proposals[row] = Proposal(self._after[pair], 2)
            elif newest in self._after:
                proposals[row] = Proposal(self._after[newest], 1)
            elif self._usual and self._usual[newest] >= 0:
                proposals[row] = Proposal(self._usual[newest], 0)
        return proposals


class HeadJump(NamedTuple):
    """A jump of a draft head, such as final@-2+20@-2+embedding@-1+embedding → final at depth 2.

    It reads sites at the last position whose states are known, and the embeddings of the tokens since; it predicts the
    final state at the newest of them.
    """

    jump: nn.Module
    sites: tuple[Site, ...]
    depth: int
    """The number of embeddings: the first draft of a step is read with depth 1."""

    @property
    def source(self) -> JointSource:
        """The source of the jump."""
        states = (Term(site, -self.depth) for site in self.sites)
        embeddings = (Term(EMBEDDING, -lag) for lag in reversed(range(self.depth)))
        return JointSource(joined=(*states, *embeddings))

    @classmethod
    def of(cls, jump: nn.Module, source: Site) -> HeadJump | None:
        """The jump from a source as that of a draft head; None if it reads anything else."""
        sites = tuple(term.site for term in source.terms if term.site != EMBEDDING)
        head = cls(jump, sites, len(source.terms) - len(sites))
        readable = all(site == FINAL or (site.part == "level" and site.index > 0) for site in sites)
        return head if sites and head.depth and readable and head.source == source else None


class DraftHead:
    """Proposes the top token of a predicted final state, with the unembedding onto a shortlist if there is one.

    A jump reads states of the last position that the model has run on, and the embeddings of the tokens since, drafts
    included: one jump for the first draft of a step, one for the second, … Where the last of them has been used, the
    first is chained on its own predictions, if the final state is all that it reads.
    """

    name = "head"

    def __init__(self, model: Model, jumps: Sequence[HeadJump], shortlist: Shortlist | None) -> None:
        """`jumps` by depth, from 1 on."""
        self._jumps = jumps
        self._embed = model.structure.embed
        self._reader = TopTokenReader(model, shortlist)
        self._chains = jumps[0].sites == (FINAL,)
        self.sites = frozenset(site for jump in jumps for site in jump.sites)

    def propose(self, context: DraftContext, rows: Sequence[int]) -> dict[int, Proposal]:
        if not context.states_before:
            return {}
        predicted = {row: self._predict(context, row) for row in rows}
        states = {row: state for row, state in predicted.items() if state is not None}
        return self._reader.read(torch.stack(list(states.values())), context, list(states)) if states else {}

    def _predict(self, context: DraftContext, row: int) -> Tensor | None:
        """The final state at a row's newest token, (d,); None beyond the depth of the jumps."""
        newest = context.tokens[row][context.n_final[row] - 1 :]
        if len(newest) > len(self._jumps) and not self._chains:
            return None
        head = self._jumps[min(len(newest), len(self._jumps)) - 1]
        before = torch.cat([context.states_before[site][row] for site in head.sites])
        embedded = self._embed(torch.tensor(newest, device=before.device)).to(before)  # (tokens, d)
        state = apply_map(head.jump, torch.cat([before, embedded[: head.depth].reshape(-1)]))
        for embedding in embedded[head.depth :]:
            state = apply_map(self._jumps[0].jump, torch.cat([state, embedding]))
        return state


class TopTokenReader:
    """The top tokens of predicted final states, with their probability and depth as evidence."""

    def __init__(self, model: Model, shortlist: Shortlist | None) -> None:
        self._structure = (pack_unembedding(model) if shortlist is None else shortlist.restrict(model)).structure
        self._tokens = None if shortlist is None else shortlist.tokens.to(model.device)

    def read(self, final: Tensor, context: DraftContext, rows: Sequence[int]) -> dict[int, Proposal]:
        """A proposal for each of these rows from the input of the unembedding, (rows, d)."""
        logits = self._structure.decode(final)  # (rows, tokens)
        top, index = logits.max(-1)
        probs = (top - logits.logsumexp(-1)).exp()
        tokens = index if self._tokens is None else self._tokens.to(index.device)[index]
        read = torch.stack([tokens.double(), probs.double()]).tolist()  # the host waits once
        return {
            row: Proposal(int(token), confidence_evidence(prob, len(context.tokens[row]) - context.n_final[row]))
            for row, token, prob in zip(rows, *read, strict=True)
        }


def confidence_evidence(prob: float, depth: int) -> int:
    """The evidence of a proposal with this probability, the first of a step at depth 0."""
    bucket = sum(prob >= border for border in _CONFIDENCES)
    return min(depth, _MAX_DEPTH - 1) * (len(_CONFIDENCES) + 1) + bucket


class Splice:
    """Proposes what the last blocks predict from a state that a jump puts in place of the blocks between.

    The newest token runs through the first blocks, which verification needs anyway. The jump reads it there, and the
    late level at the position before it. The last blocks attend to the exact keys and values of all final tokens; those
    of predicted states are dropped before verification. Only a single sequence is drafted for: rows of a batch differ
    in how far they are.
    """

    name = "splice"

    def __init__(self, runner: BlockRunner, model: Model, jump: nn.Module, source: Site, level: int) -> None:
        """`jump` leads from `source`, an early level and `level` one position before, to `level`."""
        self._runner, self._jump, self._terms, self._level = runner, jump, source.terms, level
        self._first = source.index
        self._structure = model.structure
        self._reader = TopTokenReader(model, None)
        self.sites = frozenset({Site(level)})
        self._before = torch.empty(0)
        """(d,) the predicted state of the late level at the last token that was spliced."""

    def propose(self, context: DraftContext, rows: Sequence[int]) -> dict[int, Proposal]:
        runner, ids = self._runner, context.ids
        if len(context.tokens) > 1 or not context.states_before or ids is None:
            return {}
        if not runner.is_spliced:
            self._before = context.states_before[Site(self._level)][0]
        states = runner.extend(ids)
        for block in range(1, self._first + 1):
            states = runner.run(block)
        predicted = []
        for state in states[0]:
            joined = torch.cat([self._before if term.offset else state for term in self._terms])
            self._before = apply_map(self._jump, joined[None])[0]
            predicted.append(self._before)
        last = runner.splice(self._level, torch.stack(predicted)[None])
        return self._reader.read(self._structure.to_final(last[:, -1]), context, rows)

"""Cut documents into sequences and group sequences of similar length into batches.

Documents cut into the sequences that a model reads, kept end to end in a few arrays.

Token batches: sequences of like length side by side, and the positions in them that count.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadText, TextTooShort

Ints = NDArray[np.int64]

_DOCUMENTS_AT_ONCE = 256


@dataclass
class Sequences:
    """Sequences end to end: a million of them are eight arrays, not a million lists of integers."""

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    start: "array[int]" = field(default_factory=lambda: array("q"))
    length: "array[int]" = field(default_factory=lambda: array("q"))
    source: "array[int]" = field(default_factory=lambda: array("q"))
    """How many tokens the encoder reads; they follow the sequence's own. 0 where there is one stack."""
    uncut: "array[int]" = field(default_factory=lambda: array("q"))
    document: "array[int]" = field(default_factory=lambda: array("q"))
    number: "array[int]" = field(default_factory=lambda: array("q"))
    picks: "array[int]" = field(default_factory=lambda: array("q"))

    def add(
        self,
        ids: Sequence[int],
        source: Sequence[int],
        *,
        uncut: int,
        document: int,
        number: int,
        picks: int,
    ) -> None:
        self.start.append(len(self.ids))
        self.uncut.append(uncut)
        self.ids.extend(ids)
        self.ids.extend(source)
        self.length.append(len(ids))
        self.source.append(len(source))
        self.document.append(document)
        self.number.append(number)
        self.picks.append(picks)

    def split(self) -> Ints:
        """Tokens of each sequence, its source included."""
        return np.asarray(self.length) + np.asarray(self.source)


def cut(
    corpus: Corpus,
    tokens: Tokenization,
    positions: Positions,
    documents: Sequence[int],
    tokens_wanted: int | None,
    room: int,
    seed: int,
) -> Sequences:
    """Documents to sequences, as many as it takes. Those with nothing to draw from are left out.

    What follows the last pick cannot change a causal model's states there, and is not run. (A decoder's half is left
    whole all the same: rows that are as long as their sources pad less.)
    """
    sequences = Sequences()
    around = tokens.around
    ends_early = tokens.mask is None and not tokens.both_ways and positions.kind != "all"
    for document, ids in _encoded(corpus, tokens, documents):
        end = min(len(ids), room) if positions.first_sequence_only else len(ids)
        for number, start in enumerate(range(0, end, room)):
            source, row = _rows(tokens, ids[start : start + room])
            if not (picks := positions.count(len(row), *around)):
                continue
            end = len(row)
            if ends_early:
                drawn = positions.draw(end, *around, seed=seed, document=document, sequence=number)
                end = int(drawn[-1]) + 1
            which = {"document": document, "number": number, "picks": picks}
            sequences.add(row[:end], source, uncut=len(row), **which)
        if tokens_wanted is not None and len(sequences.ids) >= tokens_wanted:
            return sequences
    if tokens_wanted is not None:
        raise TextTooShort(
            f"asked for {tokens_wanted:,} tokens of {corpus.name}, but its {len(documents):,} "
            f"documents have {len(sequences.ids):,}; give more text or ask for at most "
            f"{len(sequences.ids)}"
        )
    return sequences


def _rows(tokens: Tokenization, ids: list[int]) -> tuple[list[int], list[int]]:
    """What the encoder reads (nothing where there is one stack), and the row whose positions are drawn."""
    return ([], tokens.wrap(ids)) if tokens.start is None else tokens.halves(ids)


def _encoded(
    corpus: Corpus, tokens: Tokenization, documents: Sequence[int]
) -> Iterator[tuple[int, list[int]]]:
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        chunk = documents[start : start + _DOCUMENTS_AT_ONCE]
        encoded = tokens.encode([corpus.documents[document] for document in chunk])
        yield from zip(map(int, chunk), encoded, strict=True)


_MOST_PADDING = 0.15  # of a batch's cells: a short text has few rows of like length


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right, and the picks: positions that count, by row then position."""

    input_ids: Tensor
    """(rows, longest) int64. A masked model's picks are [MASK] here."""
    attention_mask: Tensor
    """(rows, longest) int64: 1 for tokens, 0 for padding."""
    row: Tensor
    """(picks,) int64, as are the next three."""
    position: Tensor
    document: Tensor
    """The document's index in the corpus."""
    token: Tensor
    """The token that stood at the pick before any masking."""
    source_ids: Tensor | None = None
    """(rows, longest source) int64: what an encoder–decoder's encoder reads; the rest is the decoder's."""
    source_mask: Tensor | None = None
    sequence: Tensor | None = None
    """(picks,) int64: which sequence of its document the pick is in; None: each document is one."""

    @property
    def n_tokens(self) -> int:
        source = 0 if self.source_mask is None else int(self.source_mask.sum())
        return int(self.attention_mask.sum()) + source

    @property
    def n_picks(self) -> int:
        return len(self.row)


def batch_from_ids(ids: Sequence[int], source: Sequence[int] | None = None) -> Batch:
    """A batch of one sequence, special tokens and all, with every position picked.

    For an encoder–decoder it is what the decoder reads, and `source` what the encoder does.
    """
    row = torch.tensor(ids)
    position = torch.arange(len(ids))
    where = torch.zeros_like(position)
    made = Batch(row[None], torch.ones_like(row[None]), where, position, where, row)
    if source is None:
        return made
    source_ids = torch.tensor(source)[None]
    return replace(made, source_ids=source_ids, source_mask=torch.ones_like(source_ids))


@dataclass(frozen=True, eq=False)
class Batches:
    """A sequence of batches whose tensors are made when asked for. Made by `batches`."""

    tokens: Tokenization
    positions: Positions
    seed: int
    sequences: Sequences = field(repr=False)
    groups: tuple[Ints, ...] = field(repr=False)
    """The sequences of each batch, by index."""
    look: Positions | None = None
    """Where the picks are, if not at the positions drawn (which a masked model sees as [MASK])."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Batch:
        chosen = self.groups[index].tolist()
        ids, attention = self._grid(chosen)
        sources = () if self.tokens.start is None else self._grid(chosen, source=True)
        looking = self.look is not None
        row, position = self._picks(chosen, self.look or self.positions, looking=looking)
        document = np.array([self.sequences.document[sequence] for sequence in chosen])[row]
        number = np.array([self.sequences.number[sequence] for sequence in chosen])[row]
        token = ids[row, position]
        if self.tokens.mask is not None and self.positions.masks():
            ids[self._picks(chosen, self.positions)] = self.tokens.mask
        arrays = (ids, attention, row, position, document, token, *sources)
        return replace(Batch(*map(torch.from_numpy, arrays)), sequence=torch.from_numpy(number))

    def look_at(self, positions: Positions) -> "Batches":
        """The same text with the same tokens masked, but with picks at other positions.

        A map that is applied everywhere must be fitted everywhere, not at [MASK] alone.
        """
        around = self.tokens.around
        # Of the length that is run: a causal model's sequence ends with its last pick.
        picks = array("q", [positions.count(length, *around) for length in self.sequences.length])
        sequences = replace(self.sequences, picks=picks, uncut=self.sequences.length)
        return replace(self, sequences=sequences, look=positions)

    def shard(self, rank: int, world: int) -> "Batches":
        """This process's share of the batches: about as many tokens as any other's, none twice."""
        if not 0 <= rank < world:
            raise BadText(f"shard {rank} of {world} was asked for; give a rank from 0 to world - 1")
        dealt = _deal([self._tokens_in(group) for group in self.groups], world)
        mine = tuple(self.groups[index] for index in sorted(dealt[rank]))
        return replace(self, groups=mine)

    @property
    def n_sequences(self) -> int:
        return sum(map(len, self.groups))

    @property
    def n_tokens(self) -> int:
        """Tokens, special ones and the encoder's included, padding not."""
        return sum(map(self._tokens_in, self.groups))

    @property
    def n_source_tokens(self) -> int:
        """How many of them an encoder–decoder's encoder reads."""
        source = np.asarray(self.sequences.source)
        return int(sum(source[group].sum() for group in self.groups))

    @property
    def n_picks(self) -> int:
        picks = np.asarray(self.sequences.picks)
        return int(sum(picks[group].sum() for group in self.groups))

    @property
    def most_picks(self) -> int:
        """Picks in the batch that has most of them."""
        picks = np.asarray(self.sequences.picks)
        return max((int(picks[group].sum()) for group in self.groups), default=0)

    @property
    def padding(self) -> float:
        """The share of all cells that hold padding."""
        # The longest sequence has the longest source too: they are halves of one text.
        size = self.sequences.split()
        cells = sum(len(group) * int(size[group].max()) for group in self.groups)
        return 1 - self.n_tokens / cells if cells else 0.0

    def _tokens_in(self, group: Ints) -> int:
        length, source = np.asarray(self.sequences.length), np.asarray(self.sequences.source)
        return int(length[group].sum() + source[group].sum())

    def _grid(self, chosen: list[int], *, source: bool = False) -> tuple[Ints, Ints]:
        split = self.sequences.source if source else self.sequences.length
        lengths = [split[sequence] for sequence in chosen]
        ids = np.full((len(chosen), max(lengths)), self.tokens.pad, dtype=np.int64)
        attention = np.zeros_like(ids)
        for row, (sequence, length) in enumerate(zip(chosen, lengths, strict=True)):
            start = self.sequences.start[sequence]
            start += self.sequences.length[sequence] if source else 0
            ids[row, :length] = self.sequences.ids[start : start + length]
            attention[row, :length] = 1
        return ids, attention

    def _picks(
        self, chosen: list[int], positions: Positions, *, looking: bool = False
    ) -> tuple[Ints, Ints]:
        """Rows and positions of what is drawn from each sequence of a batch."""
        draws = [self._draw(sequence, positions, looking) for sequence in chosen]
        row = np.repeat(np.arange(len(chosen)), [len(draw) for draw in draws])
        return row, np.concatenate(draws)

    def _draw(self, sequence: int, positions: Positions, looking: bool) -> Ints:
        return positions.draw(
            self.sequences.uncut[sequence],
            *self.tokens.around,
            # With the seed of the masks, a share looked at would hold more masks than the text does.
            seed=self.seed + looking,
            document=self.sequences.document[sequence],
            sequence=self.sequences.number[sequence],
        )


def make_batches(
    corpus: Corpus,
    tokens: Tokenization,
    positions: Positions,
    *,
    documents: Sequence[int] | None = None,
    seed: int = 0,
    tokens_wanted: int | None = None,
    max_length: int = 512,
    budget: int = 1024,
) -> Batches:
    """Cut documents into sequences and put those of like length together.

    `documents` are taken in the order given, until there are `tokens_wanted` tokens. A batch has at
    most `budget` cells, padding included, unless one sequence alone has more. Batches come in
    random order, so that the first few stand for all.

    For an encoder–decoder a sequence is two rows of at most `max_length`: the encoder reads the first half of its text,
    the decoder the second half behind its start token. Tokens and cells of both count; picks are the decoder's.
    """
    documents = range(len(corpus.documents)) if documents is None else documents
    _check(corpus, documents, seed=seed, tokens_wanted=tokens_wanted, budget=budget)
    room = tokens.room_in(max_length)
    if room < 1:
        raise BadText(
            f"max_length given is {max_length}, but the tokenizer adds {tokens.n_added} "
            f"tokens to a text; give at least {tokens.n_added + 1}"
        )
    sequences = cut(corpus, tokens, positions, documents, tokens_wanted, room, seed)
    if not sequences.length:
        raise TextTooShort(
            f"no position counts in any of the {len(documents):,} documents of {corpus.name}: "
            f"asked for {positions}, from position {positions.skip_first} on; give longer text"
        )
    groups = _group(sequences.split(), budget)
    order = np.argsort(np.random.PCG64(seed).random_raw(len(groups)), kind="stable")
    shuffled = tuple(groups[index] for index in order)
    return Batches(tokens, positions, seed, sequences, shuffled)


def _check(
    corpus: Corpus,
    documents: Sequence[int],
    *,
    seed: int,
    tokens_wanted: int | None,
    budget: int,
) -> None:
    least = {"seed": (seed, 0), "tokens_wanted": (tokens_wanted, 1), "budget": (budget, 1)}
    for name, (value, minimum) in least.items():
        if value is not None and value < minimum:
            raise BadText(f"{name} given is {value}; give {minimum} or more")
    for document in documents:
        if not 0 <= document < len(corpus.documents):
            raise BadText(
                f"document {document} of {corpus.name} was asked for, but it has "
                f"{len(corpus.documents):,}, counted from 0; split that many"
            )


def _group(length: Ints, budget: int) -> list[Ints]:
    """Sequences by length, cut wherever one more would make rows × longest exceed the budget, or too much padding."""
    order = np.argsort(length, kind="stable")
    cuts, tokens = [0], 0
    for place, sequence in enumerate(order):
        # Lengths grow, so the newest row is the longest.
        cells = (place - cuts[-1] + 1) * length[sequence]
        tokens += length[sequence]
        if place > cuts[-1] and (cells > budget or cells - tokens > _MOST_PADDING * cells):
            cuts.append(place)
            tokens = length[sequence]
    return np.split(order, cuts[1:])


def _deal(split: Sequence[int], world: int) -> list[list[int]]:
    """Indices for each rank. Largest first, one to each rank a round, the least laden choosing."""
    order = sorted(range(len(split)), key=lambda index: -split[index])
    hands: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for start in range(0, len(order), world):
        ranks = sorted(range(world), key=lambda rank: load[rank])
        for rank, index in zip(ranks, order[start : start + world], strict=False):
            hands[rank].append(index)
            load[rank] += split[index]
    return hands

"""Cut documents into sequences, and group sequences of similar length into batches."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadText, TextTooShort, argument

Ints = NDArray[np.int64]

_DOCUMENTS_AT_ONCE = 256
_MAX_PADDING = 0.15  # of a batch's cells: a short text has few sequences of similar length


@dataclass
class TokenSequences:
    """Token sequences, stored end to end: a million sequences are eight arrays, not a million lists."""

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    start: "array[int]" = field(default_factory=lambda: array("q"))
    length: "array[int]" = field(default_factory=lambda: array("q"))
    source: "array[int]" = field(default_factory=lambda: array("q"))
    """The number of tokens for the encoder of an encoder–decoder, stored after those for the decoder; otherwise 0."""
    uncut: "array[int]" = field(default_factory=lambda: array("q"))
    """The length before the tokens after the last pick were cut off."""
    document: "array[int]" = field(default_factory=lambda: array("q"))
    number: "array[int]" = field(default_factory=lambda: array("q"))
    """The sequence's number in its document."""
    picks: "array[int]" = field(default_factory=lambda: array("q"))
    """The number of picked positions."""

    def add(
        self, ids: Sequence[int], source: Sequence[int], *, uncut: int, document: int, number: int, picks: int
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

    def sizes(self) -> Ints:
        """The number of tokens of each sequence, including its source."""
        return np.asarray(self.length) + np.asarray(self.source)


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right, and the picks: the positions of interest, by row, then position."""

    input_ids: Tensor
    """(rows, longest) int64. The picks of a masked model are [MASK] here."""
    attention_mask: Tensor
    """(rows, longest) int64: 1 for tokens, 0 for padding."""
    row: Tensor
    """(picks,) int64, like the next three."""
    position: Tensor
    document: Tensor
    """The document's index in the corpus."""
    token: Tensor
    """The token at the pick before masking."""
    source_ids: Tensor | None = None
    """(rows, longest source) int64: the input of an encoder–decoder's encoder; the other fields are the decoder's."""
    source_mask: Tensor | None = None
    sequence: Tensor | None = None
    """(picks,) int64: the number of the pick's sequence in its document; None: each document is one sequence."""
    extra_inputs: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """Further arguments of the model's `forward`, such as the pixels of images; they go before those above."""

    @property
    def n_tokens(self) -> int:
        source = 0 if self.source_mask is None else int(self.source_mask.sum())
        return int(self.attention_mask.sum()) + source

    @property
    def n_picks(self) -> int:
        return len(self.row)


def batch_from_ids(ids: Sequence[int], source: Sequence[int] | None = None) -> Batch:
    """A batch of one sequence, which includes its special tokens, with every position picked.

    For an encoder–decoder, `ids` are the decoder's input and `source` the encoder's.
    """
    tokens = torch.tensor(ids)
    position = torch.arange(len(ids))
    zeros = torch.zeros_like(position)
    batch = Batch(tokens[None], torch.ones_like(tokens[None]), zeros, position, zeros, tokens)
    if source is None:
        return batch
    source_ids = torch.tensor(source)[None]
    return replace(batch, source_ids=source_ids, source_mask=torch.ones_like(source_ids))


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches, made by `make_batches`, whose tensors are built when they are indexed or iterated over."""

    tokenization: Tokenization
    positions: Positions
    seed: int
    sequences: TokenSequences = field(repr=False)
    groups: tuple[Ints, ...] = field(repr=False)
    """The sequences of each batch, by index."""
    picks_at: Positions | None = None
    """The positions of the picks if they are not those that were drawn (and that a masked model reads as [MASK])."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Batch:
        selected = self.groups[index].tolist()
        ids, attention = self._grid(selected)
        sources = () if self.tokenization.start is None else self._grid(selected, source=True)
        is_redrawn = self.picks_at is not None
        row, position = self._picks(selected, self.picks_at or self.positions, is_redrawn=is_redrawn)
        document = np.array([self.sequences.document[sequence] for sequence in selected])[row]
        number = np.array([self.sequences.number[sequence] for sequence in selected])[row]
        token = ids[row, position]
        if self.tokenization.mask is not None and self.positions.masks():
            ids[self._picks(selected, self.positions)] = self.tokenization.mask
        arrays = (ids, attention, row, position, document, token, *sources)
        return replace(Batch(*map(torch.from_numpy, arrays)), sequence=torch.from_numpy(number))

    def with_picks_at(self, positions: Positions) -> "Batches":
        """The same batches, with the same tokens masked, but with picks at other positions.

        A map that is applied everywhere must be fitted everywhere, not only at [MASK].
        """
        around = self.tokenization.around
        # From the length that runs: a causal model's sequence ends with its last pick.
        picks = array("q", [positions.count(length, *around) for length in self.sequences.length])
        sequences = replace(self.sequences, picks=picks, uncut=self.sequences.length)
        return replace(self, sequences=sequences, picks_at=positions)

    def first(self, count: int) -> "Batches":
        """The first batches."""
        return replace(self, groups=self.groups[:count])

    @property
    def n_sequences(self) -> int:
        return sum(map(len, self.groups))

    @property
    def n_tokens(self) -> int:
        """The number of tokens, including special tokens and the encoder's, without padding."""
        return sum(map(self._tokens_in, self.groups))

    @property
    def n_source_tokens(self) -> int:
        """The number of tokens for the encoder of an encoder–decoder."""
        source = np.asarray(self.sequences.source)
        return int(sum(source[group].sum() for group in self.groups))

    @property
    def n_picks(self) -> int:
        picks = np.asarray(self.sequences.picks)
        return int(sum(picks[group].sum() for group in self.groups))

    @property
    def max_picks(self) -> int:
        """The picks of the batch with the most picks."""
        picks = np.asarray(self.sequences.picks)
        return max((int(picks[group].sum()) for group in self.groups), default=0)

    @property
    def padding_share(self) -> float:
        """The share of padding in all cells."""
        # The longest sequence also has the longest source: they are halves of one text.
        size = self.sequences.sizes()
        cells = sum(len(group) * int(size[group].max()) for group in self.groups)
        return 1 - self.n_tokens / cells if cells else 0.0

    def _tokens_in(self, group: Ints) -> int:
        length, source = np.asarray(self.sequences.length), np.asarray(self.sequences.source)
        return int(length[group].sum() + source[group].sum())

    def _grid(self, selected: list[int], *, source: bool = False) -> tuple[Ints, Ints]:
        sizes = self.sequences.source if source else self.sequences.length
        lengths = [sizes[sequence] for sequence in selected]
        ids = np.full((len(selected), max(lengths)), self.tokenization.pad, dtype=np.int64)
        attention = np.zeros_like(ids)
        for row, (sequence, length) in enumerate(zip(selected, lengths, strict=True)):
            start = self.sequences.start[sequence]
            start += self.sequences.length[sequence] if source else 0
            ids[row, :length] = self.sequences.ids[start : start + length]
            attention[row, :length] = 1
        return ids, attention

    def _picks(self, selected: list[int], positions: Positions, *, is_redrawn: bool = False) -> tuple[Ints, Ints]:
        """Rows and positions of the draws from each sequence of a batch."""
        draws = [
            positions.draw(
                self.sequences.uncut[sequence],
                *self.tokenization.around,
                # With the seed of the masks, the share would contain more masks than the text does.
                seed=self.seed + is_redrawn,
                document=self.sequences.document[sequence],
                sequence=self.sequences.number[sequence],
            )
            for sequence in selected
        ]
        row = np.repeat(np.arange(len(selected)), [len(draw) for draw in draws])
        return row, np.concatenate(draws)


def make_batches(
    corpus: Corpus,
    tokenization: Tokenization,
    positions: Positions,
    *,
    documents: Sequence[int] | None = None,
    seed: int = 0,
    tokens: int | None = None,
    max_length: int = 512,
    max_batch_tokens: int = 1024,
) -> Batches:
    """Cut documents into sequences, and group those of similar length into batches.

    `documents` are used in their order until there are `tokens` tokens (None: all); sequences without eligible
    positions are left out. A batch has at most `max_batch_tokens` tokens, including padding, unless a single sequence
    has more. Batches are shuffled, so that the first few represent all.

    For an encoder–decoder a sequence is two rows of at most `max_length`: the encoder reads the first half of its text,
    the decoder the second half after its start token. Tokens and cells of both count; picks are the decoder's.
    """
    documents = range(len(corpus.documents)) if documents is None else documents
    limits = {"seed": (seed, 0), "tokens": (tokens, 1), "max_batch_tokens": (max_batch_tokens, 1)}
    for name, (value, minimum) in limits.items():
        if value is not None and value < minimum:
            raise BadText(f"expected {argument(name)} of {minimum} or more, got {value}")
    for document in documents:
        if not 0 <= document < len(corpus.documents):
            raise BadText(
                f"expected documents from 0 to {len(corpus.documents) - 1:,} of {corpus.name}, got {document}"
            )
    text_length = tokenization.text_length(max_length)
    if text_length < 1:
        raise BadText(
            f"expected {argument('max_length')} of at least {tokenization.n_added + 1}, because the tokenizer adds "
            f"{tokenization.n_added} tokens, got {max_length}"
        )

    # Encoded when they are needed: the text may be far longer than `tokens`.
    starts = range(0, len(documents), _DOCUMENTS_AT_ONCE)
    chunks = (documents[start : start + _DOCUMENTS_AT_ONCE] for start in starts)
    encoded = (
        (int(document), ids)
        for chunk in chunks
        for document, ids in zip(chunk, tokenization.encode([corpus.documents[i] for i in chunk]), strict=True)
    )
    sequences = TokenSequences()
    around = tokenization.around
    # Tokens after the last pick cannot change a causal model's states there, and are cut off. (Not from a decoder's
    # half: rows that are as long as their sources need less padding.)
    ends_at_pick = tokenization.mask is None and not tokenization.both_ways and positions.kind != "all"
    for document, ids in encoded:
        # Of a long document, only the first sequence is used.
        end = min(len(ids), text_length) if positions.one_per_document else len(ids)
        for number, start in enumerate(range(0, end, text_length)):
            text = ids[start : start + text_length]
            source, row = ([], tokenization.wrap(text)) if tokenization.start is None else tokenization.halves(text)
            length = len(row)
            if not (picks := positions.count(length, *around)):
                continue
            if ends_at_pick:
                draw = positions.draw(length, *around, seed=seed, document=document, sequence=number)
                length = int(draw[-1]) + 1
            sequences.add(row[:length], source, uncut=len(row), document=document, number=number, picks=picks)
        if tokens is not None and len(sequences.ids) >= tokens:
            break
    else:
        if tokens is not None:
            raise TextTooShort(
                f"expected {tokens:,} tokens in the {len(documents):,} documents of {corpus.name}, got "
                f"{len(sequences.ids):,}; pass more text, or {argument('tokens', len(sequences.ids))} or less"
            )
    if not sequences.length:
        raise TextTooShort(
            f"none of the {len(documents):,} documents of {corpus.name} has a position of {positions} from position "
            f"{positions.skip_first} on; pass longer text"
        )

    groups = _group(sequences.sizes(), max_batch_tokens)
    order = np.argsort(np.random.PCG64(seed).random_raw(len(groups)), kind="stable")
    return Batches(tokenization, positions, seed, sequences, tuple(groups[index] for index in order))


def _group(sizes: Ints, max_cells: int) -> list[Ints]:
    """Sort sequences by size, and start a new batch before rows × longest exceed `max_cells`, or padding its limit."""
    order = np.argsort(sizes, kind="stable")
    cuts, tokens = [0], 0
    for index, sequence in enumerate(order):
        # Sizes grow, so the newest row is the longest.
        cells = (index - cuts[-1] + 1) * sizes[sequence]
        tokens += sizes[sequence]
        if index > cuts[-1] and (cells > max_cells or cells - tokens > _MAX_PADDING * cells):
            cuts.append(index)
            tokens = sizes[sequence]
    return np.split(order, cuts[1:])

"""The calibration set: what each level predicts at positions of real or self-generated text.

After its own tokens a model is more confident, and its early levels are right more often, than after real text. A
threshold found on documents is therefore stricter than generation needs; `generate_text` supplies self-generated
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerjump.data.batches import Batch
from layerjump.data.corpus import Corpus, split_indices
from layerjump.errors import BadExit, TextTooShort, argument
from layerjump.generation.exit_rules import LevelReading, Shortlist
from layerjump.generation.generate import generate
from layerjump.generation.probes import probe_features
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import LOGITS_MEMORY, chunk_rows, chunks
from layerjump.models.model import Model, capture_states
from layerjump.models.structure import can_restrict

T = TypeVar("T")
MAX_CANDIDATE_LEVELS = 10
"""Levels at which exiting is considered."""
SHORTLIST_LENGTH = 2048
"""Tokens of a shortlist at most."""
_MIN_VOCAB_RATIO = 4  # a vocabulary smaller than this many shortlists is read in full
_COUNTED_DOCUMENTS = 4_000  # documents in which tokens are counted
OPENING = 12
"""Tokens of a document that the model continues."""
_GENERATION_BATCH = 64  # documents that are continued in one batch


@dataclass(frozen=True)
class ByRole(Generic[T]):
    """One value for each use of the calibration documents."""

    probes: T
    """Probes are fitted on these documents."""
    selection: T
    """The rule type, its levels and the probes' regularisation are selected on these."""
    thresholds: T
    """The threshold is tested on these, one position per document."""
    test: T
    """The reported numbers come from these."""


@dataclass(frozen=True)
class CalibrationSet:
    """The predictions of some levels at some positions; tensors are (levels, positions) unless they say otherwise."""

    levels: tuple[int, ...]
    correct: Tensor
    """Whether the level's top token is the full model's."""
    gap: Tensor
    """The difference between the level's two largest probabilities."""
    features: Tensor
    """(levels, positions, d_model + 3), the probes' features."""
    documents: Tensor
    """(positions,) document indices."""
    shortlist: Shortlist | None = None
    """The shortlist that the levels were read with; None: the full vocabulary."""

    def __len__(self) -> int:
        return len(self.documents)

    def select(self, rows: Tensor) -> CalibrationSet:
        """The same for some of the positions, given as booleans or indices."""
        by_level = {name: getattr(self, name)[:, rows] for name in ("correct", "gap", "features")}
        return replace(self, documents=self.documents[rows], **by_level)


def _known_logits(logits: Tensor, level: int, states: Tensor) -> Tensor:
    return logits


@torch.no_grad()
def build_calibration_set(
    model: Model,
    jumps: Jumps | None,
    batches: Iterable[Batch],
    levels: Sequence[int],
    shortlist: Shortlist | None = None,
) -> CalibrationSet:
    """Read the picked positions of the batches at these levels, as an exit rule would."""
    lens = Lens(model if shortlist is None else shortlist.restrict(model), jumps)
    last, sources = model.n_blocks, {level: lens.readout(level).site for level in levels}
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for states in capture_states(model, batches, [*levels, last, *sources.values()]):
        batch = states.batch
        for rows in chunks(batch.n_picks, chunk_rows(model)):
            full_model = model.logits(states[last][rows]).argmax(-1)
            columns = []
            for level in levels:
                positions = batch.position[rows].to(states[level].device)
                logits = lens.logits(level, states[sources[level]][rows])
                reading = LevelReading(level, states[level][rows], positions, partial(_known_logits, logits))
                tokens = reading.top_token
                if shortlist is not None:
                    tokens = shortlist.tokens.to(tokens.device)[tokens]
                features = probe_features(reading.states, positions).float()
                columns.append((tokens == full_model, reading.gap, features))
            correct, gap, features = (
                torch.stack([column.cpu() for column in part]) for part in zip(*columns, strict=True)
            )
            parts.append((correct, gap, features, batch.document[rows]))
    correct, gap, features = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    documents = torch.cat([part[3] for part in parts])
    return CalibrationSet(tuple(levels), correct, gap, features, documents, shortlist)


def estimate_memory(model: Model, roles: ByRole[list[int]], n_levels: int, picks: int) -> int:
    """Return the bytes that calibration takes at most: features of all positions, and float64 copies of one level's."""
    width = model.d_model + 3  # of a probe's features
    rows = {role: len(part) * (1 if role == "thresholds" else picks) for role, part in vars(roles).items()}
    # The largest role's batches are joined into one tensor; a probe is fitted on four copies of one level's.
    features = 4 * width * n_levels * (sum(rows.values()) + max(rows.values()))
    return max(features, features // 2 + 4 * 8 * width * rows["probes"]) + min(
        LOGITS_MEMORY, 1024 * 16 * model.structure.vocab_size
    )


def candidate_levels(levels: Sequence[int]) -> tuple[int, ...]:
    """The levels at which exiting is considered: all if they are few, else ten, denser where most is saved."""
    last = len(levels) - 1
    if last < MAX_CANDIDATE_LEVELS:
        return tuple(levels)
    n = MAX_CANDIDATE_LEVELS
    indices = {0, 1} | {round(2 * (last / 2) ** (step / (n - 3))) for step in range(n - 2)}
    return tuple(levels[index] for index in sorted(indices))


def unseen_documents(jumps: Jumps | None, corpus: Corpus) -> tuple[int, ...]:
    """The documents of a corpus that these jumps were not fitted on."""
    documents = tuple(range(len(corpus.documents)))
    if jumps is None or jumps.provenance.text_sha256 != corpus.sha256:
        return documents
    provenance = jumps.provenance
    fitted = set(split_indices(len(documents), provenance.split, seed=provenance.seed).fit)
    return tuple(document for document in documents if document not in fitted)


def split_documents_by_role(documents: Sequence[int], seed: int) -> ByRole[list[int]]:
    """Split documents between probes, selection, thresholds and test.

    Thresholds get most of them: they may use only one position of each, and more documents make a tighter guarantee.
    """
    if len(documents) < 8:
        raise TextTooShort(
            f"calibration needs 8 documents that the jumps were not fitted on, got {len(documents)} documents; "
            f"give another text"
        )
    split = split_indices(len(documents), "30/60/10", seed=seed)
    n_selection = 3 * len(split.fit) // 8
    return ByRole(
        probes=[documents[index] for index in split.fit[n_selection:]],
        selection=[documents[index] for index in split.fit[:n_selection]],
        thresholds=[documents[index] for index in split.validation],
        test=[documents[index] for index in split.test],
    )


def build_shortlist(model: Model, corpus: Corpus, documents: Sequence[int]) -> Shortlist | None:
    """The most frequent tokens of these documents; None where a shorter unembedding is impossible or saves little."""
    vocab_size = model.structure.vocab_size
    if not can_restrict(model.structure) or vocab_size < _MIN_VOCAB_RATIO * SHORTLIST_LENGTH:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    texts = [corpus.documents[index] for index in documents[:_COUNTED_DOCUMENTS]]
    for ids in model.tokenization.encode(texts):
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    n_tokens = max(2, min(SHORTLIST_LENGTH, int((counts > 0).sum())))
    return Shortlist(order[:n_tokens].sort().values)


def generate_text(
    model: Model, corpus: Corpus, documents: Sequence[int], *, tokens: int, picks: int, seed: int = 0
) -> list[Batch]:
    """Continue each document's opening greedily; batches with `picks` positions per document, where the model wrote.

    The positions are drawn first, and no document is continued further than the last of its own.
    """
    most = model.tokenization.max_length - len(model.tokenization.wrap([])) - OPENING
    if not 1 <= tokens <= most:
        raise BadExit(
            f"{argument('self_generated_tokens')} must be 1 to {most}, which is what its context holds after an "
            f"opening of {OPENING}, got {tokens}"
        )
    orders = {index: np.random.default_rng([seed, index]).permutation(tokens) for index in documents}
    lengths = {index: 1 + int(order[:picks].max()) for index, order in orders.items()}
    queue, tokenization, batches = sorted(documents, key=lambda index: lengths[index]), model.tokenization, []
    for start in range(0, len(queue), _GENERATION_BATCH):
        group = queue[start : start + _GENERATION_BATCH]
        texts = tokenization.encode([corpus.documents[index] for index in group])
        openings = [tokenization.wrap(ids[:OPENING]) for ids in texts]
        inputs, length, pad = tokenization.left_padded(openings), lengths[group[-1]], tokenization.pad
        continuations = generate(model, None, inputs, do_sample=False, max_new_tokens=length, pad_token_id=pad).ids
        rows, positions = [], []
        for row, (index, new) in enumerate(zip(group, continuations, strict=True)):
            # Of a text that ended early, the first positions of the order that it has are a uniform draw too.
            picked = np.sort(orders[index][orders[index] < len(new)][:picks])
            rows += [row] * len(picked)
            # The state at a position predicts the next token, so the opening's last position predicts the first one.
            positions += (len(openings[row]) - 1 + picked).tolist()
        sequences = [torch.tensor(opening + new) for opening, new in zip(openings, continuations, strict=True)]
        ids = pad_sequence(sequences, batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
        row_index, position = torch.tensor(rows), torch.tensor(positions)
        document = torch.tensor(group)[row_index]
        batches.append(Batch(ids, mask, row_index, position, document, ids[row_index, position]))
    return batches

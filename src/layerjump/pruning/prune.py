"""prune(): drop blocks and replace them by maps.

    pruned = prune(model, "wiki.txt", drop="25%")
    pruned.loss["ratio"]                          # perplexity over the whole model's, on test documents
    pruned.save("smaller")                        # an ordinary checkpoint

Choosing by loss and fitting on the pruned model's own states both need text, so text is given, not sums.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus, load_text
from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.errors import BadPruning, TextTooShort
from layerjump.jumps.collect import plan_run
from layerjump.jumps.jumps import Jumps
from layerjump.metrics.token_loss import TokenLosses, token_losses
from layerjump.models.model import Model, require_model
from layerjump.pruning.drop_layers import cannot_drop, without_blocks
from layerjump.pruning.replace import (
    ReplacementFitter,
    StreamTransform,
    check_cuts,
    check_method,
    count_parameters,
)
from layerjump.pruning.residual_weights import cannot_fold, cannot_rotate
from layerjump.pruning.select import (
    BlockSelector,
    Span,
    blocks_in_spans,
    check_criterion,
    contiguous_spans,
    parse_drop_count,
    required_blocks,
    select_blocks,
)

log = logging.getLogger("layerjump")

ALL_POSITIONS = Positions("all", skip_first=0, special=True)
MASKS = Positions.parse(MASKED_SHARE, skip_first=0)
CHOOSING = 1_500
"""Select tokens on which candidates are tried: each is run many times."""
CELLS = 1_024


@dataclass(frozen=True)
class CalibrationData:
    """The text of a pruning: what maps are fitted on, what is chosen on, and what is shown."""

    fit: Batches
    validation: Batches
    test: Batches
    about: dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Pruned:
    """A model with fewer blocks, what was done to it and what that costs."""

    model: Model
    original: Model
    cuts: tuple[Span, ...]
    method: str
    criterion: str
    loss: dict[str, float]
    """On test documents: nats and perplexity `before` and `after`, and the perplexities' `ratio`, `low` to `high`."""
    about: dict[str, Any]
    """Text, tokens, split, seed, as a fit states them."""
    jumps: Jumps | None = None
    """What `linear` keeps beside the model."""
    frames: tuple[StreamTransform, ...] = ()
    """From which of the pruned model's levels on its stream is scaled and turned."""
    distilled: dict[str, Any] = field(default_factory=dict)
    """How it was trained afterwards, if it was."""

    @property
    def dropped(self) -> tuple[int, ...]:
        return blocks_in_spans(self.cuts)

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers stored before and after."""
        kept = count_parameters(self.model.hf) + (self.jumps.n_parameters if self.jumps else 0)
        return count_parameters(self.original.hf), kept

    def __repr__(self) -> str:
        gone = ", ".join(map(str, self.dropped))
        told = f"{self.original.name}: block {gone} of {self.original.n_blocks} out, {self.method}"
        if self.loss:
            before, after = (self.loss[f"perplexity {when}"] for when in ("before", "after"))
            told += f"; perplexity {before:.4g} → {after:.4g}"
        return f"Pruned({told})"

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write an ordinary checkpoint with a model card (`linear`: base and jumps, for `lj.load`)."""
        from layerjump.pruning.checkpoint import save

        save(self, Path(folder), force=force)


def prune(
    model: Model,
    text: Corpus | str | Path,
    *,
    drop: int | str | None = None,
    max_loss: float | None = None,
    method: str = "auto",
    criterion: str = "loss",
    contiguous: bool = False,
    protect: Sequence[int] | None = None,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
) -> Pruned:
    """Drop blocks and fit what stands in for them, in closed form.

    Give `drop` (8, or "25%"), or `max_loss`: as many blocks as leave the loss on select documents at most so many
    times the whole model's. The first and the last block and those that form an attention sink stay, unless `protect`
    says which do instead. Method `auto` is the best that stores no more numbers than the model does now.
    """
    require_model(model)
    if (drop is None) == (max_loss is None):
        raise BadPruning("give either how many blocks to drop, or how much loss to allow")
    if reason := cannot_drop(model):
        raise BadPruning(reason)
    if method != "auto":
        check_method(model, method)
    check_criterion(criterion)
    model.require_predictions()
    calibration = prepare_calibration(model, text, tokens=tokens, split=split, seed=seed)
    stay = _stay(model, calibration, protect)
    mapped = method != "remove" and not (method == "auto" and model.masked)
    given = BlockSelector(model, calibration.fit, calibration.validation, stay, mapped, contiguous)
    if drop is not None:
        count = parse_drop_count(drop, model.n_blocks)
        found = _chosen(given, calibration, method, criterion, count)
    else:
        assert max_loss is not None
        found = _within(given, calibration, method, criterion, max_loss)
    return with_test_loss(replace(found, criterion=criterion), calibration)


def prepare_calibration(
    model: Model, text: Corpus | str | Path, *, tokens: int | None, split: str, seed: int
) -> CalibrationData:
    """Split a text and cut it into batches, as a pruning needs them."""
    corpus = text if isinstance(text, Corpus) else load_text(text)
    asked = MASKS if model.masked else ALL_POSITIONS
    made = plan_run(
        model, corpus, pairs="adjacent", positions=asked, tokens=tokens, split=split, seed=seed
    )
    for name in ("fit", "select", "test"):
        if name not in made.batches:
            raise TextTooShort(
                f"the split {split} of {corpus.name} leaves no {name} documents; give it some"
            )
    fit = made.batches["fit"].look_at(ALL_POSITIONS) if model.masked else made.batches["fit"]
    select = make_batches(
        corpus,
        model.tokenization,
        asked,
        documents=_first(made.batches["select"]),
        seed=seed,
        budget=CELLS,
    )
    return CalibrationData(fit, select, made.batches["test"], made.about)


def _first(found: Batches) -> list[int]:
    """As many documents as it takes for the tokens on which candidates are tried."""
    taken: dict[int, None] = {}
    total = 0
    for document, length in zip(found.sequences.document, found.sequences.length, strict=True):
        if total >= CHOOSING and document not in taken:
            break
        taken[document] = None
        total += length
    return list(taken)


def drop_and_replace(
    model: Model, cuts: Sequence[Span], method: str, calibration: CalibrationData
) -> Pruned:
    """A copy of the model without the blocks of these runs, stand-ins fitted, nothing measured yet."""
    dropped = blocks_in_spans(cuts)
    student = without_blocks(model, dropped)
    if method == "auto":
        method = _best(model, student, cuts)
    check_method(model, method)
    check_cuts(cuts, method)
    if method != "remove" and calibration.fit.n_picks < 2 * model.d_model:
        raise TextTooShort(
            f"{calibration.about['text']} gives {calibration.fit.n_picks:,} positions to fit maps of width "
            f"{model.d_model} on; give text for at least {2 * model.d_model:,} (better {10 * model.d_model:,}), or use "
            f"method remove, which fits nothing"
        )
    log.info("%s: blocks %s out, %s in", model.name, ", ".join(map(str, dropped)), method)
    fitting = ReplacementFitter(model, student, calibration.fit, calibration.about)
    jumps, about = fitting.fit(cuts, method), calibration.about
    frames = tuple(fitting.frames)
    return Pruned(student, model, tuple(cuts), method, "given", {}, about, jumps, frames)


def with_test_loss(pruned: Pruned, calibration: CalibrationData) -> Pruned:
    """The same with its loss on test documents."""
    before = token_losses(pruned.original, calibration.test)
    return replace(
        pruned, loss=compare_losses(before, token_losses(pruned.model, calibration.test))
    )


def compare_losses(before: TokenLosses, after: TokenLosses) -> dict[str, float]:
    """Two models' losses on the same tokens."""
    ratio, low, high = after.over(before)
    return {
        "before": before.mean,
        "after": after.mean,
        "perplexity before": before.perplexity,
        "perplexity after": after.perplexity,
        "ratio": ratio,
        "low": low,
        "high": high,
        "tokens": len(after.each),
    }


def _best(model: Model, student: Model, cuts: Sequence[Span]) -> str:
    """The best method that stores no more numbers than the model did."""
    if cannot_fold(model) or cuts[0][0] == 0:
        return "remove" if model.masked or cannot_fold(model) else "linear"
    if cannot_rotate(model):
        return "fold"
    head = student.structure.unembedding.get_parameter("weight")
    tied = head is student.hf.get_input_embeddings().weight
    untied = count_parameters(student.hf) + (head.numel() if tied else 0)
    return "rotation" if untied <= count_parameters(model.hf) else "fold"


def _stay(
    model: Model, calibration: CalibrationData, protect: Sequence[int] | None
) -> dict[int, str]:
    if protect is None:
        stay = required_blocks(model, calibration.fit)
        said = "; ".join(f"block {block}, {why}" for block, why in sorted(stay.items()))
        log.info("%s: these stay: %s", model.name, said)
        return stay
    wrong = [block for block in protect if not 1 <= block <= model.n_blocks]
    if wrong:
        raise BadPruning(
            f"block {wrong[0]} was to be protected; this model has blocks 1 to {model.n_blocks}"
        )
    return dict.fromkeys(protect, "as told")


def _chosen(
    given: BlockSelector, calibration: CalibrationData, method: str, criterion: str, count: int
) -> Pruned:
    """So many blocks out. By loss, the best single run competes with what was found one block at a time."""
    ways = [given]
    if criterion == "loss" and not given.contiguous and given.runs(count):
        ways.append(replace(given, contiguous=True))
    cuts = {tuple(contiguous_spans(select_blocks(criterion, count, way))) for way in ways}
    found = [drop_and_replace(given.model, each, method, calibration) for each in sorted(cuts)]
    return found[0] if len(found) == 1 else lowest_loss(found, calibration)


def lowest_loss(found: Sequence[Pruned], calibration: CalibrationData) -> Pruned:
    """The one that does best on select documents, stand-ins in place: several cuts cost more than their maps say."""
    return min(found, key=lambda one: token_losses(one.model, calibration.validation).mean)


def _within(
    given: BlockSelector, calibration: CalibrationData, method: str, criterion: str, max_loss: float
) -> Pruned:
    """As many blocks as keep the loss on select documents within the limit, by halving the range."""
    if not max_loss > 1:
        raise BadPruning(
            f"the loss allowed is {max_loss} times the model's own; give more than 1, such as 1.05x"
        )
    limit = max_loss * token_losses(given.model, calibration.validation).mean
    best, fits, too_many = None, 0, len(given.candidates) + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        try:
            found = _chosen(given, calibration, method, criterion, count)
        except BadPruning:  # no run is so long, or the longest ones are not long enough
            too_many = count
            continue
        if token_losses(found.model, calibration.validation).mean <= limit:
            best, fits = found, count
        else:
            too_many = count
    if best is None:
        raise BadPruning(
            f"not one block can be dropped within {max_loss} times the loss; allow more, or give another method"
        )
    return best

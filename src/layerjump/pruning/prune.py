"""prune(): drop blocks of a model and replace them by maps fitted in closed form.

    pruned = lj.prune(model, "wiki.txt", drop="25%")
    pruned.loss.ratio                             # perplexity relative to the original model, on test documents
    pruned.save("smaller")                        # an ordinary checkpoint

Selection by loss and replacements after the first span need text, so `prune` takes text and not second moments.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_indices
from layerjump.data.mixture import Mixture, mix_texts
from layerjump.data.positions import ALL_POSITIONS, MASKED_SHARE, Positions
from layerjump.errors import BadPruning, TextTooShort, argument
from layerjump.io import writing
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.jumps import Jumps, RunInfo
from layerjump.metrics.token_loss import TokenLosses, token_losses
from layerjump.models.model import Model, require_model
from layerjump.pruning.drop_blocks import cannot_drop, count_parameters, without_blocks
from layerjump.pruning.estimate_memory import estimate_memory
from layerjump.pruning.fit_replacements import REFITTED_METHODS, check_method, fit_replacements, starting_method
from layerjump.pruning.output_weights import cannot_fold
from layerjump.pruning.refit_projections import RefitStep, refit_projections
from layerjump.pruning.rotate_stream import StreamTransform, cannot_rotate
from layerjump.pruning.select import (
    BlockSelector,
    Span,
    blocks_in_spans,
    check_criterion,
    contiguous_spans,
    parse_drop_count,
    required_blocks,
)
from layerjump.pruning.self_generated_text import continue_documents

log = logging.getLogger("layerjump")

MASKED_POSITIONS = Positions.parse(MASKED_SHARE, skip_first=0)
VALIDATION_TOKENS = 1_500
"""Number of tokens on which candidates are tried; each is run many times."""
OUT_OF_DOMAIN_TOKENS = 5_000
"""Number of tokens of each text on which nothing is calibrated."""
VALIDATION_BATCH = 1_024
"""Number of padded tokens in a batch of these."""


@dataclass(frozen=True)
class CalibrationData:
    """The text of a pruning: batches to fit maps on, to select blocks on, and to measure on."""

    fit: Batches
    validation: Batches
    test: Batches
    info: RunInfo
    """Description of model and text."""
    sources: tuple[str, ...] = ()
    """The text of each document, if several texts are mixed."""
    out_of_domain: tuple[tuple[str, Batches], ...] = ()
    """Further texts to measure on, by name."""


def on_disk(key: str) -> Any:
    """Declare the key of a field in files."""
    return Field(validation_alias=key, serialization_alias=key)


class LossComparison(BaseModel):
    """Losses of two models on the same test tokens; the 95 % interval of the ratio is over documents."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    loss_before: float = on_disk("before")
    """Mean loss of the original model in nats per token."""
    loss_after: float = on_disk("after")
    perplexity_before: float = on_disk("perplexity before")
    perplexity_after: float = on_disk("perplexity after")
    ratio: float
    """Perplexity after / perplexity before."""
    low: float
    high: float
    tokens: int


class TextLoss(BaseModel):
    """Losses on the test documents of one text."""

    model_config = ConfigDict(frozen=True)

    text: str
    in_domain: bool
    """Whether other documents of this text were calibrated on."""
    loss: LossComparison


class Distillation(BaseModel):
    """How a pruned model was trained."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    steps: int
    trained: str
    """The trained weights, in words."""
    kl_weight: float = on_disk("kl weight")
    minutes: float


@dataclass(frozen=True, eq=False, repr=False)
class Pruned:
    """A model with fewer blocks, with the settings and the cost of its pruning."""

    model: Model
    original: Model
    spans: tuple[Span, ...]
    """Dropped spans: (i, j) stands for blocks i + 1 to j."""
    method: str
    criterion: str
    info: RunInfo
    """Description of the original model and the text."""
    test_loss: LossComparison | None = None
    """Losses on test documents; None before they are measured."""
    text_losses: tuple[TextLoss, ...] = ()
    """The same for each text of a mixture, and for texts that were not calibrated on."""
    jumps: Jumps | None = None
    """Replacement maps of the method `linear`."""
    transforms: tuple[StreamTransform, ...] = ()
    """Transforms of the pruned model's residual stream, by level."""
    distillation: Distillation | None = None
    refitted: tuple[RefitStep, ...] = ()
    """Output projections that were refitted, in order, and those that were tried and stayed as they were."""

    @property
    def loss(self) -> LossComparison:
        """Losses before and after pruning, on test documents."""
        if self.test_loss is None:
            raise BadPruning("the loss of this model is not measured; call `with_test_loss`")
        return self.test_loss

    @property
    def dropped(self) -> tuple[int, ...]:
        """Dropped blocks, counted from 1."""
        return blocks_in_spans(self.spans)

    @property
    def parameters(self) -> tuple[int, int]:
        """Number of parameters before and after, replacement maps included."""
        n_maps = self.jumps.n_parameters if self.jumps else 0
        return count_parameters(self.original.hf), count_parameters(self.model.hf) + n_maps

    def __repr__(self) -> str:
        blocks = ", ".join(map(str, self.dropped))
        text = f"{self.original.name}: dropped {blocks} of {self.original.n_blocks} blocks, {self.method}"
        if loss := self.test_loss:
            text += f"; perplexity {loss.perplexity_before:.4g} → {loss.perplexity_after:.4g}"
        return f"Pruned({text})"

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write an ordinary checkpoint with a model card (`linear`: checkpoint and jumps, for `lj.load`)."""
        from layerjump.pruning.checkpoint import save

        save(self, Path(folder), force=force)


def prune(
    model: Model,
    text: Corpus | str | Path | Sequence[Corpus | str | Path],
    *,
    drop: int | str | None = None,
    max_loss_ratio: float | None = None,
    method: str = "auto",
    criterion: str = "loss",
    contiguous: bool = False,
    protect: Sequence[int] | None = None,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    self_generated: bool = False,
    out_of_domain: Sequence[Corpus | str | Path] = (),
    work_folder: str | Path | None = None,
) -> Pruned:
    """Drop blocks and fit their replacements in closed form; return the pruned model with its test loss.

    Args:
        model: The model, which stays as it is.
        text: Calibration text: a corpus, or a source for `lj.load_text`; several are mixed in equal parts.
        drop: Number of blocks to drop, or a share such as "25%". Pass either this or `max_loss_ratio`.
        max_loss_ratio: Drop as many blocks as keep the loss on the validation split below this multiple of the
            original.
        method: Replacement: remove, linear, replaceme, fold, rotation, refit or rotation-refit. "auto" is the best one
            that stores no more parameters than the original model and takes a single pass over the text.
        criterion: Selection of blocks: loss, linearity, linearity-iterative, influence, angle or deepest.
        contiguous: Whether to drop a single span of blocks.
        protect: Blocks that stay, counted from 1; by default the first, the last and those that form an attention sink.
        tokens: Number of tokens of the text to use; by default all.
        split: Shares of the fit, validation and test documents.
        seed: Seed of the split.
        self_generated: Whether to fit on the model's own continuations of the documents' openings; the validation and
            test documents stay as they are.
        out_of_domain: Further texts whose losses are measured; nothing is calibrated on them.
        work_folder: Folder for the finished blocks of an unfinished `refit`; the same call continues from there.
    """
    require_model(model)
    if (drop is None) == (max_loss_ratio is None):
        raise BadPruning(f"pass either {argument('drop')} or {argument('max_loss_ratio')}")
    if max_loss_ratio is not None and not max_loss_ratio > 1:
        raise BadPruning(
            f"expected {argument('max_loss_ratio')} of more than 1 (times the original loss), got {max_loss_ratio}"
        )
    if reason := cannot_drop(model):
        raise BadPruning(reason)
    if method != "auto":
        check_method(model, method)
    check_criterion(criterion)
    model.require_predictions()
    calibration = prepare_calibration(
        model, text, tokens=tokens, split=split, seed=seed, self_generated=self_generated, out_of_domain=out_of_domain
    )
    if protect is None:
        required = required_blocks(model, calibration.fit)
        reasons = "; ".join(f"block {block}, {why}" for block, why in sorted(required.items()))
        log.info("%s: blocks that stay: %s", model.name, reasons)
        protect = list(required)
    for block in protect:
        if not 1 <= block <= model.n_blocks:
            raise BadPruning(f"expected {argument('protect')} among blocks 1 to {model.n_blocks}, got {block}")
    selector = BlockSelector(
        model,
        calibration.fit,
        calibration.validation,
        protect,
        use_maps=method != "remove" and not (method == "auto" and model.masked),
        contiguous=contiguous,
    )

    count = None if drop is None else parse_drop_count(drop, model.n_blocks)
    needed = estimate_memory(selector, criterion, count, method)
    log.info("%s: %s", model.name, needed)
    needed.require(model.device)

    def prune_count(count: int) -> Pruned:
        """Drop `count` blocks. By loss, the best single span competes with the greedy selection."""
        selectors = [selector]
        if criterion == "loss" and not contiguous and selector.spans(count):
            selectors.append(replace(selector, contiguous=True))
        selections = {tuple(contiguous_spans(way.select(criterion, count))) for way in selectors}
        candidates = [
            drop_and_replace(model, spans, starting_method(model, method, spans), calibration)
            for spans in sorted(selections)
        ]
        pruned = candidates[0] if len(candidates) == 1 else lowest_loss(candidates, calibration)
        return refit(pruned, method, calibration, work_folder) if method in REFITTED_METHODS else pruned

    if count is not None:
        pruned = prune_count(count)
        return with_test_loss(replace(pruned, criterion=criterion), calibration)
    # As many blocks as keep the validation loss below the limit, by bisection.
    assert max_loss_ratio is not None
    limit = max_loss_ratio * token_losses(model, calibration.validation).mean
    best, fits, too_many = None, 0, len(selector.candidates) + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        try:
            pruned = prune_count(count)
            is_within = token_losses(pruned.model, calibration.validation).mean <= limit
        except BadPruning:  # no span has this length
            is_within = False
        if is_within:
            best, fits = pruned, count
        else:
            too_many = count
    if best is None:
        raise BadPruning(
            f"no block can be dropped within {max_loss_ratio} times the loss; pass a larger "
            f"{argument('max_loss_ratio')}, or another {argument('method')}"
        )
    return with_test_loss(replace(best, criterion=criterion), calibration)


def prepare_calibration(
    model: Model,
    text: Corpus | str | Path | Sequence[Corpus | str | Path],
    *,
    tokens: int | None,
    split: str,
    seed: int,
    self_generated: bool = False,
    out_of_domain: Sequence[Corpus | str | Path] = (),
) -> CalibrationData:
    """Split a text and batch it for a pruning; several texts are mixed in equal parts."""
    corpus = _as_corpus(text)
    if self_generated:
        fit_documents = split_indices(len(corpus.documents), split, seed=seed).fit
        corpus = continue_documents(model, corpus, fit_documents, tokens=tokens, seed=seed)
    positions = MASKED_POSITIONS if model.masked else ALL_POSITIONS
    plan = plan_run(model, corpus, pairs="adjacent", positions=positions, tokens=tokens, split=split, seed=seed)
    for name in ("fit", "validation", "test"):
        if name not in plan.batches:
            raise TextTooShort(
                f"{argument('split', split)} leaves no {name} documents of {corpus.name}; give that part a larger share"
            )
    fit = plan.batches["fit"].with_picks_at(ALL_POSITIONS) if model.masked else plan.batches["fit"]
    sequences = plan.batches["validation"].sequences
    documents: list[int] = []  # the first that have enough tokens
    n_tokens = 0
    for document, length in zip(sequences.document, sequences.length, strict=True):
        if document not in documents:
            if n_tokens >= VALIDATION_TOKENS:
                break
            documents.append(document)
        n_tokens += length
    validation = make_batches(
        corpus, model.tokenization, positions, documents=documents, seed=seed, max_batch_tokens=VALIDATION_BATCH
    )
    sources = corpus.sources if isinstance(corpus, Mixture) else ()
    others = []
    for other in map(_as_corpus, out_of_domain):
        batches = make_batches(other, model.tokenization, positions, seed=seed)
        n_batches, n_tokens = 0, 0
        while n_batches < len(batches) and n_tokens < OUT_OF_DOMAIN_TOKENS:
            n_tokens += batches[n_batches].n_tokens
            n_batches += 1
        others.append((other.name, batches.first(n_batches)))
    return CalibrationData(fit, validation, plan.batches["test"], plan.info, sources, tuple(others))


def _as_corpus(text: Corpus | str | Path | Sequence[Corpus | str | Path]) -> Corpus:
    if isinstance(text, Corpus):
        return text
    if isinstance(text, (str, Path)):
        return load_text(text)
    corpora = [_as_corpus(each) for each in text]
    return corpora[0] if len(corpora) == 1 else mix_texts(corpora)


def drop_and_replace(
    model: Model,
    spans: Sequence[Span],
    method: str,
    calibration: CalibrationData,
    work_folder: str | Path | None = None,
) -> Pruned:
    """Return a copy of the model without the blocks of these spans, with replacements, not measured yet."""
    if method in REFITTED_METHODS:
        check_method(model, method, spans)
        pruned = drop_and_replace(model, spans, starting_method(model, method, spans), calibration)
        return refit(pruned, method, calibration, work_folder)
    dropped = blocks_in_spans(spans)
    shorter = without_blocks(model, dropped)
    if method == "auto":  # the best that stores no more parameters than the original model
        if cannot_fold(model):
            method = "remove"
        elif spans[0][0] == 0:
            method = "linear"
        elif cannot_rotate(model):
            method = "fold"
        else:
            unembedding = shorter.structure.unembedding.get_parameter("weight")
            is_tied = unembedding is shorter.hf.get_input_embeddings().weight
            n_untied = count_parameters(shorter.hf) + (unembedding.numel() if is_tied else 0)
            method = "rotation" if n_untied <= count_parameters(model.hf) else "fold"
    check_method(model, method, spans)
    n_positions, width = calibration.fit.n_picks, model.d_model
    if method != "remove" and n_positions < 2 * width:
        raise TextTooShort(
            f"{calibration.info.text} has {n_positions:,} positions to fit maps of width {width}; pass text with "
            f"at least {2 * width:,} (better {10 * width:,}), or {argument('method', 'remove')}, which fits nothing"
        )
    log.info("%s: drop blocks %s, %s", model.name, ", ".join(map(str, dropped)), method)
    jumps, transforms = fit_replacements(model, shorter, spans, method, calibration.fit, calibration.info)
    return Pruned(shorter, model, tuple(spans), method, "given", calibration.info, jumps=jumps, transforms=transforms)


def refit(pruned: Pruned, method: str, calibration: CalibrationData, work_folder: str | Path | None = None) -> Pruned:
    """Refit the output projections of a pruned model in place; the loss on the validation split does not rise."""
    info = pruned.info
    run = {  # everything that the result depends on
        **{name: getattr(info, name) for name in ("fingerprint", "text_sha256", "tokens", "split", "seed")},
        "method": pruned.method,
        "dropped": list(pruned.dropped),
    }
    if work_folder is not None:
        work_folder = Path(work_folder).expanduser()
        with writing(work_folder):
            work_folder.mkdir(parents=True, exist_ok=True)
    steps = refit_projections(
        pruned.original,
        pruned.model,
        pruned.spans,
        calibration.fit,
        calibration.validation,
        transforms=pruned.transforms,
        run=run,
        work_folder=work_folder,
    )
    return replace(pruned, method=method, refitted=steps)


def with_test_loss(pruned: Pruned, calibration: CalibrationData) -> Pruned:
    """Measure the loss on test documents, and on each text by itself where there are several."""
    models = (pruned.original, pruned.model)
    before, after = (token_losses(model, calibration.test) for model in models)
    by_text = []
    names = [calibration.sources[document] for document in after.document.tolist()] if calibration.sources else []
    for name in dict.fromkeys(names):
        selected = torch.tensor([other == name for other in names])
        loss = _compare(*(TokenLosses(each.losses[selected], each.document[selected]) for each in (before, after)))
        by_text.append(TextLoss(text=name, in_domain=True, loss=loss))
    for name, batches in calibration.out_of_domain:
        loss = _compare(*(token_losses(model, batches) for model in models))
        by_text.append(TextLoss(text=name, in_domain=False, loss=loss))
    return replace(pruned, test_loss=_compare(before, after), text_losses=tuple(by_text))


def _compare(before: TokenLosses, after: TokenLosses) -> LossComparison:
    ratio, low, high = after.over(before)
    return LossComparison(
        loss_before=before.mean,
        loss_after=after.mean,
        perplexity_before=before.perplexity,
        perplexity_after=after.perplexity,
        ratio=ratio,
        low=low,
        high=high,
        tokens=len(after.losses),
    )


def lowest_loss(candidates: Sequence[Pruned], calibration: CalibrationData) -> Pruned:
    """Return the candidate with the lowest validation loss: several spans cost more than their maps predict."""
    return min(candidates, key=lambda p: token_losses(p.model, calibration.validation).mean)

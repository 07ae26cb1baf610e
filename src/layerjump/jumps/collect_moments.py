"""The pass over the text: hidden states in, second moments out.

`plan_run` decides which documents, positions and moments a run takes; `RunPlan.run` performs it. A run can be stopped
at any moment and resumed, and several processes under `torchrun` can share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from layerjump.data.batches import Batch, Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_indices
from layerjump.data.positions import Positions
from layerjump.errors import BadEstimator, BadMoments, BadText, RunStopped, TextTooShort, argument
from layerjump.jumps.cost_estimate import CostEstimate, MemoryPlan, estimate_cost, measure_speed
from layerjump.jumps.estimators.registry import find_estimator
from layerjump.jumps.jumps import RunInfo
from layerjump.jumps.layer_pass import can_run_by_layer, capture_by_layer
from layerjump.jumps.maps import FEATURES, FeatureKind
from layerjump.jumps.moments import Moments, check_states, describe_pairs
from layerjump.jumps.moments_checkpoint import Checkpoint, PartialSums, deferred_interrupt, join_equal_parts
from layerjump.jumps.moments_of_splits import MAX_LENGTH, SPLITS, SplitMoments
from layerjump.jumps.process_group import Layout, ProcessGroup
from layerjump.jumps.reservoir import sampling_keys
from layerjump.jumps.spill_states import SUFFIX, StagedMoments, StoredMoments, spill_folder
from layerjump.jumps.text_shards import TextShard, describe_shards, parse_shard
from layerjump.models.fully_sharded import is_fully_sharded
from layerjump.models.model import Model, States, capture_states, require_model
from layerjump.models.sites import Pair, Site, lag_of, parse_pairs
from layerjump.models.weight_forms import is_offloaded

log = logging.getLogger("layerjump")

_FAST_FLOAT64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
"""Compute capabilities of CUDA devices that form float64 products at half the rate of float32 or more."""
Progress = Callable[[int, int], None]
"""Called after each batch with the tokens done and the tokens to do."""


def plan_run(
    model: Model,
    text: Corpus | str | Path,
    *,
    estimator: str | None = None,
    strength: float | None = None,
    pairs: str | None = None,
    positions: Positions | str | None = None,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    use_validation: bool | None = None,
    max_length: int = MAX_LENGTH,
    features: FeatureKind | None = None,
    float32_products: bool | None = None,
    shard: str | None = None,
) -> RunPlan:
    """Plan a pass over a text: which documents, positions and second moments it takes.

    The arguments are those of `fit`. The `estimator` decides what is not passed, and checks the pairs; without one,
    pairs are to-last, features raw, and the validation split runs too. With a `strength`, ridge needs no validation
    split. Products of both features in float32 suffice for an estimator with a penalty. A `shard` "2/8" is the third of
    eight parts of the documents, for eight runs whose moments are merged; `tokens` are those of all eight.
    """
    require_model(model)
    if tokens is not None and tokens < 1:
        raise BadText(f"expected {argument('tokens')} of 1 or more, or none for all, got {tokens}")
    needs = None if estimator is None else find_estimator(estimator, closed_form=True)
    if use_validation is None:
        use_validation = needs is None or needs.needs_validation(strength)
    if features is None:
        features = needs.features if needs else "raw"
    elif features not in FEATURES:
        raise BadEstimator(f"expected {argument('features')} {', '.join(FEATURES)}, got {features!r}")
    if float32_products is None:
        float32_products = needs is not None and needs.float32_products
    pairs = pairs or (needs.pairs if needs else "to-last")
    site_pairs = parse_pairs(pairs, model.structure)
    if needs is not None:
        needs.check_targets(site_pairs, model.n_blocks)
        needs.check_widths(site_pairs, model.structure.width)
    corpus = text if isinstance(text, Corpus) else load_text(text)
    documents = split_indices(len(corpus.documents), split, seed=seed)
    parts = {"fit": documents.fit, "test": documents.test}
    if use_validation:
        parts = {"fit": documents.fit, "validation": documents.validation, "test": documents.test}
    index, n_shards = parse_shard(shard) if shard is not None else (0, 1)
    sharded = {name: part[index::n_shards] for name, part in parts.items()}
    if len(documents.fit) < n_shards:
        raise TextTooShort(
            f"expected at least {n_shards} documents in the fit split for {n_shards} shards, got "
            f"{len(documents.fit)}; use fewer shards, or more text"
        )

    def cut(positions: Positions, parts: Mapping[str, Sequence[int]], tokens: int | None) -> dict[str, Batches]:
        """Batches of every split that has documents; tokens are shared out by their number."""
        n_documents = sum(map(len, parts.values()))
        return {
            name: make_batches(
                corpus,
                model.tokenization,
                positions,
                documents=part,
                seed=seed,
                tokens=tokens and max(1, tokens * len(part) // n_documents),
                max_length=max_length,
            )
            for name, part in parts.items()
            if part
        }

    only_levels = all(site.between_blocks for pair in site_pairs for site in pair)
    skip_first = 1 if only_levels else 0
    if isinstance(positions, str):
        positions = Positions.parse(positions, skip_first=skip_first, special=not only_levels)
    elif positions is None and model.pooled is not None:
        positions = model.prediction_positions
    elif positions is None:
        positions = Positions("all", skip_first=skip_first, special=not only_levels)
        if pairs == "all":
            # Of the whole text, so that all shards draw the same share.
            positions = sample_positions(cut(positions, parts, tokens)["fit"].n_picks, model.d_model)
    positions = _positions_with_history(positions, site_pairs)
    batches = cut(positions, sharded, tokens and max(1, tokens // n_shards))
    n = batches["fit"].n_picks * n_shards
    if lag := lag_of(source for source, _ in site_pairs):
        log.info("positions without the states of %s positions before them are left out: %s are fitted on", lag, n)
    d = max(model.structure.width(source) for source, _ in site_pairs)
    if n < 5 * d:
        inflation = f"{1 + d / (n - d - 1):.2f}" if n > d + 1 else "unbounded"
        log.warning(
            "only %s positions to fit maps of width %s: expect held-out errors inflated by 1 + d/(n−d−1) = %s; use "
            "more text, or ridge or low-rank",
            f"{n:,}",
            d,
            inflation,
        )
    products = product_dtype(model, float32_products=float32_products and features == "both")
    n_tokens = sum(part.n_tokens for part in batches.values())
    info = RunInfo.of(model, corpus, positions, tokens=n_tokens, split=split, seed=seed)
    moments = {name: Moments(site_pairs, products=products, features=features) for name in SPLITS}
    text_shard = TextShard(corpus.name, corpus.sha256, index, n_shards)
    return RunPlan(model, moments, batches, replace(info, text=describe_shards([text_shard])), max_length, text_shard)


def _positions_with_history(positions: Positions, pairs: Sequence[Pair]) -> Positions:
    """Return the positions at which every source has its earlier states, of positions that themselves count."""
    lag = lag_of(source for source, _ in pairs)
    if not lag:
        return positions
    if positions.kind == "first":
        raise BadText(
            f"expected {argument('positions')} that have earlier ones for {describe_pairs(pairs)}, got first; use last "
            f"or all, or sources without an offset"
        )
    return replace(positions, skip_first=positions.skip_first + lag)


def collect_moments(
    model: Model,
    text: Corpus | str | Path,
    *,
    estimator: str | None = None,
    pairs: str | None = None,
    positions: Positions | str | None = None,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    use_validation: bool | None = None,
    max_length: int = MAX_LENGTH,
    features: FeatureKind | None = None,
    float32_products: bool | None = None,
    shard: str | None = None,
    progress: Progress | None = None,
) -> SplitMoments:
    """Collect second moments of hidden states in one pass over a text; the arguments are those of `fit`.

    The `estimator` decides what is not passed, and checks the pairs; without one, pairs are to-last, features raw, and
    the validation split runs too. A `shard` "2/8" is the third of eight parts of the documents, for eight runs whose
    moments are merged; `tokens` are those of all eight.
    """
    plan = plan_run(
        model,
        text,
        estimator=estimator,
        pairs=pairs,
        positions=positions,
        tokens=tokens,
        split=split,
        seed=seed,
        use_validation=use_validation,
        max_length=max_length,
        features=features,
        float32_products=float32_products,
        shard=shard,
    )
    return plan.run(progress=progress)


@dataclass(frozen=True)
class RunPlan:
    """A run that is planned and not started: its batches by split, and all that its result depends on."""

    model: Model
    moments: dict[str, Moments]
    batches: dict[str, Batches]
    info: RunInfo
    max_length: int
    shard: TextShard

    @property
    def cost(self) -> CostEstimate:
        """The memory and arithmetic that the run will take."""
        moments = self.moments["fit"]
        return estimate_cost(self.model, moments, self.batches, speed=measure_speed(self.model, moments.products))

    def run(self, *, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> SplitMoments:
        """Run the text through the model and return its moments (with several processes: in the first one)."""
        self.cost.require_memory(self.model.device)
        group = checkpoint.group if checkpoint else ProcessGroup()
        fresh = SplitMoments(**self.moments, info=self.info, max_length=self.max_length, texts=(self.shard,))
        parts = [PartialSums(fresh, dict.fromkeys(self.batches, 0))]
        if checkpoint is not None:
            parts = checkpoint.restore(fresh, list(self.batches))
        earlier_tokens = 0
        folder = checkpoint.folder if checkpoint and checkpoint.folder.is_dir() else None
        with deferred_interrupt() as interrupt:
            # The largest split runs last: memory peaks in its pass, where all sums are allocated already.
            for name in sorted(self.batches, key=lambda name: self.batches[name].n_tokens):
                with closing(self._add_split(name, parts, group, folder)) as rounds:
                    for split_tokens in rounds:
                        n_tokens = earlier_tokens + split_tokens
                        if progress:
                            progress(n_tokens, self.info.tokens)
                        parts[:] = join_equal_parts(parts, fresh)
                        stops, saves = group.any_of(interrupt.is_set(), checkpoint is not None and checkpoint.is_due())
                        if checkpoint is not None and (stops or saves):
                            checkpoint.save(parts)
                        if stops:
                            self._stop(n_tokens, resumable=checkpoint is not None)
                for part in parts:
                    part.moments.splits[name].release_buffers()
                earlier_tokens += self.batches[name].n_tokens
        if group.world == 1:
            return parts[0].moments
        for name, moments in fresh.splits.items():
            group.gather(parts[0].moments.splits[name] if parts else None, moments)
        group.lowest(0)  # no process leaves while others talk
        return fresh

    def _add_split(
        self, name: str, parts: list[PartialSums], group: ProcessGroup, folder: Path | None
    ) -> Generator[int]:
        """Add the batches of a split that the parts lack, in order; yield the number of tokens done."""
        batches, moments = self.batches[name], self.moments[name]
        first = group.lowest(min((part.done[name] for part in parts), default=len(batches)))
        n_tokens = batches.first(first).n_tokens
        # In every round each copy of the model runs one batch. Processes that gather weights together all run: those
        # without a batch in the last round run the last one again, for nothing.
        in_lockstep = is_fully_sharded(self.model.hf)
        stop = len(batches) + group.replica if in_lockstep else len(batches)
        own_indices = range(first + group.replica, stop, group.replicas)
        own = (batches[min(index, len(batches) - 1)] for index in own_indices)
        captured = self._capture(own, moments.sites, batches.max_picks, folder)
        layout: Layout | None = None
        with closing(captured) as stream:
            for start in range(first, len(batches), group.replicas):
                states = next(stream, None)
                if start + group.replica >= len(batches):
                    states = None
                at = states.at if states else None
                layout = layout or group.share_layout(at)
                indices = range(start, min(start + group.replicas, len(batches)))
                round_batches = [
                    states.batch if states and index == start + group.replica else batches[index] for index in indices
                ]
                n_rows = [batch.n_picks for batch in round_batches]
                received = group.exchange(at, n_rows, moments.pairs, layout, self.model.device)
                outlying: Sequence[Tensor | None] = [None] * len(n_rows)
                # With all sites at hand, `Moments.add` finds them itself.
                if moments.products == torch.float32 and (group.world > 1 or len(parts) > 1):
                    held = [part.moments.splits[name] for part in parts]
                    outlying = _outlying_rows(name, start, held, round_batches, received, group)
                for index, batch, rows, mask in zip(indices, round_batches, received, outlying, strict=True):
                    self._add_batch(name, [part for part in parts if part.done[name] == index], batch, rows, mask)
                n_tokens += sum(batch.n_tokens for batch in round_batches)
                # Release the states before the next ones are computed.
                del states, at, received, rows
                yield n_tokens

    def _capture(
        self, batches: Iterable[Batch], sites: Sequence[Site], max_picks: int, folder: Path | None
    ) -> Generator[States]:
        """Capture the states of batches; of an offloaded model layer by layer, so that its weights are read once.

        States of one layer then wait in `folder`.
        """
        if is_offloaded(self.model.hf) and can_run_by_layer(self.model):
            return capture_by_layer(self.model, list(batches), sites, folder)
        return capture_states(self.model, batches, sites, reuse_buffer_rows=max_picks)

    def _add_batch(
        self, name: str, parts: list[PartialSums], batch: Batch, rows: Mapping[Site, Tensor], outlying: Tensor | None
    ) -> None:
        keys = sampling_keys(batch.document, batch.position, batch.sequence, seed=self.info.seed)
        for part in parts:
            with naming_batch(batch, name, part.done[name]):
                part.moments.splits[name].add(rows, keys=keys, outlying=outlying)
            part.done[name] += 1

    def _stop(self, n_tokens: int, *, resumable: bool) -> NoReturn:
        message = f"stopped after {n_tokens:,} of {self.info.tokens:,} tokens"
        if resumable:
            message += f"; the sums are saved: run the same command with {argument('resume', True)} to continue"
        raise RunStopped(message, resumable=resumable)

    def restrict(self, pairs: Sequence[Pair]) -> RunPlan:
        """Return the plan of a pass for some of the pairs."""
        moments = {
            name: Moments(pairs, reservoir=split.reservoir.size, products=split.products, features=split.features)
            for name, split in self.moments.items()
        }
        return replace(self, moments=moments)

    @contextmanager
    def staged(self, plan: MemoryPlan, *, progress: Progress | None = None) -> Iterator[StagedMoments]:
        """Run the text through the model once, and hold states as the plan says until the end of the context."""
        with nullcontext() if plan.spill is None else spill_folder(plan.spill) as folder:
            splits: dict[str, Moments | StoredMoments] = dict(self.moments)
            for name, moments in self.moments.items():
                if plan.storage == "spill" or name != "fit":
                    n_rows = self.batches[name].n_picks if name in self.batches else 0
                    splits[name] = StoredMoments(moments, n_rows, folder and folder / f"{name}{SUFFIX}")
            pairs = self.moments["fit"].pairs
            staged = StagedMoments(splits, pairs, self.info, self.max_length, plan.targets_at_once, folder)
            try:
                self.store(staged, progress=progress)
                yield staged
            finally:
                staged.close()

    def store(self, staged: StagedMoments, *, progress: Progress | None = None) -> None:
        """Run the text through the model once, and store the states of the splits that are formed later."""
        done = 0
        with deferred_interrupt() as interrupt:
            for name, batches in self.batches.items():
                split = staged.splits[name]
                captured = self._capture(batches, split.sites, batches.max_picks, staged.spill)
                for number, states in enumerate(captured):
                    batch = states.batch
                    keys = sampling_keys(batch.document, batch.position, batch.sequence, seed=self.info.seed)
                    with naming_batch(batch, name, number):
                        split.add(states.at, keys=keys)
                    done += batch.n_tokens
                    del states
                    if progress:
                        progress(done, self.info.tokens)
                    if interrupt.is_set():
                        raise RunStopped(f"stopped after {done:,} of {self.info.tokens:,} tokens")


@contextmanager
def naming_batch(batch: Batch, split: str, number: int) -> Iterator[None]:
    """Name a batch and its documents in the error that its states raise."""
    try:
        yield
    except BadMoments as error:
        documents = batch.document
        raise BadMoments(
            f"{error} in batch {number} of the {split} split (documents {int(documents.min())} to "
            f"{int(documents.max())}); load the model in float32, or leave that text out"
        ) from error


def _outlying_rows(
    split: str,
    first: int,
    parts: Sequence[Moments],
    batches: Sequence[Batch],
    received: Sequence[Mapping[Site, Tensor]],
    group: ProcessGroup,
) -> list[Tensor]:
    """The rows of every batch that are outlying at any site: those of the parts, and of the other processes."""
    masks = [torch.zeros(batch.n_picks, dtype=torch.bool) for batch in batches]
    for number, (mask, batch, rows) in enumerate(zip(masks, batches, received, strict=True), start=first):
        for moments in parts:
            with naming_batch(batch, split, number):
                widened, _ = check_states(rows, moments.sites)
            if not moments.shift:
                moments.shift = moments.shift_for(widened)
            mask |= moments.outlying_rows(widened).cpu()
    return group.combine_masks(masks)


def product_dtype(model: Model, *, float32_products: bool = False) -> torch.dtype:
    """Return float64, or float32 where a device is many times faster in it, or where it suffices.

    `calibrated` collects three times the products of `mat`, and its penalty is far above their rounding. Without a
    penalty it would not be: h and h / rms(h) are nearly the same directions.
    """
    exact = _has_fast_float64(model.device) and not float32_products
    return torch.float64 if exact else torch.float32


def _has_fast_float64(device: torch.device) -> bool:
    """Whether float64 takes at most twice the time of float32: on CPUs and data-centre GPUs. Others take 32 times."""
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) in _FAST_FLOAT64
    return device.type == "cpu"


def sample_positions(available: int, width: int, *, everywhere: bool = False) -> Positions:
    """Return a sample of positions for all pairs, which cost more than the model itself: 15 %, never below 44 d.

    Least squares loses about (1 − R²) · d/n of its R²: at 44 d about a hundredth, and more text lowers it further.
    `everywhere` includes position 0 and special tokens.
    """
    share = min(1.0, max(0.15, 44 * width / available))
    skip_first = 0 if everywhere else 1
    if share == 1.0:
        return Positions("all", skip_first=skip_first, special=everywhere)
    return Positions("share", round(share + 5e-4, 3), skip_first=skip_first, special=everywhere)

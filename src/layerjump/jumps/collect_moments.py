"""The pass over the text: hidden states in, second moments out; with checkpoints, resume and several processes.

`plan_run` decides which documents, positions and moments a run takes; `RunPlan.run` performs it. A run can be stopped
at any moment and resumed, and several processes under `torchrun` can share it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_documents
from layerjump.data.positions import Positions
from layerjump.errors import BadArtifact, BadEstimator, BadMoments, BadText, RunStopped, argument
from layerjump.io import writing
from layerjump.jumps.cost_estimate import CostEstimate, estimate_cost
from layerjump.jumps.estimators.registry import find_estimator
from layerjump.jumps.jumps import RunInfo
from layerjump.jumps.maps import FEATURES, FeatureKind
from layerjump.jumps.moments import MAX_LENGTH, SPLITS, Moments, SplitMoments, sampling_keys
from layerjump.models.model import Model, capture_states, require_model
from layerjump.models.structure import Site, parse_pairs

log = logging.getLogger("layerjump")

Progress = Callable[[int, int], None]
"""Called after each batch with the tokens done and the tokens to do."""
SAVING_SHARE = 0.05
"""Saving sums takes at most this share of a run's time, however large they are."""


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
) -> RunPlan:
    """Plan a pass over a text: which documents, positions and second moments it takes.

    The arguments are those of `fit`. The `estimator` decides what is not passed, and checks the pairs; without one,
    pairs are to-last, features raw, and the validation split runs too. With a `strength`, ridge needs no validation
    split. Products of both features in float32 suffice for an estimator with a penalty.
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
    corpus = text if isinstance(text, Corpus) else load_text(text)
    documents = split_documents(len(corpus.documents), split, seed=seed)
    parts = {"fit": documents.fit, "test": documents.test}
    if use_validation:
        parts = {"fit": documents.fit, "validation": documents.validation, "test": documents.test}
    n_documents = sum(map(len, parts.values()))

    def cut(positions: Positions) -> dict[str, Batches]:
        """Batches of every split that has documents; tokens are shared out by their number."""
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
            positions = sample_positions(cut(positions)["fit"].n_picks, model.d_model)
    batches = cut(positions)
    n, d = batches["fit"].n_picks, model.d_model
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
    return RunPlan(model, moments, batches, info, max_length)


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
    progress: Progress | None = None,
) -> SplitMoments:
    """Collect second moments of hidden states in one pass over a text; the arguments are those of `fit`.

    The `estimator` decides what is not passed, and checks the pairs; without one, pairs are to-last, features raw, and
    the validation split runs too.
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

    @property
    def cost(self) -> CostEstimate:
        """The memory and arithmetic that the run will take."""
        return estimate_cost(self.model, self.moments["fit"], self.batches)

    def run(self, *, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> SplitMoments:
        """Run the text through the model and return its moments (with several processes: in the first one)."""
        self.cost.require_memory()
        group = checkpoint.group if checkpoint else ProcessGroup()
        collected = SplitMoments(**self.moments, info=self.info, max_length=self.max_length)
        steps = dict.fromkeys(self.batches, 0)
        if checkpoint is not None:
            collected, steps = checkpoint.restore(collected, steps)
        earlier_tokens = 0
        # The largest split runs last: memory peaks in its pass, where all sums are allocated already.
        for name in sorted(self.batches, key=lambda name: self.batches[name].n_tokens):
            moments = collected.splits[name]
            batches = self.batches[name].shard(group.rank, group.world)
            remaining = (batches[index] for index in range(steps[name], len(batches)))
            resumed_tokens = sum(batches[index].n_tokens for index in range(steps[name]))
            n_tokens = earlier_tokens + resumed_tokens * group.world
            captured = capture_states(self.model, remaining, moments.sites, reuse_buffer_rows=batches.max_picks)
            with deferred_interrupt() as interrupt, closing(captured) as stream:
                states = next(stream, None)
                group.share_shift(moments, states.at if states else None)
                while states is not None:
                    batch = states.batch
                    keys = sampling_keys(batch.document, batch.position, batch.sequence, seed=self.info.seed)
                    try:
                        moments.add(states.at, keys=keys)
                    except BadMoments as error:
                        documents = batch.document
                        raise BadMoments(
                            f"{error} in batch {steps[name]} of the {name} split (documents {int(documents.min())} to "
                            f"{int(documents.max())}); load the model in float32, or leave that text out"
                        ) from error
                    steps[name] += 1
                    if checkpoint:
                        checkpoint.save_if_due(collected, steps)
                    n_tokens += batch.n_tokens * group.world
                    if progress:
                        progress(n_tokens, self.info.tokens)
                    if interrupt.is_set():
                        message = f"stopped after {n_tokens:,} of {self.info.tokens:,} tokens"
                        if checkpoint is None:
                            raise RunStopped(message)
                        checkpoint.save(collected, steps)
                        raise RunStopped(
                            f"{message}; the sums are saved: run the same command with {argument('resume', True)} to "
                            f"continue",
                            resumable=True,
                        )
                    states = None  # release this batch's states before the next are computed
                    states = next(stream, None)
            earlier_tokens += self.batches[name].n_tokens
        for moments in collected.splits.values():
            group.reduce(moments)
        return collected


def product_dtype(model: Model, *, float32_products: bool = False) -> torch.dtype:
    """Return float64, or float32 where a device is many times faster in it, or where it suffices.

    `calibrated` collects three times the products of `mat`, and its penalty is far above their rounding. Without a
    penalty it would not be: h and h / rms(h) are nearly the same directions.
    """
    exact = model.device.type == "cpu" and not float32_products
    return torch.float64 if exact else torch.float32


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


@dataclass
class Checkpoint:
    """Saved moments of an unfinished run, one file for each process."""

    folder: Path
    every: float = 60.0
    """Seconds between saves; more where saving is slow."""
    resume: bool = False
    group: ProcessGroup = field(default_factory=lambda: ProcessGroup())

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()
        self._seconds_to_save = 0.0

    @property
    def path(self) -> Path:
        """The file of this process."""
        return self.folder / f"unfinished-{self.group.rank}-of-{self.group.world}.safetensors"

    def restore(self, fresh: SplitMoments, steps: dict[str, int]) -> tuple[SplitMoments, dict[str, int]]:
        """Return the saved moments and steps if the run is to be resumed, or else those passed in."""
        if not self.resume or not self.path.is_file():
            return fresh, steps
        saved, progress = SplitMoments.load_unfinished(self.path)
        ours, theirs = (
            asdict(run.info) | {"max_length": run.max_length, "features": run.fit.features} for run in (fresh, saved)
        )
        changed = [name for name in ours if theirs[name] != ours[name]]
        if changed or saved.fit.pairs != fresh.fit.pairs or set(progress or {}) != set(steps):
            changes = ", ".join(f"{name} {theirs[name]} → {ours[name]}" for name in changed)
            raise BadArtifact(
                f"the unfinished run in {self.folder} had other settings ({changes or 'pairs'}); use the same, or "
                f"{argument('force', True)} instead of {argument('resume', True)} to start again"
            )
        return saved, progress or steps

    def save_if_due(self, collected: SplitMoments, steps: Mapping[str, int]) -> None:
        """Save if the last save is long enough ago."""
        wait = max(self.every, self._seconds_to_save / SAVING_SHARE)
        if time.monotonic() - self._saved_at >= wait:
            self.save(collected, steps)

    def save(self, collected: SplitMoments, steps: Mapping[str, int]) -> None:
        """Save the moments and the number of batches done by split."""
        start = time.monotonic()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        collected.save(self.path, progress=steps)
        self._saved_at = time.monotonic()
        self._seconds_to_save = self._saved_at - start

    def clear(self) -> None:
        """Remove the unfinished files of all processes, and of a tuning that has ended."""
        for path in self.folder.glob("unfinished-*"):
            path.unlink(missing_ok=True)


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Let a batch finish before Ctrl-C or a termination request, which set the event: half-added sums are useless.

    A second Ctrl-C stops at once, and loses what came after the last save.
    """
    interrupt = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may handle signals
        return

    def request(number: int, frame: object) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process, and the number of processes that share a run."""

    rank: int = 0
    world: int = 1

    @classmethod
    def from_environment(cls) -> ProcessGroup:
        """Join the process group that `torchrun` started, if it did."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            # Sums are on the devices, counts and samples in memory.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), world)

    def leave(self) -> None:
        """Leave the group: a process that ends with open connections may be aborted on exit."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def share_shift(self, moments: Moments, first: Mapping[Site, Tensor] | None) -> None:
        """Give every process the first process's shift: sums about one shift simply add."""
        if self.world == 1:
            return
        ours = moments.shift or (moments.shift_for(first) if first else {})
        message: list[Any] = [{str(site): shift.cpu() for site, shift in ours.items()}]
        _communicate(lambda: dist.broadcast_object_list(message, src=0))
        if moments.n == 0:
            moments.set_shift({Site.parse(site): shift for site, shift in message[0].items()})

    def reduce(self, moments: Moments) -> None:
        """Add all processes' sums into the first process's."""
        if self.world == 1:
            return
        count = torch.tensor(moments.n, dtype=torch.float64)
        totals = [count, *(moments.sums.named().values() if moments.sums else ())]
        _communicate(lambda: [dist.reduce(total, dst=0) for total in totals])
        moments.n = int(count.item())
        reservoirs: list[Any] | None = [None] * self.world if self.rank == 0 else None
        _communicate(lambda: dist.gather_object(moments.reservoir, reservoirs, dst=0))
        for other in (reservoirs or [])[1:]:
            moments.reservoir.merge(other)


def _communicate(action: Callable[[], object]) -> None:
    try:
        action()
    except RuntimeError as error:
        raise RunStopped(
            f"another process of this run has died; run the same command with {argument('resume', True)} to continue "
            f"from the saved sums",
            resumable=True,
        ) from error

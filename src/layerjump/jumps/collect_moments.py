"""The pass over the text: hidden states in, second moments out; with checkpoints, resume and several processes.

`plan_run` decides which documents, positions and moments a run takes; `RunPlan.run` performs it. A run can be stopped
at any moment and resumed, and several processes under `torchrun` can share it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_documents
from layerjump.data.positions import Positions
from layerjump.errors import (
    BadArtifact,
    BadEstimator,
    BadMoments,
    BadText,
    NewerFormat,
    RunStopped,
    WrongModel,
    argument,
    one_line,
)
from layerjump.io import parse_json, read_tensors, write_tensors, writing
from layerjump.jumps.cost_estimate import CostEstimate, estimate_cost
from layerjump.jumps.estimators.registry import find_estimator
from layerjump.jumps.jumps import RunInfo
from layerjump.jumps.maps import FEATURES, FeatureKind
from layerjump.jumps.moments import Moments, Sums, sampling_keys
from layerjump.jumps.serialization import Pairing, Record, RunInfoRecord, read_record
from layerjump.models.model import Model, capture_states, require_model
from layerjump.models.structure import Site, parse_pairs

log = logging.getLogger("layerjump")

Progress = Callable[[int, int], None]
"""Called after each batch with the tokens done and the tokens to do."""
MAX_LENGTH = 512
"""Longest sequence, unless a run is planned with another; longer documents are cut."""
SPLITS = ("fit", "validation", "test")
FORMAT = 1
KIND = "layerjump moments"
MAX_SAMPLED = 100_000
"""Raw states that a file may claim to hold: memory for all of them is allocated at once."""
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

    Args:
        model: The model to run.
        text: A corpus, or anything that `load_text` reads.
        estimator: Collect what this estimator needs. It decides what is not passed below, and checks the pairs.
        strength: The estimator's regularisation strength: with one, ridge needs no validation split.
        pairs: to-last, to-final, predictions, adjacent, all, submodules, or a list such as `0:6,3:6`. Default: the
            estimator's, or to-last.
        positions: one, all, `sample=8` or `15%`. Default: all; for all pairs a sample (15 %, never fewer than 44 d).
            Jumps between levels skip position 0; maps meant for every position (sub-modules) include it.
        tokens: Number of tokens to run, over all splits. Default: the whole text.
        split: Shares or numbers of documents in the fit, validation and test splits.
        seed: Seed of the split and of the positions.
        use_validation: Whether to run the validation split. Default: whether the estimator needs it; without one, yes.
        max_length: Longest sequence; longer documents are cut.
        features: What maps read of a source state h: raw (h), rms (h / rms(h)) or both. Default: the estimator's.
        float32_products: Whether the products of both features are formed in float32, which suffices for an estimator
            with a penalty. Default: the estimator's.
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
    """Collect second moments of hidden states in one pass over a text; the arguments are those of `plan_run`."""
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

    def run(
        self,
        *,
        progress: Progress | None = None,
        checkpoint: Checkpoint | None = None,
        group: ProcessGroup | None = None,
    ) -> SplitMoments:
        """Run the text through the model and return its moments (with several processes: in the first one)."""
        self.cost.require_memory()
        group = group or ProcessGroup()
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
                    if interrupt.requested:
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


@dataclass(frozen=True)
class SplitMoments:
    """Moments of the fit, validation and test documents, and the run they come from."""

    fit: Moments
    validation: Moments
    test: Moments
    info: RunInfo
    max_length: int = MAX_LENGTH

    @property
    def splits(self) -> dict[str, Moments]:
        """The moments by the name of their split."""
        return {"fit": self.fit, "validation": self.validation, "test": self.test}

    def save(self, path: Path, *, progress: Mapping[str, int] | None = None) -> None:
        """Write everything to one file; `progress` (batches done by split) marks an unfinished run."""
        tensors = {
            f"{_ON_DISK[split]}|{name}": tensor
            for split, moments in self.splits.items()
            for name, tensor in _pack(moments).items()
        }
        about = asdict(self.info) | {"max_length": self.max_length, "n_pairs": len(self.fit.pairs)}
        header = {
            "format": FORMAT,
            "about": about,
            "pairs": [[str(source), str(target)] for source, target in self.fit.pairs],
            "full_targets": self.fit.full_targets,
            "reads": self.fit.features,
            "reservoir": self.fit.reservoir.size,
            "n": {_ON_DISK[split]: moments.n for split, moments in self.splits.items()},
            "progress": progress and {_ON_DISK[name]: step for name, step in progress.items()},
        }
        write_tensors(path, tensors, {"kind": KIND, "head": json.dumps(header)})

    @classmethod
    def load(cls, path: Path) -> SplitMoments:
        """Read the moments of a finished run."""
        collected, progress = cls.load_unfinished(path)
        if progress is not None:
            raise BadArtifact(
                f"{path} holds the moments of an unfinished run; finish it with {argument('resume', True)}"
            )
        return collected

    @classmethod
    def load_unfinished(cls, path: Path) -> tuple[SplitMoments, dict[str, int] | None]:
        """Read moments, and the batches done by split of an unfinished run (None for a finished one)."""
        tensors, metadata = read_tensors(path)
        if metadata.get("kind") != KIND or "head" not in metadata:
            raise BadArtifact(f"{path} is not a moments file; fit with {argument('save_moments', True)} to write one")
        data = parse_json(metadata["head"], path)
        version = read_record(_Version, data, path).format
        if version > FORMAT:
            raise NewerFormat(
                f"{path} has moments format {str(version)[:50]}, but this layerjump reads up to {FORMAT}; upgrade it"
            )
        header = read_record(MomentsHeader, data, path)
        try:
            splits = {name: _unpack(_ON_DISK[name], header, tensors) for name in SPLITS}
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise BadArtifact(
                f"{path} is damaged: {type(error).__name__} {one_line(error)}; collect the moments again"
            ) from error
        about = dict(header.about)
        max_length = about.pop("max_length")
        progress = header.progress
        if progress is not None:
            progress = {name: progress[_ON_DISK[name]] for name in SPLITS if _ON_DISK[name] in progress}
        return cls(**splits, info=RunInfo(**about), max_length=max_length), progress


def merge_moments(runs: Sequence[SplitMoments]) -> SplitMoments:
    """Add the moments of several runs: other text, other machines, other days, but the same model."""
    first = runs[0]
    merged = {
        name: Moments(
            first.fit.pairs,
            reservoir=first.fit.reservoir.size,
            full_targets=first.fit.full_targets,
            features=first.fit.features,
        )
        for name in SPLITS
    }
    hashes: list[str] = []
    for run in runs:
        if first.info.fingerprint != run.info.fingerprint:
            raise WrongModel(
                f"these moments come from different weights: {first.info.model} ({first.info.fingerprint[:12]}) and "
                f"{run.info.model} ({run.info.fingerprint[:12]}); merge runs of one model only"
            )
        if run.info.text_sha256 in hashes:
            raise BadMoments(
                f"the text {run.info.text!r} is in more than one of these runs; merging would count it twice"
            )
        hashes.append(run.info.text_sha256)
        for name, moments in run.splits.items():
            merged[name].merge(moments)
    info = replace(
        first.info,
        text=" + ".join(run.info.text for run in runs),
        text_sha256="+".join(hashes),
        tokens=sum(run.info.tokens for run in runs),
    )
    return SplitMoments(**merged, info=info, max_length=first.max_length)


class _Version(Record):
    format: int


class _About(RunInfoRecord):
    max_length: int


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class MomentsHeader(Record):
    """The header of a moments file. Files written before there were features lack `reads`."""

    about: _About
    pairs: Annotated[list[Pairing], Field(min_length=1)]
    full_targets: bool
    reads: FeatureKind = "raw"
    reservoir: Annotated[int, Field(ge=0, le=MAX_SAMPLED)]
    n: dict[Literal["fit", "select", "test"], _Count]
    progress: dict[str, _Count] | None


_ON_DISK: dict[str, Literal["fit", "select", "test"]] = {"fit": "fit", "validation": "select", "test": "test"}
"""Name of every split in a moments file."""


def _pack(moments: Moments) -> dict[str, Tensor]:
    """Everything that moments hold, by its name in a file."""
    tensors = _name_sums(moments.sums) if moments.sums else {}
    tensors |= {f"shift/{site}": shift for site, shift in moments.shift.items()}
    if len(moments.reservoir.keys):
        tensors["reservoir-keys"] = moments.reservoir.keys
    tensors |= {f"reservoir/{site}": rows for site, rows in moments.reservoir.states.items()}
    return tensors


def _name_sums(sums: Sums) -> dict[str, Tensor]:
    tensors = {"norm": sums.norm, "cosine": sums.cosine, "angle": sums.angle}
    tensors |= {f"sum/{site}": tensor for site, tensor in sums.sum.items()}
    tensors |= {f"square/{site}": tensor for site, tensor in sums.gram.items()}
    tensors |= {f"diagonal/{site}": tensor for site, tensor in sums.diagonal.items()}
    return tensors | {f"cross/{a}>{b}": tensor for (a, b), tensor in sums.cross.items()}


def _unpack(split: Literal["fit", "select", "test"], header: MomentsHeader, tensors: Mapping[str, Tensor]) -> Moments:
    moments = Moments(header.pairs, reservoir=header.reservoir, full_targets=header.full_targets, features=header.reads)
    moments.n = header.n[split]
    stored = {
        name.removeprefix(f"{split}|"): tensor for name, tensor in tensors.items() if name.startswith(f"{split}|")
    }
    if not stored and moments.n:
        raise ValueError(f"the {split} split has {moments.n} positions, but no sums")
    if not stored:
        return moments
    sampled = {
        Site.parse(name.removeprefix("reservoir/")): stored.pop(name)
        for name in list(stored)
        if name.startswith("reservoir/")
    }
    if sampled:
        moments.reservoir.add(sampled, stored.pop("reservoir-keys"))
    shift = {site: stored.pop(f"shift/{site}") for site in moments.sites}
    moments.shift = shift
    # Compared before memory is allocated: a shift may claim to be very wide.
    expected = {name: sums.shape for name, sums in _name_sums(moments.zeros("meta")).items()}
    if expected != {name: tensor.shape for name, tensor in stored.items()}:
        raise ValueError(f"the {split} split's sums are not those of its pairs")
    moments.set_shift(shift)
    assert moments.sums is not None
    # Copied into memory of our own: matrix products round differently on memory aligned as in a file.
    for name, total in _name_sums(moments.sums).items():
        total.copy_(stored[name])
    return moments


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


@dataclass
class Interrupt:
    """Whether a signal has asked the run to stop."""

    requested: bool = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Let a batch finish before Ctrl-C or a termination request stops the run: half-added sums are useless.

    A second Ctrl-C stops at once, and loses what came after the last save.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may handle signals
        return

    def request(number: int, frame: object) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

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
        totals = [count, *(moments.sums.tensors() if moments.sums else ())]
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

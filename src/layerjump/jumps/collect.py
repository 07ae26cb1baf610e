"""The pass over the text: hidden states in, second-moment sums out; checkpoint, resume, distributed.

Several processes under `torchrun`: each takes its share of the batches, and their sums are added at the end.

The sums of a run's three splits, with where they come from: saved, loaded, merged.

An unfinished run: its saved sums, and how it is stopped without losing them.

The pass over the text: states in, sums out. It can be cut short at any moment and taken up again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_documents
from layerjump.data.positions import Positions
from layerjump.errors import (
    BadArtifact,
    BadMoments,
    BadText,
    NewerFormat,
    RunStopped,
    WrongModel,
    argument,
    one_line,
)
from layerjump.io import parse_json, read_tensors, write_tensors, writing
from layerjump.jumps.jumps import Provenance
from layerjump.jumps.maps import FEATURES, FeatureKind
from layerjump.jumps.memory import CostEstimate, estimate_cost
from layerjump.jumps.pairs import Pair, parse_pairs
from layerjump.jumps.serialization import check_members
from layerjump.jumps.statistics import Moments, keys_of
from layerjump.models.activations import States, capture_states
from layerjump.models.fingerprint import describe_model
from layerjump.models.model import Model, require_model
from layerjump.models.structure import Site


@dataclass(frozen=True)
class ProcessGroup:
    """This process's place among the processes of a run."""

    rank: int = 0
    world: int = 1

    @classmethod
    def from_environment(cls) -> ProcessGroup:
        """Join the group `torchrun` started, if it did."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # each its own
        if not dist.is_initialized():
            # Sums are on the devices, counts and samples in memory.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), world)

    def leave(self) -> None:
        """Leave the group: a process that ends with its connections open may be aborted on the way out."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def share_shift(self, moments: Moments, first: dict[Site, Tensor] | None) -> None:
        """Give every process the first process's shift: sums about one shift simply add."""
        if self.world == 1:
            return
        mine = moments.shift or (moments.shift_for(first) if first else {})
        box: list[Any] = [{str(site): shift.cpu() for site, shift in mine.items()}]
        _together(lambda: dist.broadcast_object_list(box, src=0))
        if moments.n == 0:
            moments.set_shift({Site.parse(site): shift for site, shift in box[0].items()})

    def reduce(self, moments: Moments) -> None:
        """Add all processes' sums into the first process's."""
        if self.world == 1:
            return
        count = torch.tensor(moments.n, dtype=torch.float64)
        _together(lambda: [dist.reduce(total, dst=0) for total in [count, *moments.sums.values()]])
        moments.n = int(count.item())
        reservoirs: list[Any] | None = [None] * self.world if self.rank == 0 else None
        _together(lambda: dist.gather_object(moments.reservoir, reservoirs, dst=0))
        for other in (reservoirs or [])[1:]:
            moments.reservoir.merge(other)


def _together(action: Any) -> None:
    try:
        action()
    except RuntimeError as error:
        raise RunStopped(
            f"another process of this run has died; run the same command with {argument('resume', True)} to continue "
            f"from the saved sums",
            resumable=True,
        ) from error


FORMAT = 1
KIND = "layerjump moments"
SPLITS = ("fit", "select", "test")
_OF_A_FIT = ("n_fit", "n_select", "n_test", "estimator", "settings", "layerjump")
ABOUT = [each.name for each in dataclasses.fields(Provenance) if each.name not in _OF_A_FIT]
"""What is known of a run before anything is fitted."""

MOST_KEPT = 100_000
"""Raw states that a file may say it keeps: room for all of them is taken at once."""


@dataclass(frozen=True)
class SplitMoments:
    """Moments of the fit, select and test documents, and what was run to get them."""

    splits: dict[str, Moments]
    about: dict[str, Any]

    @property
    def fit(self) -> Moments:
        return self.splits["fit"]

    @property
    def select(self) -> Moments:
        return self.splits["select"]

    @property
    def test(self) -> Moments:
        return self.splits["test"]

    def save(self, path: Path, *, progress: dict[str, int] | None = None) -> None:
        """Write everything to one file; `progress` marks an unfinished run."""
        tensors = {
            f"{split}|{name}": tensor
            for split, moments in self.splits.items()
            for name, tensor in pack(moments).items()
        }
        head = {
            "format": FORMAT,
            "about": self.about,
            "pairs": [[str(a), str(b)] for a, b in self.fit.pairs],
            "full_targets": self.fit.full_targets,
            "reads": self.fit.features,
            "reservoir": self.fit.reservoir.size,
            "n": {split: moments.n for split, moments in self.splits.items()},
            "progress": progress,
        }
        write_tensors(path, tensors, {"kind": KIND, "head": json.dumps(head)})

    @classmethod
    def load(cls, path: Path) -> SplitMoments:
        """Read a finished run's sums."""
        collected, progress = cls.load_unfinished(path)
        if progress is not None:
            raise BadArtifact(
                f"{path} holds the sums of an unfinished run; finish it with {argument('resume', True)}"
            )
        return collected

    @classmethod
    def load_unfinished(cls, path: Path) -> tuple[SplitMoments, dict[str, int] | None]:
        """Read sums, and how far the run had come (None: to its end)."""
        tensors, metadata = read_tensors(path)
        if metadata.get("kind") != KIND:
            raise BadArtifact(
                f"{path} is no file of moments; fit with {argument('save_moments', True)} to write one"
            )
        try:
            head = parse_json(metadata["head"], path)
            if head["format"] > FORMAT:
                raise NewerFormat(
                    f"{path} has moments format {head['format']}, but this layerjump knows {FORMAT}; upgrade it"
                )
            pairs = [(Site.parse(a), Site.parse(b)) for a, b in head["pairs"]]
            check_members(Provenance, head["about"], ABOUT, path)
            if type(head["about"]["max_length"]) is not int:
                raise ValueError("max_length is no integer")
            splits = {split: _unpack(split, head, pairs, tensors) for split in SPLITS}
            return cls(splits, head["about"]), head["progress"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise BadArtifact(
                f"{path} is damaged: {type(error).__name__} {one_line(error)}; collect the sums again"
            ) from error


def merge_moments(runs: Sequence[SplitMoments]) -> SplitMoments:
    """Add several runs' sums: other text, other machines, other days, but the same model."""
    first = runs[0]
    kept = first.fit
    made = {
        split: Moments(
            kept.pairs,
            reservoir=kept.reservoir.size,
            full_targets=kept.full_targets,
            features=kept.features,
        )
        for split in SPLITS
    }
    texts: list[str] = []
    for run in runs:
        _check_same_model(first, run)
        if run.about["text_sha256"] in texts:
            raise BadMoments(
                f"the text {run.about['text']!r} is in more than one of these runs; merging would count it twice"
            )
        texts.append(run.about["text_sha256"])
        for name, part in run.splits.items():
            made[name].merge(part)
    about = first.about | {
        "text": " + ".join(run.about["text"] for run in runs),
        "text_sha256": "+".join(texts),
        "tokens": sum(run.about["tokens"] for run in runs),
    }
    return SplitMoments(made, about)


def _check_same_model(first: SplitMoments, run: SplitMoments) -> None:
    if first.about["fingerprint"] != run.about["fingerprint"]:
        raise WrongModel(
            f"these sums come from different weights: {first.about['model']} ({first.about['fingerprint'][:12]}) and "
            f"{run.about['model']} ({run.about['fingerprint'][:12]}); merge runs of one model only"
        )


def pack(moments: Moments) -> dict[str, Tensor]:
    """Everything a `Moments` holds, by name."""
    tensors = dict(moments.sums)
    tensors |= {f"shift/{site}": shift for site, shift in moments.shift.items()}
    if len(moments.reservoir.keys):
        tensors["reservoir-keys"] = moments.reservoir.keys
    tensors |= {f"reservoir/{site}": rows for site, rows in moments.reservoir.states.items()}
    return tensors


def _unpack(
    split: str, head: dict[str, Any], pairs: list[Pair], tensors: dict[str, Tensor]
) -> Moments:
    features = head.get("reads", "raw")  # files older than features have no such key
    if features not in FEATURES:
        raise ValueError(f"there are no features {features!r}")
    size = head["reservoir"]
    if type(size) is not int or not 0 <= size <= MOST_KEPT:
        raise ValueError(f"it keeps {str(size)[:50]} states")
    moments = Moments(pairs, reservoir=size, full_targets=head["full_targets"], features=features)
    moments.n = head["n"][split]
    if not pairs:
        raise ValueError("it pairs no sites")
    if type(moments.n) is not int or not 0 <= moments.n < 2**53:
        raise ValueError(f"the {split} split has {str(moments.n)[:50]} positions")
    mine = {
        name.partition("|")[2]: t for name, t in tensors.items() if name.startswith(f"{split}|")
    }
    if not mine and moments.n:
        raise ValueError(f"the {split} split has {moments.n} positions, but no sums")
    if not mine:
        return moments
    reservoir = {
        Site.parse(name.removeprefix("reservoir/")): mine.pop(name)
        for name in list(mine)
        if name.startswith("reservoir/")
    }
    if reservoir:
        moments.reservoir.add(reservoir, mine.pop("reservoir-keys"))
    shift = {site: mine.pop(f"shift/{site}") for site in moments.sites}
    # Before any room is taken: a shift may claim to be very wide.
    if moments.shapes(shift) != {name: tuple(tensor.shape) for name, tensor in mine.items()}:
        raise ValueError(f"the {split} split's sums are not those of its pairs")
    moments.set_shift(shift)
    # Copied into tensors of our own: matrix products round differently on memory aligned as in a file.
    for name, total in moments.sums.items():
        total.copy_(mine[name])
    return moments


SAVING_SHARE = 0.05
"""Saving sums takes at most this share of a run's time, however large they are."""


@dataclass
class Interrupt:
    """Whether somebody asked the run to stop."""

    asked: bool = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Let a batch finish before Ctrl-C or a termination request stops the run: half-added sums are worthless.

    A second Ctrl-C stops at once, and loses what came after the last save.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may handle signals
        return

    def ask(number: int, frame: object) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Checkpoint:
    """Saved sums of an unfinished run, one file for each process."""

    folder: Path
    every: float = 60.0
    resume: bool = False
    group: ProcessGroup = field(default_factory=ProcessGroup)

    def __post_init__(self) -> None:
        self._saved = time.monotonic()
        self._cost = 0.0

    @property
    def path(self) -> Path:
        return self.folder / f"unfinished-{self.group.rank}-of-{self.group.world}.safetensors"

    def restore(
        self, fresh: SplitMoments, steps: dict[str, int]
    ) -> tuple[SplitMoments, dict[str, int]]:
        """What was saved, if the run is to be taken up and was started with the same settings."""
        if not self.resume or not self.path.is_file():
            return fresh, steps
        saved, progress = SplitMoments.load_unfinished(self.path)
        mine, theirs = (each.about | {"features": each.fit.features} for each in (fresh, saved))
        changed = [key for key in mine if theirs.get(key) != mine[key]]
        if changed or saved.fit.pairs != fresh.fit.pairs or set(progress or {}) != set(steps):
            what = ", ".join(f"{key} {theirs.get(key)} → {mine[key]}" for key in changed) or "pairs"
            raise BadArtifact(
                f"the unfinished run in {self.folder} had other settings ({what}); give the same, or "
                f"{argument('force', True)} in place of {argument('resume', True)} to start again"
            )
        return saved, progress or steps

    def save_now_and_then(self, done: SplitMoments, steps: dict[str, int]) -> None:
        """Save if it is time: every so many seconds, less often if saving is slow."""
        if time.monotonic() - self._saved >= max(self.every, self._cost / SAVING_SHARE):
            self.save(done, steps)

    def save(self, done: SplitMoments, steps: dict[str, int]) -> None:
        start = time.monotonic()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        done.save(self.path, progress=dict(steps))
        self._saved = time.monotonic()
        self._cost = self._saved - start

    def clear(self) -> None:
        """Remove what a finished run no longer needs: all processes' sums, and a tuning that has come to its end."""
        for path in self.folder.glob("unfinished-*"):
            path.unlink(missing_ok=True)


log = logging.getLogger("layerjump")

Progress = Callable[[int, int], None]
"""Called after each batch with the tokens done and the tokens to do."""


@dataclass(frozen=True)
class RunPlan:
    """A run decided on but not started: its batches by split, and all that its result depends on."""

    model: Model
    moments: dict[str, Moments]
    batches: dict[str, Batches]
    about: dict[str, Any]

    @property
    def bill(self) -> CostEstimate:
        return estimate_cost(self.model, self.moments["fit"], self.batches)

    @property
    def in_order(self) -> list[str]:
        """The splits as they are run, the largest last.

        The peak of memory is then in its pass, where all sums are there already, however long the text is.
        """
        return sorted(self.batches, key=lambda name: self.batches[name].n_tokens)

    def run(
        self,
        *,
        progress: Progress | None = None,
        checkpoint: Checkpoint | None = None,
        group: ProcessGroup | None = None,
    ) -> SplitMoments:
        """Run the text through the model and return the sums (with several processes: the first one's)."""
        self.bill.require_memory()
        group = group or ProcessGroup()
        done = SplitMoments(self.moments, self.about)
        steps = dict.fromkeys(self.batches, 0)
        if checkpoint is not None:
            done, steps = checkpoint.restore(done, steps)
        for name in self.in_order:
            one_pass = _Pass(self, name, done, steps, progress, checkpoint)
            one_pass.run(self.batches[name].shard(group.rank, group.world), group)
        for moments in done.splits.values():
            group.reduce(moments)
        return done


def plan_run(
    model: Model,
    text: Corpus | str | Path,
    *,
    pairs: str = "to-last",
    positions: Positions | str | None = None,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    select: bool = True,
    max_length: int = 512,
    features: FeatureKind = "raw",
    float32_products: bool = False,
) -> RunPlan:
    """Decide on a run: which documents, positions and sums (of which features of the sources' states).

    Without `positions`, all are taken; for `all` pairs a sample (15 %, never fewer than 44 d). Jumps between
    levels skip position 0; maps meant for every position (sub-modules) take it in. `rough` forms the many products
    of both features in float32: enough for an estimator with a penalty.
    """
    require_model(model)
    if tokens is not None and tokens < 1:
        raise BadText(f"tokens given is {tokens}; give 1 or more, or none for the whole text")
    corpus = text if isinstance(text, Corpus) else load_text(text)
    chosen = parse_pairs(pairs, model.structure)
    first = 1 if all(site.between_blocks for pair in chosen for site in pair) else 0
    parts = split_documents(len(corpus.documents), split, seed=seed)
    wanted = {name: getattr(parts, name) for name in SPLITS if name != "select" or select}
    cut = partial(_cut, model, corpus, wanted, seed=seed, tokens=tokens, max_length=max_length)
    if positions is None:
        positions = Positions("all", skip_first=first, special=first == 0)
        if pairs == "all":
            positions = sample_positions(cut(positions)["fit"].n_picks, model.d_model)
    elif isinstance(positions, str):
        positions = Positions.parse(positions, skip_first=first, special=first == 0)
    made = cut(positions)
    if made["fit"].n_picks < 5 * model.d_model:
        _warn_few(made["fit"].n_picks, model.d_model)
    products = product_dtype(model, float32_products=float32_products and features == "both")
    return RunPlan(
        model,
        {name: Moments(chosen, products=products, features=features) for name in SPLITS},
        made,
        _about(model, corpus, positions, made, split, seed, max_length, chosen),
    )


def _cut(
    model: Model,
    corpus: Corpus,
    wanted: Mapping[str, Sequence[int]],
    positions: Positions,
    *,
    seed: int,
    tokens: int | None,
    max_length: int,
) -> dict[str, Batches]:
    """Batches of every split that has documents; tokens are shared out by their number."""
    total = sum(map(len, wanted.values()))
    return {
        name: make_batches(
            corpus,
            model.tokenization,
            positions,
            documents=documents,
            seed=seed,
            tokens_wanted=None if tokens is None else max(1, tokens * len(documents) // total),
            max_length=max_length,
        )
        for name, documents in wanted.items()
        if documents
    }


def collect_moments(model: Model, text: Corpus | str | Path, **settings: Any) -> SplitMoments:
    """Sum a text's states in one pass; the settings are `plan`'s."""
    return plan_run(model, text, **settings).run()


def product_dtype(model: Model, *, float32_products: bool = False) -> torch.dtype:
    """float64 products, but float32 where a device does those many times faster, or where there are many.

    What `calibrated` collects is three times `mat`'s products, and its penalty is far above their rounding. Without
    a penalty it would not be: h and h / rms(h) are nearly the same directions.
    """
    exact = model.device.type == "cpu" and not float32_products
    return torch.float64 if exact else torch.float32


def sample_positions(available: int, width: int, *, everywhere: bool = False) -> Positions:
    """All pairs cost more than the model itself, so they sample positions: 15 %, never fewer than 44 d.

    Least squares loses about (1 − R²) · d/n of its R²: at 44 d about a hundredth, and more text lowers it further.
    `everywhere` lets position 0 and special tokens be drawn.
    """
    share = min(1.0, max(0.15, 44 * width / available))
    first = 0 if everywhere else 1
    if share == 1.0:
        return Positions("all", skip_first=first, special=everywhere)
    return Positions("share", round(share + 5e-4, 3), skip_first=first, special=everywhere)


def _warn_few(n: int, width: int) -> None:
    inflation = f"{1 + width / (n - width - 1):.2f}" if n > width + 1 else "unbounded"
    log.warning(
        "only %s positions to fit maps of width %s: expect held-out errors inflated by 1 + d/(n−d−1) = %s; "
        "give more text, or use ridge or low-rank",
        f"{n:,}",
        width,
        inflation,
    )


def _about(
    model: Model,
    corpus: Corpus,
    positions: Positions,
    made: dict[str, Batches],
    split: str,
    seed: int,
    max_length: int,
    pairs: list[Pair],
) -> dict[str, Any]:
    return {
        **describe_model(model),
        "text": corpus.name,
        "text_sha256": corpus.sha256,
        "tokens": sum(split.n_tokens for split in made.values()),
        "positions": str(positions),
        "skip_first": positions.skip_first,
        "special": positions.special,
        "split": split,
        "seed": seed,
        "max_length": max_length,
        "n_pairs": len(pairs),
    }


@dataclass
class _Pass:
    """One split's pass, from wherever it stood."""

    plan: RunPlan
    split: str
    done: SplitMoments
    steps: dict[str, int]
    progress: Progress | None
    checkpoint: Checkpoint | None

    def run(self, mine: Batches, group: ProcessGroup) -> None:
        moments, start = self.done.splits[self.split], self.steps[self.split]
        rest = (mine[index] for index in range(start, len(mine)))
        mine_before = sum(mine[index].n_tokens for index in range(start))
        tokens = self._tokens_before() + mine_before * group.world
        with (
            deferred_interrupt() as interrupt,
            closing(
                capture_states(self.plan.model, rest, moments.sites, buffer_rows=mine.most_picks)
            ) as stream,
        ):
            found = next(stream, None)
            group.share_shift(moments, found.at if found else None)
            while found is not None:
                self._add(moments, found)
                tokens += found.batch.n_tokens * group.world
                if self.progress:
                    self.progress(tokens, self.plan.about["tokens"])
                if interrupt.asked:
                    raise self._stopped(tokens)
                found = None  # let go of this batch's states before the next are made
                found = next(stream, None)

    def _add(self, moments: Moments, found: States) -> None:
        batch = found.batch
        seed = self.plan.about["seed"]
        keys = keys_of(batch.document, batch.position, batch.sequence, seed=seed)
        try:
            moments.add(found.at, keys=keys)
        except BadMoments as error:
            documents = sorted(set(found.batch.document.tolist()))
            raise BadMoments(
                f"{error} in batch {self.steps[self.split]} of the {self.split} split (documents {documents[0]} to "
                f"{documents[-1]}); load the model in float32, or leave that text out"
            ) from error
        self.steps[self.split] += 1
        if self.checkpoint:
            self.checkpoint.save_now_and_then(self.done, self.steps)

    def _tokens_before(self) -> int:
        earlier = self.plan.in_order[: self.plan.in_order.index(self.split)]
        return sum(self.plan.batches[name].n_tokens for name in earlier)

    def _stopped(self, tokens: int) -> RunStopped:
        if not self.checkpoint:
            return RunStopped(f"stopped after {tokens:,} of {self.plan.about['tokens']:,} tokens")
        self.checkpoint.save(self.done, self.steps)
        return RunStopped(
            f"stopped after {tokens:,} of {self.plan.about['tokens']:,} tokens; the sums are saved: run the same "
            f"command with {argument('resume', True)} to continue",
            resumable=True,
        )

"""Models and jump sets served under names; background fits.

The models and jump sets that were given at the start, under names; loaded on first use, read one at a time.

Fits in the background: how far each is, and how it ended.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from layerjump.errors import BadText, CannotServe, LayerjumpError, argument, one_line
from layerjump.generation.calibration.serialization import FILE_NAME as EXIT_RULE
from layerjump.jumps.cache import cache_folder, cached_jumps, has_cached_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens, read_trajectories
from layerjump.models.fingerprint import fingerprint
from layerjump.models.loading import load
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.server.worker import NOT_YET, UNFORESEEN, Answer, Answers, Worker, encode, refusal

FITTED = ("mat", "affine", "ridge")
"""Estimators that the page fits itself, all in one pass over the built-in text."""
MOST_TOKENS = 256
"""Positions of a text that are shown: a grid of more is neither quick to make nor possible to look at."""
MOST_READ = 1024
"""Tokens of a text that the model reads: nobody else is answered meanwhile."""

State = Literal["not loaded", "loading", "ready", "failed"]
_NAME = re.compile(r"[\w.+-]{1,60}")


@dataclass(frozen=True)
class LensQuestion:
    """What `/api/lens` was asked."""

    text: str
    lenses: tuple[str, ...]
    k: int = 10
    tokens: tuple[int | str, ...] = ()
    js: bool = False


@dataclass
class ServedModel:
    """One model: its desk, its lenses, and how far it is loaded. Only its desk's thread changes it."""

    name: str
    source: str
    sets: Mapping[str, Jumps]
    desk: Worker
    state: State = "not loaded"
    error: str | None = None
    model: Model | None = None
    lenses: dict[str, Lens] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    """Estimators whose jumps are on disk but not in memory yet."""
    folders: dict[str, Path] = field(default_factory=dict)
    """Lens → where its jumps are or will be, and maybe an exit rule with them."""

    def load(self) -> Model:
        """The model, loaded on the first call."""
        if self.model is not None:
            return self.model
        self.state, self.error = "loading", None
        try:
            model = load(self.source)
            model.require_predictions()
            _most_tokens(model)  # an error if there is no tokenizer
            self._take_lenses(model)
        except Exception as error:
            known = isinstance(error, LayerjumpError)
            self.state, self.error = "failed", str(error) if known else UNFORESEEN
            raise
        self.model, self.state = model, "ready"
        return model

    def loaded(self) -> Answer:
        """Load the model, and say what it has."""
        self.load()
        return Answer(200, encode(self.about()))

    def _take_lenses(self, model: Model) -> None:
        own = fingerprint(model.hf)
        self.lenses["identity"] = Lens(model)
        for name, jumps in self.sets.items():
            if jumps.provenance.fingerprint == own:
                self.lenses[name] = Lens(model, jumps)
        own_folders = {name: cache_folder(model, name) for name in FITTED}
        self.folders = own_folders | {
            name: jumps.folder
            for name, jumps in self.sets.items()
            if name in self.lenses and jumps.folder is not None
        }
        self.kept = {name for name in FITTED if has_cached_jumps(model, (name,))}

    def answer(self, question: LensQuestion) -> Answer:
        """Read a text through the lenses asked for."""
        model = self.load()
        refused = self.refused(question.lenses)
        if refused is not None:
            return refused
        self.fetch(question.lenses)
        _check_length(model, question.text)
        lenses = {name: self.lenses[name] for name in question.lenses}
        start = time.perf_counter()
        (found,) = read_trajectories(
            lenses,
            [question.text],
            k=question.k,
            tokens=question.tokens,
            jensen_shannon=question.js,
            last=MOST_TOKENS,
        )
        content = {
            "model": self.name,
            "lenses": {name: trajectory.to_dict() for name, trajectory in found.items()},
            "seconds": round(time.perf_counter() - start, 4),
        }
        return Answer(200, encode(content))

    def refused(self, lenses: Sequence[str]) -> Answer | None:
        """Why a text cannot be read through these, if it cannot."""
        by_state = {self.lens_state(name): name for name in lenses}
        if "other weights" in by_state:
            name = by_state["other weights"]
            return refusal(422, f"the jumps {name} were fitted on another model than {self.name}")
        unfitted = [name for name in lenses if self.lens_state(name) == "not fitted"]
        if not unfitted:
            return None
        said = f"{' and '.join(unfitted)} must be fitted for {self.name} first: ask /api/fit"
        return refusal(NOT_YET, said, unfitted=unfitted)

    def fit(self, job: Job) -> Answer:
        """Fit what the job asks for, and tell it how far that is."""
        with job:
            model = self.load()
            found = cached_jumps(model, job.estimators, progress=job.progress)
            for name, jumps in found.items():
                self.lenses[name] = Lens(model, jumps)
        return Answer(200, b"")

    def fetch(self, names: Sequence[str]) -> None:
        """Read kept jumps from disk, once."""
        missing = tuple(name for name in names if name not in self.lenses)
        if missing and self.model is not None:
            for name, jumps in cached_jumps(self.model, missing).items():
                self.lenses[name] = Lens(self.model, jumps)

    def lens_state(self, name: str) -> str:
        """`ready`, `not fitted`, `other weights`; before the model is loaded, `unknown`."""
        if name in self.lenses or name in self.kept or name == "identity":
            return "ready"
        if self.model is None:
            return "unknown"
        return "not fitted" if name in FITTED else "other weights"

    @property
    def cannot_generate(self) -> str | None:
        """Why this model writes no text, if it does not."""
        if self.model is None or self.model.task == "causal":
            return None
        kinds = {"masked": "a masked model", "seq2seq": "an encoder–decoder"}
        kind = kinds.get(self.model.task, "an encoder")
        return f"{self.name} is {kind}; only decoders generate with early exit"

    @property
    def calibrated(self) -> list[str]:
        """Lenses that have an exit rule beside their jumps."""
        return [name for name, place in self.folders.items() if (place / EXIT_RULE).is_file()]

    @property
    def predicting(self) -> list[str]:
        """Lenses whose jumps lead to every level above, so that they can fill skipped blocks."""
        if self.model is None:
            return []
        last = self.model.n_blocks
        return [
            name
            for name, jumps in self.sets.items()
            if name in self.lenses and _leads_everywhere(jumps, last)
        ]

    def about(self) -> dict[str, Any]:
        """What the page shows of it."""
        model = self.model
        names = ("identity", *FITTED, *self.sets)
        return {
            "name": self.name,
            "state": self.state,
            "error": self.error,
            "doing": self.desk.doing,
            "task": model and model.task,
            "n_blocks": model and model.n_blocks,
            "most_tokens": model and _most_tokens(model),
            "mask": model and model.masked and model.tokenization.tokenizer.mask_token,
            "lenses": [{"name": name, "state": self.lens_state(name)} for name in names],
            "cannot_generate": self.cannot_generate,
            "calibrated": self.calibrated,
            "predicting": self.predicting,
        }


class ModelRegistry:
    """All shelves by name. Only what was given at the start can ever be asked for."""

    def __init__(self, sources: Sequence[str], sets: Mapping[str, Jumps]) -> None:
        self.sets = dict(sets)
        self.shelves: dict[str, ServedModel] = {}
        self.closing = threading.Event()
        """Set when the server ends: whoever writes stops."""
        answers = Answers()
        for source in sources:
            name = self._free_name(source)
            self.shelves[name] = ServedModel(name, source, self.sets, Worker(answers))

    @property
    def lens_names(self) -> tuple[str, ...]:
        return ("identity", *FITTED, *self.sets)

    @property
    def working(self) -> bool:
        """Whether a thread is reading, loading or fitting."""
        return any(shelf.desk.doing is not None for shelf in self.shelves.values())

    def _free_name(self, source: str) -> str:
        """A folder or file goes by its own name, without the way to it; twice the same gets a number."""
        path = Path(source).expanduser()
        name = path.resolve().name if path.exists() else source
        taken = [other for other in self.shelves if other == name or other.startswith(f"{name} (")]
        return f"{name} ({len(taken) + 1})" if taken else name


def jump_sets(given: Sequence[str]) -> dict[str, Jumps]:
    """Read `NAME=FOLDER` options."""
    found: dict[str, Jumps] = {}
    for option in given:
        name, equals, folder = option.partition("=")
        if not equals or not folder or not _NAME.fullmatch(name):
            raise CannotServe(
                f"expected {argument('jumps')} as NAME=FOLDER, the name of letters, digits and . _ + -, got {option!r}"
            )
        if name in found or name in ("identity", *FITTED):
            raise CannotServe(f"two lenses would be called {name!r}; give the jumps another name")
        found[name] = Jumps.from_pretrained(folder)
    return found


def _leads_everywhere(jumps: Jumps, n_blocks: int) -> bool:
    pairs = ((level, above) for level in range(1, n_blocks) for above in range(level + 1, n_blocks))
    return all((Site(level), Site(above)) in jumps for level, above in pairs)


def _most_tokens(model: Model) -> int:
    return min(MOST_TOKENS, model.tokenization.max_length)


def _check_length(model: Model, text: str) -> None:
    tokens = model.tokenization
    length, most = len(tokens.wrap(tokens.encode([text])[0])), min(MOST_READ, tokens.max_length)
    if length > most:
        raise BadText(
            f"the text has {length:,} tokens, and up to {most:,} can be read; shorten it to about "
            f"{len(text) * most // length:,} characters"
        )


KEPT = 50
"""Ended jobs that can still be asked about."""


@dataclass
class Job:
    """One fit. It is a context: entered when its turn comes, left when it is done or has failed."""

    model: str
    estimators: tuple[str, ...]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    state: Literal["waiting", "fitting", "done", "failed"] = "waiting"
    done: int = 0
    total: int = 0
    error: str | None = None
    _started: float = 0.0

    def progress(self, done: int, total: int) -> None:
        """Tokens done and to do."""
        if not self._started:
            self._started = time.monotonic()
        self.done, self.total = done, total

    def __enter__(self) -> Job:
        self.state = "fitting"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.state = "done" if error is None else "failed"
        self.error = None if error is None else one_line(error, 1_000)

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed")

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None before there is one."""
        spent = time.monotonic() - self._started
        if not self._started or not self.done or spent < 0.5:
            return None
        return spent * (self.total - self.done) / self.done

    def about(self) -> dict[str, Any]:
        """What the page shows of it."""
        left = self.seconds_left
        return {
            "id": self.id,
            "model": self.model,
            "estimators": list(self.estimators),
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "seconds_left": None if left is None else round(left, 1),
            "error": self.error,
        }


class Jobs:
    """The fits of one run of the server, by id. Only the event loop uses it."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def same(self, model: str, estimators: tuple[str, ...]) -> Job | None:
        """A fit of the same that has not ended."""
        return next(
            (
                job
                for job in self._jobs.values()
                if (job.model, job.estimators) == (model, estimators) and not job.ended
            ),
            None,
        )

    def add(self, job: Job) -> Job:
        """Remember a job, and forget the oldest that have ended."""
        self._jobs[job.id] = job
        ended = [each.id for each in self._jobs.values() if each.ended]
        for old in ended[: max(0, len(ended) - KEPT)]:
            del self._jobs[old]
        return job

    def get(self, id_: str) -> Job | None:
        return self._jobs.get(id_)

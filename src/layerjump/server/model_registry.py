"""The served models and jump sets, by name.

Models are loaded on first use. Requests can only name what the server was started with.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from layerjump.errors import BadText, CannotServe, LayerjumpError, WrongModel, argument, one_line
from layerjump.generation.calibration.serialization import FILE_NAME as EXIT_RULE_FILE
from layerjump.jumps.default_jumps import cache_folder, cached_jumps, has_cached_jumps
from layerjump.jumps.estimators.registry import SERVED
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens, read_trajectories
from layerjump.models.fingerprint import fingerprint
from layerjump.models.loading import load
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.server import schemas
from layerjump.server.schemas import MAX_POSITIONS, MAX_PROMPT_TOKENS
from layerjump.server.worker import INTERNAL_ERROR, NOT_FITTED, Answer, AnswerCache, Refused, Worker, encode

_NAME = re.compile(r"[\w.+-]{1,60}")


@dataclass
class ServedModel:
    """One model, its worker and its lenses. Only the worker's thread changes it."""

    name: str
    source: str
    jump_sets: Mapping[str, Jumps]
    worker: Worker
    state: schemas.ModelState = "not loaded"
    error: str | None = None
    model: Model | None = None
    max_positions: int | None = None
    """Positions of a text that are shown."""
    lenses: dict[str, Lens] = field(default_factory=dict)
    cached: set[str] = field(default_factory=set)
    """Estimators whose jumps are in the cache on disk."""
    folders: dict[str, Path] = field(default_factory=dict)
    """Folder of each lens's jumps, which may hold a calibrated exit rule too."""

    def load(self) -> Model:
        """Return the model; the first call loads it."""
        if self.model is not None:
            return self.model
        self.state, self.error = "loading", None
        try:
            model = load(self.source)
            model.require_predictions()
            self.max_positions = min(MAX_POSITIONS, model.tokenization.max_length)  # raises without a tokenizer
            self._add_lenses(model)
        except Exception as error:
            is_expected = isinstance(error, LayerjumpError)
            self.state, self.error = "failed", str(error) if is_expected else INTERNAL_ERROR
            raise
        self.model, self.state = model, "ready"
        return model

    def load_and_describe(self) -> Answer:
        """Load the model; answer with its status."""
        self.load()
        return Answer(200, encode(self.status()))

    def _add_lenses(self, model: Model) -> None:
        weights = fingerprint(model.hf)
        self.lenses["identity"] = Lens(model)
        self.folders = {name: cache_folder(model, name) for name in SERVED}
        for name, jumps in self.jump_sets.items():
            if jumps.provenance.fingerprint == weights:
                self.lenses[name] = Lens(model, jumps)
                if jumps.folder is not None:
                    self.folders[name] = jumps.folder
        self.cached = {name for name in SERVED if has_cached_jumps(model, (name,))}

    def read(self, request: schemas.LensRequest) -> Answer:
        """Read a text through the requested lenses."""
        model = self.load()
        lenses = self.get_lenses(request.lenses)
        count_tokens(model, "text", request.text)
        start = time.perf_counter()
        (trajectories,) = read_trajectories(
            lenses, [request.text], k=request.k, tokens=request.tokens, jensen_shannon=request.js, last=MAX_POSITIONS
        )
        answer = schemas.LensAnswer(
            model=self.name,
            lenses={name: trajectory.to_dict() for name, trajectory in trajectories.items()},
            seconds=round(time.perf_counter() - start, 4),
        )
        return Answer(200, encode(answer))

    def get_lenses(self, names: Sequence[str]) -> dict[str, Lens]:
        """The lenses of these names, if all can be used; jumps in the cache on disk are loaded once."""
        states = {name: self.lens_state(name) for name in names}
        for name, state in states.items():
            if state == "other weights":
                raise WrongModel(f"the jumps {name} were fitted on another model than {self.name}")
        unfitted = [name for name, state in states.items() if state == "not fitted"]
        if unfitted:
            message = f"{' and '.join(unfitted)} must be fitted for {self.name} first: ask /api/fit"
            raise Refused(Answer(NOT_FITTED, encode(schemas.UnfittedProblem(error=message, unfitted=unfitted))))
        missing = tuple(name for name in names if name not in self.lenses)
        if missing and self.model is not None:
            for name, jumps in cached_jumps(self.model, missing).items():
                self.lenses[name] = Lens(self.model, jumps)
        return {name: self.lenses[name] for name in names}

    def fit(self, job: schemas.JobStatus) -> Answer:
        """Fit the estimators of a job, and report its progress there."""
        job.state = "fitting"
        try:
            model = self.load()
            for name, jumps in cached_jumps(model, job.estimators, progress=job.report).items():
                self.lenses[name] = Lens(model, jumps)
        except BaseException as error:
            job.state, job.error = "failed", one_line(error, 1_000)
            raise
        job.state = "done"
        return Answer(200, b"")

    def lens_state(self, name: str) -> Literal["ready", "not fitted", "other weights", "unknown"]:
        """Whether a lens can be used; unknown before the model is loaded."""
        if name in self.lenses or name in self.cached or name == "identity":
            return "ready"
        if self.model is None:
            return "unknown"
        return "not fitted" if name in SERVED else "other weights"

    @property
    def cannot_generate(self) -> str | None:
        """Why this model does not generate text; None if it does."""
        if self.model is None or self.model.task == "causal":
            return None
        kinds = {"masked": "a masked model", "seq2seq": "an encoder–decoder", "classification": "a classifier"}
        kind = kinds.get(self.model.task, "an encoder")
        return f"{self.name} is {kind}; only decoders generate with early exit"

    @property
    def calibrated(self) -> list[str]:
        """Lenses with a calibrated exit rule."""
        return [name for name, path in self.folders.items() if (path / EXIT_RULE_FILE).is_file()]

    @property
    def predicting(self) -> list[str]:
        """Lenses with jumps between all levels, which the `jump` cache needs."""
        if self.model is None:
            return []
        last = self.model.n_blocks
        pairs = [(Site(low), Site(high)) for low in range(1, last) for high in range(low + 1, last)]
        return [
            name
            for name, jumps in self.jump_sets.items()
            if name in self.lenses and all(pair in jumps for pair in pairs)
        ]

    def status(self) -> schemas.ModelStatus:
        """The state of the model and its lenses."""
        model = self.model
        names = ("identity", *SERVED, *self.jump_sets)
        return schemas.ModelStatus(
            name=self.name,
            state=self.state,
            error=self.error,
            doing=self.worker.current_label,
            task=None if model is None else model.task,
            n_blocks=None if model is None else model.n_blocks,
            most_tokens=self.max_positions,
            mask=None if model is None else model.masked and str(model.tokenization.tokenizer.mask_token),
            lenses=[schemas.LensStatus(name=name, state=self.lens_state(name)) for name in names],
            cannot_generate=self.cannot_generate,
            calibrated=self.calibrated,
            predicting=self.predicting,
        )


def count_tokens(model: Model, what: str, text: str) -> int:
    """The number of tokens of a text or prompt; raise if the model does not read so many."""
    tokenization = model.tokenization
    length = len(tokenization.wrap(tokenization.encode([text])[0]))
    longest = min(MAX_PROMPT_TOKENS, tokenization.max_length)
    if length > longest:
        raise BadText(
            f"the {what} has {length:,} tokens, and at most {longest:,} are read; shorten it to about "
            f"{len(text) * longest // length:,} characters"
        )
    return length


class ModelRegistry:
    """All served models by name."""

    def __init__(self, sources: Sequence[str], jump_sets: Mapping[str, Jumps]) -> None:
        self.models: dict[str, ServedModel] = {}
        self.lens_names = ("identity", *SERVED, *jump_sets)
        self.closing = threading.Event()
        """Set when the server ends: generations stop."""
        cache = AnswerCache()
        for source in sources:
            # The last part of a path, or the hub id; a number is appended to duplicates.
            path = Path(source).expanduser()
            name = path.resolve().name if path.exists() else source
            taken = sum(other == name or other.startswith(f"{name} (") for other in self.models)
            name = f"{name} ({taken + 1})" if taken else name
            self.models[name] = ServedModel(name, source, dict(jump_sets), Worker(cache))

    @property
    def is_busy(self) -> bool:
        """Whether a worker runs a task."""
        return any(served.worker.current_label is not None for served in self.models.values())


def load_jump_sets(options: Sequence[str]) -> dict[str, Jumps]:
    """Load jumps given as `NAME=FOLDER`."""
    jump_sets: dict[str, Jumps] = {}
    for option in options:
        name, equals, folder = option.partition("=")
        if not equals or not folder or not _NAME.fullmatch(name):
            raise CannotServe(
                f"expected {argument('jumps')} as NAME=FOLDER, the name of letters, digits and . _ + -, got {option!r}"
            )
        if name in jump_sets or name in ("identity", *SERVED):
            raise CannotServe(f"two lenses would be called {name!r}; give the jumps another name")
        jump_sets[name] = Jumps.from_pretrained(folder)
    return jump_sets

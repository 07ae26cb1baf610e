"""The served models and jump sets, by name.

Models are loaded on first use. Requests can only name what the server was started with.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from layerjump.data.chat import has_chat_template
from layerjump.errors import BadText, CannotServe, LayerjumpError, WrongModel, argument, one_line
from layerjump.generation.calibration.calibration_file import FILE_NAME as EXIT_RULE_FILE
from layerjump.jumps.default_jumps import cache_folder, cached_jumps, has_cached_jumps
from layerjump.jumps.estimators.registry import SERVED
from layerjump.jumps.jumps import Jumps
from layerjump.lens.attribution import Contribution, attribute
from layerjump.lens.concepts import ConceptRace, concept_ids
from layerjump.lens.lens import Lens, read_trajectories
from layerjump.lens.prepare_prompt import chat_prompt, tokenize_prompts
from layerjump.lens.trajectory import Trajectory
from layerjump.models.fingerprint import fingerprint
from layerjump.models.loading import load
from layerjump.models.model import Model
from layerjump.models.sites import Site
from layerjump.server import schemas
from layerjump.server.interventions import RequestInterventions
from layerjump.server.request_text import as_prompt, count_tokens
from layerjump.server.schemas import MAX_POSITIONS
from layerjump.server.worker import INTERNAL_ERROR, NOT_FITTED, Answer, AnswerCache, Refused, Worker, encode

_NAME = re.compile(r"[\w.+-]{1,60}")


@dataclass
class ServedModel:
    """One model, its worker and its lenses. Only the worker's thread changes it."""

    name: str
    source: str
    jump_sets: Mapping[str, Jumps]
    worker: Worker
    load_model: Callable[[str], Model] = load
    """Loads a model from its source."""
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
            model = self.load_model(self.source)
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
        text = as_prompt(request.text)
        n_tokens = count_tokens(model, "text", text)
        start = time.perf_counter()
        options: dict[str, Any] = {
            "k": request.k,
            "tokens": request.tokens,
            "jensen_shannon": request.js,
            "last": MAX_POSITIONS,
        }
        if request.interventions:
            trajectories: dict[str, Trajectory] = {}
            for name, lens in lenses.items():  # each tells its own directions
                with RequestInterventions(lens, request.interventions, n_positions=n_tokens):
                    trajectories |= read_trajectories({name: lens}, [text], **options)[0]
        else:
            (trajectories,) = read_trajectories(lenses, [text], **options)
        answer = schemas.LensAnswer(
            model=self.name,
            lenses={name: trajectory.to_dict() for name, trajectory in trajectories.items()},
            seconds=round(time.perf_counter() - start, 4),
        )
        return Answer(200, encode(answer))

    def explain(self, request: schemas.ExplainRequest) -> Answer:
        """Attribute the logit that a lens reads in one cell to the parts of the model."""
        model = self.load()
        lenses = self.get_lenses([request.lens])
        text = as_prompt(request.text)
        count_tokens(model, "text", text)
        start = time.perf_counter()
        lens, token, position = lenses[request.lens], request.token, request.position
        prompt = tokenize_prompts(model, [text])[0] if isinstance(text, str) else chat_prompt(model, text)
        if position not in prompt.positions:
            raise BadText(f"position {position} was not read; expected one of {', '.join(map(str, prompt.positions))}")
        if token is None:
            (trajectories,) = read_trajectories(lenses, [text], k=1, levels=[request.level])
            trajectory = trajectories[request.lens]
            token = int(trajectory.top[0, trajectory.row_of(position), 0])
        readout = lens.readout(request.level)
        attribution = attribute(model, readout, prompt, position, token, against=request.against, lens=request.lens)

        def describe(rows: Sequence[Contribution]) -> list[schemas.ContributionRow]:
            return [
                schemas.ContributionRow(
                    name=row.name,
                    part=row.part,
                    block=row.block,
                    value=row.value,
                    source=row.source,
                    token=None if row.source is None else attribution.tokens[row.source],
                )
                for row in rows
            ]

        answer = schemas.ExplainAnswer(
            model=self.name,
            lens=request.lens,
            level=request.level,
            position=request.position,
            token=attribution.token,
            against=attribution.against,
            reading=attribution.reading,
            error=attribution.error,
            parts=describe(attribution.parts),
            heads=describe(attribution.top(request.rows, "heads")),
            sources=describe(attribution.top(request.rows, "sources")),
            notes=list(attribution.notes),
            seconds=round(time.perf_counter() - start, 4),
        )
        return Answer(200, encode(answer))

    def race(self, request: schemas.RaceRequest) -> Answer:
        """Compare the probabilities of concepts at every level and position."""
        model = self.load()
        lenses = self.get_lenses([request.lens])
        text = as_prompt(request.text)
        count_tokens(model, "text", text)
        start = time.perf_counter()
        concepts = {concept.name: concept.words for concept in request.concepts}
        if len(concepts) < len(request.concepts):
            raise BadText(f"expected concepts of different names, got {', '.join(c.name for c in request.concepts)}")
        tokens = [token for words in concepts.values() for token in concept_ids(model, words)]
        (trajectories,) = read_trajectories(lenses, [text], k=1, tokens=tokens, last=MAX_POSITIONS)
        trajectory = trajectories[request.lens]
        levels, positions = trajectory.levels, trajectory.positions
        trajectory.race(concepts)  # raises if concepts have a token in common
        tracks = {name: trajectory.concept(words) for name, words in concepts.items()}
        by_position = torch.stack([track.probability for track in tracks.values()], -1).unbind(1)
        races = [ConceptRace(at, levels, tuple(concepts), row) for at, row in zip(positions, by_position, strict=True)]
        answer = schemas.RaceAnswer(
            model=self.name,
            lens=request.lens,
            levels=list(levels),
            positions=list(positions),
            concepts=[
                schemas.ConceptTrack(
                    name=name, tokens=trajectory.decode(track.ids), probability=track.probability.tolist()
                )
                for name, track in tracks.items()
            ],
            leader=[race.leaders[-1] for race in races],
            crossing=[race.crossing_level for race in races],
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
            chat=None if model is None else model.task == "causal" and has_chat_template(model.tokenizer),
            lenses=[schemas.LensStatus(name=name, state=self.lens_state(name)) for name in names],
            cannot_generate=self.cannot_generate,
            calibrated=self.calibrated,
            predicting=self.predicting,
        )


class ModelRegistry:
    """All served models by name."""

    def __init__(
        self, sources: Sequence[str], jump_sets: Mapping[str, Jumps], load_model: Callable[[str], Model] = load
    ) -> None:
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
            self.models[name] = ServedModel(name, source, dict(jump_sets), Worker(cache), load_model)

    @property
    def is_busy(self) -> bool:
        """Whether a worker runs a task."""
        return any(served.worker.current_label is not None for served in self.models.values())


def load_jump_sets(options: Sequence[str]) -> dict[str, Jumps]:
    """Load jumps given as `NAME=FOLDER`, or as `FOLDER`, whose name is the lens' name."""
    jump_sets: dict[str, Jumps] = {}
    for option in options:
        name, equals, folder = option.partition("=")
        if not equals:
            name, folder = Path(option).expanduser().resolve().name, option
        if not folder or not _NAME.fullmatch(name):
            raise CannotServe(
                f"expected {argument('jumps')} as FOLDER or NAME=FOLDER, the name of letters, digits and . _ + -, got "
                f"{option!r}"
            )
        if name in jump_sets or name in ("identity", *SERVED):
            raise CannotServe(f"two lenses would be called {name!r}; give the jumps another name")
        jump_sets[name] = Jumps.from_pretrained(folder)
    return jump_sets

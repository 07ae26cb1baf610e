"""Schemas of requests and answers, and their limits."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from layerjump.generation.loop import CacheKind
from layerjump.jumps.estimators.registry import SERVED

MAX_CHARACTERS, MAX_TOP_K, MAX_TRACKED, MAX_LENSES = 20_000, 50, 16, 4
MAX_NEW_TOKENS = 256
MAX_POSITIONS = 256
"""Positions of a text that are shown: a larger grid is slow and unreadable."""
MAX_PROMPT_TOKENS = 1024
"""Tokens of a text that the model reads: all other requests wait meanwhile."""

Name = Annotated[str, Field(max_length=300)]
TokenText = Annotated[str, Field(min_length=1, max_length=200)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
ModelState = Literal["not loaded", "loading", "ready", "failed"]


class Request(BaseModel):
    """The body of a request. It is hashable: the same request has the same place in the queue."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Name = Field(description="One of the names of /api/models.")


class LoadRequest(Request):
    """The model to load."""


class LensRequest(Request):
    """A text, and the lenses to read it through."""

    text: str = Field(min_length=1, max_length=MAX_CHARACTERS)
    lenses: tuple[Name, ...] = Field(
        default=("identity",),
        min_length=1,
        max_length=MAX_LENSES,
        description="identity, an estimator, or the name of a jumps folder.",
    )
    k: int = Field(default=10, ge=1, le=MAX_TOP_K, strict=True, description="Top tokens a cell.")
    tokens: tuple[TokenId | TokenText, ...] = Field(
        default=(),
        max_length=MAX_TRACKED,
        description="Tokens to track through the levels: ids, or texts of one token.",
    )
    js: bool = Field(default=False, strict=True, description="Jensen–Shannon divergence too.")

    @field_validator("lenses")
    @classmethod
    def _drop_duplicates(cls, lenses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lenses))


class GenerateRequest(Request):
    """A prompt to continue, and the early exit. The names are those of `layerjump.generate`."""

    prompt: str = Field(min_length=1, max_length=MAX_CHARACTERS)
    lens: Name = Field(default="identity", description="The lens of the exit rule (see /api/lens).")
    exit: Name = Field(
        default="never",
        description="never, fixed:3, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; at given levels: gap:0.9@8,16; or "
        "calibrated, if /api/models lists the lens as calibrated.",
    )
    cache: CacheKind = Field(default="exact", description="KV cache of skipped blocks: exact, jump or copy.")
    verify: bool = Field(default=False, strict=True, description="Lossless: the full model verifies the drafts.")
    max_new_tokens: int = Field(default=48, ge=1, le=MAX_NEW_TOKENS, strict=True)


class FitRequest(Request):
    """The estimators to fit on the built-in text."""

    estimators: tuple[Name, ...] = Field(default=SERVED, min_length=1, max_length=len(SERVED))


class Problem(BaseModel):
    """Why a request failed, in one sentence."""

    error: str


class UnfittedProblem(Problem):
    """The lenses to fit before the request is repeated."""

    unfitted: list[str]


class Health(BaseModel):
    """The server answers."""

    ok: Literal[True] = True
    version: str


class Busy(BaseModel):
    """The request waits in the queue; repeat it to keep its place."""

    busy: Literal[True] = True
    position: int
    doing: str | None
    said: str


class LensStatus(BaseModel):
    """Whether one lens can be used."""

    name: str
    state: Literal["ready", "not fitted", "other weights", "unknown"]


class ModelStatus(BaseModel):
    """One served model; fields that only a loaded model has are null before."""

    name: str
    state: ModelState
    error: str | None
    doing: str | None
    task: str | None
    n_blocks: int | None
    most_tokens: int | None
    mask: str | bool | None
    lenses: list[LensStatus]
    cannot_generate: str | None
    calibrated: list[str]
    """Lenses with a calibrated exit rule."""
    predicting: list[str]
    """Lenses with jumps between all levels, which the `jump` cache needs."""


class Limits(BaseModel):
    """The largest values that requests may have."""

    characters: int = MAX_CHARACTERS
    k: int = MAX_TOP_K
    followed: int = MAX_TRACKED
    new_tokens: int = MAX_NEW_TOKENS


class Models(BaseModel):
    """All served models."""

    models: list[ModelStatus]
    fitted_here: tuple[str, ...] = SERVED
    limits: Limits = Limits()


class LensAnswer(BaseModel):
    """The trajectory of each lens, as `layerjump lens --json` prints it."""

    model: str
    lenses: dict[str, dict[str, Any]]
    seconds: float


class JobStatus(BaseModel):
    """The progress of a fit, in tokens."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    id: str = Field(default_factory=lambda: secrets.token_urlsafe(9))
    model: str
    estimators: tuple[str, ...]
    state: Literal["waiting", "fitting", "done", "failed"] = "waiting"
    done: int = 0
    total: int = 0
    seconds_left: float | None = None
    error: str | None = None
    _start: float | None = None

    def report(self, done: int, total: int) -> None:
        """Take the number of tokens done; the time left is known after half a second."""
        self._start = self._start or time.monotonic()
        self.done, self.total = done, total
        seconds = time.monotonic() - self._start
        if done and seconds >= 0.5:
            self.seconds_left = round(seconds * (total - done) / done, 1)

    @property
    def is_finished(self) -> bool:
        return self.state in ("done", "failed")

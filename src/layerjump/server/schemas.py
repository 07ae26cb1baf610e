"""Schemas of requests and answers, and their limits."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from layerjump.generation.decoding_loop import CacheKind
from layerjump.jumps.estimators.registry import SERVED

MAX_CHARACTERS, MAX_TOP_K, MAX_TRACKED, MAX_LENSES = 20_000, 50, 16, 4
MAX_NEW_TOKENS = 256
MAX_MESSAGES, MAX_CONCEPTS, MAX_WORDS, MAX_INTERVENTIONS = 40, 6, 32, 4
MAX_LEVEL, MAX_LEVELS = 10_000, 200
MAX_STRENGTH = 10.0
MAX_POSITIONS = 256
"""Positions of a text that are shown: a larger grid is slow and unreadable."""
MAX_PROMPT_TOKENS = 1024
"""Tokens of a text that the model reads: all other requests wait meanwhile."""

Name = Annotated[str, Field(max_length=300)]
TokenText = Annotated[str, Field(min_length=1, max_length=200)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Token = TokenId | TokenText
Level = Annotated[int, Field(ge=0, le=MAX_LEVEL, strict=True)]
Position = Annotated[int, Field(ge=0, le=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS, strict=True)]
ModelState = Literal["not loaded", "loading", "ready", "failed"]


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str = Field(min_length=1, max_length=40, description="system, user or assistant.")
    content: str = Field(max_length=MAX_CHARACTERS)


TEXT_KINDS = "text", "messages"
"""The two kinds of text that a request may hold."""
Text = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS), Tag(TEXT_KINDS[0])]
    | Annotated[tuple[Message, ...], Field(min_length=1, max_length=MAX_MESSAGES), Tag(TEXT_KINDS[1])],
    Discriminator(lambda value: TEXT_KINDS[isinstance(value, list | tuple)]),
    Field(description="A text, or the messages of a chat, which the model's chat template renders."),
]


class _Change(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: tuple[Level, ...] = Field(min_length=1, max_length=MAX_LEVELS, description="Levels that are changed.")


class _ChangeOfDirections(_Change):
    positions: tuple[Position, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_PROMPT_TOKENS,
        description="Positions that are changed. Default: all, those of generated tokens too.",
    )


class SwapChange(_ChangeOfDirections):
    """Exchange what the lens reads of two tokens."""

    kind: Literal["swap"]
    first: Token
    second: Token


class SteerChange(_ChangeOfDirections):
    """Add the direction of a token."""

    kind: Literal["steer"]
    token: Token
    strength: float = Field(
        default=0.3, ge=-MAX_STRENGTH, le=MAX_STRENGTH, description="In units of each state's norm."
    )


class AblateChange(_ChangeOfDirections):
    """Project the directions of tokens out."""

    kind: Literal["ablate"]
    tokens: tuple[Token, ...] = Field(min_length=1, max_length=MAX_TRACKED)


class PatchChange(_Change):
    """Replace the state at one position by that of another text, level by level."""

    kind: Literal["patch"]
    source: Text
    source_position: Position
    position: Position


Intervention = Annotated[SwapChange | SteerChange | AblateChange | PatchChange, Field(discriminator="kind")]
Interventions = Annotated[
    tuple[Intervention, ...],
    Field(
        max_length=MAX_INTERVENTIONS,
        description="Changes of hidden states while the model runs, the first one first; the lens tells the directions "
        "of tokens. They end with the request.",
    ),
]


class Request(BaseModel):
    """The body of a request. It is hashable: the same request has the same place in the queue."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Name = Field(description="One of the names of /api/models.")


class LoadRequest(Request):
    """The model to load."""


class LensRequest(Request):
    """A text, and the lenses to read it through."""

    text: Text
    lenses: tuple[Name, ...] = Field(
        default=("identity",),
        min_length=1,
        max_length=MAX_LENSES,
        description="identity, an estimator, or the name of a jumps folder.",
    )
    k: int = Field(default=10, ge=1, le=MAX_TOP_K, strict=True, description="Top tokens a cell.")
    tokens: tuple[Token, ...] = Field(
        default=(),
        max_length=MAX_TRACKED,
        description="Tokens to track through the levels: ids, or texts of one token.",
    )
    js: bool = Field(default=False, strict=True, description="Jensen–Shannon divergence too.")
    interventions: Interventions = ()

    @field_validator("lenses")
    @classmethod
    def _drop_duplicates(cls, lenses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lenses))


class ExplainRequest(Request):
    """One cell of a reading, and the token whose logit is attributed."""

    text: Text
    lens: Name = Field(default="identity", description="The lens that reads the cell (see /api/lens).")
    level: Level
    position: Position = Field(description="Position in the text, from 0.")
    token: Token | None = Field(default=None, description="Default: the top token of the cell.")
    against: Token | None = Field(default=None, description="Explain the difference from its logit.")
    rows: int = Field(default=10, ge=1, le=MAX_TOP_K, strict=True, description="Largest heads, and largest sources.")


class Concept(BaseModel):
    """Words that stand for one idea."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    words: tuple[Annotated[str, Field(max_length=200)], ...] = Field(max_length=MAX_WORDS)


class RaceRequest(Request):
    """Concepts whose probabilities are compared level by level."""

    text: Text
    lens: Name = Field(default="identity", description="The lens that reads the text (see /api/lens).")
    concepts: tuple[Concept, ...] = Field(min_length=1, max_length=MAX_CONCEPTS)


class GenerateRequest(Request):
    """A prompt to continue, and the early exit. The names are those of `layerjump.generate`."""

    prompt: Text
    lens: Name = Field(default="identity", description="The lens of the exit rule (see /api/lens).")
    exit: Name = Field(
        default="never",
        description="never, fixed:3, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; at given levels: gap:0.9@8,16; or "
        "calibrated, if /api/models lists the lens as calibrated.",
    )
    cache: CacheKind = Field(default="exact", description="KV cache of skipped blocks: exact, jump or copy.")
    verify: bool = Field(default=False, strict=True, description="Lossless: the full model verifies the drafts.")
    max_new_tokens: int = Field(default=48, ge=1, le=MAX_NEW_TOKENS, strict=True)
    interventions: Interventions = ()


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


class ContributionRow(BaseModel):
    """The share of one part, attention head, or source position of a head in a logit."""

    name: str
    part: str
    block: int | None
    value: float
    source: int | None
    token: str | None


class ExplainAnswer(BaseModel):
    """A logit as a sum over all parts of the model, in its order; the largest heads and sources."""

    model: str
    lens: str
    level: int
    position: int
    token: str
    against: str | None
    reading: float
    error: float
    parts: list[ContributionRow]
    heads: list[ContributionRow]
    sources: list[ContributionRow]
    notes: list[str]
    seconds: float


class ConceptTrack(BaseModel):
    """The probability of one concept at every level and position."""

    name: str
    tokens: list[str]
    """The spellings that are one token each."""
    probability: list[list[float]]


class RaceAnswer(BaseModel):
    """A race of concepts at every position."""

    model: str
    lens: str
    levels: list[str]
    positions: list[int]
    concepts: list[ConceptTrack]
    leader: list[str]
    """The concept that leads at the last level, for each position."""
    crossing: list[str]
    """The level from which on it leads, for each position."""
    seconds: float


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
    chat: bool | None
    """Whether it has a chat template."""
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
    messages: int = MAX_MESSAGES
    concepts: int = MAX_CONCEPTS
    strength: float = MAX_STRENGTH


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

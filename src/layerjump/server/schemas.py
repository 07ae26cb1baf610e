"""Request schemas and their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from layerjump.generation.kv_cache import CacheKind
from layerjump.server.generation import MOST_NEW
from layerjump.server.model_registry import FITTED

MOST_CHARACTERS, MOST_K, MOST_FOLLOWED, MOST_LENSES = 20_000, 50, 16, 4

Name = Annotated[str, Field(max_length=300)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]


class Problem(BaseModel):
    """Why a question was not answered."""

    error: str


class LensRequest(BaseModel):
    """A text, and what to read of it."""

    model_config = ConfigDict(extra="forbid")

    model: Name = Field(description="One of the names that /api/models gives.")
    text: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    lenses: list[Name] = Field(
        default=["identity"],
        min_length=1,
        max_length=MOST_LENSES,
        description="identity, an estimator, or a jump set's name.",
    )
    k: int = Field(default=10, ge=1, le=MOST_K, strict=True, description="Best tokens a cell.")
    tokens: list[TokenId | Word] = Field(
        default=[],
        max_length=MOST_FOLLOWED,
        description="Tokens to follow through the levels: ids, or texts of one token.",
    )
    js: bool = Field(default=False, strict=True, description="Jensen–Shannon divergence too.")


class GenerateRequest(BaseModel):
    """A prompt to go on with, and when tokens may leave. The names are those of `layerjump.generate`."""

    model_config = ConfigDict(extra="forbid")

    model: Name = Field(description="One of the names that /api/models gives.")
    prompt: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    lens: Name = Field(default="identity", description="What reads the levels, as for /api/lens.")
    exit: Name = Field(
        default="never",
        description="never, fixed:3, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; with levels: gap:0.9@8,16; or "
        "calibrated, where /api/models says so for the lens.",
    )
    cache: CacheKind = Field(
        default="exact", description="What skipped blocks keep: exact, jump or copy."
    )
    verify: bool = Field(
        default=False, strict=True, description="Lossless: the full model's own text."
    )
    max_new_tokens: int = Field(default=48, ge=1, le=MOST_NEW, strict=True)


class LoadRequest(BaseModel):
    """Which model to load."""

    model_config = ConfigDict(extra="forbid")

    model: Name


class FitRequest(BaseModel):
    """Which jumps to fit on the built-in text."""

    model_config = ConfigDict(extra="forbid")

    model: Name
    estimators: list[Name] = Field(default=list(FITTED), min_length=1, max_length=len(FITTED))

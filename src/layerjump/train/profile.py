"""What is measured of a model in training, on other text: loss, linearity, angles, what its levels predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerjump.compress.loss import losses
from layerjump.errors import TextTooShort
from layerjump.fit.collect import Plan, plan
from layerjump.fit.fit import solve_jumps
from layerjump.fit.linearity import block_map, block_pair, block_scores
from layerjump.inputs.batches import Batches, batches
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model
from layerjump.inputs.positions import MASKED_SHARE, Positions
from layerjump.lens.lens import Lens
from layerjump.lens.readings import read_levels
from layerjump.measure.linearity import jump_strength

SIZES = "75/0/25"
"""Of the held-out documents: maps are fitted on three quarters and tested on one."""
PER_WIDTH = 60
"""Positions to fit on, at most, for every coordinate: noise would then score a sixtieth."""
PREDICTED = 30_000
"""Tokens whose loss is taken, at most."""
READ = 600
"""Positions read through the vocabulary at every level."""


@dataclass(frozen=True)
class Profile:
    """One model's numbers at one moment."""

    loss: float
    """Nats a held-out token."""
    perplexity: float
    jump_strength: float
    blocks: list[dict[str, Any]]
    """By block: linearity with and without the residual stream, in sample and held out; the turn of its stream."""
    levels: list[dict[str, Any]]
    """By level: R² of the map to the last one, and how often map and identity give the model's own token."""

    def mean(self, column: str) -> float:
        """The mean over blocks, or over the levels below the last."""
        rows = self.blocks if column in self.blocks[0] else self.levels[:-1]
        return sum(row[column] for row in rows) / len(rows)

    def row(self) -> dict[str, float]:
        """All in a few numbers."""
        names = ("with residual", "without residual")
        found = {"loss": self.loss, "perplexity": self.perplexity}
        for name in (*names, *(f"{name} held out" for name in names), "identity", "chance floor"):
            found[name] = self.mean(name)
        found["jump strength"] = self.jump_strength
        for name in ("agreement map", "agreement identity", "r2"):
            found[name] = self.mean(name)
        return found


def profile(model: Model, text: Corpus, *, seed: int = 0) -> Profile:
    """Measure a model on a text; the same seed takes the same documents and positions."""
    everywhere = Positions("all", special=True)
    adjacent = _plan(model, text, "adjacent", everywhere, seed).run()
    to_last = _plan(model, text, "to-last", _predicting(model), seed)
    collected = to_last.run()
    found = losses(model, _predicted(model, text, seed))
    jumps = solve_jumps(collected, "affine")
    lenses = {"map": Lens(model, jumps), "identity": Lens(model)}
    hits = read_levels(model, lenses, _few(model, text, to_last, seed)).hits(1).double().mean(-1)
    blocks = []
    for level in range(model.n_blocks):
        fitted = block_map(adjacent.fit, level)
        scores = block_scores(fitted, adjacent.fit, adjacent.test, level)
        angle = adjacent.test.mean_angle(block_pair(level))
        blocks.append({"block": level + 1, **scores, "angle": angle})
    scores_of = {info.source.index: info.r2 for info in jumps.info.values() if info.r2}
    levels = [
        {
            "level": level,
            "r2": scores_of[level][0] if level in scores_of else 1.0,
            "agreement map": float(hits[0, level]),
            "agreement identity": float(hits[1, level]),
        }
        for level in range(model.n_blocks + 1)
    ]
    turns = [row["angle"] for row in blocks]
    return Profile(found.mean, found.perplexity, jump_strength(turns), blocks, levels)


def _predicting(model: Model) -> Positions:
    """Where tokens are predicted: at the masks of a masked model."""
    return Positions.parse(MASKED_SHARE if model.masked else "all")


def _plan(model: Model, text: Corpus, pairs: str, positions: Positions, seed: int) -> Plan:
    share = positions.amount or 1
    wanted = int(PER_WIDTH * model.width / share / 0.75)

    def planned(tokens: int | None) -> Plan:
        return plan(
            model,
            text,
            pairs=pairs,
            positions=positions,
            tokens=tokens,
            sizes=SIZES,
            seed=seed,
            select=False,
        )

    try:
        return planned(wanted)
    except TextTooShort:
        return planned(None)


def _predicted(model: Model, text: Corpus, seed: int) -> Batches:
    try:
        return batches(
            text, model.tokens, _predicting(model), seed=seed, tokens_wanted=PREDICTED, budget=4096
        )
    except TextTooShort:
        return batches(text, model.tokens, _predicting(model), seed=seed, budget=4096)


def _few(model: Model, text: Corpus, whole: Plan, seed: int) -> Batches:
    """About `READ` positions of the test documents; a masked model must see the same masks."""
    found = whole.batches["test"]
    if found.n_picks <= READ or model.masked:
        return found
    share = Positions("share", READ / found.n_picks)
    documents = [*dict.fromkeys(found.sequences.document)]
    return batches(text, model.tokens, share, documents=documents, seed=seed)

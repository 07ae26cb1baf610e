"""`linearity`: how linear each block is, as in "Your Transformer is Secretly Linear" (arXiv 2405.12250), and why.

The paper's score is the in-sample, variance-weighted R² of a regression with intercept, over all tokens: with the
residual stream (level l → l + 1) and without it (level l → l + 1 minus level l). Beside it stand the held-out score,
what the identity alone scores, and what pure noise would score, d / (n − 1). Position 0 is an attention sink with a
huge state that by itself decides a variance-weighted score, so every score is given with and without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layerjump.fit.affine import Affine
from layerjump.fit.collect import products_on
from layerjump.fit.moments import Moments
from layerjump.fit.pairs import parse_pairs
from layerjump.fit.reservoir import keys_of
from layerjump.fit.score import residual
from layerjump.fit.solve import solve
from layerjump.inputs.positions import Positions
from layerjump.inputs.sites import Site
from layerjump.inputs.states import states
from layerjump.measure import linearity as measure
from layerjump.measure.bootstrap import mean_interval
from layerjump.studies.result import Result, Row
from layerjump.studies.setup import Setup

EVERY = Positions("all", skip_first=0, special=True)
TOKENS = 16_000
"""At most so many tokens are run (the paper's notebook takes about 14,000)."""


def run(setup: Setup) -> Result:
    """Measure the model's blocks; of an encoder–decoder the decoder's, and then the encoder's beside them."""
    result = _measure(setup)
    if setup.model.task == "seq2seq":
        beside = _measure(setup.without_kept(model=setup.model.encoder_side()))
        result.tables |= {f"encoder {name}": table for name, table in beside.tables.items()}
        result.settings |= {f"encoder_{name}": value for name, value in beside.settings.items()}
        result.headline |= {f"encoder_{name}": value for name, value in beside.headline.items()}
        result.notes.append(
            "Tables without `encoder` in their names are the decoder's, which reads the second half of a text; the "
            "encoder is measured on whole texts."
        )
    return result


def _measure(setup: Setup) -> Result:
    """One pass over fit and test documents, neighbours only."""
    fit, test = _sums(setup, "fit", 0.8), _sums(setup, "test", 0.2)
    blocks: list[Row] = []
    for level in range(setup.model.n_blocks):
        row: Row = {"block": level + 1}
        row |= _scores(fit.every, test.every, level, "")
        row |= _scores(fit.later, test.later, level, " without position 0")
        blocks.append(row | _why(test.later, level))
    distance = measure.angles(_sampled(test.later))
    result = Result("linearity", {"blocks": blocks, "levels": _levels(fit.later, setup)})
    result.tables["angles"] = [
        {"from": a, "to": b, "angle": float(distance[a, b])}
        for a in range(len(distance))
        for b in range(a + 1, len(distance))
    ]
    steps = [float(distance[level, level + 1]) for level in range(len(distance) - 1)]
    result.settings = {
        "n_fit": fit.every.n,
        "n_test": test.every.n,
        "sampled": len(test.later.reservoir.keys),
        "positions": "all tokens, position 0 and special tokens included",
    }
    result.headline = _headline(blocks) | {"jump_strength": measure.jump_strength(steps)}
    result.notes.append(
        "Jump strength (the last block's mean angle over the mean of the others') is our definition. Angles, norms and "
        "intervals are of a sample of test positions; intervals resample positions."
    )
    return result


@dataclass(frozen=True)
class _Sums:
    every: Moments
    later: Moments
    """Without position 0."""


def _sums(setup: Setup, part: str, share: float) -> _Sums:
    """Sums of neighbours, of position 0 and of the others apart: together they are the sums of all."""
    model, pairs = setup.model, parse_pairs("adjacent", setup.model.anatomy)

    def empty() -> Moments:
        return Moments(pairs, full_targets=True, products=products_on(model))

    first, later, every = empty(), empty(), empty()
    wanted = min(TOKENS, setup.settings.tokens or TOKENS)
    found = setup.batches(part=part, positions=EVERY, tokens=max(1, int(share * wanted)))
    done = 0
    for batch in states(model, found, later.sites):
        keys = keys_of(batch.batch.document, batch.batch.position, seed=setup.settings.seed)
        sink = batch.batch.position == 0
        for sums, rows in ((first, sink), (later, ~sink)):
            if rows.any():
                sums.add({site: state[rows] for site, state in batch.at.items()}, keys=keys[rows])
        done += batch.batch.n_tokens
        if setup.progress:
            setup.progress(done, found.n_tokens)
    every.merge(later)
    every.merge(first)
    return _Sums(every, later)


def _scores(fit: Moments, test: Moments, level: int, which: str) -> Row:
    """The paper's two scores in sample and held out, the identity's, and the chance floor."""
    pair = Site(level), Site(level + 1)
    source, target = fit.source(pair[0]), fit.target(*pair)
    (jump,) = solve("affine", source, [target])
    row: Row = {}
    for name, sums in (("", fit), (" held out", test)):
        error = float(residual(jump, sums.source(pair[0]), sums.target(*pair)).sum())
        step = _step_variance(sums, pair)
        row[f"with residual{name}{which}"] = 1 - error / float(sums.target(*pair).spread.sum())
        row[f"without residual{name}{which}"] = 1 - error / step
    row[f"identity{which}"] = 1 - _step_variance(fit, pair) / float(target.spread.sum())
    row[f"chance floor{which}"] = measure.chance_floor(len(source.mean), source.n)
    if which:
        row |= _intervals(jump, test, pair)
    return row


def _step_variance(sums: Moments, pair: tuple[Site, Site]) -> float:
    """Σ ‖(y − x) − mean‖²: the centred variation of what the block adds."""
    source, target = sums.source(pair[0]), sums.target(*pair)
    spread = source.scatter.diagonal() - 2 * target.cross.diagonal() + target.spread
    return float(spread.sum())


def _intervals(jump: Affine, test: Moments, pair: tuple[Site, Site]) -> Row:
    """95 % intervals of the held-out scores without position 0, by resampling sampled positions."""
    x, y = (test.reservoir.states[site].double() for site in pair)
    error = (jump(x) - y).square().sum(-1)
    row: Row = {}
    for name, total in (("with", y), ("without", y - x)):
        variation = (total - total.mean(0)).square().sum(-1)
        # Linearised ratio: the mean of (error − ratio · variation) / mean variation has the ratio's own spread.
        ratio = float(error.sum() / variation.sum())
        spread = ((error - ratio * variation) / variation.mean()).numpy()
        _, low, high = mean_interval(spread, np.arange(len(spread)))
        centre = row_name = f"{name} residual held out without position 0"
        row[f"{row_name} low"], row[f"{centre} high"] = (
            1 - ratio - float(high),
            1 - ratio - float(low),
        )
    return row


def _why(test: Moments, level: int) -> Row:
    """How small the block's step is beside the stream it is added to, and how far it turns it."""
    x, y = (test.reservoir.states[Site(level + place)].double() for place in (0, 1))
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1)
    return {
        "step norm over stream norm": float(((y - x).norm(dim=-1) / x.norm(dim=-1)).mean()),
        "block influence": float((1 - cosine).mean()),
        "angle": float(cosine.clamp(-1, 1).arccos().mean() / torch.pi),
    }


def _levels(fit: Moments, setup: Setup) -> list[Row]:
    rows: list[Row] = []
    for level, state in enumerate(_sampled(fit)):
        site = Site(level)
        total, n = fit.sums[f"sum/{site}"], fit.n
        scatter = fit.sums[f"square/{site}"] - torch.outer(total, total) / n
        rows.append(
            {
                "level": level,
                "mean norm": fit.mean_norm(site),
                "anisotropy": measure.anisotropy(scatter),
                "intrinsic dimension": measure.intrinsic_dimension(state),
            }
        )
    return rows


def _sampled(sums: Moments) -> list[Tensor]:
    return [sums.reservoir.states[site] for site in sums.sites]


def _headline(blocks: list[Row]) -> dict[str, float]:
    names = [
        f"{name}{which}"
        for name in ("with residual", "without residual", "identity", "chance floor")
        for which in ("", " without position 0")
    ]
    names += [
        "with residual held out without position 0",
        "without residual held out without position 0",
    ]
    found = {f"mean {name}": sum(row[name] for row in blocks) / len(blocks) for name in names}
    return {name.replace(" ", "_"): value for name, value in found.items()}

"""`linearity`: how linear each block is, as in "Your Transformer is Secretly Linear" (arXiv 2405.12250), and why.

The paper's score is the in-sample, variance-weighted R² of a regression with intercept, over all tokens: with the
residual stream (level l → l + 1) and without it (level l → l + 1 minus level l). Beside it stand the held-out score,
what the identity alone scores, and what pure noise would score, d / (n − 1). Position 0 is an attention sink with a
huge state that by itself decides a variance-weighted score, so every score is given with and without it.

Figures of `linearity`: how linear each block is, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from torch import Tensor

from layerjump.data.positions import Positions
from layerjump.jumps.block_linearity import block_map, block_pair, block_scores
from layerjump.jumps.collect import product_dtype
from layerjump.jumps.maps import Affine
from layerjump.jumps.memory import estimate_cost
from layerjump.jumps.pairs import parse_pairs
from layerjump.jumps.statistics import Moments, keys_of
from layerjump.metrics import linearity
from layerjump.metrics.bootstrap import mean_interval
from layerjump.models.activations import capture_states
from layerjump.models.structure import Site
from layerjump.studies.charts import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Panel,
    Study,
    add_line,
    empty_figure,
    heat_map,
    level_axis,
    mean,
    number,
)
from layerjump.studies.predictions import unit_axis
from layerjump.studies.results import Result, Row
from layerjump.studies.setup import Setup

EVERY = Positions("all", skip_first=0, special=True)
TOKENS = 16_000
"""At most so many tokens are run (the paper's notebook takes about 14,000)."""
LATER = " without position 0"


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
    levels = range(setup.model.n_blocks)
    later = [_without_first(fit, test, level) for level in levels]
    distance = linearity.angles(_sampled(test.later))
    result = Result("linearity")
    result.tables["levels"] = _levels(fit.later)
    every = fit.with_sinks(), test.with_sinks()
    result.tables["blocks"] = blocks = [
        {"block": level + 1}
        | block_scores(block_map(every[0], level), *every, level)
        | later[level]
        for level in levels
    ]
    result.tables["angles"] = [
        {"from": a, "to": b, "angle": float(distance[a, b])}
        for a in range(len(distance))
        for b in range(a + 1, len(distance))
    ]
    result.settings = {
        "n_fit": every[0].n,
        "n_test": every[1].n,
        "sampled": len(test.documents),
        "positions": "all tokens, position 0 and special tokens included",
    }
    steps = [float(distance[level, level + 1]) for level in levels]
    result.headline = _headline(blocks) | {"jump_strength": linearity.jump_strength(steps)}
    result.notes.append(
        "Jump strength (the last block's mean angle over the mean of the others') is our definition. Angles, the "
        "relative size of steps and the width of intervals are of a sample of test positions other than 0; intervals "
        "resample documents and hold the fitted map fixed."
    )
    return result


@dataclass(frozen=True)
class _Sums:
    later: Moments
    """Of all positions but the first."""
    sinks: list[dict[Site, Tensor]]
    """The states at position 0: few rows, so that they take less memory than sums of their own would."""
    documents: Tensor
    """The document of every row of the reservoir."""

    def with_sinks(self) -> Moments:
        """The sums of all positions; from here on `later` is those too, for there are no others."""
        for states_at_0 in self.sinks:
            self.later.add(states_at_0)
        self.sinks.clear()
        return self.later


def _sums(setup: Setup, part: str, share: float) -> _Sums:
    """Sums of neighbours over one part of the split."""
    model = setup.model
    pairs = parse_pairs("adjacent", model.structure)
    later = Moments(pairs, full_targets=True, products=product_dtype(model))
    wanted = min(TOKENS, setup.settings.tokens or TOKENS)
    found = setup.batches(part=part, positions=EVERY, tokens=max(1, int(share * wanted)))
    estimate_cost(model, later, {part: found}).require_memory()
    sinks: list[dict[Site, Tensor]] = []
    document_of: dict[int, int] = {}
    done = 0
    for batch in capture_states(model, found, later.sites):
        document, position = batch.batch.document, batch.batch.position
        keys = keys_of(document, position, batch.batch.sequence, seed=setup.settings.seed)
        document_of.update(zip(keys.tolist(), document.tolist(), strict=True))
        first = position == 0
        sinks.append({site: state[first] for site, state in batch.at.items()})
        if not first.all():
            rest = {site: state[~first] for site, state in batch.at.items()}
            later.add(rest, keys=keys[~first])
        done += batch.batch.n_tokens
        if setup.progress:
            setup.progress(done, found.n_tokens)
    documents = [document_of[key] for key in later.reservoir.keys.tolist()]
    return _Sums(later, sinks, torch.tensor(documents))


def _without_first(fit: _Sums, test: _Sums, level: int) -> Row:
    """All that is said of a block from the positions after the first."""
    jump = block_map(fit.later, level)
    scores = block_scores(jump, fit.later, test.later, level, LATER)
    return scores | _intervals(jump, test, level, scores) | _why(test.later, level)


def _intervals(jump: Affine, test: _Sums, level: int, scores: Row) -> Row:
    """95 % intervals of the held-out scores without position 0, by resampling the sampled rows' documents."""
    device = jump.weight.device  # the sums'; sampled states are on the CPU
    sampled = test.later.reservoir.states
    x, y = (sampled[site].to(device, torch.float64) for site in block_pair(level))
    error = (jump(x) - y).square().sum(-1)
    row: Row = {}
    for name, total in (("with", y), ("without", y - x)):
        variation = (total - total.mean(0)).square().sum(-1)
        # Linearised ratio: the mean of (error − ratio · variation) / mean variation has the ratio's own spread.
        ratio = error.sum() / variation.sum()
        spread = ((error - ratio * variation) / variation.mean()).nan_to_num(0.0)  # 0 / 0: no step
        _, low, high = mean_interval(spread.cpu().numpy(), test.documents.numpy())
        score = f"{name} residual held out{LATER}"
        row[f"{score} low"] = scores[score] - float(high)
        row[f"{score} high"] = scores[score] - float(low)
    return row


def _why(test: Moments, level: int) -> Row:
    """How small the block's step is beside the stream it is added to, and how far it turns it."""
    x, y = (test.reservoir.states[site].double() for site in block_pair(level))
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1)
    return {
        "step norm over stream norm": float(((y - x).norm(dim=-1) / x.norm(dim=-1)).mean()),
        "block influence": float((1 - cosine).mean()),
        "angle": float(cosine.clamp(-1, 1).arccos().mean() / torch.pi),
    }


def _levels(fit: Moments) -> list[Row]:
    return [
        {
            "level": site.index,
            "mean norm": fit.mean_norm(site),
            "anisotropy": linearity.anisotropy(fit.source(site).scatter),
            "intrinsic dimension": linearity.intrinsic_dimension(fit.reservoir.states[site]),
        }
        for site in fit.sites
    ]


def _sampled(sums: Moments) -> list[Tensor]:
    return [sums.reservoir.states[site] for site in sums.sites]


def _headline(blocks: list[Row]) -> dict[str, float]:
    names = [
        f"{name}{which}"
        for name in ("with residual", "without residual", "identity", "chance floor")
        for which in ("", LATER)
    ]
    names += [f"{name} residual held out{LATER}" for name in ("with", "without")]
    found = {f"mean {name}": sum(row[name] for row in blocks) / len(blocks) for name in names}
    return {name.replace(" ", "_"): value for name, value in found.items()}


_WITHOUT = " without position 0"
_SERIES = (
    ("", "in sample (the paper's)", BLUE, "solid"),
    (" held out", "held out", GREEN, "solid"),
)


def scores(study: Study) -> list[Panel]:
    """With and without the residual stream, with and without position 0."""
    rows = study["tables"].get("blocks")
    if not rows:
        return []
    figures = [
        _scores(rows, stream, which, f"{stream}, {title}")
        for stream in ("with residual", "without residual")
        for which, title in (("", "all positions"), (_WITHOUT, "without position 0"))
    ]
    held_out = f"without residual held out{_WITHOUT}"
    least = min(rows, key=lambda row: row[held_out])
    reading = (
        f"With the residual stream the blocks score {_mean(rows, 'with residual')} on average, the identity alone "
        f"{_mean(rows, 'identity')}; of what a block itself adds, a linear map explains "
        f"{_mean(rows, 'without residual')} in sample and {number(mean(row[held_out] for row in rows))} on unseen text "
        f"without position 0, where noise would score {_mean(rows, f'chance floor{_WITHOUT}')}; the least linear is "
        f"block {least['block']} ({number(least[held_out])})."
    )
    return [Panel("How linear each block is", reading, ("blocks",), figures)]


def _mean(rows: Sequence[Row], column: str) -> str:
    return number(mean(row[column] for row in rows))


def _scores(rows: Sequence[Row], stream: str, which: str, title: str) -> go.Figure:
    figure = empty_figure(title, x="block", y="R², weighted by variance")
    for suffix, name, colour, dash in _SERIES:
        column = f"{stream}{suffix}{which}"
        add_line(figure, rows, "block", column, name=name, colour=colour, dash=dash)
    if stream == "with residual":
        column = f"identity{which}"
        add_line(figure, rows, "block", column, name="identity", colour=ORANGE, dash="dash")
    column = f"chance floor{which}"
    add_line(figure, rows, "block", column, name="noise would score", colour=GREY, dash="dot")
    return unit_axis(level_axis(figure, rows, "block"), rows, stream)


def steps(study: Study) -> list[Panel]:
    """Why a block looks linear: its step is short, or hardly turns the stream."""
    rows = study["tables"].get("blocks")
    if not rows:
        return []
    ratio, influence = "step norm over stream norm", "block influence"
    figures = [
        _single(rows, "block", ratio, "length of the step over the stream's", BLUE),
        _single(rows, "block", influence, "block influence: 1 − cosine", GREEN),
    ]
    longest = max(rows, key=lambda row: row[ratio])
    least = min(rows, key=lambda row: row[influence])
    reading = (
        f"What a block adds is {_mean(rows, ratio)} times as long as the stream it is added to on average, most at "
        f"block {longest['block']} ({number(longest[ratio])}); block {least['block']} turns the stream least "
        f"(influence {number(least[influence])})."
    )
    return [Panel("How much each block changes", reading, ("blocks",), figures)]


def angles(study: Study) -> list[Panel]:
    """The mean angle between the states of two levels."""
    rows = study["tables"].get("angles")
    if not rows:
        return []
    figure = heat_map(
        rows,
        "to",
        "from",
        "angle",
        title="mean angle, degrees",
        x_title="to level",
        y_title="from level",
        factor=180,
        unit="°",
    )
    steps = [row for row in rows if row["to"] == row["from"] + 1]
    widest = max(steps, key=lambda row: row["angle"])
    first_last = max(rows, key=lambda row: row["to"] - row["from"])
    reading = (
        f"From one level to the next the stream turns by {number(180 * mean(row['angle'] for row in steps))}° on "
        f"average, most from level {widest['from']} to {widest['to']} ({number(180 * widest['angle'])}°); from the "
        f"first level to the last it is {number(180 * first_last['angle'])}°."
    )
    return [Panel("How far the stream turns", reading, ("angles",), [figure])]


def shape(study: Study) -> list[Panel]:
    """Norm, anisotropy and intrinsic dimension by level."""
    rows = study["tables"].get("levels")
    if not rows:
        return []
    columns = (
        ("mean norm", "mean norm", AMBER),
        ("anisotropy", "anisotropy", PURPLE),
        ("intrinsic dimension", "intrinsic dimension", BLUE),
    )
    figures = [_single(rows, "level", name, title, colour) for name, title, colour in columns]
    flattest = max(rows, key=lambda row: row["anisotropy"] or 0)
    widest = max(rows, key=lambda row: row["intrinsic dimension"] or 0)
    reading = (
        f"States are most stretched along one direction at level {flattest['level']} (anisotropy "
        f"{number(flattest['anisotropy'])}) and need most dimensions at level {widest['level']} "
        f"({number(widest['intrinsic dimension'])}); their mean norm goes from {number(rows[0]['mean norm'])} to "
        f"{number(rows[-1]['mean norm'])}."
    )
    return [Panel("The shape of the states", reading, ("levels",), figures)]


def _single(rows: Sequence[Row], x: str, y: str, title: str, colour: str) -> go.Figure:
    figure = empty_figure(title, x=x)
    add_line(figure, rows, x, y, name=y, colour=colour)
    figure.update_traces(showlegend=False)
    figure.update_yaxes(rangemode="tozero")
    return level_axis(figure, rows, x)

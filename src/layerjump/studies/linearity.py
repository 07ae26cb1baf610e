"""`linearity`: how linear each block is, as in "Your Transformer is Secretly Linear" (arXiv 2405.12250), and why.

The paper's score is the in-sample, variance-weighted R² of a regression with intercept over all tokens: with the
residual stream (level l → l + 1) and without it (level l → l + 1 minus level l). For comparison: the held-out score,
the score of the identity, and what pure noise would score, d / (n − 1). Position 0 is an attention sink with a huge
state that dominates a variance-weighted score, so every score is given with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import plotly.graph_objects as go
import torch
from torch import Tensor

from layerjump.data.positions import ALL_POSITIONS
from layerjump.jumps.collect_moments import product_dtype
from layerjump.jumps.cost_estimate import estimate_cost
from layerjump.jumps.moments import Moments
from layerjump.jumps.reservoir import sampling_keys
from layerjump.jumps.score_from_moments import block_map, block_pair, block_scores
from layerjump.metrics import geometry
from layerjump.metrics.bootstrap import mean_interval
from layerjump.models.model import capture_states
from layerjump.models.sites import Site, parse_pairs
from layerjump.studies.charts import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Panel,
    Value,
    draw_heat_map,
    line_chart,
    unit_axis,
)
from layerjump.studies.formatting import mean, number
from layerjump.studies.results import Column, Finding, Interval, Record, Result, Study, from_json
from layerjump.studies.setup import Setup

MAX_TOKENS = 16_000
"""Tokens to run at most (the paper's notebook takes about 14,000)."""


class Scores(Record):
    """R² of one block on all positions, weighted by variance."""

    with_residual: Annotated[float, Column("with residual")]
    without_residual: Annotated[float, Column("without residual")]
    with_residual_held_out: Annotated[float, Column("with residual held out")]
    without_residual_held_out: Annotated[float, Column("without residual held out")]
    identity: float
    chance_floor: Annotated[float, Column("chance floor")]


class LaterScores(Record):
    """R² of one block on all positions but position 0, weighted by variance."""

    with_residual: Annotated[float, Column("with residual without position 0")]
    without_residual: Annotated[float, Column("without residual without position 0")]
    with_residual_held_out: Annotated[Interval, Column("with residual held out without position 0{}")]
    without_residual_held_out: Annotated[Interval, Column("without residual held out without position 0{}")]
    identity: Annotated[float, Column("identity without position 0")]
    chance_floor: Annotated[float, Column("chance floor without position 0")]


class StepSize(Record):
    """How much a block changes the residual stream, at positions other than 0."""

    relative_norm: Annotated[float, Column("step norm over stream norm")]
    influence: Annotated[float, Column("block influence")]
    """1 − cosine between the states before and after the block."""
    angle: float
    """In half turns."""


class BlockRow(Record):
    """One block."""

    block: int
    all: Annotated[Scores, Column("{}")]
    later: Annotated[LaterScores, Column("{}")]
    step: Annotated[StepSize, Column("{}")]


class LevelRow(Record):
    """The states of one level."""

    level: int
    mean_norm: Annotated[float, Column("mean norm")]
    anisotropy: float
    intrinsic_dimension: Annotated[float, Column("intrinsic dimension")]


class AngleRow(Record):
    """The mean angle between the states of two levels, in half turns."""

    source: Annotated[int, Column("from")]
    target: Annotated[int, Column("to")]
    angle: float


class StackTables(Record):
    """One stack of blocks."""

    levels: list[LevelRow]
    blocks: list[BlockRow]
    angles: list[AngleRow]


class Tables(StackTables):
    """The decoder's stack, and of an encoder–decoder also the encoder's."""

    encoder: Annotated[StackTables | None, Column("encoder {}")] = None


class StackHeadline(Record):
    """Means over the blocks of one stack."""

    mean_with_residual: float
    mean_with_residual_without_position_0: float
    mean_without_residual: float
    mean_without_residual_without_position_0: float
    mean_identity: float
    mean_identity_without_position_0: float
    mean_chance_floor: float
    mean_chance_floor_without_position_0: float
    mean_with_residual_held_out_without_position_0: float
    mean_without_residual_held_out_without_position_0: float
    jump_strength: float
    """The angle of the last block over the mean angle of the others."""


class Headline(StackHeadline):
    """The decoder's stack, and of an encoder–decoder also the encoder's."""

    encoder: Annotated[StackHeadline | None, Column("encoder_{}")] = None


def run(setup: Setup) -> Result[Tables, Headline]:
    """Measure the blocks of the model; of an encoder–decoder those of both stacks."""
    tables, headline, facts = _measure(setup)
    notes = [
        "Jump strength (the mean angle of the last block over the mean of the others) is our definition. Angles, step "
        "sizes and the widths of intervals are of a sample of test positions other than 0; intervals resample "
        "documents with the fitted map held fixed."
    ]
    encoder_tables, encoder_headline = None, None
    if setup.model.task == "seq2seq":
        encoder = setup.with_empty_cache(model=setup.model.encoder_side())
        encoder_tables, encoder_headline, encoder_facts = _measure(encoder)
        facts |= {f"encoder_{name}": value for name, value in encoder_facts.items()}
        notes.append(
            "Tables without `encoder` in their names are of the decoder, which sees the second half of each text; the "
            "encoder is measured on full texts."
        )
    both = Tables(tables.levels, tables.blocks, tables.angles, encoder_tables)
    return Result("linearity", both, Headline(**asdict(headline), encoder=encoder_headline), notes, facts)


def _measure(setup: Setup) -> tuple[StackTables, StackHeadline, dict[str, object]]:
    """Measure one stack in one pass over fit and test documents, adjacent levels only."""
    fit, test = _collect(setup, "fit", 0.8), _collect(setup, "test", 0.2)
    # What is measured without position 0 comes first: the moments take it in afterwards.
    later = [_later_scores(fit, test, level) for level in range(setup.model.n_blocks)]
    steps = []
    for level in range(setup.model.n_blocks):
        x, y = (test.moments.reservoir.states[site].double() for site in block_pair(level))
        cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1)
        norm = float(((y - x).norm(dim=-1) / x.norm(dim=-1)).mean())
        angle = float(cosine.clamp(-1, 1).arccos().mean() / torch.pi)
        steps.append(StepSize(norm, influence=float((1 - cosine).mean()), angle=angle))
    levels = [
        LevelRow(
            site.index,
            mean_norm=fit.moments.mean_norm(site),
            anisotropy=geometry.anisotropy(fit.moments.source(site).scatter),
            intrinsic_dimension=geometry.intrinsic_dimension(fit.moments.reservoir.states[site]),
        )
        for site in fit.moments.sites
    ]
    sampled = [test.moments.reservoir.states[site] for site in test.moments.sites]
    angles = geometry.angles(sampled)
    fit.add_position_0()
    test.add_position_0()
    blocks = []
    for level in range(setup.model.n_blocks):
        scores = block_scores(block_map(fit.moments, level), fit.moments, test.moments, level)
        blocks.append(BlockRow(level + 1, from_json(Scores, scores), later[level], steps[level]))
    angle_rows = [AngleRow(a, b, float(angles[a, b])) for a in range(len(angles)) for b in range(a + 1, len(angles))]
    adjacent = [float(angles[level, level + 1]) for level in range(setup.model.n_blocks)]
    facts: dict[str, object] = {
        "n_fit": fit.moments.n,
        "n_test": test.moments.n,
        "sampled": len(test.documents),
        "positions": "all tokens, position 0 and special tokens included",
    }
    means = {}
    for name in ("with_residual", "without_residual", "identity", "chance_floor"):
        means[f"mean_{name}"] = sum(getattr(row.all, name) for row in blocks) / len(blocks)
        means[f"mean_{name}_without_position_0"] = sum(getattr(row.later, name) for row in blocks) / len(blocks)
    for name in ("with_residual_held_out", "without_residual_held_out"):
        total = sum(getattr(row.later, name).mean for row in blocks)
        means[f"mean_{name}_without_position_0"] = total / len(blocks)
    headline = StackHeadline(**means, jump_strength=geometry.jump_strength(adjacent))
    return StackTables(levels, blocks, angle_rows), headline, facts


@dataclass
class _Activations:
    """Second moments of adjacent levels over one part of the split."""

    moments: Moments
    """Of all positions but position 0, until `add_position_0`."""
    states_at_0: list[dict[Site, Tensor]]
    """Few rows, which take less memory than moments of their own would."""
    documents: Tensor
    """The document of every row of the reservoir."""

    def add_position_0(self) -> None:
        """Let `moments` cover all positions."""
        while self.states_at_0:
            self.moments.add(self.states_at_0.pop(0))


def _collect(setup: Setup, part: str, share: float) -> _Activations:
    model = setup.model
    pairs = parse_pairs("adjacent", model.structure)
    moments = Moments(pairs, full_targets=True, products=product_dtype(model))
    tokens = min(MAX_TOKENS, setup.settings.tokens or MAX_TOKENS)
    batches = setup.batches(part=part, positions=ALL_POSITIONS, tokens=max(1, int(share * tokens)))
    estimate_cost(model, moments, {part: batches}).require_memory()
    states_at_0: list[dict[Site, Tensor]] = []
    document_of: dict[int, int] = {}
    done = 0
    for states in capture_states(model, batches, moments.sites):
        document, position = states.batch.document, states.batch.position
        keys = sampling_keys(document, position, states.batch.sequence, seed=setup.settings.seed)
        document_of.update(zip(keys.tolist(), document.tolist(), strict=True))
        first = position == 0
        states_at_0.append({site: state[first] for site, state in states.at.items()})
        if not first.all():
            later = {site: state[~first] for site, state in states.at.items()}
            moments.add(later, keys=keys[~first])
        done += states.batch.n_tokens
        if setup.progress:
            setup.progress(done, batches.n_tokens)
    documents = [document_of[key] for key in moments.reservoir.keys.tolist()]
    return _Activations(moments, states_at_0, torch.tensor(documents))


def _later_scores(fit: _Activations, test: _Activations, level: int) -> LaterScores:
    """Score a block without position 0, with 95 % intervals of the held-out scores."""
    jump = block_map(fit.moments, level)
    scores = from_json(Scores, block_scores(jump, fit.moments, test.moments, level))
    device = jump.weight.device  # of the moments; sampled states are on the CPU
    sampled = test.moments.reservoir.states
    x, y = (sampled[site].to(device, torch.float64) for site in block_pair(level))
    error = (jump(x) - y).square().sum(-1)

    def interval(score: float, target: Tensor) -> Interval:
        variation = (target - target.mean(0)).square().sum(-1)
        # Linearised ratio: the mean of (error − ratio · variation) / mean variation has the spread of the ratio.
        ratio = error.sum() / variation.sum()
        spread = ((error - ratio * variation) / variation.mean()).nan_to_num(0.0)  # 0 / 0: no step
        _, low, high = mean_interval(spread.cpu().numpy(), test.documents.numpy())
        return Interval(score, score - float(high), score - float(low))

    held_out = {
        "with_residual_held_out": interval(scores.with_residual_held_out, y),
        "without_residual_held_out": interval(scores.without_residual_held_out, y - x),
    }
    return LaterScores(**asdict(scores) | held_out)


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return linearity and step size by block, angles between levels and the shape of the states, for each stack."""
    tables, headline = result.tables, result.headline
    panels = _stack_panels(tables, headline, "")
    if tables.encoder and headline.encoder:
        panels += _stack_panels(tables.encoder, headline.encoder, "encoder ")
    return panels


def _stack_panels(tables: StackTables, headline: StackHeadline, stack: str) -> list[Panel]:
    of, blocks, levels = stack and " of the encoder", tables.blocks, tables.levels
    least = min(blocks, key=lambda row: row.later.without_residual_held_out.mean)
    linearity = (
        f"With the residual stream the mean score of the blocks is {number(headline.mean_with_residual)}; the identity "
        f"scores {number(headline.mean_identity)}. Without it, a linear map explains "
        f"{number(headline.mean_without_residual)} of what a block adds in sample, and "
        f"{number(headline.mean_without_residual_held_out_without_position_0)} on held-out text without position 0, "
        f"where noise would score {number(headline.mean_chance_floor_without_position_0)}. Block {least.block} is the "
        f"least linear ({number(least.later.without_residual_held_out.mean)})."
    )
    every = {row.block: row.all for row in blocks}
    later = {row.block: row.later for row in blocks}
    score_charts = [
        _score_chart("with residual, all positions", every, "with_residual"),
        _score_chart("with residual, without position 0", later, "with_residual"),
        _score_chart("without residual, all positions", every, "without_residual"),
        _score_chart("without residual, without position 0", later, "without_residual"),
    ]

    longest = max(blocks, key=lambda row: row.step.relative_norm)
    least = min(blocks, key=lambda row: row.step.influence)
    steps = (
        f"What a block adds is on average {number(mean(row.step.relative_norm for row in blocks))} times as long as "
        f"its input, at most {number(longest.step.relative_norm)} times (block {longest.block}). Block {least.block} "
        f"changes the direction of the residual stream least (influence {number(least.step.influence)})."
    )
    norms = [(row.block, row.step.relative_norm) for row in blocks]
    influences = [(row.block, row.step.influence) for row in blocks]
    step_charts = [
        _single_line("norm of the step over norm of the stream", "block", norms, BLUE),
        _single_line("block influence: 1 − cosine", "block", influences, GREEN),
    ]

    degrees = {(row.source, row.target): 180 * row.angle for row in tables.angles}
    adjacent = {pair: angle for pair, angle in degrees.items() if pair[1] == pair[0] + 1}
    widest = max(adjacent, key=lambda pair: adjacent[pair])
    ends = max(degrees, key=lambda pair: pair[1] - pair[0])
    angles = (
        f"The mean angle between adjacent levels is {number(mean(adjacent.values()))}°, with a maximum of "
        f"{number(adjacent[widest])}° from level {widest[0]} to {widest[1]}. Between the first and the last level it "
        f"is {number(degrees[ends])}°."
    )
    cells = {(target, source): angle for (source, target), angle in degrees.items()}

    flattest = max(levels, key=lambda row: 0 if math.isnan(row.anisotropy) else row.anisotropy)
    richest = max(levels, key=lambda row: 0 if math.isnan(row.intrinsic_dimension) else row.intrinsic_dimension)
    shape = (
        f"The states are most anisotropic at level {flattest.level} ({number(flattest.anisotropy)}) and have the "
        f"highest intrinsic dimension at level {richest.level} ({number(richest.intrinsic_dimension)}). Their mean "
        f"norm goes from {number(levels[0].mean_norm)} to {number(levels[-1].mean_norm)}."
    )
    dimensions = [(row.level, row.intrinsic_dimension) for row in levels]
    shape_charts = [
        _single_line("mean norm", "level", [(row.level, row.mean_norm) for row in levels], AMBER),
        _single_line("anisotropy", "level", [(row.level, row.anisotropy) for row in levels], PURPLE),
        _single_line("intrinsic dimension", "level", dimensions, BLUE),
    ]
    heat_map = draw_heat_map(cells, title="mean angle, degrees", unit="°")
    return [
        Panel(f"How linear each block{of} is", linearity, (f"{stack}blocks",), score_charts),
        Panel(f"How much each block{of} changes", steps, (f"{stack}blocks",), step_charts),
        Panel(f"Angles between the levels{of}", angles, (f"{stack}angles",), [heat_map]),
        Panel(f"The shape of the states{of}", shape, (f"{stack}levels",), shape_charts),
    ]


_IN_SAMPLE, _HELD_OUT, _NOISE = "in sample (as in the paper)", "held out", "score of pure noise"


def _score_chart(
    title: str, scores: Mapping[int, Scores | LaterScores], stream: Literal["with_residual", "without_residual"]
) -> go.Figure:
    """Draw the scores of all blocks, with or without the residual stream."""
    fields = {_IN_SAMPLE: stream, _HELD_OUT: f"{stream}_held_out", "identity": "identity", _NOISE: "chance_floor"}
    if stream == "without_residual":
        del fields["identity"]
    lines: dict[str, list[tuple[float, Value]]] = {
        name: [(block, getattr(of_block, field)) for block, of_block in scores.items()]
        for name, field in fields.items()
    }
    paint = {_IN_SAMPLE: BLUE, _HELD_OUT: GREEN, "identity": ORANGE, _NOISE: GREY}
    axis = "R², weighted by variance"
    figure = line_chart(
        title, lines, x="block", y=axis, whole_x=True, dashed=["identity"], dotted=[_NOISE], paint=paint
    )
    return unit_axis(figure, [value for name in (_IN_SAMPLE, _HELD_OUT) for _, value in lines[name]])


def _single_line(title: str, axis: str, points: Sequence[tuple[float, float]], colour: str) -> go.Figure:
    return line_chart(title, {title: points}, x=axis, scale="zero", whole_x=True, paint={title: colour})


def finding(result: Result[Tables, Headline]) -> Finding:
    """Return the mean linearity with and without the residual stream."""
    head = result.headline
    return Finding(
        "Mean linearity of a block",
        number(head.mean_with_residual),
        f"with the residual stream (the identity: {number(head.mean_identity)}); without it, "
        f"{number(head.mean_without_residual)} in sample and "
        f"{number(head.mean_without_residual_held_out_without_position_0)} on held-out text without position 0.",
    )


STUDY = Study("linearity", "how linear is each block, and why?", run, figures, finding, cannot_run=lambda setup: None)

"""`failures`: where are the maps wrong?

Protocol: agreement with the model by position, by frequency of the token in the fit text, and by entropy of the model's
prediction; the error of the predicted state at the first token, whose state is unlike any other, and at the other
positions; percentiles of the error; and the examples with the largest KL in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.data.positions import ALL_POSITIONS, Positions
from layerjump.data.token_text import token_text
from layerjump.jumps.jumps import Jumps
from layerjump.lens.evaluate import LensScores
from layerjump.models.model import capture_states
from layerjump.studies.charts import Panel, colours, line_chart
from layerjump.studies.examples import context
from layerjump.studies.formatting import html_table, identity_last, number, safe, unique
from layerjump.studies.results import Column, Record, Result, Study
from layerjump.studies.setup import Setup

N_WORST = 20
MIN_EXAMPLES = 10
"""Examples that a bin needs to be named in a sentence."""
FIRST, OTHERS = "position 0", "other positions"


class BinRow(Record):
    """One lens at one level on the examples of one bin."""

    level: int
    lens: str
    bin: str
    n: int
    p1: Annotated[float, Column("p@1")]
    kl: float


class FirstTokenRow(Record):
    """Mean norms of the states and errors of one map, at position 0 or at the other positions."""

    level: int
    map: str
    at: str
    """`position 0` or `other positions`."""
    n: int
    state_norm: Annotated[float, Column("state norm")]
    target_norm: Annotated[float, Column("target norm")]
    error: float
    relative_error: Annotated[float, Column("relative error")]


class ErrorTail(Record):
    """Percentiles of an error."""

    p50: Annotated[float, Column("50 %")]
    p90: Annotated[float, Column("90 %")]
    p95: Annotated[float, Column("95 %")]
    p99: Annotated[float, Column("99 %")]
    max: float

    @classmethod
    def of(cls, errors: np.ndarray) -> ErrorTail:
        return cls(*map(float, (*np.percentile(errors, (50, 90, 95, 99)), errors.max())))


class ErrorRow(Record):
    """The error of one map at the test positions, absolute and relative to the norm of the last level."""

    level: int
    map: str
    absolute: Annotated[ErrorTail, Column("{}")]
    relative: Annotated[ErrorTail, Column("{} relative")]


class WorstRow(Record):
    """An example of large KL."""

    kl: float
    context: str
    model_token: Annotated[str, Column("model's best")]
    lens_token: Annotated[str, Column("lens' best")]
    level: int
    position: int
    document: int


class Tables(Record):
    """Agreement by bins of examples, errors of states, worst examples."""

    by_position: Annotated[list[BinRow], Column("by position")]
    by_frequency: Annotated[list[BinRow], Column("by frequency")]
    by_entropy: Annotated[list[BinRow], Column("by entropy")]
    first_token: Annotated[list[FirstTokenRow], Column("first token")]
    errors: list[ErrorRow]
    worst: list[WorstRow]


class Headline(Record):
    """Agreement and relative error of the first estimator, half-way up."""

    p1_where_model_is_sure: Annotated[float, Column("p@1_where_model_is_sure")]
    p1_where_unsure: Annotated[float, Column("p@1_where_unsure")]
    error_at_position_0: Annotated[float, Column("relative_error_at_position_0")]
    error_elsewhere: Annotated[float, Column("relative_error_elsewhere")]
    median_error: Annotated[float, Column("median_relative_error")]
    error_99_percent: Annotated[float, Column("99_percent_relative_error")]


def run(setup: Setup) -> Result[Tables, Headline]:
    """Sort the scored examples into bins, and measure the errors of the states in separate passes."""
    scores, estimator = setup.lens_scores(), setup.settings.estimators[0]
    jumps, middle = setup.jumps(estimator), setup.model.n_blocks // 2
    levels = quarter_levels(setup.model.n_blocks)
    fit = setup.batches(part="fit", positions=Positions("all"), tokens=setup.settings.tokens)
    counts = np.bincount(np.asarray(fit.sequences.ids), minlength=setup.model.structure.vocab_size)
    frequency = counts[scores.token.numpy()]
    everywhere = setup.batches(positions=ALL_POSITIONS, tokens=setup.settings.rerun_tokens)
    errors = _measure_errors(setup, jumps, setup.test_batches())
    tables = Tables(
        by_position=_bin_rows(scores, levels, *bin_positions(scores.position)),
        by_frequency=_bin_rows(scores, levels, *bin_counts(frequency)),
        by_entropy=_bin_rows(scores, levels, *bin_quarters(scores.model_entropy)),
        first_token=_first_token_rows(_measure_errors(setup, jumps, everywhere)),
        errors=[
            ErrorRow(level, name, ErrorTail.of(norms), ErrorTail.of(norms / errors.target.numpy()))
            for name, error in errors.error.items()
            for level, norms in enumerate(error.numpy())
        ],
        worst=_worst_rows(setup, scores, middle),
    )
    facts = {"n_examples": scores.n_examples, "levels": levels, "map": estimator, "worst_at_level": middle}
    notes = [
        "Frequency counts how often the token at the position occurs in the fit documents; entropy is that of the "
        "model's own prediction. First token: position 0 of every sequence, special tokens included, nothing masked."
    ]
    if setup.model.masked:
        notes.append(
            "The maps of this model are fitted at masked positions, and the pass for the first token masks none: there "
            "the maps are wrong at all positions."
        )
    entropy = [row for row in tables.by_entropy if (row.level, row.lens) == (middle, estimator)]
    at = {row.at: row.relative_error for row in tables.first_token if (row.level, row.map) == (middle, estimator)}
    (tail,) = (row.relative for row in tables.errors if (row.level, row.map) == (middle, estimator))
    headline = Headline(
        p1_where_model_is_sure=entropy[0].p1,
        p1_where_unsure=entropy[-1].p1,
        error_at_position_0=at.get(FIRST, math.nan),
        error_elsewhere=at.get(OTHERS, math.nan),
        median_error=tail.p50,
        error_99_percent=tail.p99,
    )
    return Result("failures", tables, headline, notes, facts)


def quarter_levels(n_blocks: int) -> list[int]:
    """Return the levels a quarter, half and three quarters up."""
    return list(dict.fromkeys(n_blocks * part // 4 for part in (1, 2, 3)))


Bins = tuple[np.ndarray, list[str]]
"""The bin of every example, and the names of the bins in order."""


def bin_positions(position: Tensor) -> Bins:
    """Bin positions by powers of two: 0, 1, 2–3, 4–7, …"""
    bins = np.ceil(np.log2(position.numpy() + 1)).astype(int)
    names = ["0", "1"] + [f"{2 ** (k - 1)}–{2**k - 1}" for k in range(2, bins.max() + 1)]
    return bins, names


def bin_counts(counts: np.ndarray) -> Bins:
    """Bin counts by powers of ten: never, 1–9, 10–99, …"""
    bins = np.where(counts > 0, np.floor(np.log10(np.maximum(counts, 1))) + 1, 0).astype(int)
    names = ["never"] + [f"{10 ** (k - 1):,}–{10**k - 1:,}" for k in range(1, bins.max() + 1)]
    return bins, names


def bin_quarters(values: Tensor) -> Bins:
    """Bin values by quartiles."""
    ends = np.quantile(values.numpy(), [0.25, 0.5, 0.75])
    low, middle, high = (f"{end:.2f}" for end in ends)
    names = [f"up to {low}", f"{low} to {middle}", f"{middle} to {high}", f"above {high}"]
    return np.searchsorted(ends, values.numpy()), names


def _bin_rows(scores: LensScores, levels: Sequence[int], bins: np.ndarray, names: Sequence[str]) -> list[BinRow]:
    p1, kl = scores.hits(1).double().numpy(), scores.kl.double().numpy()
    members = {name: bins == index for index, name in enumerate(names) if (bins == index).any()}
    return [
        BinRow(level, lens, name, int(is_in.sum()), *(float(score[index, level, is_in].mean()) for score in (p1, kl)))
        for level in levels
        for index, lens in enumerate(scores.lenses)
        for name, is_in in members.items()
    ]


class _Errors(NamedTuple):
    """Norms in float64: of states and errors (levels, positions), and of the last level (positions,)."""

    position: Tensor
    state: Tensor
    target: Tensor
    error: dict[str, Tensor]
    """‖jump(h) − h_L‖ and ‖h − h_L‖, by the name of the map."""


@torch.no_grad()
def _measure_errors(setup: Setup, jumps: Jumps, batches: Batches) -> _Errors:
    last, estimator = setup.model.n_blocks, jumps.provenance.estimator
    positions: list[Tensor] = []
    norms: dict[str, list[Tensor]] = {}
    for states in capture_states(setup.model, batches, range(last + 1)):
        h = torch.stack([states[level].float() for level in range(last + 1)])
        jumped = torch.stack([jumps[level, last](h[level]) for level in range(last)])
        positions.append(states.batch.position)
        vectors = {"state": h[:-1], "target": h[-1:]}
        errors = {estimator: jumped - h[-1], "identity": h[:-1] - h[-1]}
        for name, vector in (vectors | errors).items():
            norms.setdefault(name, []).append(vector.double().norm(dim=-1).cpu())
    joined = {name: torch.cat(parts, dim=1) for name, parts in norms.items()}
    state, target = joined.pop("state"), joined.pop("target")[0]
    return _Errors(torch.cat(positions), state, target, joined)


def _first_token_rows(errors: _Errors) -> list[FirstTokenRow]:
    is_first = errors.position == 0
    return [
        FirstTokenRow(
            level,
            name,
            at,
            n=int(rows.sum()),
            state_norm=float(errors.state[level, rows].mean()),
            target_norm=float(errors.target[rows].mean()),
            error=float(error[level, rows].mean()),
            relative_error=float((error[level, rows] / errors.target[rows]).mean()),
        )
        for name, error in errors.error.items()
        for level in range(len(error))
        for at, rows in ((FIRST, is_first), (OTHERS, ~is_first))
        if rows.any()
    ]


def _worst_rows(setup: Setup, scores: LensScores, level: int) -> list[WorstRow]:
    """Return the examples of largest KL of the first estimator at one level."""
    lens = scores.lenses.index(setup.settings.estimators[0])
    worst = scores.kl[lens, level].argsort(descending=True)[:N_WORST].tolist()
    # The scored examples are the picks of the test batches in order.
    contexts: dict[int, str] = {}
    start = 0
    for batch in setup.test_batches():
        for pick in range(batch.n_picks):
            if start + pick in worst:
                contexts[start + pick] = context(setup.model, batch, pick)
        start += batch.n_picks
    tokenizer = setup.model.tokenization.tokenizer
    return [
        WorstRow(
            kl=float(scores.kl[lens, level, example]),
            context=contexts[example],
            model_token=token_text(tokenizer, int(scores.model_top[example])),
            lens_token=token_text(tokenizer, int(scores.top[lens, level, example])),
            level=level,
            position=int(scores.position[example]),
            document=int(scores.document[example]),
        )
        for example in worst
    ]


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return agreement by bins, errors by level, and the worst examples as a table."""
    tables = result.tables
    panels = [
        _bin_panel(tables.by_position, "position", "by position"),
        _bin_panel(tables.by_frequency, "occurrences of the token in the fit text", "by frequency"),
        _bin_panel(tables.by_entropy, "entropy of the model's prediction, nats", "by entropy"),
    ]
    levels, maps = sorted({row.level for row in tables.errors}), identity_last(row.map for row in tables.errors)
    middle = levels[len(levels) // 2]

    errors = {
        f"{name}, {at}": [
            (row.level, row.relative_error) for row in tables.first_token if (row.map, row.at) == (name, at)
        ]
        for name in maps
        for at in (FIRST, OTHERS)
    }
    norms = {
        f"state at {at}": [
            (row.level, row.state_norm) for row in tables.first_token if (row.map, row.at) == (maps[0], at)
        ]
        for at in (FIRST, OTHERS)
    }
    title, paint = "error relative to the norm of the last level", colours([*errors, *norms])
    charts = [
        line_chart(title, errors, x="level", scale="log", whole_x=True, paint=paint),
        line_chart("norm of the state", norms, x="level", scale="log", whole_x=True, paint=paint),
    ]
    error = {row.at: row.relative_error for row in tables.first_token if (row.level, row.map) == (middle, maps[0])}
    reading = (
        f"From level {middle}, the error of {maps[0]} relative to the norm of the last level is "
        f"{number(error.get(FIRST))} at position 0 and {number(error.get(OTHERS))} at the other positions, on average."
    )
    panels.append(Panel("The first token", reading, ("first token",), charts))

    charts = []
    for name in maps:
        tails = {row.level: row.relative for row in tables.errors if row.map == name}
        lines = {
            "median": [(level, tail.p50) for level, tail in tails.items()],
            "90 %": [(level, tail.p90) for level, tail in tails.items()],
            "99 %": [(level, tail.p99) for level, tail in tails.items()],
            "largest": [(level, tail.max) for level, tail in tails.items()],
        }
        axis = "error over the norm of the last level"
        charts.append(line_chart(name, lines, x="level", y=axis, scale="zero", whole_x=True))
    tail = next(row.relative for row in tables.errors if (row.level, row.map) == (middle, maps[0]))
    reading = (
        f"From level {middle}, the error of {maps[0]} relative to the norm of the last level has the median "
        f"{number(tail.p50)}; 99 % of the examples are below {number(tail.p99)} and the largest is {number(tail.max)}."
    )
    panels.append(Panel("The tail of the error", reading, ("errors",), charts))

    worst = tables.worst
    body = [
        [
            number(row.kl),
            f"… {safe(row.context)}",
            f'<span class="token own">{safe(row.model_token)}</span>',
            f'<span class="token">{safe(row.lens_token)}</span>',
            number(row.position),
        ]
        for row in worst
    ]
    table = html_table(["KL, nats", "context", "model's token", "map's token", "position"], body, numeric=(0, 4))
    reading = (
        f"The {len(worst)} examples with the largest KL at level {worst[0].level}: from {number(worst[-1].kl)} to "
        f"{number(worst[0].kl)} nats."
    )
    return [*panels, Panel("Where the map is most wrong", reading, ("worst",), html=table)]


def _bin_panel(rows: Sequence[BinRow], axis: str, table: str) -> Panel:
    """Draw precision@1 by bin, one figure for each level."""
    names, levels = unique(row.bin for row in rows), unique(row.level for row in rows)
    lenses = identity_last(row.lens for row in rows)
    charts = []
    for level in levels:
        lines = {
            lens: [(names.index(row.bin), row.p1) for row in rows if (row.level, row.lens) == (level, lens)]
            for lens in lenses
        }
        figure = line_chart(f"level {level}", lines, x=axis, y="precision@1", scale="unit")
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names)
        hover = "<b>%{fullData.name}</b><br>%{x}: %{y:.3f}<extra></extra>"
        charts.append(figure.update_traces(hovertemplate=hover))
    middle, lens = levels[len(levels) // 2], lenses[0]
    group = [row for row in rows if (row.level, row.lens) == (middle, lens)]
    # A bin of a few examples would win by chance.
    group = [row for row in group if row.n >= MIN_EXAMPLES] or group
    best, worst = (end(group, key=lambda row: row.p1) for end in (max, min))
    reading = (
        f"At level {middle}, the precision@1 of {lens} is highest in the bin {best.bin} ({number(best.p1)}, "
        f"{number(best.n)} examples) and lowest in the bin {worst.bin} ({number(worst.p1)}, {number(worst.n)} "
        f"examples) of {axis}."
    )
    return Panel(f"Agreement with the model {table}", reading, (table,), charts)


STUDY = Study("failures", "where are the maps wrong?", run, figures)

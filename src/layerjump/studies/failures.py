"""`failures`: where are the maps wrong?

Protocol: agreement with the model by position, by frequency of the token in the fit text, and by entropy of the model's
prediction; the error of the predicted state at the first token, whose state is unlike any other, and at the other
positions; percentiles of the error; and the examples with the largest KL in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.data.positions import ALL_POSITIONS, Positions
from layerjump.data.tokenization import token_text
from layerjump.jumps.jumps import Jumps
from layerjump.lens.evaluate import LensScores
from layerjump.models.model import capture_states
from layerjump.studies.charts import (
    Panel,
    colours,
    html_table,
    identity_last,
    level_axis,
    line_chart,
    number,
    safe,
    unique,
    unit_axis,
)
from layerjump.studies.examples import context
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
    frequency = _token_counts(setup)[scores.token.numpy()]
    everywhere = setup.batches(positions=ALL_POSITIONS, tokens=setup.settings.variant_tokens)
    tables = Tables(
        by_position=_bin_rows(scores, levels, *bin_positions(scores.position)),
        by_frequency=_bin_rows(scores, levels, *bin_counts(frequency)),
        by_entropy=_bin_rows(scores, levels, *bin_quarters(scores.model_entropy)),
        first_token=_first_token_rows(_measure_errors(setup, jumps, everywhere)),
        errors=_error_rows(_measure_errors(setup, jumps, setup.test_batches())),
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
    return Result("failures", tables, _headline(tables, middle, estimator), notes, facts)


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
    hits, kl = scores.hits(1).double().numpy(), scores.kl.double().numpy()
    members = {name: bins == index for index, name in enumerate(names) if (bins == index).any()}
    return [
        BinRow(
            level,
            lens,
            name,
            n=int(member.sum()),
            p1=float(hits[index, level, member].mean()),
            kl=float(kl[index, level, member].mean()),
        )
        for level in levels
        for index, lens in enumerate(scores.lenses)
        for name, member in members.items()
    ]


def _token_counts(setup: Setup) -> np.ndarray:
    """Return how often each token of the vocabulary occurs in the fit documents."""
    fit = setup.batches(part="fit", positions=Positions("all"), tokens=setup.settings.tokens)
    ids = np.asarray(fit.sequences.ids)
    return np.bincount(ids, minlength=setup.model.structure.vocab_size)


class _Errors(Record):
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


def _error_rows(errors: _Errors) -> list[ErrorRow]:
    target = errors.target.numpy()
    return [
        ErrorRow(level, name, ErrorTail.of(norms), ErrorTail.of(norms / target))
        for name, error in errors.error.items()
        for level, norms in enumerate(error.numpy())
    ]


def _worst_rows(setup: Setup, scores: LensScores, level: int) -> list[WorstRow]:
    """Return the examples of largest KL of the first estimator at one level."""
    lens = scores.lenses.index(setup.settings.estimators[0])
    worst = scores.kl[lens, level].argsort(descending=True)[:N_WORST].tolist()
    contexts = _contexts(setup, set(worst))
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


def _contexts(setup: Setup, examples: set[int]) -> dict[int, str]:
    """Return the text around some of the scored examples, which are the picks of the test batches in order."""
    contexts: dict[int, str] = {}
    start = 0
    for batch in setup.test_batches():
        for pick in range(batch.n_picks):
            if start + pick in examples:
                contexts[start + pick] = context(setup.model, batch, pick)
        start += batch.n_picks
    return contexts


def _headline(tables: Tables, level: int, estimator: str) -> Headline:
    entropy = [row for row in tables.by_entropy if (row.level, row.lens) == (level, estimator)]
    first = {row.at: row.relative_error for row in tables.first_token if (row.level, row.map) == (level, estimator)}
    (tail,) = (row.relative for row in tables.errors if (row.level, row.map) == (level, estimator))
    return Headline(
        p1_where_model_is_sure=entropy[0].p1,
        p1_where_unsure=entropy[-1].p1,
        error_at_position_0=first.get(FIRST, float("nan")),
        error_elsewhere=first.get(OTHERS, float("nan")),
        median_error=tail.p50,
        error_99_percent=tail.p99,
    )


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return agreement by bins, errors by level, and the worst examples as a table."""
    tables = result.tables
    return [
        _bin_panel(tables.by_position, "position", "by position"),
        _bin_panel(tables.by_frequency, "occurrences of the token in the fit text", "by frequency"),
        _bin_panel(tables.by_entropy, "entropy of the model's prediction, nats", "by entropy"),
        _first_token_panel(tables.first_token),
        _error_panel(tables.errors),
        _worst_panel(tables.worst),
    ]


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
        figure = line_chart(f"level {level}", lines, x=axis, y="precision@1")
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names)
        figure.update_traces(hovertemplate="<b>%{fullData.name}</b><br>%{x}: %{y:.3f}<extra></extra>")
        charts.append(unit_axis(figure))
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


def _first_token_panel(rows: Sequence[FirstTokenRow]) -> Panel:
    levels, maps = sorted({row.level for row in rows}), identity_last(row.map for row in rows)
    errors = {
        f"{name}, {at}": [(row.level, row.relative_error) for row in rows if (row.map, row.at) == (name, at)]
        for name in maps
        for at in (FIRST, OTHERS)
    }
    norms = {
        f"state at {at}": [(row.level, row.state_norm) for row in rows if (row.map, row.at) == (maps[0], at)]
        for at in (FIRST, OTHERS)
    }
    paint = colours([*errors, *norms])
    charts = [
        line_chart("error relative to the norm of the last level", errors, x="level", paint=paint),
        line_chart("norm of the state", norms, x="level", paint=paint),
    ]
    for chart in charts:
        level_axis(chart.update_yaxes(type="log", dtick="D2"), levels)
    middle = levels[len(levels) // 2]
    at = {row.at: row.relative_error for row in rows if (row.level, row.map) == (middle, maps[0])}
    reading = (
        f"From level {middle}, the error of {maps[0]} relative to the norm of the last level is "
        f"{number(at.get(FIRST))} at position 0 and {number(at.get(OTHERS))} at the other positions, on average."
    )
    return Panel("The first token", reading, ("first token",), charts)


def _error_panel(rows: Sequence[ErrorRow]) -> Panel:
    levels, maps = sorted({row.level for row in rows}), identity_last(row.map for row in rows)
    charts = []
    for name in maps:
        tails = {row.level: row.relative for row in rows if row.map == name}
        lines = {
            "median": [(level, tail.p50) for level, tail in tails.items()],
            "90 %": [(level, tail.p90) for level, tail in tails.items()],
            "99 %": [(level, tail.p99) for level, tail in tails.items()],
            "largest": [(level, tail.max) for level, tail in tails.items()],
        }
        figure = line_chart(name, lines, x="level", y="error over the norm of the last level")
        charts.append(level_axis(figure.update_yaxes(rangemode="tozero"), levels))
    middle = levels[len(levels) // 2]
    tail = next(row.relative for row in rows if (row.level, row.map) == (middle, maps[0]))
    reading = (
        f"From level {middle}, the error of {maps[0]} relative to the norm of the last level has the median "
        f"{number(tail.p50)}; 99 % of the examples are below {number(tail.p99)} and the largest is {number(tail.max)}."
    )
    return Panel("The tail of the error", reading, ("errors",), charts)


def _worst_panel(rows: Sequence[WorstRow]) -> Panel:
    body = [
        [
            number(row.kl),
            f"… {safe(row.context)}",
            f'<span class="token own">{safe(row.model_token)}</span>',
            f'<span class="token">{safe(row.lens_token)}</span>',
            number(row.position),
        ]
        for row in rows
    ]
    head = ["KL, nats", "context", "model's token", "map's token", "position"]
    reading = (
        f"The {len(rows)} examples with the largest KL at level {rows[0].level}: from {number(rows[-1].kl)} to "
        f"{number(rows[0].kl)} nats."
    )
    html = html_table(head, body, numeric=(0, 4))
    return Panel("Where the map is most wrong", reading, ("worst",), html=html)


STUDY = Study("failures", "where are the maps wrong?", run, figures)

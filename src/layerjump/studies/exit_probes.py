"""`gates`: how many more blocks does early exit save with a probe of the hidden state?

Protocol: early exit is replayed as in `exits`, but with probes in place of the paper's rule. That rule demands the same
lead of the best token at every level, although a lead means more at some levels than at others. Here a linear probe of
the state (`gate`), or probe and lead together (`both`), estimates at each level the probability that the lens predicts
the model's token; an example exits at the first level, from 1 on, where this probability exceeds the threshold. Probes
are fitted on documents of the validation split and replayed on the test split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.errors import argument
from layerjump.generation.calibration.dataset import CalibrationSet, build_calibration_set
from layerjump.generation.calibration.search import THRESHOLDS, FittedProbes, RuleCandidate, RuleType, fit_probes
from layerjump.studies.charts import (
    Panel,
    colours,
    identity_last,
    line_chart,
    listed,
    number,
    percent,
    unique,
    unit_axis,
)
from layerjump.studies.early_exit import Exits, Headline, SavedRow, headline_of, saved_chart, saved_row
from layerjump.studies.results import Record, Result, Study
from layerjump.studies.setup import Setup

RULES: dict[str, RuleType] = {"gate": "probe", "both": "two-stage"}
"""Exit rules of the generation package, by their names in this study."""
NAMES = {"gate": "probe", "both": "probe and lead"}
MAX_POSITIONS = 12_000
"""Positions of the validation split to fit probes on; a probe has d_model weights."""


class CurveRow(Record):
    """One threshold of one rule."""

    lens: str
    kind: str
    """`gate` or `both`."""
    at: float
    """The threshold."""
    blocks: float
    """Blocks run, on average."""
    agreement: float


class Tables(Record):
    """Agreement against blocks run, and blocks saved at the targets."""

    curves: list[CurveRow]
    saved: list[SavedRow]


def cannot_run(setup: Setup) -> str | None:
    """Return why a run has no probes, or None."""
    if setup.model.no_predictions:
        return setup.model.no_predictions
    if len(setup.splits().validation) < 2:
        return f"probes are fitted on the validation split, which is empty; pass {argument('split', '80/10/10')}"
    return None


def run(setup: Setup) -> Result[Tables, Headline]:
    """Replay both rules, and state the blocks saved at the target agreements."""
    tables = Tables([], [])
    for lens in setup.lenses():
        validation, test = (_calibration_set(setup, lens, part) for part in ("validation", "test"))
        half = every_second_document(validation.documents)
        probes = fit_probes(validation.select(half), validation.select(~half))
        for kind, rule in RULES.items():
            points = _replay(setup, rule, probes, test)
            tables.curves.extend(
                CurveRow(
                    lens,
                    kind,
                    threshold,
                    blocks=float(point.level.double().mean()),
                    agreement=float(point.right.double().mean()),
                )
                for threshold, point in zip(THRESHOLDS, points, strict=True)
            )
            tables.saved.extend(
                saved_row(lens, kind, points, target, test.documents, setup) for target in setup.settings.targets
            )
    facts = {"n_select": len(validation), "n_test": len(test)}
    notes = [
        "Only blocks are counted, as in `exits`: not the probes, nor the unembedding at every level that `both` needs. "
        "`layerjump calibrate` chooses levels by the measured time of everything."
    ]
    return Result("gates", tables, headline_of(tables.saved), notes, facts)


def _calibration_set(setup: Setup, lens: str, part: str) -> CalibrationSet:
    jumps = None if lens == "identity" else setup.jumps(lens)
    if part == "test":
        batches = setup.test_batches()
    else:
        positions = Positions.parse(MASKED_SHARE) if setup.model.masked else Positions("all")
        batches = setup.batches(picks=MAX_POSITIONS, positions=positions, part=part)
    return build_calibration_set(setup.model, jumps, batches, range(setup.model.n_blocks))


def every_second_document(documents: torch.Tensor) -> torch.Tensor:
    """Return a mask of the positions of every second document."""
    return documents.unique(return_inverse=True)[1] % 2 == 0


def _replay(setup: Setup, rule: RuleType, probes: FittedProbes, examples: CalibrationSet) -> list[Exits]:
    """Return where the examples exit under every threshold."""
    n_blocks = setup.model.n_blocks
    replay = RuleCandidate(rule, tuple(range(1, n_blocks)), probes).replay(examples, n_blocks)
    return [Exits(outcome.exit_levels, outcome.correct) for outcome in map(replay, THRESHOLDS)]


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return agreement against blocks run, and the blocks saved at each target."""
    return [_curve_panel(result.tables.curves), _saved_panel(result.tables.saved)]


def _curve_panel(rows: Sequence[CurveRow]) -> Panel:
    lenses = identity_last(row.lens for row in rows)
    names = {(lens, kind): f"{lens}, {NAMES[kind]}" for lens in lenses for kind in ("both", "gate")}
    lines = {
        name: [(row.blocks, row.agreement) for row in rows if (row.lens, row.kind) == key]
        for key, name in names.items()
    }
    figure = line_chart(
        "",
        lines,
        x="blocks run, mean",
        y="agreement with the model",
        dashed=[name for (_, kind), name in names.items() if kind == "gate"],
        paint={name: colours(lenses)[lens] for (lens, _), name in names.items()},
    )
    most = max(row.blocks for row in rows)
    cheap = [row for row in rows if row.blocks <= most / 2]
    reading = "No threshold saves half of the blocks."
    if cheap:
        best = max(cheap, key=lambda row: row.agreement)
        reading = (
            f"With at most {number(most / 2)} blocks, half of the most, the best rule ({NAMES[best.kind]} with "
            f"{best.lens}) predicts the model's token in {percent(best.agreement)} of the examples."
        )
    return Panel("Agreement against blocks run", reading, ("curves",), [unit_axis(figure)])


def _saved_panel(rows: Sequence[SavedRow]) -> Panel:
    targets = unique(row.target for row in rows if row.target is not None)
    charts = [saved_chart(rows, target, NAMES) for target in targets]
    parts = [
        f"{NAMES[row.kind]} with {row.lens} {number(row.blocks_saved)} ({number(row.low)} to {number(row.high)})"
        for row in rows
        if row.target == targets[0]
    ]
    reading = f"Blocks saved at {percent(targets[0])} agreement with the model, with 95 % intervals: {listed(parts)}."
    return Panel("Blocks saved", reading, ("saved",), charts)


STUDY = Study(
    "gates",
    "how many more blocks does early exit save with a probe of the hidden state?",
    run,
    figures,
    cannot_run=cannot_run,
)

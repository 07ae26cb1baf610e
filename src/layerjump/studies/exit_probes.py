"""`exit_probes`: how many more blocks does early exit save with a probe of the hidden state?

Protocol: as in `early_exit`, but with probes in place of the paper's rule. That rule demands the same
lead of the best token at every level, although a lead means more at some levels than at others. Here a linear probe of
the state (`gate`), or probe and lead together (`both`), estimates at each level the probability that the lens predicts
the model's token; an example exits at the first level, from 1 on, where this probability exceeds the threshold. Probes
are fitted on documents of the validation split and replayed on the test split.
"""

from __future__ import annotations

import torch

from layerjump.errors import argument
from layerjump.generation.calibration.dataset import CalibrationSet, build_calibration_set
from layerjump.generation.calibration.result import RuleType
from layerjump.generation.calibration.rule_search import THRESHOLDS, RuleCandidate, fit_probes
from layerjump.studies.charts import Panel, colours, line_chart
from layerjump.studies.early_exit import Exits, Headline, SavedRow, curve_of, headline_of, saved_chart, saved_row
from layerjump.studies.formatting import identity_last, listed, number, percent, unique
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
    if not setup.model.no_predictions and len(setup.splits().validation) < 2:
        return f"probes are fitted on the validation split, which is empty; pass {argument('split', '80/10/10')}"
    return setup.model.no_predictions


def run(setup: Setup) -> Result[Tables, Headline]:
    """Replay both rules, and state the blocks saved at the target agreements."""
    tables, n_blocks = Tables([], []), setup.model.n_blocks
    for lens in setup.lenses():
        validation, test = (_calibration_set(setup, lens, part) for part in ("validation", "test"))
        half = every_second_document(validation.documents)
        probes = fit_probes(validation.select(half), validation.select(~half))
        for kind, rule in RULES.items():
            replay = RuleCandidate(rule, tuple(range(1, n_blocks)), probes).replay(test, n_blocks)
            points = [Exits(outcome.exit_levels, outcome.correct) for outcome in map(replay, THRESHOLDS)]
            for threshold, point in zip(THRESHOLDS, points, strict=True):
                blocks, agreement = float(point.level.double().mean()), float(point.right.double().mean())
                tables.curves.append(CurveRow(lens, kind, threshold, blocks, agreement))
            curve = curve_of(points)
            tables.saved.extend(
                saved_row(lens, kind, curve, target, test.documents, setup) for target in setup.settings.targets
            )
    facts = {"n_select": len(validation), "n_test": len(test)}
    notes = [
        "Only blocks are counted, as in `early_exit`: not the probes, nor the unembedding at every level that `both` "
        "needs. `layerjump calibrate` chooses levels by the measured time of everything."
    ]
    return Result("exit_probes", tables, headline_of(tables.saved), notes, facts)


def _calibration_set(setup: Setup, lens: str, part: str) -> CalibrationSet:
    jumps = None if lens == "identity" else setup.jumps(lens)
    if part == "test":
        batches = setup.test_batches()
    else:
        positions = setup.model.prediction_positions
        batches = setup.batches(picks=MAX_POSITIONS, positions=positions, part=part)
    return build_calibration_set(setup.model, jumps, batches, range(setup.model.n_blocks))


def every_second_document(documents: torch.Tensor) -> torch.Tensor:
    """Return a mask of the positions of every second document."""
    return documents.unique(return_inverse=True)[1] % 2 == 0


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return agreement against blocks run, and the blocks saved at each target."""
    rows, saved = result.tables.curves, result.tables.saved
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
        scale="unit",
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
    targets = unique(row.target for row in saved if row.target is not None)
    bars = [saved_chart(saved, target, NAMES) for target in targets]
    parts = [
        f"{NAMES[row.kind]} with {row.lens} {number(row.blocks_saved)} ({number(row.low)} to {number(row.high)})"
        for row in saved
        if row.target == targets[0]
    ]
    savings = f"Blocks saved at {percent(targets[0])} agreement with the model, with 95 % intervals: {listed(parts)}."
    return [
        Panel("Agreement against blocks run", reading, ("curves",), [figure]),
        Panel("Blocks saved", savings, ("saved",), bars),
    ]


STUDY = Study(
    "exit_probes",
    "how many more blocks does early exit save with a probe of the hidden state?",
    run,
    figures,
    cannot_run=cannot_run,
)

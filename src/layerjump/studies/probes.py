"""`gates`: early exit replayed with gates in the place of the papers' rule.

The rule of `exits` asks every level for the same lead of the best token, though a lead means more at some levels than
at others. Here a probe of the state (`gate`), or probe and lead together (`both`), say at each level how likely it is
that its token is the model's own; an example leaves at the first level, from 1 on, where that is likely enough. They
are fitted on documents of the select split, and replayed on the test split's.
"""

from __future__ import annotations

import torch

from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.errors import argument
from layerjump.generation.calibration.dataset import CalibrationSet, build_calibration_set
from layerjump.generation.calibration.search import THRESHOLDS, Probes, RuleCandidate, fit_probes
from layerjump.studies._untyped import Result, Row, to_json
from layerjump.studies.early_exit import Exits, saved_row
from layerjump.studies.setup import Setup

KINDS = {"gate": "gate", "both": "two-stage"}
PICKS = 12_000
"""Positions of the select split that gates are fitted on, at most: a gate has as many weights as the model is wide."""


def unable(setup: Setup) -> str | None:
    """Why a run has no gates."""
    if setup.model.no_predictions:
        return setup.model.no_predictions
    if len(setup.splits(setup.corpus).select) < 2:
        return f"probes are fitted on the validation split, and this run has none; give {argument('split', '80/10/10')}"
    return None


def run(setup: Setup) -> Result:
    """Curves of agreement against blocks run, and what each saves at the target agreement."""
    curves: list[Row] = []
    saved: list[Row] = []
    for name in setup.lenses():
        fitted, test = _evidence(setup, name, "select"), _evidence(setup, name, "test")
        first = _every_second(fitted.document)
        probes = fit_probes(_of(fitted, first), _of(fitted, ~first))
        for kind, rule in KINDS.items():
            points = _replayed(setup, rule, probes, test)
            curves += [
                {
                    "lens": name,
                    "kind": kind,
                    "at": threshold,
                    "blocks": float(levels.double().mean()),
                    "agreement": float(hits.double().mean()),
                }
                for threshold, (levels, hits) in zip(THRESHOLDS, points, strict=True)
            ]
            saved += [
                to_json(saved_row(name, kind, points, target, test.document, setup))
                for target in setup.settings.targets
            ]
    result = Result("gates", {"curves": curves, "saved": saved})
    result.settings = {"n_select": len(fitted), "n_test": len(test)}
    result.headline = {
        f"{row['kind']}_{row['lens']}_at_{row['target']:g}": row["blocks_saved"] for row in saved
    }
    result.notes.append(
        "Blocks alone are counted, as in `exits`: not the gates, nor the vocabulary product at every level that `both` "
        "makes. `layerjump calibrate` chooses levels by what all of it costs on the clock."
    )
    return result


def _evidence(setup: Setup, name: str, part: str) -> CalibrationSet:
    jumps = None if name == "identity" else setup.jumps(name)
    masked = setup.model.masked
    many = Positions.parse(MASKED_SHARE) if masked else Positions("all")
    batches = (
        setup.batches(picks=PICKS, positions=many, part=part)
        if part == "select"
        else setup.test_batches()
    )
    return build_calibration_set(setup.model, jumps, batches, range(setup.model.n_blocks))


def _every_second(documents: torch.Tensor) -> torch.Tensor:
    """Which positions are of every second document."""
    return documents.unique(return_inverse=True)[1] % 2 == 0


def _of(evidence: CalibrationSet, rows: torch.Tensor) -> CalibrationSet:
    return CalibrationSet(
        evidence.levels,
        evidence.right[:, rows],
        evidence.gap[:, rows],
        evidence.features[:, rows],
        evidence.document[rows],
    )


def _replayed(setup: Setup, kind: str, probes: Probes, evidence: CalibrationSet) -> list[Exits]:
    """Where each example leaves under every threshold, and whether it gives the model's token there."""
    blocks = setup.model.n_blocks
    replay = RuleCandidate(kind, tuple(range(1, blocks)), probes).replay(evidence, blocks)
    return [Exits(made.left, made.right) for made in map(replay, THRESHOLDS)]

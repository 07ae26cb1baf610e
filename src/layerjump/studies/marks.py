"""What a marked `plausibility` sheet says: shares by lens and by level, and who beats whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerjump.measure.bootstrap import mean_interval
from layerjump.studies.result import Row
from layerjump.studies.sheet import Mark


def shares(marks: Sequence[Mark]) -> list[Row]:
    """The share of readings found plausible for each lens, with 95 % intervals (sentences resampled)."""
    return [{"lens": lens, **_share(mine)} for lens, mine in _by_lens(marks).items()]


def shares_by_level(marks: Sequence[Mark]) -> list[Row]:
    """The same for each level."""
    rows: list[Row] = []
    for lens, mine in _by_lens(marks).items():
        for level in sorted({mark.level for mark in mine}):
            here = [mark for mark in mine if mark.level == level]
            rows.append({"lens": lens, "level": level, **_share(here)})
    return rows


def comparison(marks: Sequence[Mark]) -> list[Row]:
    """How often each lens is plausible where the other is not, at the same sentence and level."""
    lenses = list(_by_lens(marks))
    cases: dict[tuple[int, int], dict[str, bool]] = {}
    for mark in marks:
        cases.setdefault((mark.sentence, mark.level), {})[mark.lens] = mark.plausible
    sentences = [sentence for sentence, _ in cases]
    found = {
        f"{lens} only": [case[lens] and sum(case.values()) == 1 for case in cases.values()]
        for lens in lenses
    }
    found["both"] = [all(case.values()) for case in cases.values()]
    found["neither"] = [not any(case.values()) for case in cases.values()]
    return [{"plausible": name, **_row(values, sentences)} for name, values in found.items()]


def _by_lens(marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    """The maps' marks, then the identity's."""
    lenses = sorted({mark.lens for mark in marks}, key=lambda lens: (lens == "identity", lens))
    return {lens: [mark for mark in marks if mark.lens == lens] for lens in lenses}


def _share(marks: Sequence[Mark]) -> Row:
    return _row([mark.plausible for mark in marks], [mark.sentence for mark in marks])


def _row(values: Sequence[bool], sentences: Sequence[int]) -> Row:
    mean, low, high = mean_interval(np.array(values, dtype=float), sentences)
    return {"n": len(values), "share": float(mean), "low": float(low), "high": float(high)}

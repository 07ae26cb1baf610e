"""`layerjump human-eval`: score the sheet that a human filled in for the study `human_evaluation`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from layerjump.cli._options import JSON, option
from layerjump.cli._printing import print_json, print_table


def human_eval(
    sheet: Path = typer.Argument(help="The folder that the study wrote, or the marked sheet."),
    key: Path | None = option(None, "Key file (default: plausibility-key.json next to it)."),
    as_json: bool = JSON,
) -> None:
    """Score the sheet that a person filled in for the study `human_evaluation`.

    [bold]layerjump study bert-large-cased human_evaluation -o study[/]   writes study/plausibility.csv to mark
    [bold]layerjump human-eval study[/]
    [bold]layerjump human-eval marked.csv --key study/plausibility-key.json --json[/]
    """
    from layerjump.studies.human_evaluation import comparison, read_marks, shares, shares_by_level

    marks = read_marks(sheet, key)
    tables = {
        "lenses": [{"lens": lens, **asdict(share)} for lens, share in shares(marks).items()],
        "cases": [{"plausible": case, **asdict(share)} for case, share in comparison(marks).items()],
        "levels": [
            {"lens": lens, "level": level, **asdict(share)} for (lens, level), share in shares_by_level(marks).items()
        ],
    }
    if as_json:
        print_json(tables)
        return
    titles = (
        "Plausible (the paper, bert-large: 0.854 for mat, 0.528 for the identity)",
        "Cases: one sentence at one level",
        "Plausible by level",
    )
    for title, rows in zip(titles, tables.values(), strict=True):
        print_table(title, rows)

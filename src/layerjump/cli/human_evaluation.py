"""`layerjump plausibility score`: what a human's marks say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from layerjump.cli._options import AsJson, print_table

plausibility = typer.Typer(
    help="Score a sheet of `layerjump study --study plausibility` that a human has marked.",
    no_args_is_help=True,
)


@plausibility.callback()
def _group() -> None:
    """Keeps `score` a command of its own name, alone as it is."""


@plausibility.command()
def score(
    sheet: Annotated[
        Path, typer.Argument(help="The folder that the study wrote, or the marked sheet.")
    ],
    key: Annotated[
        Path | None, typer.Option(help="The key (default: plausibility-key.json beside the sheet).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The share of readings that a human found plausible, through the map and through the identity.

    [bold]layerjump study bert-large-cased --study plausibility -o study[/]
    [bold]layerjump plausibility score study[/]           after study/plausibility.csv was marked
    [bold]layerjump plausibility score marked.csv --key study/plausibility-key.json --json[/]
    """
    from layerjump.studies.human_evaluation import comparison, read_marks, shares, shares_by_level

    marks = read_marks(sheet, key)
    tables = {
        "Plausible (the paper, bert-large: 0.854 for mat, 0.528 for the identity)": shares(marks),
        "Cases: one sentence at one level": comparison(marks),
        "Plausible by level": shares_by_level(marks),
    }
    if as_json:
        named = dict(zip(("lenses", "cases", "levels"), tables.values(), strict=True))
        print(json.dumps(named, indent=2, ensure_ascii=False))
        return
    for title, rows in tables.items():
        print_table(title, rows, as_json=False)

"""`layerjump human-eval score`: score a sheet that a human annotator has marked."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from layerjump.cli._options import AsJson, print_table

human_eval = typer.Typer(
    help="Score the human evaluation of the study `plausibility`.", no_args_is_help=True
)


@human_eval.callback()
def _group() -> None:
    """Keeps `score` a sub-command: typer would merge a single command into its group."""


@human_eval.command()
def score(
    sheet: Annotated[
        Path, typer.Argument(help="The folder that the study wrote, or the marked sheet.")
    ],
    key: Annotated[
        Path | None, typer.Option(help="Key file (default: plausibility-key.json next to it).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the share of predictions that the annotator marked plausible, for each lens.

    [bold]layerjump study bert-large-cased plausibility -o study[/]   writes study/plausibility.csv to mark
    [bold]layerjump human-eval score study[/]
    [bold]layerjump human-eval score marked.csv --key study/plausibility-key.json --json[/]
    """
    from layerjump.studies.human_evaluation import comparison, read_marks, shares, shares_by_level

    marks = read_marks(sheet, key)
    tables = {
        "lenses": [{"lens": lens, **asdict(share)} for lens, share in shares(marks).items()],
        "cases": [
            {"plausible": case, **asdict(share)} for case, share in comparison(marks).items()
        ],
        "levels": [
            {"lens": lens, "level": level, **asdict(share)}
            for (lens, level), share in shares_by_level(marks).items()
        ],
    }
    if as_json:
        print(json.dumps(tables, indent=2, ensure_ascii=False))
        return
    titles = (
        "Plausible (the paper, bert-large: 0.854 for mat, 0.528 for the identity)",
        "Cases: one sentence at one level",
        "Plausible by level",
    )
    for title, rows in zip(titles, tables.values(), strict=True):
        print_table(title, rows, as_json=False)

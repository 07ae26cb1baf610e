"""`layerjump families`: list the architectures that are supported, or run the self-check of one model."""

from __future__ import annotations

from typing import Annotated

import typer

from layerjump.cli._options import LoadModel, loads_model
from layerjump.cli._output import JSON, print_table


@loads_model()
def families(
    model: Annotated[
        str | None, typer.Argument(help="A model to check: a hub id, a folder, a GGUF file, or `smollm2`.")
    ] = None,
    as_json: bool = JSON,
    *,
    load: LoadModel,
) -> None:
    """List the architectures of transformers and how far each is supported, or prove one model's structure.

    [bold]layerjump families[/]                    all architectures, with their degree of support
    [bold]layerjump families smollm2[/]            load the bundled model and run the self-check
    [bold]layerjump families ./my-bert --json[/]
    """
    if model is None:
        from layerjump.models.architectures import read_table

        print_table("Architectures", [vars(row) for row in read_table()], as_json=as_json)
        return
    from layerjump.models.self_check import self_check

    loaded = load(model)
    rows = [
        {
            "check": check.name,
            "fact": check.fact,
            "difference": check.difference,
            "passed": check.passed,
            "note": check.note,
        }
        for check in self_check(loaded)
    ]
    print_table(repr(loaded), rows, as_json=as_json)

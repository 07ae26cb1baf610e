"""`layerjump families`: list the model families, or run the self-check of one model."""

from __future__ import annotations

from typing import Annotated

import typer

from layerjump.cli._options import AsJson, LoadModel, loads_model, print_table


@loads_model()
def families(
    model: Annotated[
        str | None, typer.Argument(help="A model to check: a hub id, a folder, a GGUF file, or `smollm2`.")
    ] = None,
    as_json: AsJson = False,
    *,
    load: LoadModel,
) -> None:
    """List the supported model families, or check that layerjump captures one model's hidden states exactly.

    [bold]layerjump families[/]                    the table of families
    [bold]layerjump families smollm2[/]            load the bundled model and run the self-check
    [bold]layerjump families ./my-bert --json[/]
    """
    if model is None:
        _print_families(as_json)
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


def _print_families(as_json: bool) -> None:
    from layerjump.models.families import FAMILIES

    rows = [
        {
            "family": name,
            "task": family.task,
            "kind": family.kind,
            "blocks": family.blocks,
            "level L to logits": " → ".join([*family.to_final, family.unembedding]),
            "before level 0": family.before,
        }
        for name, family in FAMILIES.items()
    ]
    print_table("Model families", rows, as_json=as_json)

"""`layerjump families`: the table, or one model's self-check."""

from __future__ import annotations

from typing import Annotated

import typer

from layerjump.cli._options import AsJson, Device, Dtype, Revision, Trust, print_table


def families(
    model: Annotated[
        str | None, typer.Argument(help="Check this model: a hub id, folder, GGUF file, `smollm2`.")
    ] = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """List the model families, or check that one model is understood.

    [bold]layerjump families[/]                  the table
    [bold]layerjump families smollm2[/]          load the built-in model and run the self-check
    [bold]layerjump families ./my-bert --json[/]
    """
    if model is None:
        _print_families(as_json)
        return
    from layerjump.models.loading import load
    from layerjump.models.self_check import self_check

    loaded = load(
        model, revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
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
            "task": row.task,
            "kind": row.kind,
            "blocks": row.blocks,
            "level L to logits": " → ".join([*row.to_final, row.head]),
            "before level 0": row.before,
        }
        for name, row in FAMILIES.items()
    ]
    print_table("Model families", rows, as_json=as_json)

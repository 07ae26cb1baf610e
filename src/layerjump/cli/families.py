"""`layerjump families`: list the model families, or run the self-check of one model."""

from __future__ import annotations

from dataclasses import asdict

import typer

from layerjump.cli._options import LoadModel, loads_model
from layerjump.cli._output import JSON, print_table


@loads_model()
def families(
    model: str | None = typer.Argument(None, help="A model to check: a hub id, a folder, a GGUF file, or `smollm2`."),
    as_json: bool = JSON,
    *,
    load: LoadModel,
) -> None:
    """List the supported model families, or check that layerjump captures one model's hidden states exactly.

    [bold]layerjump families[/]                    the table of families
    [bold]layerjump families smollm2[/]            load the bundled model and run the self-check
    [bold]layerjump families ./my-bert --json[/]
    """
    if model is not None:
        from layerjump.models.self_check import self_check

        loaded = load(model)
        checks = [{"check": facts.pop("name"), **facts} for facts in map(asdict, self_check(loaded))]
        print_table(repr(loaded), checks, as_json=as_json)
        return
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

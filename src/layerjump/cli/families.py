"""`layerjump families`: list the architectures that are supported, or run the self-check of one model."""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated

import typer

from layerjump.cli._options import LoadModel, loads_model
from layerjump.cli._output import JSON, print_json, print_table


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
    [bold]layerjump families smollm2[/]            degree, parts and self-check of one model
    [bold]layerjump families ./my-bert --json[/]
    """
    from layerjump.models.architectures import describe, read_table

    if model is None:
        rows = read_table()
        counts = Counter(row.degree for row in rows)
        title = f"{len(rows)} architectures: {', '.join(f'{counts[degree]} {degree}' for degree in sorted(counts))}"
        print_table(title, [vars(row) for row in rows], as_json=as_json)
        return
    from layerjump.models.self_check import self_check

    loaded = load(model)
    support = describe(loaded)
    checks = [
        {
            "check": check.name,
            "fact": check.fact,
            "difference": check.difference,
            "passed": check.passed,
            "note": check.note,
        }
        for check in self_check(loaded)
    ]
    if loaded.task == "causal" and not loaded.no_predictions:
        from layerjump.generation.exit_check import check_exits

        exits = check_exits(loaded)
        checks.append(
            {
                "check": "early exit",
                "fact": "blocks run one by one with a KV cache give the model's logits",
                "difference": exits.difference if math.isfinite(exits.difference) else None,
                "passed": exits.problem is None,
                "note": exits.problem or (exits.padding_problem and f"with padding: {exits.padding_problem}") or "",
            }
        )
    # A block has one part of a name; blocks of several kinds have different parts.
    sites = list(dict.fromkeys(site.part for site in loaded.structure.sites() if not site.between_blocks))
    if as_json:
        print_json({"model": loaded.name, **vars(support), "sites": sites, "checks": checks})
        return
    summary = {"degree": support.degree, "parts": support.parts or None, "note": support.note or None}
    print_table(repr(loaded), [summary | {"sites of a block": " ".join(sites) or None}])
    print_table("Self-check", checks)

"""`layerjump check`: how far one model is supported."""

from __future__ import annotations

import math

from layerjump.cli._options import JSON, MODEL, LoadModel, loads_model
from layerjump.cli._printing import print_json, print_table


@loads_model
def check(model: str = MODEL, as_json: bool = JSON, *, load: LoadModel) -> None:
    """Check how far a model is supported: its structure, the parts of its blocks and every self-check.

    [bold]layerjump check smollm2[/]
    [bold]layerjump check ./my-bert --json[/]
    """
    from layerjump.models.self_check import self_check
    from layerjump.models.support_table import describe

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
        from layerjump.generation.exit_self_check import check_exits

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

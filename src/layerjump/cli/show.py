"""`layerjump show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli.options import AsJson, print_table

if TYPE_CHECKING:
    from layerjump.fit.jumps import Jumps


def show(
    path: Annotated[Path, typer.Argument(help="A folder of jumps, or a file of moments.")],
    as_json: AsJson = False,
) -> None:
    """Say what a folder of jumps or a file of moments holds.

    [bold]layerjump show jumps[/]
    [bold]layerjump show jumps/moments.safetensors --json[/]
    """
    from layerjump.fit.collected import Collected
    from layerjump.fit.jumps import Jumps

    if path.is_file():
        collected = Collected.load(path)
        rows = [
            {"what": name, "value": value}
            for name, value in {
                **collected.about,
                **{f"positions ({split})": m.n for split, m in collected.splits.items()},
            }.items()
        ]
        print_table(f"moments: {path}", rows, as_json=as_json)
        return
    print_jumps(Jumps.from_pretrained(path), as_json=as_json, anatomy=True)


def print_jumps(jumps: Jumps, *, as_json: bool, anatomy: bool = False) -> None:
    """Print what is known about each jump of a set."""
    rows = []
    for source, target in jumps:
        info = jumps.info[source, target]
        mapped, kept = info.r2 or (None, None), info.r2_identity or (None, None)
        row: dict[str, Any] = {
            "jump": f"{source} → {target}",
            "R²": mapped[0],
            "weighted": mapped[1],
            "identity R²": kept[0],
            "identity weighted": kept[1],
        }
        if info.strength is not None:
            row["strength"] = info.strength
        if anatomy:
            found = jumps.anatomy(source, target)
            row |= {
                "largest σ": float(found.singular_values[0]),
                "effective rank": found.effective_rank,
                "‖W − I‖/‖I‖": found.from_identity,
            }
        rows.append(row)
    print_table(repr(jumps), rows, as_json=as_json)

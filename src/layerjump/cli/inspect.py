"""`layerjump inspect`: print the contents of a jumps folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli._options import AsJson, print_table

if TYPE_CHECKING:
    from layerjump.jumps.jumps import Jumps, Pair


def show(
    path: Annotated[Path, typer.Argument(help="A folder of jumps, or a file of moments.")],
    as_json: AsJson = False,
) -> None:
    """Say what a folder of jumps or a file of moments holds.

    [bold]layerjump show jumps[/]
    [bold]layerjump show jumps/moments.safetensors --json[/]
    """
    from layerjump.jumps.collect import SplitMoments
    from layerjump.jumps.jumps import Jumps

    if path.is_file():
        collected = SplitMoments.load(path)
        rows = [
            {"what": name, "value": value}
            for name, value in {
                **collected.about,
                **{f"positions ({split})": m.n for split, m in collected.splits.items()},
            }.items()
        ]
        print_table(f"moments: {path}", rows, as_json=as_json)
        return
    print_jumps(Jumps.from_pretrained(path), as_json=as_json, structure=True)


def print_jumps(jumps: Jumps, *, as_json: bool, structure: bool = False) -> None:
    """Print what is known about each jump of a set."""
    rows = []
    strengths = any(info.strength is not None for info in jumps.info.values())
    tuned = _tuned(jumps)
    all_tuned = all(info.r2 is None for info in jumps.info.values())
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
        if tuned:
            before, after = tuned.get((source, target), (None, None))
            row = {"jump": row["jump"]} if all_tuned else row  # R² was that of the map before
            row |= {"KL before": before, "KL tuned": after}
        if strengths:
            row["strength"] = info.strength
        if structure:
            found = jumps.spectrum(source, target)
            row |= {
                "largest σ": float(found.singular_values[0]),
                "effective rank": found.effective_rank,
                "‖W − I‖/‖I‖": found.from_identity,
            }
        rows.append(row)
    print_table(repr(jumps), rows, as_json=as_json)


def _tuned(jumps: Jumps) -> dict[Pair, tuple[float | None, float | None]]:
    """Each tuned map's KL on held-out text, before and after; nothing where nothing was tuned."""
    said = jumps.provenance.settings.get("refine")
    found = [said.get(name) for name in ("kl_before", "kl_after")] if isinstance(said, dict) else []
    if not found or not all(isinstance(one, list) for one in found):
        return {}
    from layerjump.models.structure import FINAL, Site

    ends = (FINAL, Site(jumps.provenance.n_blocks))
    by_source = {pair[0]: pair for pair in jumps if pair[1] in ends}
    return dict(zip(by_source.values(), zip(*found, strict=False), strict=False))

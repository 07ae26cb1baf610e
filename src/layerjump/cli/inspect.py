"""`layerjump inspect`: print the contents of a jumps folder or a moments file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from layerjump.cli._options import JSON
from layerjump.cli._printing import print_table

if TYPE_CHECKING:
    from layerjump.jumps.jumps import Jumps
    from layerjump.models.sites import Pair


def inspect(path: Path = typer.Argument(help="A jumps folder, or a moments file."), as_json: bool = JSON) -> None:
    """Print scores, spectra and ranks of a jumps folder, or the settings of a moments file.

    [bold]layerjump inspect jumps[/]                              a folder that `layerjump fit` wrote
    [bold]layerjump inspect jumps/moments.safetensors --json[/]   second moments of `fit --save-moments`
    """
    from layerjump.jumps.jumps import Jumps
    from layerjump.jumps.moments_of_splits import SplitMoments

    if not path.is_file():
        print_jumps(Jumps.from_pretrained(path), as_json=as_json, spectrum=True)
        return
    moments = SplitMoments.load(path)
    facts = asdict(moments.info) | {f"positions ({split})": part.n for split, part in moments.splits.items()}
    rows = [{"what": name, "value": value} for name, value in facts.items()]
    print_table(f"moments: {path}", rows, as_json=as_json)


def print_jumps(jumps: Jumps, *, as_json: bool, spectrum: bool = False) -> None:
    """Print one row a jump: test R², KL if refined, strength if regularised, and the spectrum on request."""
    rows = []
    has_strengths = any(info.strength is not None for info in jumps.info.values())
    refined_kl = _refined_kl(jumps)
    has_r2 = any(info.r2 is not None for info in jumps.info.values())
    for source, target in jumps:
        info = jumps.info[source, target]
        r2, r2_identity = info.r2 or (None, None), info.r2_identity or (None, None)
        row: dict[str, Any] = {"jump": f"{source} → {target}"}
        if has_r2 or not refined_kl:  # R² of a refined map is unknown
            row |= {"R²": r2[0], "weighted": r2[1], "identity R²": r2_identity[0], "identity weighted": r2_identity[1]}
        if refined_kl:
            before, after = refined_kl.get((source, target), (None, None))
            row |= {"KL before": before, "KL tuned": after}
        if has_strengths:
            row["strength"] = info.strength
        if spectrum:
            summary = jumps.spectrum(source, target)
            row |= {
                "largest σ": float(summary.singular_values[0]),
                "effective rank": summary.effective_rank,
                "‖W − I‖/‖I‖": summary.from_identity,
            }
        rows.append(row)
    print_table(repr(jumps), rows, as_json=as_json)


def _refined_kl(jumps: Jumps) -> dict[Pair, tuple[float | None, float | None]]:
    """Held-out KL of each refined map before and after; empty if the jumps are not refined."""
    record = jumps.provenance.settings.get("refine")
    if not isinstance(record, dict):
        return {}
    columns = [record.get(name) for name in ("kl_before", "kl_after")]
    if not all(isinstance(column, list) for column in columns):
        return {}
    from layerjump.models.sites import FINAL, Site

    ends = (FINAL, Site(jumps.provenance.n_blocks))
    by_source = {pair[0]: pair for pair in jumps if pair[1] in ends}
    return dict(zip(by_source.values(), zip(*columns, strict=False), strict=False))

"""`layerjump lens`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerjump.cli._options import (
    AsJson,
    Device,
    DeviceMap,
    Dtype,
    ModelName,
    OtherWeights,
    Revision,
    Trust,
    progress_bar,
)

if TYPE_CHECKING:
    from layerjump.jumps.jumps import Jumps
    from layerjump.lens.lens import Lens
    from layerjump.models.model import Model


def lens(
    model: ModelName,
    prompt: Annotated[
        str,
        typer.Argument(
            help="The text to read; `-` for standard input. Masked models: with [MASK]."
        ),
    ],
    compare: Annotated[
        str | None,
        typer.Option(
            help="Lenses to read through, e.g. identity,mat (default: mat, or the --jumps). Fitted on first use."
        ),
    ] = None,
    jumps: Annotated[
        Path | None, typer.Option(help="A folder of jumps that `layerjump fit` wrote.")
    ] = None,
    allow_other_weights: OtherWeights = False,
    levels: Annotated[
        str | None, typer.Option(help="Levels or other sites, e.g. 0,10-20,5.mid (default: all).")
    ] = None,
    k: Annotated[int, typer.Option(help="How many of the best tokens to show.")] = 5,
    token: Annotated[
        list[str] | None, typer.Option(help="Follow this token, e.g. ' Paris'; may be repeated.")
    ] = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show what every level would predict: the best next tokens at all positions.

    [bold]layerjump lens smollm2 "The capital of France is"[/]
    [bold]layerjump lens smollm2 "The capital of France is" --compare identity,mat --token " Paris"[/]
    [bold]layerjump lens bert-base-uncased "Paris is the [MASK] of France." --k 10[/]
    [bold]layerjump lens MODEL "…" --jumps jumps --levels 0,4.mid,8-12[/]    a set fitted before, sub-module sites
    [bold]layerjump lens MODEL - --json < text.txt[/]                        one object for every lens
    """
    from layerjump.lens.lens import read_trajectories
    from layerjump.models.loading import load

    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
    lenses = _lenses(loaded, compare, jumps, allow_other_weights)
    sites = None if levels is None else _sites(levels)
    (found,) = read_trajectories(lenses, [text], k=k, levels=sites, tokens=token or ())
    if as_json:
        print(json.dumps([each.to_dict() for each in found.values()], allow_nan=False))
        return
    from rich.console import Console

    for each in found.values():
        Console().print(each)


def _lenses(
    model: Model, compare: str | None, folder: Path | None, other_weights: bool
) -> dict[str, Lens]:
    from layerjump.jumps.jumps import Jumps
    from layerjump.lens.lens import Lens

    names = [] if compare is None and folder else (compare or "mat").split(",")
    names = [name.strip() for name in names]
    fitted = _kept(model, [name for name in names if name != "identity"])
    lenses: dict[str, Lens] = {name: Lens(model, fitted.get(name)) for name in names}
    if folder is not None:
        read = Jumps.from_pretrained(folder, model=model, allow_other_weights=other_weights)
        given = Lens(model, read)
        name = given.name
        lenses[f"{name} ({folder.name})" if name in lenses else name] = given
    return lenses


def _kept(model: Model, names: list[str]) -> dict[str, Jumps]:
    from layerjump.jumps.cache import TEXT, TOKENS, cached_jumps, has_cached_jumps
    from layerjump.jumps.fit import selects

    for name in names:
        selects(name)  # an error if there is no such estimator, before anything is said or fitted
    if not names:
        return {}
    model.require_predictions()  # before the fitting, which needs none
    if not has_cached_jumps(model, names):
        print(
            f"fitting {', '.join(names)} on {TOKENS:,} tokens of {TEXT}; they are kept for the next time",
            file=sys.stderr,
        )
    with progress_bar("collecting") as update:
        return cached_jumps(model, names, progress=update)


def _sites(text: str) -> list[str]:
    """Read a list of sites, in which `3-6` stands for levels 3 to 6."""
    sites: list[str] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            sites += [str(level) for level in range(int(first), int(last) + 1)]
        else:
            sites.append(item.strip())
    return sites

"""`layerjump lens`: print what every level predicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from layerjump.cli._options import ALLOW_OTHER_WEIGHTS, MODEL, LoadModel, loads_model, option
from layerjump.cli._output import JSON, log, note_plain_text, progress_bar

if TYPE_CHECKING:
    from layerjump.lens.lens import Lens
    from layerjump.models.model import Model


@loads_model(device_map=True)
def lens(
    model: str = MODEL,
    prompt: str = typer.Argument(help="The text; `-` for standard input. A masked model's has a [MASK]."),
    compare: str | None = option(
        None, "Lenses, e.g. identity,mat (default: mat, or --jumps). The first use of one fits it."
    ),
    jumps: Path | None = option(None, "Folder of jumps that `layerjump fit` wrote."),
    levels: str | None = option(None, "Levels or sites, e.g. 0,10-20,5.mid (default: all levels)."),
    top_k: int = option(5, "Tokens to show at a level.", "-k", "--top-k"),
    token: list[str] | None = option(None, "A token to track, e.g. ' Paris': its rank and probability; repeatable."),
    as_json: bool = JSON,
    allow_other_weights: bool = ALLOW_OTHER_WEIGHTS,
    *,
    load: LoadModel,
) -> None:
    """Print the top next tokens that every level predicts at every position.

    [bold]layerjump lens smollm2 "The capital of France is" --compare identity,mat --token " Paris"[/]
    [bold]layerjump lens bert-base-uncased "Paris is the [MASK] of France." --top-k 10[/]
    [bold]layerjump lens MODEL "…" --jumps jumps --levels 0,4.mid,8-12[/]    fitted jumps, sub-module sites
    [bold]layerjump lens MODEL - --json < text.txt[/]                        one JSON object for each lens
    """
    from layerjump.lens.lens import read_trajectories

    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(model)
    note_plain_text(loaded, [text])
    lenses = _make_lenses(loaded, compare, jumps, allow_other_weights)
    sites = None if levels is None else _parse_sites(levels)
    (by_lens,) = read_trajectories(lenses, [text], k=top_k, levels=sites, tokens=token or ())
    if as_json:
        print(json.dumps([trajectory.to_dict() for trajectory in by_lens.values()], allow_nan=False))
        return
    from rich.console import Console

    for trajectory in by_lens.values():
        Console().print(trajectory)


def _make_lenses(model: Model, compare: str | None, folder: Path | None, allow_other_weights: bool) -> dict[str, Lens]:
    """Lenses by name: those of `compare`, fitted at their first use, and the one of the jumps folder."""
    from layerjump.jumps.default_jumps import TEXT, TOKENS, cached_jumps, has_cached_jumps
    from layerjump.jumps.estimators.registry import find_estimator
    from layerjump.jumps.jumps import Jumps
    from layerjump.lens.lens import Lens

    names = [] if compare is None and folder else [name.strip() for name in (compare or "mat").split(",")]
    estimators = [name for name in names if name != "identity"]
    fitted: dict[str, Jumps] = {}
    for estimator in estimators:
        # An unknown estimator is an error before anything is fitted.
        find_estimator(estimator, closed_form=True)
    if estimators:
        model.require_predictions()  # before the fit, which does not need them
        if not has_cached_jumps(model, estimators):
            log(f"fitting {', '.join(estimators)} on {TOKENS:,} tokens of {TEXT}; later runs use the cache")
        with progress_bar("collecting") as update:
            fitted = cached_jumps(model, estimators, progress=update)
    lenses = {name: Lens(model, fitted.get(name)) for name in names}
    if folder is not None:
        jumps = Jumps.from_pretrained(folder, model=model, allow_other_weights=allow_other_weights)
        lens = Lens(model, jumps)
        lenses[f"{lens.name} ({folder.name})" if lens.name in lenses else lens.name] = lens
    return lenses


def _parse_sites(text: str) -> list[str]:
    """The sites of a list such as `0,3-6,5.mid`, in which `3-6` stands for levels 3 to 6."""
    sites: list[str] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            sites += [str(level) for level in range(int(first), int(last) + 1)]
        else:
            sites.append(item.strip())
    return sites

"""`layerjump lens`: print what every level predicts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from layerjump.cli._interventions import ABLATE, EDIT_POSITIONS, STEER, STRENGTH, SWAP, Interventions, parse_ranges
from layerjump.cli._options import ALLOW_OTHER_WEIGHTS, CHAT, JSON, MODEL, LoadModel, loads_model, option
from layerjump.cli._printing import log, progress_bar, read_prompt
from layerjump.errors import BadText

PRETRAINED = "pretrained"
"""The name of the lens whose jumps are in the package, in the cache or on the hub."""

if TYPE_CHECKING:
    from layerjump.lens.lens import Lens
    from layerjump.lens.trajectory import Trajectory
    from layerjump.models.model import Model


@loads_model
def lens(
    model: str = MODEL,
    prompt: str = typer.Argument(help="The text; `-` for standard input. A masked model's has a [MASK]."),
    names: str | None = option(
        None,
        "Lenses to show, e.g. identity,mat; the first use of an estimator fits it (default: --jumps, else pretrained: "
        "from the package, the cache or the hub, else mat).",
        "--lenses",
    ),
    jumps: Path | None = option(None, "Folder of jumps that `layerjump fit` wrote."),
    levels: str | None = option(
        None, "Levels or sites to read, e.g. 0,10-20,5.mid (default: all levels); of an intervention, those it changes."
    ),
    top_k: int = option(5, "Tokens to show at a level.", "-k", "--top-k"),
    token: list[str] | None = option(None, "A token to track, e.g. ' Paris': its rank and probability; repeatable."),
    concept: list[str] | None = option(
        None, "A set of words to follow, e.g. france=Paris,France; repeat it to race several."
    ),
    new_tokens: int = option(0, "Let the model continue the text by up to this many tokens, and read them too."),
    swap: tuple[str, str] | None = SWAP,
    steer: list[str] | None = STEER,
    ablate: list[str] | None = ABLATE,
    strength: float = STRENGTH,
    edit_positions: str | None = EDIT_POSITIONS,
    chat: bool = CHAT,
    as_json: bool = JSON,
    allow_other_weights: bool = ALLOW_OTHER_WEIGHTS,
    *,
    load: LoadModel,
) -> None:
    """Print the most likely next tokens at every level and position.

    [bold]layerjump lens smollm2 "The capital of France is"[/]                the pretrained lens, else mat
    [bold]layerjump lens smollm2 "The capital of France is" --lenses identity,mat --token " Paris"[/]
    [bold]layerjump lens bert-base-uncased "Paris is the [MASK] of France." --top-k 10[/]
    [bold]layerjump lens MODEL "…" --jumps jumps --levels 0,4.mid,8-12[/]    fitted jumps, sub-module sites
    [bold]layerjump lens smollm2 "The capital of France is" --swap " Paris" " Rome" --levels 10-20[/]  before, after
    [bold]layerjump lens smollm2 "What is the capital of France?" --chat --new-tokens 8[/]   the answer's tokens too
    [bold]layerjump lens MODEL - --json < text.txt[/]                        one JSON object for each lens
    """
    from layerjump.lens.concepts import concept_ids
    from layerjump.lens.lens import read_trajectories
    from layerjump.lens.render.terminal import render_change

    concepts = dict(map(_parse_concept, concept or ()))
    sites = None if levels is None else parse_ranges(levels)
    interventions = Interventions(swap, steer, ablate, strength, sites, edit_positions)
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(model)
    prompt_or_chat = read_prompt(loaded, text, chat)
    for words in concepts.values():
        concept_ids(loaded, words)
    lenses = make_lenses(loaded, names, jumps, allow_other_weights)
    for lens in lenses.values():
        interventions.check(lens)
    options: dict[str, Any] = {"k": top_k, "tokens": token or (), "new_tokens": new_tokens}
    (by_lens,) = read_trajectories(
        lenses, [prompt_or_chat], levels=None if interventions.is_active else sites, **options
    )
    changed: dict[str, Trajectory] = {}
    if interventions.is_active:
        for name, lens in lenses.items():
            levels_read = by_lens[name].levels
            with interventions.apply(lens):
                changed |= read_trajectories({name: lens}, [prompt_or_chat], levels=levels_read, **options)[0]
    if as_json:
        after = [_record(one, concepts) | {"intervention": str(interventions)} for one in changed.values()]
        before = [_record(one, concepts) | {"findings": list(map(asdict, one.findings()))} for one in by_lens.values()]
        print(json.dumps([*before, *after], allow_nan=False))
        return
    from rich.console import Console

    console = Console()
    for name, trajectory in by_lens.items():
        if name in changed:
            console.print(render_change(trajectory, changed[name]))
            console.print(f"after: {interventions}", markup=False, highlight=False)
        else:
            console.print(trajectory)
            for finding in trajectory.findings():
                console.print(f"• {finding.sentence}", markup=False, highlight=False)
        if concepts and name in changed:
            for when, one in (("before", trajectory), ("after", changed[name])):
                console.print(f"Concepts {when}")
                console.print(one.race(concepts))
        elif concepts:
            console.print(trajectory.race(concepts))


def _record(trajectory: Trajectory, concepts: dict[str, list[str]]) -> dict[str, Any]:
    """A trajectory as JSON values, with the race of concepts if there are any."""
    if not concepts:
        return trajectory.to_dict()
    race = trajectory.race(concepts)
    columns = race.to_pandas().to_dict("list")
    return trajectory.to_dict() | {"concepts": columns, "crossing_level": race.crossing_level}


def _parse_concept(text: str) -> tuple[str, list[str]]:
    """The name and the words of a concept such as `france=Paris,France`."""
    name, equals, words = text.partition("=")
    if not (name and equals and words):
        raise BadText(f"expected a concept such as france=Paris,France, got {text!r}")
    return name, [word.strip() for word in words.split(",") if word.strip()]


def make_lens(model: Model, name: str | None, folder: Path | None, allow_other_weights: bool) -> Lens:
    """The one lens of the jumps folder, or else of a name, fitted at its first use; without either, the default one."""
    (lens,) = make_lenses(model, None if folder else name, folder, allow_other_weights).values()
    return lens


def make_lenses(model: Model, listed: str | None, folder: Path | None, allow_other_weights: bool) -> dict[str, Lens]:
    """Lenses by name: those of the list, fitted at their first use, and the one of the jumps folder.

    Without either, the pretrained lens; if there is none, mat.
    """
    from layerjump.jumps.default_jumps import TEXT, TOKENS, cached_jumps, has_cached_jumps, load_jumps, pretrained_jumps
    from layerjump.jumps.estimators.registry import find_estimator
    from layerjump.jumps.jumps import Jumps
    from layerjump.lens.lens import Lens

    if listed is None and folder is None:
        model.require_predictions()
        pretrained = pretrained_jumps(model)
        if pretrained is not None:
            lens = Lens(model, pretrained)
            return {lens.name: lens}
        listed = "mat"
    names = [name.strip() for name in (listed or "").split(",") if name.strip()]
    estimators = [name for name in names if name not in ("identity", PRETRAINED)]
    fitted: dict[str, Jumps] = {PRETRAINED: load_jumps(model)} if PRETRAINED in names else {}
    for estimator in estimators:
        # An unknown estimator is an error before anything is fitted.
        find_estimator(estimator, closed_form=True)
    if estimators:
        model.require_predictions()  # before the fit, which does not need them
        if not has_cached_jumps(model, estimators):
            log(f"fitting {', '.join(estimators)} on {TOKENS:,} tokens of {TEXT}; later runs use the cache")
        with progress_bar("collecting") as update:
            fitted |= cached_jumps(model, estimators, progress=update)
    lenses = {name: Lens(model, fitted.get(name)) for name in names}
    if folder is not None:
        jumps = Jumps.from_pretrained(folder, model=model, allow_other_weights=allow_other_weights)
        lens = Lens(model, jumps)
        lenses[f"{lens.name} ({folder.name})" if lens.name in lenses else lens.name] = lens
    return lenses

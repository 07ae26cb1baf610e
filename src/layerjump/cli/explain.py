"""`layerjump explain`: which parts of the model wrote a prediction."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from layerjump.cli._options import ALLOW_OTHER_WEIGHTS, CHAT, JSON, JUMPS, LENS, MODEL, LoadModel, loads_model, option
from layerjump.cli._printing import read_prompt
from layerjump.cli.lens import make_lens


@loads_model
def explain(
    model: str = MODEL,
    prompt: str = typer.Argument(help="The text; `-` for standard input. A masked model's has a [MASK]."),
    token: str | None = option(None, "The token to explain, e.g. ' Paris' (default: the top token)."),
    against: str | None = option(None, "Explain the difference from this token's logit, e.g. ' Rome'."),
    level: int | None = option(None, "The level that the lens reads (default: the last, the model's own logit)."),
    position: int = option(-1, "The position that the lens reads; negative ones count from the end."),
    lens: str | None = LENS,
    jumps: Path | None = JUMPS,
    chat: bool = CHAT,
    as_json: bool = JSON,
    allow_other_weights: bool = ALLOW_OTHER_WEIGHTS,
    *,
    load: LoadModel,
) -> None:
    """Attribute a token's logit to the embedding, attention, attention heads, their source positions and MLPs.

    [bold]layerjump explain smollm2 "The capital of France is" --token " Paris"[/]
    [bold]layerjump explain smollm2 "The capital of France is" --token " Paris" --against " Rome" --level 20[/]
    [bold]layerjump explain MODEL "…" --jumps jumps --level 12 --json[/]     every row, as one JSON object
    """
    from layerjump.lens.lens import read_trajectories

    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(model)
    prompt_or_chat = read_prompt(loaded, text, chat)
    at_level = loaded.n_blocks if level is None else level
    # At the last level every lens is the model, so nothing needs to be fitted.
    name = "identity" if at_level == loaded.n_blocks else lens
    reading = make_lens(loaded, name, jumps, allow_other_weights)
    (trajectory,) = read_trajectories({reading.name: reading}, [prompt_or_chat], k=1, levels=[at_level])[0].values()
    attribution = trajectory.attribution(position, at_level, token, against)
    if as_json:
        print(json.dumps(attribution.to_dict(), allow_nan=False))
        return
    from rich.console import Console

    Console().print(attribution)

"""`layerjump generate`: generate text with early exit."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from layerjump.cli._options import ALLOW_OTHER_WEIGHTS, MODEL, LoadModel, Panel, loads_model, option
from layerjump.cli._output import JSON, log, note_plain_text, print_json
from layerjump.errors import BadExit

if TYPE_CHECKING:
    from layerjump.generation.generate import Generated
    from layerjump.generation.rules import ExitConfig
    from layerjump.models.model import Model

exit_option, sampling_option = Panel("Early exit"), Panel("Sampling")


@loads_model()
def generate(
    model: str = MODEL,
    prompts: list[str] = typer.Argument(metavar="PROMPT", help="Text to continue; `-` reads standard input."),
    max_new_tokens: int = option(64, "Largest number of new tokens."),
    stream: bool = option(False, "Print tokens as they are generated (one prompt).", "--stream"),
    colour: bool = option(False, "Colour tokens by the level at which they exit.", "--colour"),
    jumps: Path | None = exit_option(None, "Folder of jumps (default: the logit lens reads all levels)."),
    exit: str | None = exit_option(
        None,
        "Exit rule: never, fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; at given levels: "
        "gap:0.9@8,16 (default: the calibrated rule in the jumps folder, else never).",
    ),
    verify: bool = exit_option(
        False, "Verify early-exit drafts with the full model: the text is the full model's own.", "--verify"
    ),
    max_draft_tokens: int | None = exit_option(
        None, "Largest number of draft tokens before --verify (default: calibrated, or 4)."
    ),
    cache: str = exit_option(
        "exact",
        "KV cache of skipped blocks: exact (computed later), jump (from a state that a jump predicts) or "
        "copy (from the exit state).",
    ),
    do_sample: bool = sampling_option(False, "Sample tokens (default: greedy).", "--do-sample"),
    temperature: float = sampling_option(1.0, "Sampling temperature."),
    top_p: float = sampling_option(1.0, "Nucleus sampling probability."),
    seed: int = sampling_option(0, "Sampling seed."),
    as_json: bool = JSON,
    allow_other_weights: bool = ALLOW_OTHER_WEIGHTS,
    *,
    load: LoadModel,
) -> None:
    """Generate text with early exit: each token exits at the first level where the exit rule is satisfied.

    [bold]layerjump generate smollm2 "The capital of France is"[/]                         the full model
    [bold]layerjump generate smollm2 "Once" --jumps jumps --exit gap:0.9@20,25 --colour[/]   early exit
    [bold]layerjump generate smollm2 "Once" --jumps jumps --verify --stream[/]               calibrated, lossless
    """
    import torch
    from transformers import TextStreamer

    from layerjump.generation.calibration import serialization
    from layerjump.generation.generate import MAX_DRAFT_TOKENS, check_ranges
    from layerjump.generation.generate import generate as generate_text
    from layerjump.jumps.jumps import Jumps

    sampling = {"temperature": temperature, "top_p": top_p}
    check_ranges({"max_new_tokens": max_new_tokens, **sampling})  # before the model is loaded
    if stream and len(prompts) > 1:
        raise BadExit(f"--stream expects one prompt, got {len(prompts)}; give one, or drop --stream")
    loaded = load(model)
    fitted, draft_tokens = None, MAX_DRAFT_TOKENS
    rule: ExitConfig | str = exit or "never"
    if jumps is not None:
        fitted = Jumps.from_pretrained(jumps, model=loaded, allow_other_weights=allow_other_weights)
        if exit is None and (jumps / serialization.FILE_NAME).is_file():
            calibration = serialization.load_calibration(jumps, model=loaded)
            rule = calibration.verified_exit if verify else calibration.exit
            draft_tokens = calibration.max_draft_tokens
    torch.manual_seed(seed)
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    note_plain_text(loaded, texts)
    generated = generate_text(
        loaded,
        fitted,
        texts,
        exit=rule,
        verify=verify,
        cache=cache,  # type: ignore[arg-type]
        max_draft_tokens=draft_tokens if max_draft_tokens is None else max_draft_tokens,
        streamer=TextStreamer(loaded.tokenization.tokenizer, skip_special_tokens=True) if stream else None,
        max_new_tokens=max_new_tokens,
        **({"do_sample": True, "top_k": 0, **sampling} if do_sample else {"do_sample": False}),
    )
    if as_json:
        columns = (texts, generated.text, generated.ids, generated.exit_levels)
        names = ("prompt", "text", "ids", "levels")
        record = {
            "texts": [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
            "blocks": generated.n_blocks,
            "blocks_saved": generated.blocks_saved,
            "agreement": generated.agreement,
            "counts": asdict(generated.counts),
        }
        print_json(record)
    elif not stream or colour:
        for row, text in enumerate(texts):
            print(text + (_colour(loaded, generated, row) if colour else generated.text[row]))
    log(generated)


def _colour(model: Model, generated: Generated, row: int) -> str:
    """The text with tokens from green (early exit) to grey (late exit); full-depth tokens are not coloured."""
    tokenizer = model.tokenization.tokenizer
    pieces, before = [], ""
    for end, level in enumerate(generated.exit_levels[row], start=1):
        text = str(tokenizer.decode(generated.ids[row][:end], skip_special_tokens=True))
        piece, before = text[len(before) :], text
        # Dark enough for a light terminal, light enough for a dark one.
        fade = round(130 * level / generated.n_blocks)
        early = level < generated.n_blocks
        pieces.append(f"\x1b[38;2;{fade};160;{fade}m{piece}\x1b[0m" if early else piece)
    # Decoded without their prompt, tokens may lose a first blank.
    lost = max(0, len(generated.text[row]) - len(before))
    return generated.text[row][:lost] + "".join(pieces)

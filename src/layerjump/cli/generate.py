"""`layerjump generate`: generate text with early exit."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli._options import (
    AllowOtherWeights,
    AsJson,
    LoadModel,
    ModelName,
    loads_model,
    note_plain_text,
    option_group,
)

if TYPE_CHECKING:
    from layerjump.generation.generate import Generated
    from layerjump.jumps.jumps import Jumps
    from layerjump.models.model import Model

exit_option, sampling_option = option_group("Early exit"), option_group("Sampling")


@loads_model()
def generate(
    model: ModelName,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Text to continue; `-` reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of new tokens.")] = 64,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they are generated (one prompt).")] = False,
    colour: Annotated[bool, typer.Option("--colour", help="Colour tokens by the level at which they exit.")] = False,
    jumps: Annotated[
        Path | None, exit_option(help="Folder of jumps (default: the logit lens reads all levels).")
    ] = None,
    exit: Annotated[
        str | None,
        exit_option(
            help="Exit rule: never, fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; at given levels: "
            "gap:0.9@8,16 (default: the calibrated rule in the jumps folder, else never)."
        ),
    ] = None,
    verify: Annotated[
        bool,
        exit_option("--verify", help="Verify early-exit drafts with the full model: the text is the full model's own."),
    ] = False,
    max_draft_tokens: Annotated[
        int | None, exit_option(help="Largest number of draft tokens before --verify (default: calibrated, or 4).")
    ] = None,
    cache: Annotated[
        str,
        exit_option(
            help="KV cache of skipped blocks: exact (computed later), jump (from a state that a jump predicts) or "
            "copy (from the exit state)."
        ),
    ] = "exact",
    do_sample: Annotated[bool, sampling_option("--do-sample", help="Sample tokens (default: greedy).")] = False,
    temperature: Annotated[float, sampling_option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, sampling_option(help="Nucleus sampling probability.")] = 1.0,
    seed: Annotated[int, sampling_option(help="Sampling seed.")] = 0,
    as_json: AsJson = False,
    allow_other_weights: AllowOtherWeights = False,
    *,
    load: LoadModel,
) -> None:
    """Generate text with early exit: each token exits at the first level where the exit rule is satisfied.

    [bold]layerjump generate smollm2 "The capital of France is"[/]                         the full model
    [bold]layerjump generate smollm2 "Once" --jumps jumps --exit gap:0.9@20,25 --colour[/]   early exit
    [bold]layerjump generate smollm2 "Once" --jumps jumps --verify --stream[/]               calibrated, lossless
    """
    import torch

    from layerjump.generation.generate import check_ranges
    from layerjump.generation.generate import generate as generate_text

    sampling = {"temperature": temperature, "top_p": top_p}
    check_ranges({"max_new_tokens": max_new_tokens, **sampling})  # before the model is loaded
    loaded = load(model)
    fitted, rule, calibrated_draft_tokens = _load_rule(loaded, jumps, exit, verify, allow_other_weights)
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
        max_draft_tokens=calibrated_draft_tokens if max_draft_tokens is None else max_draft_tokens,
        streamer=_make_streamer(loaded, len(texts)) if stream else None,
        max_new_tokens=max_new_tokens,
        **({"do_sample": True, "top_k": 0, **sampling} if do_sample else {"do_sample": False}),
    )
    if as_json:
        print(json.dumps(_record(texts, generated), indent=2, ensure_ascii=False))
    elif not stream or colour:
        for row, text in enumerate(texts):
            print(text + (_colour(loaded, generated, row) if colour else generated.text[row]))
    print(generated, file=sys.stderr)


def _load_rule(
    model: Model, folder: Path | None, exit: str | None, verify: bool, allow_other_weights: bool
) -> tuple[Jumps | None, Any, int]:
    """The jumps, the exit rule (given or calibrated), and the largest number of draft tokens."""
    from layerjump.generation.calibration import serialization
    from layerjump.generation.generate import MAX_DRAFT_TOKENS
    from layerjump.jumps.jumps import Jumps

    jumps = None
    if folder is not None:
        jumps = Jumps.from_pretrained(folder, model=model, allow_other_weights=allow_other_weights)
    if exit is not None or folder is None or not (folder / serialization.FILE_NAME).is_file():
        return jumps, exit or "never", MAX_DRAFT_TOKENS
    calibration = serialization.load_calibration(folder, model=model)
    rule = calibration.verified_exit if verify else calibration.exit
    return jumps, rule, calibration.max_draft_tokens


def _make_streamer(model: Model, n_prompts: int) -> Any:
    from transformers import TextStreamer

    from layerjump.errors import BadExit

    if n_prompts > 1:
        raise BadExit(f"--stream expects one prompt, got {n_prompts}; give one, or drop --stream")
    return TextStreamer(model.tokenization.tokenizer, skip_special_tokens=True)


def _record(prompts: list[str], generated: Generated) -> dict[str, Any]:
    return {
        "texts": [
            {"prompt": prompt, "text": text, "ids": ids, "levels": levels}
            for prompt, text, ids, levels in zip(
                prompts, generated.text, generated.ids, generated.exit_levels, strict=True
            )
        ],
        "blocks": generated.n_blocks,
        "blocks_saved": generated.blocks_saved,
        "agreement": generated.agreement,
        "counts": asdict(generated.counts),
    }


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

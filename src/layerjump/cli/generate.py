"""`layerjump generate`: generate text with early exit."""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from layerjump.cli._interventions import (
    ABLATE,
    EDIT_POSITIONS,
    INTERVENTION_LENS,
    LEVELS,
    STEER,
    STRENGTH,
    SWAP,
    Interventions,
    parse_ranges,
)
from layerjump.cli._options import ALLOW_OTHER_WEIGHTS, CHAT, JSON, MODEL, LoadModel, OptionPanel, loads_model, option
from layerjump.cli._printing import log, note_plain_text, print_json
from layerjump.cli.lens import make_lens
from layerjump.errors import BadExit

if TYPE_CHECKING:
    from layerjump.generation.exit_rules import ExitConfig
    from layerjump.generation.generate import Generated
    from layerjump.models.model import Model

exit_option, sampling_option = OptionPanel("Early exit"), OptionPanel("Sampling")


@loads_model
def generate(
    model: str = MODEL,
    prompts: list[str] = typer.Argument(metavar="PROMPT", help="Text to continue; `-` reads standard input."),
    max_new_tokens: int = option(64, "Largest number of new tokens."),
    chat: bool = CHAT,
    stream: bool = option(False, "Print tokens as they are generated (one prompt).", "--stream"),
    colour: bool = option(False, "Colour tokens by the level at which they exit.", "--colour"),
    jumps: Path | None = exit_option(None, "Folder of jumps (default: the logit lens reads all levels)."),
    exit: str | None = exit_option(
        None,
        "Exit rule: never, fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; at given levels: "
        "gap:0.9@8,16 (default: the calibrated rule in the jumps folder, else never).",
    ),
    verify: bool = exit_option(
        False, "Verify drafted tokens with the full model: the text is the full model's own.", "--verify"
    ),
    drafts: str | None = exit_option(
        None,
        "Drafters for --verify: lookup, recycled, head, splice, exit, or several (lookup,head); lookup and recycled "
        "need no jumps (default: calibrated, else the exit rule, else lookup,recycled).",
    ),
    max_draft_tokens: int | None = exit_option(
        None, "Largest number of drafts in one verification step (default: calibrated, else 4 by exit rule, 8 others)."
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
    swap: tuple[str, str] | None = SWAP,
    steer: list[str] | None = STEER,
    ablate: list[str] | None = ABLATE,
    strength: float = STRENGTH,
    levels: str | None = LEVELS,
    edit_positions: str | None = EDIT_POSITIONS,
    lens: str = INTERVENTION_LENS,
    as_json: bool = JSON,
    allow_other_weights: bool = ALLOW_OTHER_WEIGHTS,
    *,
    load: LoadModel,
) -> None:
    """Generate text with early exit: each token exits at the first level where the exit rule is satisfied.

    [bold]layerjump generate smollm2 "The capital of France is"[/]                         the full model
    [bold]layerjump generate smollm2 "Once" --jumps jumps --exit gap:0.9@20,25 --colour[/]   early exit
    [bold]layerjump generate smollm2 "Once" --jumps jumps --verify --stream[/]               calibrated, lossless
    [bold]layerjump generate smollm2 "One, two, one, two," --verify --drafts lookup[/]       lossless without jumps
    [bold]layerjump generate smollm2 "Rome is" --steer " Paris" --levels 10-20[/]            before, after
    """
    import torch
    from transformers import TextStreamer

    from layerjump.data.chat import render_chat
    from layerjump.generation.calibration import calibration_file
    from layerjump.generation.combine_drafters import DraftConfig
    from layerjump.generation.generate import check_ranges
    from layerjump.generation.generate import generate as generate_text
    from layerjump.jumps.jumps import Jumps
    from layerjump.lens.lens import Lens

    sampling = {"temperature": temperature, "top_p": top_p}
    check_ranges({"max_new_tokens": max_new_tokens, **sampling})  # before the model is loaded
    if stream and len(prompts) > 1:
        raise BadExit(f"--stream expects one prompt, got {len(prompts)}; give one, or drop --stream")
    if drafts is not None:
        DraftConfig.of(drafts)
        if not verify:
            raise BadExit("--drafts needs --verify; add it, or drop --drafts")
    loaded = load(model)
    fitted = None
    rule: ExitConfig | str = exit or "never"
    if jumps is not None:
        fitted = Jumps.from_pretrained(jumps, model=loaded, allow_other_weights=allow_other_weights)
        if exit is None and (jumps / calibration_file.FILE_NAME).is_file():
            calibration = calibration_file.load_calibration(jumps, model=loaded)
            rule = calibration.verified_exit if verify else calibration.exit
            if verify and max_draft_tokens is None and drafts is None:
                max_draft_tokens = calibration.max_draft_tokens
    torch.manual_seed(seed)
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [render_chat(loaded.name, loaded.tokenizer, messages).text for messages in chats]
    else:
        note_plain_text(loaded, texts)
    interventions = Interventions(
        swap, steer, ablate, strength, None if levels is None else parse_ranges(levels), edit_positions
    )
    continue_texts = functools.partial(
        generate_text,
        loaded,
        fitted,
        texts,
        exit=rule,
        verify=verify,
        cache=cache,  # type: ignore[arg-type]
        drafts=drafts,
        max_draft_tokens=max_draft_tokens,
        streamer=TextStreamer(loaded.tokenization.tokenizer, skip_special_tokens=True) if stream else None,
        max_new_tokens=max_new_tokens,
        **({"do_sample": True, "top_k": 0, **sampling} if do_sample else {"do_sample": False}),
    )
    # Without jumps, directions are those of a lens of this name, which a plain generation does not need.
    reading = Lens(loaded, fitted)
    if interventions.is_active and fitted is None:
        reading = make_lens(loaded, lens, None, allow_other_weights)
    interventions.check(reading)
    generated = continue_texts()
    changed = None
    if interventions.is_active:
        if stream:
            print(f"after: {interventions}")
        torch.manual_seed(seed)
        with interventions.apply(reading):
            changed = continue_texts()
    if as_json:
        columns = (texts, generated.text, generated.ids, generated.exit_levels, generated.drafters)
        names = ("prompt", "text", "ids", "levels", "drafters")
        record = {
            "texts": [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
            "blocks": generated.n_blocks,
            "blocks_saved": generated.blocks_saved,
            "agreement": generated.agreement,
            "counts": asdict(generated.counts),
        }
        if changed is not None:
            record["changed"] = [
                {"text": text, "ids": ids} for text, ids in zip(changed.text, changed.ids, strict=True)
            ]
        print_json(record)
    elif not stream or colour:
        for row, text in enumerate(texts):
            if changed is None:
                print(text + (_colour(loaded, generated, row) if colour else generated.text[row]))
            else:
                _print_side_by_side(text + generated.text[row], text + changed.text[row], str(interventions))
    log(generated)


def _print_side_by_side(before: str, after: str, interventions: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for title in ("before", f"after: {interventions}"):
        table.add_column(Text(title), ratio=1)
    table.add_row(Text(before), Text(after))
    Console().print(table)


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

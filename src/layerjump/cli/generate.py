"""`layerjump generate` and `layerjump calibrate`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli._options import (
    AsJson,
    Column,
    Device,
    Dtype,
    ModelName,
    OtherWeights,
    Revision,
    Seed,
    Trust,
    print_table,
)
from layerjump.cli._output_dir import writes_folder

if TYPE_CHECKING:
    from layerjump.generation.calibration.calibrate import Calibration
    from layerjump.generation.generate import Generated
    from layerjump.jumps.jumps import Jumps
    from layerjump.models.model import Model

Folder = Annotated[
    Path | None,
    typer.Option("--jumps", help="Folder of jumps (default: levels are read as they stand)."),
]


def generate(
    model: ModelName,
    prompt: Annotated[
        list[str], typer.Argument(help="What to go on with; `-` reads it from standard input.")
    ],
    jumps: Folder = None,
    allow_other_weights: OtherWeights = False,
    exit: Annotated[
        str | None,
        typer.Option(
            help="never, fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; with levels: gap:0.9@8,16 "
            "(default: what `calibrate` left in the folder of jumps, else never)."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Lossless: the full model's own text.")
    ] = False,
    max_draft_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that may wait for --verify (default: calibrated, or 4)."),
    ] = None,
    cache: Annotated[
        str, typer.Option(help="Skipped blocks: exact, jump (predicted) or copy.")
    ] = "exact",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random.")] = False,
    temperature: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of --sample.")] = 0,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print tokens as they come (one prompt).")
    ] = False,
    colour: Annotated[
        bool, typer.Option("--colour", help="Colour tokens by the level they left at.")
    ] = False,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write text, each token leaving at the first level that is sure.

    [bold]layerjump generate smollm2 "The capital of France is"[/]                        the whole model
    [bold]layerjump generate smollm2 "Once" --jumps jumps --exit gap:0.9@20,25 --colour[/]  stop early
    [bold]layerjump generate smollm2 "Once" --jumps jumps --verify --stream[/]              calibrated, lossless
    """
    import torch

    from layerjump.generation.generate import check_ranges
    from layerjump.generation.generate import generate as write
    from layerjump.models.loading import load

    drawn = {"temperature": temperature, "top_p": top_p}
    check_ranges({"max_new_tokens": max_new_tokens, **drawn})  # before a model is loaded
    loaded = load(
        model, revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    read, rule, most = _rule(loaded, jumps, exit, verify, allow_other_weights)
    torch.manual_seed(seed)
    prompts = [sys.stdin.read() if given == "-" else given for given in prompt]
    made = write(
        loaded,
        read,
        prompts,
        exit=rule,
        verify=verify,
        cache=cache,  # type: ignore[arg-type]
        max_draft_tokens=most if max_draft_tokens is None else max_draft_tokens,
        streamer=_streamer(loaded, len(prompts)) if stream else None,
        max_new_tokens=max_new_tokens,
        **({"do_sample": True, "top_k": 0, **drawn} if sample else {"do_sample": False}),
    )
    if as_json:
        print(json.dumps(_record(prompts, made), indent=2, ensure_ascii=False))
    elif not stream or colour:
        for given, row in zip(prompts, range(len(prompts)), strict=True):
            print(given + (_coloured(loaded, made, row) if colour else made.text[row]))
    print(made, file=sys.stderr)


@writes_folder(lambda given: "run the same command again", option="jumps")
def calibrate(
    model: ModelName,
    jumps: Annotated[
        Path, typer.Option("--jumps", help="Folder of jumps; the rule is saved there.")
    ],
    text: Annotated[
        str, typer.Option(help="A file, a hub dataset, `-` for standard input, or `pydoc`.")
    ] = "pydoc",
    column: Column = None,
    target: Annotated[float, typer.Option(help="Agreement with the full model to keep.")] = 0.95,
    confidence: Annotated[float, typer.Option(help="Confidence that it is kept.")] = 0.95,
    rule_types: Annotated[
        str, typer.Option(help="Rules that compete: gap, gate, two-stage.")
    ] = "gap,gate,two-stage",
    documents: Annotated[int, typer.Option(help="Documents to use at most.")] = 2_000,
    self_generated_tokens: Annotated[
        int | None,
        typer.Option(
            help="Let the model go on with each document's first tokens by so many, and calibrate on that."
        ),
    ] = None,
    seed: Seed = 0,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest exit rule that keeps a target agreement with the full model, and save it with the jumps.

    Cost is measured on this machine: blocks, vocabulary products and gates. The guarantee is for text like that
    given, or, with --self-generated-tokens, for what the model writes behind its openings: closer to what generation
    meets, slower to find.

    [bold]layerjump fit smollm2 --text wiki.txt -o jumps[/]
    [bold]layerjump calibrate smollm2 --jumps jumps --text wiki.txt --target 0.95[/]
    [bold]layerjump calibrate smollm2 --jumps jumps --text wiki.txt --self-generated-tokens 64[/]
    [bold]layerjump generate smollm2 "Once upon a time" --jumps jumps[/]
    """
    from layerjump.data.corpus import load_text
    from layerjump.generation.calibration import serialization
    from layerjump.generation.calibration.calibrate import calibrate as find
    from layerjump.jumps.jumps import Jumps
    from layerjump.models.loading import load

    loaded = load(
        model, revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    fitted = Jumps.from_pretrained(jumps, model=loaded)
    found = find(
        loaded,
        fitted,
        load_text(text, column=column),
        target=target,
        confidence=confidence,
        rule_types=tuple(kind.strip() for kind in rule_types.split(",")),
        documents=documents,
        self_generated_tokens=self_generated_tokens,
        seed=seed,
        log=lambda line: print(line, file=sys.stderr),
    )
    path = serialization.save_calibration(found, jumps)
    print_table(str(found), _rows(found), as_json=as_json)
    print(f"wrote {path}", file=sys.stderr)


def _rule(
    model: Model, folder: Path | None, given: str | None, verify: bool, other_weights: bool
) -> tuple[Jumps | None, Any, int]:
    """The jumps, the rule asked for or calibrated, and how many tokens may wait for verification."""
    from layerjump.generation.calibration import serialization
    from layerjump.generation.generate import MAX_DRAFT_TOKENS
    from layerjump.jumps.jumps import Jumps

    jumps = None
    if folder is not None:
        jumps = Jumps.from_pretrained(folder, model=model, allow_other_weights=other_weights)
    if given is not None or folder is None or not (folder / serialization.FILE_NAME).is_file():
        return jumps, given or "never", MAX_DRAFT_TOKENS
    found = serialization.load_calibration(folder, model=model)
    return jumps, found.verified_exit if verify else found.exit, found.max_draft_tokens


def _streamer(model: Model, prompts: int) -> Any:
    from transformers import TextStreamer

    from layerjump.errors import BadExit

    if prompts > 1:
        raise BadExit(f"--stream prints one text, but {prompts} prompts were given; give one")
    return TextStreamer(model.tokenization.tokenizer, skip_special_tokens=True)


def _record(prompts: list[str], made: Generated) -> dict[str, Any]:
    return {
        "texts": [
            {"prompt": prompt, "text": text, "ids": ids, "levels": levels}
            for prompt, text, ids, levels in zip(
                prompts, made.text, made.ids, made.exit_levels, strict=True
            )
        ],
        "blocks": made.n_blocks,
        "blocks_saved": made.blocks_saved,
        "agreement": made.agreement,
        "counts": asdict(made.counts),
    }


def _coloured(model: Model, made: Generated, row: int) -> str:
    """Tokens from green (left early) to grey (late); those of the whole model in the terminal's own colour."""
    tokenizer = model.tokenization.tokenizer
    pieces, before = [], ""
    for end, level in enumerate(made.exit_levels[row], start=1):
        text = str(tokenizer.decode(made.ids[row][:end], skip_special_tokens=True))
        piece, before = text[len(before) :], text
        # Dark enough for a light terminal, light enough for a dark one.
        fade = round(130 * level / made.n_blocks)
        early = level < made.n_blocks
        pieces.append(f"\x1b[38;2;{fade};160;{fade}m{piece}\x1b[0m" if early else piece)
    # Decoded without their prompt, tokens may have lost a first blank.
    lost = max(0, len(made.text[row]) - len(before))
    return made.text[row][:lost] + "".join(pieces)


def _rows(found: Calibration) -> list[dict[str, Any]]:
    about = found.about
    rows = [
        {"what": f"{rule} {name}", "value": about[rule][name]}
        for rule in ("rule", "lossless")
        for name in ("kind", "levels", "threshold")
    ]
    rows.append({"what": "lossless unverified", "value": about["unverified"]})
    rows.append({"what": "lossless cost (select)", "value": about["lossless_cost"]})
    rows += [
        {"what": f"test {name.replace('_', ' ')}", "value": value}
        for name, value in about["test"].items()
    ]
    rows += [
        {"what": f"cost of {kind} (select)", "value": value}
        for kind, value in about["select_cost"].items()
    ]
    return rows + [{"what": f"{name}, ms", "value": v} for name, v in about["costs"].items()]

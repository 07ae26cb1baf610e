"""`layerjump pretrain`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from layerjump.cli._options import AsJson, Column, Force, print_table
from layerjump.cli._output_dir import writes_folder
from layerjump.errors import BadTraining


@writes_folder(
    lambda given: "run the same command to go on from its last checkpoint, if it came to one",
    replaced=True,
)
def pretrain(
    text: Annotated[
        list[str],
        typer.Option(help="A file, a hub dataset, `-` or `pydoc`; several are put together."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")] = Path(
        "model"
    ),
    held_out: Annotated[
        str | None,
        typer.Option(help="Text to measure on (default: 5 % of the documents)."),
    ] = None,
    column: Column = None,
    arch: Annotated[str, typer.Option(help="llama, mistral, gpt2, bert.")] = "llama",
    layers: Annotated[int, typer.Option(help="Blocks.")] = 4,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 128,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the byte-level BPE.")] = 2048,
    length: Annotated[int, typer.Option(help="Tokens in a row.")] = 128,
    max_positions: Annotated[
        int | None, typer.Option(help="Longest sequence the model takes (default: the length).")
    ] = None,
    penalty: Annotated[
        str, typer.Option(help="none, cosine, mse, jump: what is added to the loss.")
    ] = "none",
    penalty_weight: Annotated[float, typer.Option(help="What the penalty is multiplied by.")] = 0.5,
    levels: Annotated[
        str | None, typer.Option(help="Levels to penalise, e.g. 3,4 (default: all).")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Rows in a step, over all processes.")] = 32,
    accumulate: Annotated[int, typer.Option(help="Parts that a step's rows are run in.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Its largest value.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and held-out text.")] = 0,
    eval_every: Annotated[
        int | None,
        typer.Option(help="Steps between measurements and checkpoints (default: a tenth)."),
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Mixed precision.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda (default: a GPU where there is one).")
    ] = None,
    keep_checkpoints: Annotated[
        bool,
        typer.Option("--keep-checkpoints", help="Keep them all, e.g. for the study `dynamics`."),
    ] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a small model from scratch, with a penalty that changes how linear it becomes.

    [bold]layerjump pretrain --text stories.txt --penalty cosine --penalty-weight 0.5 -o model[/]
    [bold]layerjump pretrain --text a.txt --text b.txt --held-out c.txt --arch gpt2 --layers 6[/]
    [bold]torchrun --nproc-per-node 2 -m layerjump pretrain --text stories.txt[/]    two processes

    Writes an ordinary checkpoint with its tokenizer, training.json (every number) and training.html (figures). A run
    that was stopped goes on with the same command: its checkpoints stand in OUTPUT-training.
    """
    from layerjump.data.corpus import load_text
    from layerjump.training.model import ModelShape
    from layerjump.training.pretrain import join_corpora
    from layerjump.training.pretrain import pretrain as train
    from layerjump.training.trainer import Recipe

    recipe = Recipe(
        arch=arch,
        shape=ModelShape(layers, hidden, heads, length if max_positions is None else max_positions),
        vocab_size=vocab_size,
        length=length,
        penalty=penalty,
        penalty_weight=penalty_weight,
        levels=None if levels is None else _numbers(levels),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        eval_every=max(1, steps // 10) if eval_every is None else eval_every,
        bf16=bf16,
    )
    record = train(
        join_corpora([load_text(source, column=column) for source in text]),
        output,
        recipe,
        held_out=None if held_out is None else load_text(held_out, column=column),
        accumulate=accumulate,
        device=device,
        keep_checkpoints=keep_checkpoints,
        force=force,
        render_page=_page,
    )
    if int(os.environ.get("RANK", "0")) == 0:  # the first process speaks for all
        _show(record, output, as_json=as_json)


def _page(record: dict[str, Any]) -> str:
    from layerjump.report.training_report import training_page

    return training_page(record, shlex.join(["layerjump", *sys.argv[1:]]))


def _show(record: dict[str, Any], output: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        first, last = record["tables"]["steps"][0], record["tables"]["steps"][-1]
        rows = [{"": name, "before": first[name], "after": last[name]} for name in last]
        size = f"{record['settings']['arch']}, {record['parameters']:,} parameters"
        print_table(f"{size}, held-out text", rows, as_json=False)
    print(f"wrote {output}", file=sys.stderr)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise BadTraining(f"levels were given as {text!r}; give numbers, such as 3,4") from None

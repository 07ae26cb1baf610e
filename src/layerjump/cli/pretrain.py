"""`layerjump pretrain`: train a small model from scratch."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerjump.cli._options import (
    AsJson,
    Column,
    Force,
    OutputFolder,
    option_group,
    output_option,
    parse_numbers,
    print_table,
)
from layerjump.cli._output_dir import locks_output
from layerjump.errors import BadTraining

if TYPE_CHECKING:
    from layerjump.training.pretrain import PretrainingRecord

penalty_option, architecture_option = (option_group("Linearity penalty"), option_group("Architecture"))
training_option = option_group("Training")


@locks_output("run the same command to continue from the last checkpoint, if there is one", is_replaced=True)
def pretrain(
    text: Annotated[
        list[str], typer.Option(help="A file, a hub dataset, `-` for standard input, or `pydoc`; may be repeated.")
    ],
    held_out: Annotated[str | None, typer.Option(help="Evaluation text (default: 5 % of the documents).")] = None,
    column: Column = None,
    penalty: Annotated[str, penalty_option(help="Loss term: none, cosine, mse or jump.")] = "none",
    penalty_weight: Annotated[float, penalty_option(help="Weight of the penalty.")] = 0.5,
    penalty_levels: Annotated[str | None, penalty_option(help="Levels to penalise, e.g. 3,4 (default: all).")] = None,
    arch: Annotated[str, architecture_option(help="llama, mistral, gpt2 or bert.")] = "llama",
    layers: Annotated[int, architecture_option(help="Blocks.")] = 4,
    hidden_size: Annotated[int, architecture_option(help="Width of the residual stream.")] = 128,
    heads: Annotated[int, architecture_option(help="Attention heads.")] = 4,
    vocab_size: Annotated[int, architecture_option(help="Vocabulary of the byte-level BPE.")] = 2048,
    max_positions: Annotated[
        int | None, architecture_option(help="Longest sequence of the model (default: --length).")
    ] = None,
    steps: Annotated[int, training_option(help="Optimiser steps.")] = 1000,
    batch_size: Annotated[int, training_option(help="Sequences a step, over all processes.")] = 32,
    gradient_accumulation_steps: Annotated[int, training_option(help="Parts that a batch is run in.")] = 1,
    length: Annotated[int, training_option(help="Tokens a sequence.")] = 128,
    learning_rate: Annotated[float, training_option(help="Peak learning rate.")] = 1e-3,
    eval_every: Annotated[
        int | None,
        training_option(help="Steps between evaluations, and between checkpoints (default: a tenth of --steps)."),
    ] = None,
    seed: Annotated[int, training_option(help="Seed of weights, order and evaluation documents.")] = 0,
    bf16: Annotated[bool, training_option("--bf16", help="Mixed precision.")] = False,
    device: Annotated[str | None, training_option(help="cpu or cuda (default: a GPU if available).")] = None,
    keep_checkpoints: Annotated[
        bool, output_option("--keep-checkpoints", help="Keep all checkpoints, e.g. for the study `dynamics`.")
    ] = False,
    output: OutputFolder = Path("model"),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a small model from scratch, with a penalty that makes its blocks more or less linear.

    Writes a Hugging Face checkpoint with its tokenizer, training.json (all numbers) and training.html (figures). The
    same command continues a stopped run from its checkpoints in OUTPUT-training.

    [bold]layerjump pretrain --text stories.txt --penalty cosine --penalty-weight 0.5 -o model[/]
    [bold]layerjump pretrain --text a.txt --text b.txt --held-out c.txt --arch gpt2 --layers 6[/]
    [bold]torchrun --nproc-per-node 2 -m layerjump pretrain --text stories.txt[/]    two processes
    """
    from layerjump.data.corpus import load_text
    from layerjump.training.pretrain import Recipe, join_corpora
    from layerjump.training.pretrain import pretrain as train

    recipe = Recipe(
        arch=arch,
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        max_positions=length if max_positions is None else max_positions,
        vocab_size=vocab_size,
        length=length,
        penalty=penalty,
        penalty_weight=penalty_weight,
        levels=None if penalty_levels is None else parse_numbers(penalty_levels, BadTraining),
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
        gradient_accumulation_steps=gradient_accumulation_steps,
        device=device,
        keep_checkpoints=keep_checkpoints,
        force=force,
        render_page=_render_page,
    )
    if int(os.environ.get("RANK", "0")) == 0:  # the first process prints for all
        _print_record(record, as_json=as_json)
        print(f"wrote {output}", file=sys.stderr)


def _render_page(record: PretrainingRecord) -> str:
    from layerjump.report.write_report import training_page

    return training_page(record, shlex.join(["layerjump", *sys.argv[1:]]))


def _print_record(record: PretrainingRecord, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record.to_json(), indent=2))
        return
    first, last = record.tables.steps[0], record.tables.steps[-1]
    rows = [{"": name, "before": first[name], "after": last[name]} for name in last]
    title = f"{record.settings.arch}, {record.parameters:,} parameters, held-out text"
    print_table(title, rows, as_json=False)

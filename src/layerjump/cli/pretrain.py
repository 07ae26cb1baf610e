"""`layerjump pretrain`: train a small model from scratch."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import typer

from layerjump.cli._options import COLUMN, FORCE, JSON, OptionPanel, option, output_folder, output_option, parse_numbers
from layerjump.cli._output_folder import locks_output
from layerjump.cli._printing import log, print_json, print_table
from layerjump.errors import BadTraining

penalty_option, training_option = OptionPanel("Linearity penalty"), OptionPanel("Training")
architecture_option = OptionPanel("Architecture")


@locks_output("run the same command to continue from the last checkpoint, if there is one", is_replaced=True)
def pretrain(
    text: list[str] = typer.Option(help="A file, a hub dataset, `-` for standard input, or `pydoc`; may be repeated."),
    eval_text: str | None = option(None, "Evaluation text (default: 5 % of the documents)."),
    column: str | None = COLUMN,
    penalty: str = penalty_option("none", "Loss term: none, cosine, mse or jump."),
    penalty_weight: float = penalty_option(0.5, "Weight of the penalty."),
    penalty_levels: str | None = penalty_option(None, "Levels to penalise, e.g. 3,4 (default: all)."),
    arch: str = architecture_option(
        "llama", "llama, mistral, gpt2, bert, or any causal model type of transformers, such as qwen3_moe.", "--arch"
    ),
    layers: int = architecture_option(4, "Number of blocks."),
    hidden_size: int = architecture_option(128, "Width of the residual stream."),
    heads: int = architecture_option(4, "Number of attention heads."),
    vocab_size: int = architecture_option(2048, "Vocabulary size of the byte-level BPE tokenizer."),
    max_positions: int | None = architecture_option(None, "Longest sequence of the model (default: --length)."),
    steps: int = training_option(1000, "Optimiser steps."),
    batch_size: int = training_option(32, "Sequences per step, over all processes."),
    micro_batches: int = training_option(1, "Split each batch into this many parts, run one after the other."),
    length: int = training_option(128, "Tokens per sequence."),
    learning_rate: float = training_option(1e-3, "Peak learning rate."),
    eval_every: int | None = training_option(
        None, "Steps between evaluations, and between checkpoints (default: a tenth of --steps)."
    ),
    seed: int = training_option(0, "Seed of weights, order and evaluation documents."),
    bf16: bool = training_option(False, "Mixed precision.", "--bf16"),
    device: str | None = training_option(None, "cpu or cuda (default: a GPU if available)."),
    keep_checkpoints: bool = output_option(
        False, "Keep all checkpoints, e.g. for the study `training_dynamics`.", "--keep-checkpoints"
    ),
    output: Path = output_folder("model"),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Train a small model from scratch, with a penalty that makes its blocks more or less linear.

    Writes a Hugging Face checkpoint with its tokenizer, training.json (all numbers) and training.html (figures). The
    same command continues a stopped run from its checkpoints in OUTPUT-training.

    [bold]layerjump pretrain --text stories.txt --penalty cosine --penalty-weight 0.5 -o model[/]
    [bold]layerjump pretrain --text a.txt --text b.txt --eval-text c.txt --arch gpt2 --layers 6[/]
    [bold]layerjump pretrain --text stories.txt --arch qwen3_moe -o experts[/]    any causal model type
    [bold]torchrun --nproc-per-node 2 -m layerjump pretrain --text stories.txt[/]    two processes
    """
    from layerjump.data.corpus import load_text
    from layerjump.report.write_report import training_page
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
        eval_text=None if eval_text is None else load_text(eval_text, column=column),
        micro_batches=micro_batches,
        device=device,
        keep_checkpoints=keep_checkpoints,
        force=force,
        render_page=lambda record: training_page(record, shlex.join(["layerjump", *sys.argv[1:]])),
    )
    if os.environ.get("RANK", "0") != "0":  # the first process prints for all
        return
    if as_json:
        print_json(record.to_json())
    else:
        first, last = record.tables.steps[0], record.tables.steps[-1]
        rows = [{"": name, "before": first[name], "after": last[name]} for name in last]
        print_table(f"{record.settings.arch}, {record.parameters:,} parameters, held-out text", rows)
    log(f"wrote {output}")

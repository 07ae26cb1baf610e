"""`layerjump prune`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli._options import (
    AsJson,
    Column,
    Device,
    Dtype,
    Force,
    ModelName,
    Revision,
    Seed,
    Split,
    Trust,
    print_table,
)
from layerjump.cli._output_dir import writes_folder
from layerjump.errors import BadPruning

if TYPE_CHECKING:
    from layerjump.pruning.prune import Pruned


def _go_on(given: dict[str, Any]) -> str:
    if given["distil"] is None:
        return "nothing was written: run the same command to start anew"
    return "run the same command to go on from the training's last checkpoint"


@writes_folder(_go_on, replaced=True)
def prune(
    model: ModelName,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")] = Path(
        "pruned"
    ),
    drop: Annotated[
        str | None, typer.Option(help="Blocks to drop: a number, or a share such as 25%.")
    ] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(help="Drop as many as keep the loss within so many times, such as 1.05x."),
    ] = None,
    first: Annotated[
        int | None,
        typer.Option(help="Keep the first so many blocks, with the jump merged into the head."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="What stands in: remove, linear, replaceme, fold, rotation (default: the best that stores no more)."
        ),
    ] = "auto",
    criterion: Annotated[
        str,
        typer.Option(help="loss, linearity, linearity-iterative, influence, angle, deepest."),
    ] = "loss",
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Drop one run of blocks.")
    ] = False,
    protect: Annotated[
        str | None,
        typer.Option(
            help="Blocks that must stay, e.g. 1,30 (default: first, last, those that form the attention sink)."
        ),
    ] = None,
    distil: Annotated[
        int | None, typer.Option(help="Then train the stand-ins for so many batches.")
    ] = None,
    distil_all: Annotated[
        bool, typer.Option("--distil-all", help="Train every weight, not the stand-ins alone.")
    ] = False,
    distil_kl: Annotated[
        float, typer.Option(help="Weight of the KL from the whole model's predictions.")
    ] = 0.0,
    learning_rate: Annotated[float, typer.Option(help="Of the training.")] = 1e-4,
    text: Annotated[
        str, typer.Option(help="A file, a hub dataset, `-` for standard input, or `pydoc`.")
    ] = "pydoc",
    column: Column = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to run (default: the whole text).")
    ] = None,
    split: Split = "80/10/10",
    seed: Seed = 0,
    force: Force = False,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Drop the blocks a matrix stands in for best; save an ordinary checkpoint.

    [bold]layerjump prune smollm2 --drop 25% --tokens 20000 -o smaller[/]
    [bold]layerjump prune MODEL --text wiki.txt --max-loss 1.05x --method rotation[/]
    [bold]layerjump prune MODEL --drop 3 --method linear --distil 200[/]    train the maps afterwards
    [bold]layerjump prune MODEL --first 12 -o draft[/]                      a shorter draft model
    """
    from layerjump.data.corpus import load_text
    from layerjump.io import check_free
    from layerjump.models.loading import load
    from layerjump.pruning.checkpoint import make_record
    from layerjump.pruning.distill import distill as train
    from layerjump.pruning.draft_model import make_draft_model
    from layerjump.pruning.prune import prepare_calibration
    from layerjump.pruning.prune import prune as cut
    from layerjump.training.hf_trainer import remove_training_folder

    check_free(output, force=force)
    if sum(value is not None for value in (drop, max_loss, first)) != 1:
        raise BadPruning("give one of --drop, --max-loss and --first")
    where = {"revision": revision, "device": device, "dtype": dtype}
    loaded = load(model, **where, trust_remote_code=trust_remote_code)
    corpus = load_text(text, column=column)
    texts: dict[str, Any] = {"tokens": tokens, "split": split, "seed": seed}
    if first is not None:
        made = make_draft_model(loaded, corpus, first, **texts)
    else:
        made = cut(
            loaded,
            corpus,
            drop=drop,
            max_loss=None if max_loss is None else _times(max_loss),
            method=method,
            criterion=criterion,
            contiguous=contiguous,
            protect=None if protect is None else _numbers(protect),
            **texts,
        )
    training = output.with_name(f"{output.name}-training")
    if distil is not None:
        made = train(
            made,
            prepare_calibration(loaded, corpus, **texts),
            training,
            steps=distil,
            learning_rate=learning_rate,
            kl_weight=distil_kl,
            train_all_weights=distil_all,
            seed=seed,
        )
    made.save(output, force=force)
    if distil is not None:
        remove_training_folder(training)  # what a run that is stopped goes on from
    _print(made, make_record(made), as_json=as_json)
    print(f"wrote {output}", file=sys.stderr)


def _print(made: Pruned, record: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(record, indent=2))
        return
    before, after = made.parameters
    rows: list[dict[str, Any]] = [
        {"": "blocks", "before": made.original.n_blocks, "after": made.model.n_blocks},
        {"": "parameters", "before": f"{before:,}", "after": f"{after:,}"},
        {"": "test loss", "before": made.loss["before"], "after": made.loss["after"]},
        {
            "": "test perplexity",
            "before": made.loss["perplexity before"],
            "after": made.loss["perplexity after"],
        },
    ]
    gone = ", ".join(map(str, made.dropped))
    print_table(f"{made.original.name}: blocks {gone} out, {made.method}", rows, as_json=False)
    low, high = made.loss["low"], made.loss["high"]
    print(f"perplexity ratio {made.loss['ratio']:.3f} (95 % interval {low:.3f} to {high:.3f})")


def _times(text: str) -> float:
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise BadPruning(
            f"the loss allowed was given as {text!r}; give a number of times, such as 1.05x"
        ) from None


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BadPruning(f"blocks were given as {text!r}; give numbers, such as 1,30") from None

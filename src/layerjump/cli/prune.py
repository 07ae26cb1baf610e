"""`layerjump prune`: drop blocks and write a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli._options import (
    AsJson,
    Column,
    Force,
    LoadModel,
    ModelName,
    OutputFolder,
    Seed,
    Split,
    TextSource,
    Tokens,
    loads_model,
    option_group,
    parse_numbers,
    print_table,
)
from layerjump.cli._output_dir import Options, locks_output
from layerjump.errors import BadPruning

if TYPE_CHECKING:
    from layerjump.pruning.prune import Pruned

distill_option = option_group("Distillation")


def _resume_hint(options: Options) -> str:
    if options["distill_steps"] is None:
        return "nothing was written: run the same command to start again"
    return "run the same command to continue from the last checkpoint of the distillation"


@locks_output(_resume_hint, is_replaced=True)
@loads_model()
def prune(
    model: ModelName,
    drop: Annotated[str | None, typer.Option(help="Blocks to drop: a number, or a share such as 25%.")] = None,
    max_loss_ratio: Annotated[
        str | None,
        typer.Option(
            help="Drop as many blocks as possible while the loss stays below this multiple of the original, e.g. 1.05x."
        ),
    ] = None,
    keep_first: Annotated[
        int | None,
        typer.Option(
            help="Keep this many first blocks and merge a jump to the output into the LM head: a draft model."
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="Replacement of dropped blocks: remove, linear, replaceme, fold, rotation (default: the best that "
            "stores no extra weights)."
        ),
    ] = "auto",
    criterion: Annotated[
        str,
        typer.Option(help="How blocks are selected: loss, linearity, linearity-iterative, influence, angle, deepest."),
    ] = "loss",
    contiguous: Annotated[bool, typer.Option("--contiguous", help="Drop one contiguous range of blocks.")] = False,
    protect: Annotated[
        str | None,
        typer.Option(
            help="Blocks to keep, e.g. 1,30 (default: the first, the last, and those that form the attention sink)."
        ),
    ] = None,
    text: TextSource = "pydoc",
    column: Column = None,
    tokens: Tokens = None,
    split: Split = "80/10/10",
    seed: Seed = 0,
    distill_steps: Annotated[
        int | None, distill_option(help="Train the replacement maps afterwards, for this many batches.")
    ] = None,
    distill_all_weights: Annotated[
        bool, distill_option("--distill-all-weights", help="Train all weights, not only the replacement maps.")
    ] = False,
    distill_kl_weight: Annotated[
        float, distill_option(help="Weight of the KL divergence from the original model's predictions.")
    ] = 0.0,
    distill_learning_rate: Annotated[float, distill_option(help="Peak learning rate.")] = 1e-4,
    output: OutputFolder = Path("pruned"),
    force: Force = False,
    as_json: AsJson = False,
    *,
    load: LoadModel,
) -> None:
    """Drop the blocks that a linear map replaces best, and write a Hugging Face checkpoint.

    [bold]layerjump prune smollm2 --drop 25% --tokens 20000 -o smaller[/]
    [bold]layerjump prune MODEL --text wiki.txt --max-loss-ratio 1.05x --method rotation[/]
    [bold]layerjump prune MODEL --drop 3 --method linear --distill-steps 200[/]    train the maps afterwards
    [bold]layerjump prune MODEL --keep-first 12 -o draft[/]                        a draft model
    """
    from layerjump.data.corpus import load_text
    from layerjump.io import check_free
    from layerjump.pruning.checkpoint import PruningRecord
    from layerjump.pruning.distill import distill
    from layerjump.pruning.draft_model import make_draft_model
    from layerjump.pruning.prune import prepare_calibration
    from layerjump.pruning.prune import prune as prune_model
    from layerjump.training.trainer import remove_training_folder

    check_free(output, force=force)
    if sum(value is not None for value in (drop, max_loss_ratio, keep_first)) != 1:
        raise BadPruning("give one of --drop, --max-loss-ratio and --keep-first")
    loaded = load(model)
    corpus = load_text(text, column=column)
    if keep_first is not None:
        pruned = make_draft_model(loaded, corpus, keep_first, tokens=tokens, split=split, seed=seed)
    else:
        pruned = prune_model(
            loaded,
            corpus,
            drop=drop,
            max_loss_ratio=None if max_loss_ratio is None else _parse_ratio(max_loss_ratio),
            method=method,
            criterion=criterion,
            contiguous=contiguous,
            protect=None if protect is None else parse_numbers(protect, BadPruning),
            tokens=tokens,
            split=split,
            seed=seed,
        )
    training = output.with_name(f"{output.name}-training")
    if distill_steps is not None:
        pruned = distill(
            pruned,
            prepare_calibration(loaded, corpus, tokens=tokens, split=split, seed=seed),
            training,
            steps=distill_steps,
            learning_rate=distill_learning_rate,
            kl_weight=distill_kl_weight,
            train_all_weights=distill_all_weights,
            seed=seed,
        )
    pruned.save(output, force=force)
    if distill_steps is not None:
        remove_training_folder(training)
    if as_json:
        print(json.dumps(PruningRecord.of(pruned).to_json(), indent=2))
    else:
        _print_summary(pruned)
    print(f"wrote {output}", file=sys.stderr)


def _print_summary(pruned: Pruned) -> None:
    before, after = pruned.parameters
    loss = pruned.loss
    rows: list[dict[str, Any]] = [
        {"": "blocks", "before": pruned.original.n_blocks, "after": pruned.model.n_blocks},
        {"": "parameters", "before": f"{before:,}", "after": f"{after:,}"},
        {"": "test loss", "before": loss.loss_before, "after": loss.loss_after},
        {"": "test perplexity", "before": loss.perplexity_before, "after": loss.perplexity_after},
    ]
    dropped = ", ".join(map(str, pruned.dropped))
    title = f"{pruned.original.name}: dropped blocks {dropped}, method {pruned.method}"
    print_table(title, rows, as_json=False)
    print(f"perplexity ratio {loss.ratio:.3f} (95 % interval {loss.low:.3f} to {loss.high:.3f})")


def _parse_ratio(text: str) -> float:
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise BadPruning(f"expected --max-loss-ratio as a multiple such as 1.05x, got {text!r}") from None

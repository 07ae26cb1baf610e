"""`layerjump prune`: drop blocks and write a checkpoint."""

from __future__ import annotations

from pathlib import Path

from layerjump.cli._options import (
    COLUMN,
    MODEL,
    SEED,
    SPLIT,
    TEXT,
    TOKENS,
    LoadModel,
    Panel,
    loads_model,
    option,
    parse_numbers,
)
from layerjump.cli._output import FORCE, JSON, Options, locks_output, log, output_folder, print_json, print_table
from layerjump.errors import BadPruning

distill_option = Panel("Distillation")


def _resume_hint(options: Options) -> str:
    if options["distill_steps"] is None:
        return "nothing was written: run the same command to start again"
    return "run the same command to continue from the last checkpoint of the distillation"


@locks_output(_resume_hint, is_replaced=True)
@loads_model()
def prune(
    model: str = MODEL,
    drop: str | None = option(None, "Blocks to drop: a number, or a share such as 25%."),
    max_loss_ratio: str | None = option(
        None, "Drop as many blocks as possible while the loss stays below this multiple of the original, e.g. 1.05x."
    ),
    keep_first: int | None = option(
        None, "Keep this many first blocks and merge a jump to the output into the LM head: a draft model."
    ),
    method: str = option(
        "auto",
        "Replacement of dropped blocks: remove, linear, replaceme, fold, rotation (default: the best that "
        "stores no extra weights).",
    ),
    criterion: str = option(
        "loss", "How blocks are selected: loss, linearity, linearity-iterative, influence, angle, deepest."
    ),
    contiguous: bool = option(False, "Drop one contiguous range of blocks.", "--contiguous"),
    protect: str | None = option(
        None, "Blocks to keep, e.g. 1,30 (default: the first, the last, and those that form the attention sink)."
    ),
    text: str = TEXT,
    column: str | None = COLUMN,
    tokens: int | None = TOKENS,
    split: str = SPLIT,
    seed: int = SEED,
    distill_steps: int | None = distill_option(None, "Train the replacement maps afterwards, for this many batches."),
    distill_all_weights: bool = distill_option(
        False, "Train all weights, not only the replacement maps.", "--distill-all-weights"
    ),
    distill_kl_weight: float = distill_option(
        0.0, "Weight of the KL divergence from the original model's predictions."
    ),
    distill_learning_rate: float = distill_option(1e-4, "Peak learning rate."),
    output: Path = output_folder("pruned"),
    force: bool = FORCE,
    as_json: bool = JSON,
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
        print_json(PruningRecord.of(pruned).to_json())
    else:
        loss = pruned.loss
        parameters = [f"{count:,}" for count in pruned.parameters]
        rows = [
            ("blocks", pruned.original.n_blocks, pruned.model.n_blocks),
            ("parameters", *parameters),
            ("test loss", loss.loss_before, loss.loss_after),
            ("test perplexity", loss.perplexity_before, loss.perplexity_after),
        ]
        dropped = ", ".join(map(str, pruned.dropped))
        title = f"{pruned.original.name}: dropped blocks {dropped}, method {pruned.method}"
        print_table(title, [dict(zip(("", "before", "after"), row, strict=True)) for row in rows])
        print(f"perplexity ratio {loss.ratio:.3f} (95 % interval {loss.low:.3f} to {loss.high:.3f})")
    log(f"wrote {output}")


def _parse_ratio(text: str) -> float:
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise BadPruning(f"expected --max-loss-ratio as a multiple such as 1.05x, got {text!r}") from None

"""`layerjump prune`: drop blocks and write a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from layerjump.cli._options import (
    COLUMN,
    FORCE,
    JSON,
    MODEL,
    SEED,
    SPLIT,
    TOKENS,
    LoadModel,
    OptionPanel,
    loads_model,
    option,
    output_folder,
    parse_numbers,
    text_option,
)
from layerjump.cli._output_folder import Options, locks_output
from layerjump.cli._printing import log, print_json, print_table
from layerjump.errors import BadPruning

distill_option = OptionPanel("Distillation")
TEXTS: list[str] = text_option(
    ["pydoc"],
    "A file, a hub dataset, `-` for standard input, or `pydoc`; repeat it to mix texts in equal parts.",
    "--text",
    metavar="<str>",
)
OUT_OF_DOMAIN: list[str] = text_option(
    [], "A text to measure the loss on that is not calibrated on; may be repeated.", "--out-of-domain", metavar="<str>"
)


def _resume_hint(options: Options) -> str:
    if options["distill_steps"] is not None:
        return "run the same command to continue from the last checkpoint of the distillation"
    if str(options["method"]).endswith("refit"):
        return "run the same command to continue after the last block that was refitted"
    return "nothing was written: run the same command to start again"


@locks_output(_resume_hint, is_replaced=True)
@loads_model
def prune(
    model: str = MODEL,
    drop: str | None = option(None, "Blocks to drop: a number, or a share such as 25%."),
    max_loss_ratio: str | None = option(
        None, "Drop as many blocks as possible while the loss stays below this multiple of the original, e.g. 1.05x."
    ),
    draft_blocks: int | None = option(
        None, "Write a draft model: keep this many first blocks, and merge a jump to the output into the LM head."
    ),
    method: str = option(
        "auto",
        "Replacement of dropped blocks: remove, linear, replaceme, fold, rotation, refit, rotation-refit (default: "
        "the best that stores no extra weights and takes one pass).",
    ),
    criterion: str = option(
        "loss", "How blocks are selected: loss, linearity, linearity-iterative, influence, angle, deepest."
    ),
    contiguous: bool = option(False, "Drop one contiguous range of blocks.", "--contiguous"),
    protect: str | None = option(
        None, "Blocks to keep, e.g. 1,30 (default: the first, the last, and those that form the attention sink)."
    ),
    text: list[str] = TEXTS,
    out_of_domain: list[str] = OUT_OF_DOMAIN,
    self_generated: bool = text_option(
        False, "Fit on the model's own continuations of the documents' openings.", "--self-generated"
    ),
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
    [bold]layerjump prune MODEL --text wiki.txt --drop 6 --method refit[/]    refit output projections
    [bold]layerjump prune MODEL --drop 3 --method linear --distill-steps 200[/]    train the maps afterwards
    [bold]layerjump prune MODEL --drop 6 --text wiki.txt --text tales.txt --out-of-domain law.txt[/]    mixed texts
    [bold]layerjump prune MODEL --draft-blocks 12 -o draft[/]                        a draft model
    """
    from layerjump.data.corpus import load_text
    from layerjump.data.mixture import mix_texts
    from layerjump.io import check_free
    from layerjump.pruning.checkpoint import PruningRecord
    from layerjump.pruning.distill import distill
    from layerjump.pruning.draft_model import make_draft_model
    from layerjump.pruning.prune import prepare_calibration
    from layerjump.pruning.prune import prune as prune_model
    from layerjump.training.trainer import remove_training_folder

    check_free(output, force=force)
    if sum(value is not None for value in (drop, max_loss_ratio, draft_blocks)) != 1:
        raise BadPruning("give one of --drop, --max-loss-ratio and --draft-blocks")
    refitting = output.with_name(f"{output.name}-refitting") if method.endswith("refit") else None
    loaded = load(model)
    texts = [load_text(each, column=column) for each in text]
    corpus = texts[0] if len(texts) == 1 else mix_texts(texts)
    if draft_blocks is not None:
        pruned = make_draft_model(loaded, corpus, draft_blocks, tokens=tokens, split=split, seed=seed)
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
            self_generated=self_generated,
            out_of_domain=out_of_domain,
            work_folder=refitting,
        )
    training = output.with_name(f"{output.name}-training")
    if distill_steps is not None:
        pruned = distill(
            pruned,
            prepare_calibration(
                loaded,
                corpus,
                tokens=tokens,
                split=split,
                seed=seed,
                self_generated=self_generated,
                out_of_domain=out_of_domain,
            ),
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
    if refitting is not None:
        shutil.rmtree(refitting)
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
        for each in pruned.text_losses:
            kind = "calibrated on" if each.in_domain else "not calibrated on"
            print(f"{each.text} ({kind}): perplexity ratio {each.loss.ratio:.3f}")
        print(f"perplexity ratio {loss.ratio:.3f} (95 % interval {loss.low:.3f} to {loss.high:.3f})")
    log(f"wrote {output}")


def _parse_ratio(text: str) -> float:
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise BadPruning(f"expected --max-loss-ratio as a multiple such as 1.05x, got {text!r}") from None

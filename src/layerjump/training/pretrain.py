"""pretrain(): train a small model from scratch.

All that decides what a pretraining run ends with.

The model card of a model trained here: how it was made, and what was measured.

Train a small model from scratch, with or without a penalty, and follow how linear it becomes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from layerjump import __version__
from layerjump.data.corpus import Corpus, split_documents
from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadText
from layerjump.io import check_free, replace_folder, write_json, write_text
from layerjump.models.loading import quiet_transformers
from layerjump.training.data import pack_rows, train_tokenizer
from layerjump.training.hf_trainer import find_checkpoint, remove_training_folder
from layerjump.training.model import build_model
from layerjump.training.monitor import TrainingMonitor
from layerjump.training.trainer import NONE, Recipe, train_model, training_arguments


def card(record: dict[str, Any]) -> str:
    """A README in the form the hub reads."""
    return "\n\n".join([_head(record), _made(record), _measured(record), _use(record)]) + "\n"


def _head(record: dict[str, Any]) -> str:
    told = record["settings"]
    return (
        "---\nlibrary_name: transformers\ntags:\n- layerjump\n---\n\n"
        f"# {told['arch']}, {told['shape_layers']} blocks, width {told['shape_hidden']}"
    )


def _made(record: dict[str, Any]) -> str:
    told, text, held_out = (record[name] for name in ("settings", "text", "held_out"))
    penalty = (
        "no penalty"
        if told["penalty"] == "none"
        else f"penalty {told['penalty']}, strength {told['strength']:g}"
    )
    return "\n".join(
        [
            f"Trained from scratch by layerjump {record['layerjump']}, {penalty}.",
            f"- {record['parameters']:,} parameters, {told['shape_heads']} heads, {told['shape_positions']} positions, "
            f"byte-level BPE of {told['vocabulary']:,} tokens.",
            f"- {told['steps']:,} steps of {told['batch']} rows of {told['length']} tokens, learning rate "
            f"{told['learning_rate']:g}, seed {told['seed']}.",
            f"- Text `{text['name']}`: {text['documents']:,} documents, {record['tokens']:,} tokens, passed through "
            f"{record['passes']:.2f} times.",
            f"- Held out: `{held_out['name']}`, {held_out['documents']:,} documents.",
        ]
    )


def _measured(record: dict[str, Any]) -> str:
    first, last = record["tables"]["steps"][0], record["tables"]["steps"][-1]
    rows = [
        f"| {name} | {first[name]:.4g} | {last[name]:.4g} |"
        for name in last
        if name != "step" and first[name] is not None and last[name] is not None
    ]
    head = f"| on held-out text | step {first['step']} | step {last['step']} |\n|---|---|---|"
    return "\n".join([head, *rows])


def _use(record: dict[str, Any]) -> str:
    kind = (
        "AutoModelForMaskedLM" if record["settings"]["arch"] == "bert" else "AutoModelForCausalLM"
    )
    return f"`{kind}.from_pretrained(folder)` loads it; `training.json` holds every number."


RECORD, PAGE = "training.json", "training.html"
HELD_OUT = "95/0/5"
"""How documents are dealt out where no held-out text is given."""
Page = Callable[[dict[str, Any]], str]
"""Makes a page of a record."""


def pretrain(
    text: Corpus,
    folder: str | Path,
    recipe: Recipe,
    *,
    held_out: Corpus | None = None,
    accumulate: int = 1,
    device: str | None = None,
    keep_checkpoints: bool = False,
    force: bool = False,
    render_page: Page | None = None,
) -> dict[str, Any]:
    """Train a tokenizer and a model, write them as a plain Hugging Face checkpoint, and return the record beside it.

    Checkpoints of the run stand in `FOLDER-training`: the same call goes on from the last one after a stop. They are
    removed at the end unless `keep_checkpoints`. `render_page` makes a training.html of the record. Under `torchrun`
    or `accelerate launch` every process calls it, and the first one writes.
    """
    place = Path(folder).expanduser()
    check_free(place, force=force)
    work = place.with_name(f"{place.name}-training")
    text, held_out = _parted(text, held_out, recipe.seed)
    settings = training_arguments(
        recipe, work, accumulate=accumulate, device=device, keep_checkpoints=keep_checkpoints
    )
    start = time.perf_counter()
    with settings.main_process_first(local=False, desc="tokenizer"):
        before = find_checkpoint(work, _run(text, held_out, recipe))
        if before is None and settings.process_index == 0:
            _make_tokenizer(work / "tokenizer", text, recipe)
        # Read back, so that every process and every restart has the same.
        tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    rows = pack_rows(text.documents, _tokens(tokenizer, recipe), recipe.length)
    hf = build_model(recipe.architecture, recipe.shape, tokenizer, seed=recipe.seed)
    track = TrainingMonitor(hf, tokenizer, held_out, eval_every=recipe.eval_every, folder=work)
    log = train_model(hf, tokenizer, rows, recipe, settings, track=track, before=before)
    minutes = (time.perf_counter() - start) / 60
    record = _record(text, held_out, recipe, hf, rows) | {
        "processes": settings.world_size,
        "minutes": round(minutes, 2),
        "log": log,
        "tables": track.tables,
    }
    if settings.process_index == 0:
        replace_folder(
            place, lambda new: _write(new, hf, tokenizer, record, render_page), force=force
        )
        if not keep_checkpoints:
            remove_training_folder(work)
    return record


def join_corpora(texts: Sequence[Corpus]) -> Corpus:
    """Several texts as one."""
    documents = tuple(document for text in texts for document in text.documents)
    return Corpus(" + ".join(text.name for text in texts), documents, "put together")


def _parted(text: Corpus, held_out: Corpus | None, seed: int) -> tuple[Corpus, Corpus]:
    """The text to train on and the one to measure on."""
    if held_out is not None:
        if held_out.sha256 == text.sha256:
            raise BadText(
                "the held-out text is the one to train on; give another, or none: then 5 % of the documents are held "
                "out"
            )
        return text, held_out
    parts = split_documents(len(text.documents), HELD_OUT, seed=seed)

    def part(chosen: tuple[int, ...], note: str) -> Corpus:
        return Corpus(text.name, tuple(text.documents[i] for i in sorted(chosen)), note)

    return part(parts.fit, "to train on"), part(parts.test, "held out")


_DISK_KEYS = {
    "vocab_size": "vocabulary",
    "penalty_weight": "strength",
    "batch_size": "batch",
    "eval_every": "every",
}


def _run(text: Corpus, held_out: Corpus, recipe: Recipe) -> dict[str, Any]:
    """All that the run's end depends on, as JSON has it."""
    told = asdict(recipe)
    told |= {
        f"shape_{name.removeprefix('max_')}": value for name, value in told.pop("shape").items()
    }
    for name, key in _DISK_KEYS.items():
        told[key] = told.pop(name)
    told["levels"] = None if recipe.levels is None else list(recipe.levels)
    return told | {"text": text.sha256, "held_out": held_out.sha256}


def _make_tokenizer(place: Path, text: Corpus, recipe: Recipe) -> None:
    made = train_tokenizer(
        text.documents,
        recipe.vocab_size,
        recipe.shape.max_positions,
        masked=recipe.architecture.masked,
    )
    replace_folder(place, lambda new: _saved(made, new), force=True)


def _saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    tokenizer.save_pretrained(folder)


def _tokens(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> Tokenization:
    return Tokenization.of(
        tokenizer, max_positions=recipe.shape.max_positions, masked=recipe.architecture.masked
    )


def _record(
    text: Corpus, held_out: Corpus, recipe: Recipe, hf: PreTrainedModel, rows: Tensor
) -> dict[str, Any]:
    told = _run(text, held_out, recipe)
    if recipe.penalty == NONE:
        told["strength"] = 0.0
    return {
        "kind": "layerjump pretraining",
        "layerjump": __version__,
        "settings": told,
        "text": {"name": text.name, "documents": len(text.documents)},
        "held_out": {"name": held_out.name, "documents": len(held_out.documents)},
        "parameters": hf.num_parameters(),
        "tokens": rows.numel(),
        "passes": recipe.steps * recipe.batch_size / len(rows),
    }


def _write(
    folder: Path,
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    record: dict[str, Any],
    page: Page | None,
) -> None:
    with quiet_transformers():
        hf.save_pretrained(folder)
        _saved(tokenizer, folder)
    write_json(folder / RECORD, record)
    write_text(folder / "README.md", card(record))
    if page is not None:
        write_text(folder / PAGE, page(record))

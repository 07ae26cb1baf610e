"""Write a pruned model, whole or not at all: an ordinary checkpoint, or base and jumps where no weight holds them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerjump import __version__
from layerjump.compress.card import card
from layerjump.compress.prune import Pruned
from layerjump.errors import BadArtifact
from layerjump.fit.files import sync, write_json, write_text, writing
from layerjump.fit.fingerprint import fingerprint
from layerjump.fit.output import OLD
from layerjump.inputs.loading import quiet_transformers
from layerjump.inputs.models import Model

RECORD = "pruning.json"
"""What was done, for programs; README.md says it to people."""
LINEAR = "linear.json"
BASE = "base"
"""The folder of the checkpoint that maps stand beside: a plain loader must not take it for the whole."""


def save(pruned: Pruned, folder: Path, *, force: bool = False) -> None:
    """Write a pruned model, its card and its record into a folder that does not exist yet (`force`: or does)."""
    replace_folder(folder.expanduser(), lambda place: _write(pruned, place), force=force)


def _write(pruned: Pruned, place: Path) -> None:
    record = record_of(pruned)
    if pruned.jumps is None:
        save_checkpoint(pruned.model, place)
    else:
        save_checkpoint(pruned.model, place / BASE)
        pruned.jumps.save_pretrained(place)
        head = {"kind": "layerjump linear model", "format": 1, "cuts": [*map(list, pruned.cuts)]}
        write_json(place / LINEAR, head | {"fingerprint": fingerprint(pruned.model.hf)})
    write_json(place / RECORD, record)
    write_text(place / "README.md", card(record))


def save_checkpoint(model: Model, folder: Path) -> None:
    """Weights, configuration, generation configuration and tokenizer, as Hugging Face saves them."""
    with quiet_transformers():
        model.hf.save_pretrained(folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)


def record_of(pruned: Pruned) -> dict[str, Any]:
    """All that is known about a pruning, as JSON knows it."""
    before, after = pruned.parameters
    about = pruned.about
    return {
        "kind": "layerjump pruning",
        "layerjump": __version__,
        # A path says something about a machine, and nothing about the model.
        "model": Path(pruned.original.name).name
        if Path(pruned.original.name).exists()
        else pruned.original.name,
        "fingerprint": about["fingerprint"],
        "method": pruned.method,
        "choice": pruned.choice,
        "blocks": pruned.original.n_blocks,
        "dropped": list(pruned.dropped),
        "parameters": {"before": before, "after": after},
        "text": about["text"],
        "text_sha256": about["text_sha256"],
        "tokens": about["tokens"],
        "split": about["split"],
        "seed": about["seed"],
        "loss": pruned.loss,
        "distilled": pruned.distilled,
    }


def check_free(folder: Path, *, force: bool) -> None:
    """Refuse to write over something, before the work is done rather than after."""
    folder = folder.expanduser()
    if not force and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadArtifact(
            f"{folder} exists and would be overwritten; give another folder, or --force"
        )


def replace_folder(folder: Path, write: Callable[[Path], None], *, force: bool) -> None:
    """Let `write` fill a new folder, then give it its name in one step; an interruption leaves the old one, or none."""
    check_free(folder, force=force)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent, ignore_cleanup_errors=True
        ) as place:
            new, old = Path(place) / "new", Path(place) / OLD
            new.mkdir()
            write(new)
            for path in new.rglob("*"):
                sync(path)
            if folder.exists():
                os.replace(folder, old)
            os.replace(new, folder)
            shutil.rmtree(old, ignore_errors=True)
        sync(folder.parent)

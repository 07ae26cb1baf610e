"""Good samples of smaller files, and how each is read: linear models, sheets, task items, a training's track."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers import foreign_lenses

import layerjump as lj
from faults.small import model
from layerjump.evaluation.tasks import load_items, select_tasks
from layerjump.models.fingerprint import fingerprint
from layerjump.models.loading import LINEAR
from layerjump.pruning.checkpoint import BASE
from layerjump.studies import human_evaluation
from layerjump.studies.human_evaluation import comparison, shares, shares_by_level
from layerjump.training.finetune_on_task import load_task
from layerjump.training.linearity_profile import load_measurements

GOOD = Path("good")
ITEMS = {
    "arc_easy": {"query": "Q", "choices": ["a", "b"], "gold": 1},
    "boolq": {"query": "Q", "choices": ["no", "yes"], "gold": 0},
    "copa": {"query": "It rained because", "choices": ["of clouds", "of sand"], "gold": 0},
    "cb": {"premise": "p", "hypothesis": "h", "label": "neutral"},
    "lambada": {"text": "the last word"},
    "winograd": {"context_options": ["a b", "a c"], "continuation": "d.", "gold": 1},
}


def make_linear(folder: Path) -> None:
    """As `prune --method linear` writes it: a checkpoint, and maps to put into it."""
    base = model()
    base.hf.save_pretrained(folder / BASE)
    foreign_lenses.drawn(base, [(1, 2)], bias=True).save_pretrained(folder)
    head = {"kind": "layerjump linear model", "format": 1, "cuts": [[1, 2]]}
    (folder / LINEAR).write_text(json.dumps(head | {"fingerprint": fingerprint(base.hf)}))


def read_linear(path: Path) -> None:
    """Load it, with the good checkpoint beside it."""
    base = path.parent / BASE
    if not base.exists():
        base.symlink_to((GOOD / BASE).resolve(), target_is_directory=True)
    lj.load(path.parent).hf(torch.tensor([[1, 2, 3]]))


def make_sheet(folder: Path) -> None:
    """A marked sheet and its key."""
    words = ("a", "b", "c", "d", "e")
    items = [
        human_evaluation.Item(f"sentence {sentence}", words, lens, level, sentence)
        for sentence in range(3)
        for level in (0, 1)
        for lens in ("mat", "identity")
    ]
    filled = human_evaluation.write_sheet(items).replace(",\n", ",1\n")
    (folder / human_evaluation.SHEET).write_text(filled, "utf-8")
    (folder / human_evaluation.KEY).write_text(human_evaluation.write_key(items, "model"))


def read_sheet(path: Path) -> None:
    marks = human_evaluation.read_marks(path.parent)
    for count in (shares, comparison, shares_by_level):
        count(marks)


def make_items(folder: Path) -> None:
    """A file of each kind of task, and two that a fine-tuning reads."""
    for name, row in ITEMS.items():
        place = folder / Path(select_tasks([name])[0].file).name
        place.write_text(f"{json.dumps(row)}\n" * 3)
    for name in ("boolq", "cb"):
        (folder / f"learn-{name}.jsonl").write_text(f"{json.dumps(ITEMS[name])}\n" * 3)


def read_items(path: Path) -> None:
    if path.name.startswith("learn-"):
        load_task(path)
        return
    for task in select_tasks(list(ITEMS)):
        if Path(task.file).name == path.name:
            place = path.parent / task.file
            if place != path:  # a task that has a folder of its own
                place.parent.mkdir(parents=True, exist_ok=True)
                path.rename(place)
            load_items(task, path.parent)


def make_track(folder: Path) -> None:
    rows = [{"step": step, "loss": 3.5, "r2": None} for step in (0, 10, 20)]
    (folder / "track.json").write_text(json.dumps(dict.fromkeys(("steps", "blocks", "levels"), rows)))


def read_track(path: Path) -> None:
    load_measurements(path, 10)

"""Benchmark tasks from local files.

A file has one JSON object a line. Multiple-choice sets have `query`, `choices` and `gold`, Winograd `context_options`,
`continuation` and `gold`, LAMBADA `text`; CB and RTE are SuperGLUE's own files. Prompts, and which blanks stand where,
are those of the task of lm-eval that is named, so that numbers can be compared with published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerjump.data.corpus import json_rows, shorten
from layerjump.errors import BadEvaluation

Item = dict[str, Any]
"""`context`, `choices` and `gold`; a cloze has a `target` for choices, and where contexts are chosen they are these."""


@dataclass(frozen=True)
class Task:
    """One set of questions."""

    name: str
    file: str
    harness: str
    """The name of lm-eval's own task."""
    columns: Mapping[str, type]
    item: Callable[[Mapping[str, Any]], Item]
    metrics: tuple[str, ...] = ("acc",)
    """The first is the one that a figure shows."""
    kind: str = "choice"
    """choice: the model chooses a continuation; contexts: a context; cloze: it is to write the target itself."""


def _arc_easy(row: Mapping[str, Any]) -> Item:
    return {**_choice(row), "context": f"{row['query']}\nAnswer:"}


def _boolq(row: Mapping[str, Any]) -> Item:
    return {**_choice(row), "context": f"{row['query'].removeprefix('Passage: ')}\nAnswer:"}


def _copa(row: Mapping[str, Any]) -> Item:
    # lm-eval leaves the comma before the conjunction out, and puts two blanks before a choice.
    premise, _, link = row["query"].rpartition(", ")
    choices = [f" {choice}" for choice in row["choices"]]
    return {**_choice(row), "context": f"{premise} {link}", "choices": choices}


def _piqa(row: Mapping[str, Any]) -> Item:
    return {**_choice(row), "context": row["query"].removesuffix("\n") + "\nAnswer:"}


def _choice(row: Mapping[str, Any]) -> Item:
    return {"choices": row["choices"], "gold": row["gold"]}


def _winograd(row: Mapping[str, Any]) -> Item:
    rest = row["continuation"]
    # lm-eval cuts behind the pronoun and adds a blank: two before a word, one before a full stop.
    target = f" {rest}" if rest[:1].isalnum() else rest
    return {"choices": row["context_options"], "target": target, "gold": row["gold"]}


def _lambada(row: Mapping[str, Any]) -> Item:
    context, blank, word = row["text"].rpartition(" ")
    return {"context": context, "target": blank + word}


def _entailment(*labels: str, asks: str, answers: Sequence[str]) -> Callable[..., Item]:
    def item(row: Mapping[str, Any]) -> Item:
        if row["label"] not in labels:
            raise ValueError(
                f"`label` is {row['label'][:40]!r}, but {' or '.join(labels)} was wanted"
            )
        question = f"{row['premise']}\nQuestion: {row['hypothesis']}{asks}\nAnswer:"
        gold = labels.index(row["label"])
        return {"context": question, "choices": list(answers), "gold": gold}

    return item


_CHOICE = {"query": str, "choices": list, "gold": int}
_PAIR = {"premise": str, "hypothesis": str, "label": str}
_CB = _entailment(
    "entailment",
    "contradiction",
    "neutral",
    asks=". True, False, or Neither?",
    answers=("True", "False", "Neither"),
)
_RTE = _entailment(
    "entailment", "not_entailment", asks=" True or False?", answers=("True", "False")
)
_ROWS = (
    Task("arc_easy", "arc_easy.jsonl", "arc_easy", _CHOICE, _arc_easy, ("acc", "acc_norm")),
    Task("boolq", "boolq.jsonl", "boolq", _CHOICE, _boolq),
    Task("cb", "superglue/CB/val.jsonl", "cb", _PAIR, _CB, ("acc", "f1")),
    Task("copa", "copa.jsonl", "copa", _CHOICE, _copa),
    Task(
        "lambada",
        "lambada_test.jsonl",
        "lambada_openai",
        {"text": str},
        _lambada,
        ("acc", "perplexity"),
        "cloze",
    ),
    Task("piqa", "piqa.jsonl", "piqa", _CHOICE, _piqa, ("acc", "acc_norm")),
    Task("rte", "superglue/RTE/val.jsonl", "sglue_rte", _PAIR, _RTE),
    Task(
        "winograd",
        "winograd_wsc.jsonl",
        "wsc273",
        {"context_options": list, "continuation": str, "gold": int},
        _winograd,
        kind="contexts",
    ),
)
TASKS: dict[str, Task] = {row.name: row for row in _ROWS}


def select_tasks(names: str | Sequence[str]) -> list[Task]:
    """The tasks of a list such as `copa,piqa`, in the order given; `all` is every one."""
    asked = names.split(",") if isinstance(names, str) else list(names)
    asked = list(TASKS) if asked == ["all"] else [name.strip() for name in asked]
    for name in asked:
        if name not in TASKS:
            raise BadEvaluation(f"there is no task {name!r}; known are {', '.join(TASKS)}, or all")
    return [TASKS[name] for name in dict.fromkeys(asked)]


def load_items(task: Task, data: str | Path, limit: int | None = None) -> list[Item]:
    """The first items of a task's file, checked line by line."""
    if limit is not None and limit < 1:
        raise BadEvaluation(f"the limit given is {limit}; give 1 item a task or more")
    path = Path(data).expanduser() / task.file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadEvaluation(
            f"there is no {path}; give the folder that holds {task.file}, or leave {task.name} out"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadEvaluation(f"{path} cannot be read ({shorten(error)}); mend it") from error
    rows = list(json_rows(str(path), text))[:limit]
    if not rows:
        raise BadEvaluation(f"{path} holds no items; give one JSON object a line")
    return [_checked(task, row, number, path) for number, row in enumerate(rows, start=1)]


def _checked(task: Task, row: Mapping[str, Any], number: int, path: Path) -> Item:
    try:
        for column, kind in task.columns.items():
            if type(row.get(column)) is not kind:
                wanted = {str: "a text", list: "a list", int: "a number"}[kind]
                given = shorten(row[column]) if column in row else "not there"
                raise ValueError(f"`{column}` is {given}, but {wanted} was wanted")
        item = task.item(row)
        _check_item(item)
    except ValueError as error:
        raise BadEvaluation(
            f"item {number} of {path} is not one of {task.name}: {error}; mend it"
        ) from None
    return item


def _check_item(item: Item) -> None:
    choices = item.get("choices", ["", "any"])
    if len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"its choices are {shorten(choices)}, but two texts or more were wanted")
    if "gold" in item and not 0 <= item["gold"] < len(choices):
        raise ValueError(f"`gold` is {item['gold']}, but there are {len(choices)} choices")
    scored = [item["target"]] if "target" in item else choices
    if not all(text.strip() for text in scored) or item.get("context") == "":
        raise ValueError("there is nothing to predict, or nothing to predict it from")

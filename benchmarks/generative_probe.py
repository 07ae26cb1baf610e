"""What perplexity does not show: arithmetic, bracket matching, copying and retrieval from context.

A question has its answer and three wrong ones of the same form, and a model answers with the likeliest of the four.
The questions come from a seed alone. `score` returns accuracy by kind (chance: 0.25) with the mean loss of the right
answers in nats per token, which moves before accuracy does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from layerjump.models.model import Model

WORDS = ["apple", "river", "stone", "cloud", "tiger", "piano", "window", "garden", "silver", "candle", "rocket"]
NAMES = ["Tom", "Anna", "Ben", "Mia", "Sam", "Lucy", "Max", "Sue"]
PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Question:
    """A prompt, its answer, and wrong answers of the same form."""

    kind: str
    prompt: str
    answer: str
    wrong: tuple[str, ...]


def _arithmetic(draw: random.Random) -> Question:
    examples = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(4)]
    lines = [f"{a} + {b} = {a + b}" for a, b in examples[:-1]]
    a, b = examples[-1]
    wrong = draw.sample([n for n in range(2, 19) if n != a + b], 3)
    return Question("arithmetic", "\n".join([*lines, f"{a} + {b} ="]), f" {a + b}", tuple(f" {n}" for n in wrong))


def _brackets(draw: random.Random) -> Question:
    opened = draw.choices(list(PAIRS), k=4)
    closed = [PAIRS[bracket] for bracket in reversed(opened)]
    right = " ".join(closed[2:])
    others = [f"{a} {b}" for a in PAIRS.values() for b in PAIRS.values() if f"{a} {b}" != right]
    wrong = draw.sample(others, 3)
    prompt = " ".join(["( [ ] )\n{ ( ) }\n[ { ( ) } ]\n" + opened[0], *opened[1:], *closed[:2]])
    return Question("brackets", prompt, f" {right}", tuple(f" {each}" for each in wrong))


def _copying(draw: random.Random) -> Question:
    words = draw.sample(WORDS, 5)
    wrong = draw.sample([word for word in WORDS if word != words[-1]], 3)
    prompt = f"Repeat the words.\n{' '.join(words)}\n{' '.join(words[:-1])}"
    return Question("copying", prompt, f" {words[-1]}", tuple(f" {word}" for word in wrong))


def _retrieval(draw: random.Random) -> Question:
    owners, things = draw.sample(NAMES, 4), draw.sample(WORDS, 4)
    facts = " ".join(f"{name} has the {thing}." for name, thing in zip(owners, things, strict=True))
    target = draw.randrange(4)
    wrong = tuple(f" {thing}" for index, thing in enumerate(things) if index != target)
    return Question("retrieval", f"{facts} So {owners[target]} has the", f" {things[target]}", wrong)


KINDS: tuple[Callable[[random.Random], Question], ...] = (_arithmetic, _brackets, _copying, _retrieval)


def questions(count: int, *, seed: int = 0) -> list[Question]:
    """Return `count` questions of each kind."""
    draw = random.Random(seed)
    return [make(draw) for make in KINDS for _ in range(count)]


@dataclass(frozen=True)
class Score:
    """Results of one kind of question."""

    accuracy: float
    loss: float
    """Mean loss of the right answers in nats per token."""


@torch.no_grad()
def score(model: Model, asked: list[Question]) -> dict[str, Score]:
    """Return the accuracy of a model and the loss of the right answers, by kind."""
    results: dict[str, list[tuple[bool, float]]] = {}
    for question in asked:
        prompt, *_ = model.tokenization.encode([question.prompt])
        losses = []
        for answer in (question.answer, *question.wrong):
            whole, *_ = model.tokenization.encode([question.prompt + answer])
            ids = torch.tensor([model.tokenization.wrap(whole)])
            n_new = max(1, len(whole) - len(prompt))
            logits = model.hf(ids.to(model.device)).logits[0, -n_new - 1 : -1].float()
            losses.append(cross_entropy(logits.cpu(), ids[0, -n_new:], reduction="none"))
        totals = [float(each.sum()) for each in losses]
        is_right = totals[0] < min(totals[1:])
        results.setdefault(question.kind, []).append((is_right, float(losses[0].mean())))
    return {
        kind: Score(sum(right for right, _ in each) / len(each), sum(loss for _, loss in each) / len(each))
        for kind, each in results.items()
    }

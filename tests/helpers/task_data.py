"""Small questions of every kind of task, in words that the tiny models know, as the files of a data folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LINES = {
    "arc_easy.jsonl": [
        {
            "query": "Question: Which of these is an animal?",
            "choices": ["a red ball", "a little dog", "the old house", "a cake"],
            "gold": 1,
        },
        {
            "query": "Question: What did Lily find in the park?",
            "choices": ["a box", "a shiny stone", "the moon", "a kite and a toy"],
            "gold": 1,
        },
        {
            "query": "Question: Where do fish live?",
            "choices": ["in the lake", "in a tree", "in the kitchen", "in a book"],
            "gold": 0,
        },
    ],
    "boolq.jsonl": [
        {
            "query": "Passage: Tom had a big red ball. He lost it in the forest.\nQuestion: did tom lose a ball?",
            "choices": ["no", "yes"],
            "gold": 1,
        },
        {
            "query": "Passage: Mia and Ben went to the beach.\nQuestion: did mia stay at home?",
            "choices": ["no", "yes"],
            "gold": 0,
        },
    ],
    "copa.jsonl": [
        {"query": "Lily was very sad, because", "choices": ["she lost her ball.", "she found her ball."], "gold": 0},
        {
            "query": "The dog was happy, therefore",
            "choices": ["it hid under the car.", "it played all day."],
            "gold": 1,
        },
    ],
    "lambada_test.jsonl": [
        {"text": "One day, Lily went to the park with Tom. They played in the park"},
        {"text": "They played with the big ball all day"},
        {"text": "They were happy and went home"},
    ],
    "piqa.jsonl": [
        {
            "query": "Question: How do you play with a ball?\n",
            "choices": ["Throw it to a friend.", "Put it in the cake."],
            "gold": 0,
        },
        {"query": "Question: dry a hat\n", "choices": ["put it in the lake", "put it in the sun"], "gold": 1},
    ],
    "superglue/CB/val.jsonl": [
        {"premise": "Tom has a dog.", "hypothesis": "Tom has a pet", "label": "entailment"},
        {"premise": "Tom has a dog.", "hypothesis": "Tom has nothing", "label": "contradiction"},
        {"premise": "Tom has a dog.", "hypothesis": "it is blue", "label": "neutral"},
    ],
    "superglue/RTE/val.jsonl": [
        {"premise": "Amy is old.", "hypothesis": "Amy is not young.", "label": "entailment"},
        {"premise": "Amy is old.", "hypothesis": "Amy has a kite.", "label": "not_entailment"},
    ],
    "winograd_wsc.jsonl": [
        {
            "context_options": [
                "The toy was not in the box because the toy",
                "The toy was not in the box because the box",
            ],
            "continuation": "was too small.",
            "gold": 1,
        },
        {
            "context_options": ["The cat saw the fish. Tom took the cat", "Tom took the fish"],
            "continuation": ".",
            "gold": 0,
        },
    ],
}


def write_questions(folder: Path) -> Path:
    """Write the files, and say where."""
    for name, rows in LINES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("questions"))

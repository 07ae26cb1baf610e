"""Choose the documents and positions that `make.py` and the library are both run on: writes `examples.json`.

The sentences are put together here from a few words. Which of them are for fitting and testing, and which token of
each a masked model is asked for, is what layerjump draws: a test holds it to what is written down.

    python tests/golden/choose.py
"""

import json
import random
from pathlib import Path

import layerjump as lj
from layerjump.data.positions import PAPER

HERE = Path(__file__).resolve().parent
SPLIT = {"gpt2": "90/0/40", "bert": "400/0/120"}
NAMES = ["Lily", "Tom", "Ben", "Sara", "Max", "Anna", "Tim", "Mia", "Sam", "Sue"]
NOUNS = [
    "ball",
    "dog",
    "cat",
    "cake",
    "car",
    "bird",
    "tree",
    "box",
    "hat",
    "book",
    "fish",
    "doll",
    "kite",
    "boat",
    "bear",
]
KINDS = ["big", "red", "little", "happy", "sad", "soft", "old", "new", "funny", "shiny", "blue", "pretty"]
PLACES = ["park", "house", "garden", "lake", "school", "store", "forest", "beach"]
ACTS = ["found", "saw", "wanted", "lost", "liked", "made", "took", "hid"]
FRAMES = (
    "One day, {name} {act} a {kind} {noun} in the {place}.",
    "{name} and {other} went to the {place} with a {kind} {noun}.",
    "The {kind} {noun} was in the {place}, and {name} {act} it.",
    "{name} said, “I want to play with your {kind} {noun}!”",
    "Once upon a time, there was a {kind} {noun} who lived near the {place}.",
    "{name} was {kind} because {other} {act} the {noun}.",
)


def documents(count: int) -> list[str]:
    """So many different sentences, the same every time."""
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < count:
        frame = draw.choice(FRAMES)
        name, other = draw.sample(NAMES, 2)
        words = {"kind": KINDS, "noun": NOUNS, "place": PLACES, "act": ACTS}
        chosen = {kind: draw.choice(list_) for kind, list_ in words.items()}
        found[frame.format(name=name, other=other, **chosen)] = None
    return list(found)


def main() -> None:
    texts = documents(520)
    examples: dict[str, object] = {"documents": texts}
    for name, split in SPLIT.items():
        parts = lj.split_indices(len(texts), split)
        examples[name] = {"split": split, "fit": parts.fit, "test": parts.test}
    tokens = lj.load(HERE.parent / "fixtures" / "tiny-bert").tokenization
    position = [0] * len(texts)
    for batch in lj.make_batches(lj.load_text(texts), tokens, PAPER):
        for document, place in zip(batch.document.tolist(), batch.position.tolist(), strict=True):
            position[document] = place
    examples["bert"]["position"] = position
    (HERE / "examples.json").write_text(json.dumps(examples, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Fine-tuning tasks: loading files, scoring and learning answers."""

from __future__ import annotations

import json

import pytest
import torch

import layerjump as lj
from layerjump.errors import BadText
from layerjump.training.finetune_on_task import ChoiceItem, accuracy, encode_example, finetune, load_task, pad_examples
from layerjump.training.packed_rows import IGNORE_INDEX


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


def write_rows(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_both_formats_are_loaded(tmp_path):
    choices = {"query": "Is it? ", "choices": ["no", "yes"], "gold": 1}
    assert load_task(write_rows(tmp_path / "a", choices, "", choices)) == [ChoiceItem("Is it?", ("no", "yes"), 1)] * 2
    rows = [{"premise": "P", "hypothesis": "H", "label": label} for label in ("not_entailment", "entailment")]
    first, second = load_task(write_rows(tmp_path / "b", *rows))
    assert first == ChoiceItem("P\nQuestion: H\nAnswer:", ("entailment", "not entailment"), 1)
    assert second.gold == 0


def test_only_newlines_separate_items(tmp_path):
    row = {"query": "one\u2028two", "choices": ["no\x85", "yes"], "gold": 1}
    (values,) = load_task(write_rows(tmp_path / "a", json.dumps(row, ensure_ascii=False)))
    assert values == ChoiceItem("one\u2028two", ("no\x85", "yes"), 1)


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[1]",
        '{"query": "a", "choices": ["b"], "gold": 1}',
        '{"query": 3, "choices": ["b"], "gold": 0}',
        '{"premise": "a", "label": "b"}',
    ],
)
def test_a_bad_line_is_named(line, tmp_path):
    good = {"query": "a", "choices": ["b"], "gold": 0}
    with pytest.raises(BadText, match="line 2"):
        load_task(write_rows(tmp_path / "task", good, line))
    with pytest.raises(BadText, match="no items"):
        load_task(write_rows(tmp_path / "empty", ""))
    with pytest.raises(BadText, match="cannot be read"):
        load_task(tmp_path / "absent")


def test_long_prompts_lose_their_beginning_and_labels_cover_answers(model):
    tokens = model.tokenization
    ids, labels = encode_example(tokens, "Once upon a time. " * 60 + "The end was", "happy")
    answer = tokens.encode([" happy"])[0]
    assert len(ids) == len(labels) == tokens.max_length
    assert ids[-len(answer) :].tolist() == labels[-len(answer) :].tolist() == answer
    assert set(labels[: -len(answer)].tolist()) == {IGNORE_INDEX}
    with pytest.raises(BadText, match="shorter answers"):
        encode_example(tokens, "Once", "upon a time " * 80)


def test_accuracy_compares_mean_likelihood_per_token(model):
    items = [
        ChoiceItem("Once upon a", ("time there was a little girl", "xqzj"), 0),
        ChoiceItem("Lily went to the", ("park", "zzzz qqqq xxxx"), 0),
        ChoiceItem("The dog was very", ("qxqx", "happy"), 1),
    ]

    def score(item, choice):
        ids, labels = encode_example(model.tokenization, item.prompt, choice)
        with torch.no_grad():
            log_probs = model.hf(ids[None]).logits[0].log_softmax(-1)
        values = [log_probs[at - 1, ids[at]] for at in range(len(ids)) if labels[at] != IGNORE_INDEX]
        return float(torch.stack(values).mean())

    expected = [max(range(2), key=lambda n, item=item: score(item, item.choices[n])) == item.gold for item in items]
    assert accuracy(model, items) == sum(expected) / 3 == 1
    swapped = [ChoiceItem(item.prompt, item.choices, 1 - item.gold) for item in items]
    assert accuracy(model, swapped) == 0


def test_a_copy_learns_the_answers(model):
    """Answers that the model finds unlikely become the most likely ones."""
    items = [ChoiceItem(f"{name} has a", ("cat", "xqzj"), 1) for name in ("Tom", "Lily", "Ben", "Sue")]
    before = {name: weight.clone() for name, weight in model.hf.state_dict().items()}
    assert accuracy(model, items) == 0
    tuned = finetune(model, items, steps=40, learning_rate=2e-3)
    assert accuracy(tuned, items) == 1
    assert all(torch.equal(weight, before[name]) for name, weight in model.hf.state_dict().items())
    again = finetune(model, items, steps=40, learning_rate=2e-3)
    ours, theirs = tuned.hf.state_dict(), again.hf.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_padding_is_on_the_right_and_has_no_labels():
    rows = [(torch.tensor([5, 6, 7]), torch.tensor([IGNORE_INDEX, 6, 7])), (torch.tensor([8]), torch.tensor([8]))]
    batch = pad_examples(rows, pad_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, 7], [8, IGNORE_INDEX, IGNORE_INDEX]]

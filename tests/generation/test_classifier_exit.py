"""Texts leave a classifier early, with the labels that the levels predict, and the rest runs as ever."""

from __future__ import annotations

import pytest
import torch
from helpers.classifiers import FAMILIES, LABELS, numbers, ranges, trained, wrapped
from helpers.tiny_models import tiny_model
from helpers.tokenizers import bert, gpt2
from torch import Tensor, nn

import layerjump as lj
from layerjump.errors import BadExit, TextTooShort
from layerjump.models.discovery import StructureHints
from layerjump.models.model import Model


def own_probabilities(model: Model, texts: list[str]) -> torch.Tensor:
    """The model's own, text by text, without padding."""
    tokenization, rows = model.tokenization, []
    for ids in tokenization.encode(texts):
        inputs = torch.tensor([tokenization.wrap(ids)])
        with torch.no_grad():
            logits = model.hf(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
        rows.append(logits.softmax(-1)[0])
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_that_stay_get_the_models_own_label(family):
    model, texts = wrapped(family), list(numbers(40).documents)
    theirs = own_probabilities(model, texts)
    full = lj.classify(model, None, texts)
    torch.testing.assert_close(full.probabilities, theirs, atol=1e-5, rtol=1e-3)
    assert full.labels == [LABELS[index] for index in theirs.argmax(-1)]
    assert (full.exit_levels, full.blocks_saved) == ([3] * 40, 0)
    # Texts that leave must not change those that stay, nor their order.
    certain = torch.stack([trajectory.confidence[1:3, 0].amax() for trajectory in lj.Lens(model)(texts)])
    early = lj.classify(model, None, texts, exit=f"gap:{float(certain.median())}", max_batch_tokens=300)
    stayed = torch.tensor(early.exit_levels) == 3
    assert 10 < int(stayed.sum()) < 30
    torch.testing.assert_close(early.probabilities[stayed], theirs[stayed], atol=1e-5, rtol=1e-3)
    assert early.blocks_saved == pytest.approx(1 - sum(early.exit_levels) / 120)


def test_a_text_exits_at_the_first_level_where_the_lens_is_certain():
    model, texts = wrapped("Bert"), list(numbers(30).documents)
    jumps = lj.fit(model, numbers(400))
    result = lj.classify(model, jumps, texts, exit="gap:0.3@1,2")
    trajectories = lj.Lens(model, jumps)(texts)
    for row, trajectory in enumerate(trajectories):
        expected = next((level for level in (1, 2) if float(trajectory.confidence[level, 0]) > 0.3), 3)
        assert result.exit_levels[row] == expected
        assert result.labels[row] == trajectory.decode([int(trajectory.top[expected, 0, 0])])[0]
    assert len(set(result.exit_levels)) > 1


def test_agreeing_levels_are_those_of_the_same_text():
    model, texts = wrapped("Bert"), list(numbers(30).documents)
    tops = [trajectory.top[:, 0, 0].tolist() for trajectory in lj.Lens(model)(texts)]
    expected = [2 if top[1] == top[2] else 3 for top in tops]
    assert lj.classify(model, None, texts, exit="agree:2").exit_levels == expected
    assert len(set(expected)) == 2


def test_a_calibrated_exit_of_a_trained_classifier_saves_blocks_at_its_target():
    model = trained()
    texts, labels = ranges(600, seed=2)
    full = lj.classify(model, None, texts.documents)
    assert sum(a == b for a, b in zip(full.labels, labels, strict=True)) > 480
    jumps = lj.fit(model, texts, split="40/0/60")
    calibration = lj.calibrate_classifier(model, jumps, texts, target=0.95)
    assert calibration.n_texts == {"selection": 108, "thresholds": 216, "test": 36}
    fresh, _ = ranges(500, seed=3)
    early = lj.classify(model, jumps, fresh.documents, exit=calibration.exit)
    theirs = lj.classify(model, None, fresh.documents)
    agreement = sum(a == b for a, b in zip(early.labels, theirs.labels, strict=True)) / 500
    assert agreement >= 0.95
    assert early.blocks_saved > 0.1
    assert set(early.exit_levels) <= {*calibration.levels, 4}


def test_too_few_texts_for_the_target_are_refused():
    with pytest.raises(TextTooShort, match="needs 299 texts for its threshold, but 60 of 100 are available"):
        lj.calibrate_classifier(wrapped("Bert"), None, numbers(100), target=0.99)


def test_what_is_no_classifier_of_texts_is_refused():
    with pytest.raises(BadExit, match="labels every token"):
        lj.classify(wrapped("Bert", "Token"), None, ["1 2"])
    with pytest.raises(BadExit, match="expected a classifier, got"):
        lj.classify(Model.wrap(tiny_model("gpt2", dtype=torch.float32), gpt2(), name="lm"), None, ["1 2"])
    with pytest.raises(BadExit, match="one string"):
        lj.classify(wrapped("Bert"), None, "1 2")


class SkippingBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return x + self.mix(x.mean(1, keepdim=True) + before).tanh()


class Skipping(nn.Module):
    """A classifier whose blocks read the last two levels."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(1100, d), nn.Linear(d, 3)
        self.stages = nn.ModuleList(SkippingBlock(d) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = before = self.tokens(input_ids)
        for stage in self.stages:
            x, before = stage(x, before), x
        return self.head(x[:, 0])


def test_blocks_that_read_more_than_the_last_block_are_refused():
    model = Model.wrap(Skipping(), bert(), hints=StructureHints(task="classification"))
    assert (model.pooled, model.labels) == ("first", ("LABEL_0", "LABEL_1", "LABEL_2"))
    with pytest.raises(BadExit, match="cannot be run one by one"):
        lj.classify(model, None, ["1 2 3"])

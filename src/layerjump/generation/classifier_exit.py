"""Early exit of a classifier: a text exits at the first level whose label is certain enough.

calibration = lj.calibrate_classifier(model, jumps, texts, target=0.99)
lj.classify(model, jumps, ["Once upon a time …"], exit=calibration.exit)

A text that exits skips all later blocks: a classifier has no later tokens that would need its keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerjump.data.batches import make_batches
from layerjump.data.corpus import Corpus, split_indices
from layerjump.errors import BadExit, TextTooShort, argument
from layerjump.generation.calibration.calibrate import held_out_result, loosest_threshold
from layerjump.generation.calibration.dataset import (
    CalibrationSet,
    build_calibration_set,
    candidate_levels,
    unseen_documents,
)
from layerjump.generation.calibration.result import Costs, HeldOutResult
from layerjump.generation.calibration.rule_search import FittedProbes, search_rule
from layerjump.generation.exit_rules import ExitConfig, LevelReading, Rule, checked_levels
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.serialization import check_model
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import upcast
from layerjump.models.hooks import Call, intercept_calls, watch_outputs
from layerjump.models.model import Model, capture_states, require_model
from layerjump.models.self_check import TOLERANCE, sample

BATCH_TOKENS = 4096
"""Tokens of a batch, padding included."""
_READING = 0.01  # cost of reading a level at one position, in blocks that run on a whole text


@dataclass(frozen=True, eq=False)
class Classified:
    """The labels of texts, in their order."""

    labels: list[str]
    probabilities: Tensor
    """(texts, labels), by the level at which each text exited."""
    exit_levels: list[int]
    """L where the full model ran."""
    n_blocks: int

    @property
    def blocks_saved(self) -> float:
        """The share of blocks that did not run: 1 − mean exit level / L."""
        return 1 - sum(self.exit_levels) / (len(self.exit_levels) * self.n_blocks)

    def __repr__(self) -> str:
        return f"Classified({len(self.labels)} texts, {self.blocks_saved:.0%} of blocks saved)"


@dataclass(frozen=True, eq=False)
class ClassifierCalibration:
    """An exit rule for `classify`, and how it does on texts that nothing was chosen on."""

    exit: ExitConfig
    levels: tuple[int, ...]
    """The levels at which texts may exit."""
    threshold: float | None
    """The gap between the two largest probabilities at which a text exits; None: none is safe, no text exits."""
    target: float
    confidence: float
    test: HeldOutResult
    n_texts: dict[str, int]
    """Texts on which levels were selected, the threshold was tested and the result was measured."""

    def __repr__(self) -> str:
        where = f"gap {self.threshold:.3f} at levels {', '.join(map(str, self.levels))}" if self.threshold else "never"
        return (
            f"ClassifierCalibration({where}: agreement {self.test.agreement:.3f}, "
            f"{self.test.blocks_saved:.0%} of blocks saved on {self.n_texts['test']} texts)"
        )


@torch.no_grad()
def classify(
    model: Model,
    jumps: Jumps | None,
    texts: Sequence[str],
    *,
    exit: ExitConfig | Rule | str = "never",
    max_length: int | None = None,
    max_batch_tokens: int = BATCH_TOKENS,
) -> Classified:
    """Classify texts; each exits at the first level where the exit rule fires.

    Args:
        model: A classifier of whole texts.
        jumps: Map the states of levels to level L or `final`; None reads them as they are.
        texts: The texts. Longer ones than the model takes are cut.
        exit: A rule, its short name (gap:0.9, maxprob:0.95, fixed:3, …) or a calibrated configuration.
        max_length: Longest sequence in tokens. Default: the model's own limit.
        max_batch_tokens: Tokens that run together, padding included.
    """
    if isinstance(texts, str):
        raise BadExit(f"expected a list of {argument('texts')}, got one string; pass [text]")
    if not texts:
        raise BadExit(f"{argument('texts')} is empty; give at least one text")
    config = ExitConfig.of(exit)
    lens = _classifier_lens(model, jumps)
    if config.shortlist is not None:
        raise BadExit("the exit rule has a shortlist of tokens, but a classifier predicts labels; calibrate one for it")
    levels = checked_levels(config.rule, model.n_blocks)
    if config.rule.levels is None:
        levels = tuple(level for level in levels if level in lens.levels)
    for level in levels:
        lens.readout(level)  # raises if the jumps lack it
    n_outputs = _count_block_outputs(model)
    _require_blocks_one_by_one(model, n_outputs)

    tokenization = model.tokenization
    length = tokenization.text_length(max_length or tokenization.max_length)
    if length < 1:
        raise BadExit(f"expected {argument('max_length')} of more than {tokenization.n_added}, got {max_length}")
    rows = [torch.tensor(tokenization.wrap(ids[:length])) for ids in tokenization.encode(list(texts))]
    if not all(map(len, rows)):
        raise BadExit("a text has no tokens; pass at least one word")
    size = model.structure.vocab_size
    probabilities, exit_levels = torch.zeros(len(rows), size), torch.full((len(rows),), model.n_blocks)
    for group in _groups([len(row) for row in rows], max_batch_tokens):
        ids = pad_sequence([rows[index] for index in group], batch_first=True, padding_value=tokenization.pad)
        mask = pad_sequence([torch.ones_like(rows[index]) for index in group], batch_first=True)
        left = torch.tensor(group)
        earlier: tuple[Tensor, ...] = ()
        for level, states in _run_levels(model, stream := _Stream(ids, mask), n_outputs):
            is_last = level == model.n_blocks
            if not is_last and level not in levels:
                continue
            # A text is one prediction, so no rule may ask for more certainty at its position.
            positions = torch.ones(len(left), device=states.device)
            reading = LevelReading(level, states, positions, lens.logits, earlier)
            leaves = torch.ones(len(left), dtype=torch.bool) if is_last else config.rule.should_exit(reading).cpu()
            if bool(leaves.any()):
                probabilities[left[leaves]] = upcast(reading.logits).softmax(-1).float().cpu()[leaves]
                exit_levels[left[leaves]] = level
            if reading.has_logits:
                earlier = (*earlier, reading.top_token)
            stays = ~leaves
            left, earlier = left[stays], tuple(top[stays.to(top.device)] for top in earlier)
            stream.keep(stays)
    assert model.labels is not None
    labels = [model.labels[index] for index in probabilities.argmax(-1).tolist()]
    return Classified(labels, probabilities, exit_levels.tolist(), model.n_blocks)


@torch.no_grad()
def calibrate_classifier(
    model: Model, jumps: Jumps | None, texts: Corpus, *, target: float = 0.99, confidence: float = 0.95, seed: int = 0
) -> ClassifierCalibration:
    """Find levels and a threshold that save blocks at a target agreement with the full model.

    Texts that the jumps were fitted on are left out. Of the others 30 % select the levels, 60 % test thresholds from
    strict to loose until the first fails an exact binomial test, and 10 % measure the result. With the stated
    confidence over the draw of texts, at least the target share of texts gets the full model's label.
    """
    lens = _classifier_lens(model, jumps)
    for name, value in (("target", target), ("confidence", confidence)):
        if not 0 < value < 1:
            raise BadExit(f"{argument(name)} must be between 0 and 1, got {value}")
    unseen = unseen_documents(jumps, texts)
    needed = math.ceil(math.log(1 - confidence) / math.log(target))
    available = len(split_indices(len(unseen), "30/60/10", seed=seed).validation) if len(unseen) > 2 else 0
    if available < needed:
        raise TextTooShort(
            f"a target of {target:g} with confidence {confidence:g} needs {needed} texts for its threshold, but "
            f"{available} of {len(unseen)} are available for it; give more texts that the jumps were not fitted on, or "
            f"lower the target or the confidence"
        )
    split = split_indices(len(unseen), "30/60/10", seed=seed)
    levels = candidate_levels([level for level in lens.levels if 0 < level < model.n_blocks])

    def read(part: Sequence[int]) -> CalibrationSet:
        documents = [unseen[index] for index in part]
        batches = make_batches(texts, model.tokenization, model.prediction_positions, documents=documents, seed=seed)
        return build_calibration_set(model, jumps, batches, levels)

    selection, thresholds, test = read(split.fit), read(split.validation), read(split.test)
    costs = Costs(block=1.0, queued_token=0.0, unembedding=_READING, probe=0.0)
    candidate, _ = search_rule("gap", FittedProbes({}, {}), selection, costs, model.n_blocks, target)
    threshold = loosest_threshold(candidate, thresholds, model.n_blocks, target, confidence)
    return ClassifierCalibration(
        candidate.exit_config(threshold),
        candidate.levels if threshold is not None else (),
        threshold,
        target,
        confidence,
        held_out_result(candidate, threshold, test, costs, model.n_blocks, seed),
        {"selection": len(selection), "thresholds": len(thresholds), "test": len(test)},
    )


def _classifier_lens(model: Model, jumps: Jumps | None) -> Lens:
    require_model(model)
    if model.task != "classification":
        raise BadExit(f"expected a classifier, got {model.name}, a {model.task} model; use lj.generate for text")
    model.require_predictions()
    if model.pooled is None:
        raise BadExit(
            f"expected a classifier of whole texts, got {model.name}, which labels every token: no token may leave "
            f"while others read it; use lj.Lens for the labels of its levels"
        )
    if jumps is not None:
        check_model(jumps, model, allow_other_weights=jumps.used_on is not None)
        jumps.to(model.device)
    return Lens(model, jumps)


def _groups(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of texts of similar length, at most `max_tokens` with padding."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * lengths[index] > max_tokens:
            yield group
            group = []
        group.append(index)
    yield group


@dataclass
class _Stream:
    """The texts of a batch that are still in the model."""

    ids: Tensor
    mask: Tensor
    stays: Tensor | None = None
    """Which rows to go on with; None: all."""

    def keep(self, stays: Tensor) -> None:
        self.stays = None if bool(stays.all()) else stays


def _run_levels(model: Model, stream: _Stream, n_outputs: int) -> Iterator[tuple[int, Tensor]]:
    """Run the blocks one by one; yield each level's states where the head reads. `stream.keep` lets rows go."""
    structure = model.structure
    calls = _block_calls(model, stream, n_outputs)
    states = calls[0].states
    for level in range(structure.n_blocks + 1):
        if level:
            states = calls[level - 1].repeat(structure.blocks[level - 1], states)
        position = torch.zeros(len(states), dtype=torch.long)
        if model.pooled == "last":
            position = stream.mask.sum(1) - 1
        rows = torch.arange(len(states), device=states.device)
        yield level, states[rows, position.to(states.device)]
        if stream.stays is None:
            continue
        stays, stream.stays = stream.stays, None
        if not bool(stays.any()):
            return
        stream.ids, stream.mask = stream.ids[stays], stream.mask[stays]
        states = states[stays.to(states.device)]
        if level < structure.n_blocks:
            # The masks of the rows that stay; embedding them again costs little.
            calls = _block_calls(model, stream, n_outputs)


def _block_calls(model: Model, stream: _Stream, n_outputs: int) -> list[Call]:
    with intercept_calls(model.structure, n_outputs) as calls:
        model.run_body(stream.ids, stream.mask)
    return calls


def _count_block_outputs(model: Model) -> int:
    """How many values a block returns."""
    counts: list[int] = []
    batch = sample(model)
    with watch_outputs(
        model.structure.blocks, lambda output: counts.append(len(output) if isinstance(output, tuple) else 1)
    ):
        model.run_body(batch.input_ids, batch.attention_mask)
    return max(counts)


def _require_blocks_one_by_one(model: Model, n_outputs: int) -> None:
    """Prove that the blocks, run one by one, compute the model's own last level; `BadExit` if not."""
    batch = sample(model)
    lengths = batch.attention_mask.sum(1).cpu()
    position = torch.zeros_like(lengths) if model.pooled == "first" else lengths - 1
    rows = torch.arange(len(lengths))
    picked = replace(batch, row=rows, position=position, document=rows, token=rows, sequence=None)
    (theirs,) = capture_states(model, [picked], [model.n_blocks])
    expected = theirs[model.n_blocks]
    try:
        *_, (_, ours) = _run_levels(model, _Stream(batch.input_ids, batch.attention_mask), n_outputs)
        is_same = bool((ours - expected).abs().max() <= TOLERANCE[expected.dtype] * expected.abs().max())
    except (IndexError, RuntimeError, TypeError, ValueError):
        is_same = False
    if not is_same:
        raise BadExit(
            f"the blocks of {model.name} cannot be run one by one: they read more than the last block's output; "
            f"texts cannot exit early, but lj.Lens reads every level"
        )

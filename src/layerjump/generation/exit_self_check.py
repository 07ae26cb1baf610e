"""Prove, before a model first generates, that its blocks can run one by one with a KV cache.

Early exit leaves tokens in the queues of blocks and runs them later. That is exact where a block carries nothing from
token to token but keys and values. The check runs random tokens with pseudo-random exits and a rollback, with and
without padding, and compares all logits with those of one plain forward pass. It decides; the structure of the model
only explains why a model does not pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache

from layerjump.errors import BadExit, LayerjumpError, one_line
from layerjump.generation.block_runner import BlockRunner, prompt_positions, takes_positions
from layerjump.generation.packed_llama import choose_blocks
from layerjump.models.discovery import main_output
from layerjump.models.hugging_face_config import forward_arguments, vocabulary_size
from layerjump.models.model import Model
from layerjump.models.self_check import tolerance
from layerjump.models.structure import Structure

_PROMPT, _NEW, _PADDING = 8, 4, 3
"""Tokens of the prompt, new tokens, and padding of the second row."""
_EXITS = (0.6, 0.0, 0.8, 0.3)
"""Where the prompt and all new tokens but the last exit, as shares of the blocks."""


@dataclass(frozen=True)
class ExitCheck:
    """Whether the blocks of a model, run one by one with a KV cache, give the model's own logits."""

    difference: float
    """The largest difference of logits relative to the largest logit; infinite if the blocks did not run."""
    padded_difference: float
    """Likewise of a batch with padding on the left."""
    problem: str | None
    """Why the model cannot exit early; None if it can."""
    padding_problem: str | None
    """Why it cannot with padding; None if it can."""


_CHECKED: WeakKeyDictionary[Structure, ExitCheck] = WeakKeyDictionary()


def check_exits(model: Model) -> ExitCheck:
    """Run the check; a model that was checked before is not run again."""
    if model.structure not in _CHECKED:
        _CHECKED[model.structure] = _check(model)
    return _CHECKED[model.structure]


def require_exits(model: Model, *, padded: bool = False) -> None:
    """Raise `BadExit` with the reason if the model's blocks cannot run one by one, `padded`: with padding."""
    check = check_exits(model)
    if check.problem is not None:
        raise BadExit(
            f"{model.name} cannot exit early: {check.problem}; generate without early exit, by Hugging Face's own "
            f"model.generate, or use lens, fit and studies, which work"
        )
    if padded and check.padding_problem is not None:
        raise BadExit(
            f"{model.name} cannot exit early with padding: {check.padding_problem}; generate from one prompt at a "
            f"time, or from prompts of one length"
        )


def _check(model: Model) -> ExitCheck:
    if model.extra_inputs is not None:
        problem = "it reads further inputs besides tokens, and early exit passes tokens alone"
        return ExitCheck(math.inf, math.inf, problem, problem)
    if model.task == "seq2seq":
        problem = "its decoder reads the states of an encoder"
        return ExitCheck(math.inf, math.inf, problem, problem)
    if not model.causal:
        problem = "its states depend on later tokens, so those of earlier tokens cannot be kept"
        return ExitCheck(math.inf, math.inf, problem, problem)
    difference, error = _try(model, padded=False)
    padded_difference, padded_error = _try(model, padded=True)
    explained = None if error is None else _structural_reason(model) or error
    return ExitCheck(difference, padded_difference, explained, padded_error if explained is None else explained)


def _try(model: Model, *, padded: bool) -> tuple[float, str | None]:
    """The largest difference, and the reason why the proof fails; None if it holds."""
    try:
        difference, allowed = _difference(model, padded=padded)
    except LayerjumpError as error:
        return math.inf, str(error)
    except Exception as error:  # whatever a model's own code raises when its blocks are called one by one
        if isinstance(error, ValueError) and "values to unpack" in str(error):
            return math.inf, "its blocks hand more than the residual stream to the next block"
        return math.inf, f"its blocks do not run one by one: {type(error).__name__}: {one_line(error)}"
    # `not <=` rather than `>`: a NaN must fail.
    if not difference <= allowed:
        return difference, (
            f"the proof failed: run one by one with a cache, its blocks give other logits than its forward pass "
            f"(relative difference {difference:.2g})"
        )
    return difference, None


@torch.no_grad()
def _difference(model: Model, *, padded: bool) -> tuple[float, float]:
    """The largest relative difference between the logits of single blocks and of a plain forward pass; the largest
    that is allowed.
    """
    n_prompt = max(2, min(_PROMPT, model.max_positions - _NEW))
    vocab_size, pad = vocabulary_size(model.hf), getattr(model.text_config, "pad_token_id", None)
    ids = torch.randint(0, vocab_size, (2, n_prompt + _NEW), generator=torch.Generator().manual_seed(0))
    if isinstance(pad, int):  # some models treat the padding token as padding, whatever the mask says
        ids[ids == pad] = (pad + 1) % vocab_size
    ids = ids.to(model.device)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, : min(_PADDING, n_prompt - 1)] = 0
    states = _run_blocks(model, ids, mask if padded else None, n_prompt)
    positions = {"position_ids": prompt_positions(model, ids, mask)} if takes_positions(model.hf) else {}
    output = model.hf(**forward_arguments(model.hf, model.task, ids, mask if padded else None, **positions))
    logits = (model.structure.anatomy.read_logits or main_output)(output)
    assert logits is not None, "the model has predictions"
    attended = mask.bool()
    ours, theirs = model.logits(states)[attended], logits[attended]
    allowed = max(tolerance(model, dtype) for dtype in (model.dtype, theirs.dtype))
    return (ours - theirs).abs().max().item() / (theirs.abs().max().item() or 1.0), allowed


def _run_blocks(model: Model, ids: Tensor, mask: Tensor | None, n_prompt: int) -> Tensor:
    """Level L of all tokens, (rows, tokens, d_model), with exits and a rollback on the way."""
    mask = None if mask is None else mask[:, :n_prompt]
    positions = prompt_positions(model, ids[:, :n_prompt], mask)
    runner = BlockRunner(model, choose_blocks(model), mask, positions)
    n_blocks, outputs = runner.n_blocks, []
    for step, share in enumerate(_EXITS):
        if step == 2:
            # Wrong tokens, of which every block stores keys and values before they are dropped.
            wrong = torch.cat([ids[:, : n_prompt + 1], ids[:, :2]], 1)
            outputs.append(_run_to(runner, wrong, n_blocks)[:, :-2])
            runner.rollback(n_prompt + 1)
        _run_to(runner, ids[:, : n_prompt + step], int(share * n_blocks))
    outputs.append(_run_to(runner, ids, n_blocks))
    return torch.cat(outputs, 1)


def _run_to(runner: BlockRunner, ids: Tensor, level: int) -> Tensor:
    states = runner.extend(ids)
    for block in range(1, level + 1):
        states = runner.run(block)
    return states


def _structural_reason(model: Model) -> str | None:
    """What in the model's structure explains that its blocks cannot run one by one; None if nothing does."""
    anatomy, kind = model.structure.anatomy, model.model_type
    writes = [write for block in anatomy.blocks for write in block.writes]
    if any(write.role == "mixer" for write in writes) or _has_recurrent_cache(model):
        return (
            f"blocks of {kind} keep a recurrent state, which cannot wait for later tokens as keys and values can, nor "
            f"be rolled back"
        )
    if not anatomy.is_chain:
        return f"blocks of {kind} do not read the output of the last block as it is"
    if len(set(model.structure.blocks)) < model.n_blocks:
        return f"blocks of {kind} run several times in one forward pass"
    if anatomy.n_streams > 1:
        return f"blocks of {kind} have {anatomy.n_streams} residual streams, and a cache of their own"
    return None


def _has_recurrent_cache(model: Model) -> bool:
    """Whether Hugging Face's cache for this model has layers with a state instead of keys and values."""
    try:
        layers: list[Any] = DynamicCache(config=model.text_config).layers
    except Exception:  # a configuration that it cannot read: the error of the proof says more
        return False
    return any(hasattr(layer, "recurrent_states") for layer in layers)

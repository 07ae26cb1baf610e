"""Prove at load that the captured states are those that the model computes with.

The captured parts of every block must add up to the next level, in the order that the family's row says, and level L
must lead to the model's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.errors import BadModel, LayerjumpError, SelfCheckFailed, one_line
from layerjump.models.hooks import Capture, apply_attached
from layerjump.models.structure import FINAL, Site

if TYPE_CHECKING:
    from layerjump.models.model import Model

# Largest difference allowed, as a share of the compared tensor's largest entry.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Check:
    """One statement of the self-check, and how far it is from exact."""

    name: str
    fact: str
    difference: float | None
    """The largest difference relative to the largest entry compared; None where the check does not apply."""
    passed: bool
    note: str = ""


def self_check(model: Model) -> list[Check]:
    """Run every check and return the results, failed ones too."""
    from layerjump.models.model import require_model  # which imports this module

    require_model(model)
    with torch.no_grad(), hooks_as_before(model.hf):
        return [
            *_states_checks(model),
            *(_encoder_checks(model) if model.task == "seq2seq" else ()),
            _causality(model),
            Check(
                "weights",
                "every weight between level L and the logits was in the checkpoint",
                None,
                not model.no_predictions,
                note=model.no_predictions or "",
            ),
        ]


def require_passed(model: Model) -> None:
    """Raise `SelfCheckFailed` with the first check whose difference is too large.

    A missing unembedding does not count: all but predictions works, and those raise `NoPredictions`.
    """
    try:
        checks = self_check(model)
    except LayerjumpError:
        raise
    except Exception as error:  # a model that loads may still not run
        raise BadModel(
            f"{model.name} loads, but does not run: {type(error).__name__}: {one_line(error)}; its configuration and "
            "its weights do not belong together"
        ) from error
    for check in checks:
        if not check.passed and check.difference is not None:
            raise SelfCheckFailed(
                f"{model.name}: self-check {check.name!r} failed: {check.fact}, but the relative difference is "
                f"{check.difference:.2g}. Its family's row (models/families.py) does not describe this model; "
                f"please report it."
            )


def sample(model: Model, *, rows: int = 2, length: int = 12) -> Batch:
    """A short random batch, the same at every call; its last row is padded, and every other position is picked."""
    generator = torch.Generator().manual_seed(0)
    length = min(length, model.max_positions)
    ids, mask = _padded(model, generator, rows, length, length // 4)
    row, position = mask.nonzero(as_tuple=True)
    token = ids[row, position]
    ids, mask = ids.to(model.device), mask.to(model.device)
    batch = Batch(ids, mask, row, position, row, token)
    if model.task != "seq2seq":
        return batch
    # Another length and another padding than the decoder's, so that a confusion of the two shows.
    source = max(1, length - 3)
    ids, mask = _padded(model, generator, rows, source, source // 3)
    return replace(batch, source_ids=ids.to(model.device), source_mask=mask.to(model.device))


def _padded(model: Model, generator: torch.Generator, rows: int, length: int, padding: int) -> tuple[Tensor, Tensor]:
    vocab_size = model.hf.config.vocab_size
    ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    pad = getattr(model.hf.config, "pad_token_id", None) or 0
    pad = pad if 0 <= pad < vocab_size else 0  # some configurations have −1 for none
    # A pad id inside the text would change the positions of families that count from it (RoBERTa).
    ids[ids == pad] = (pad + 1) % vocab_size
    mask = torch.ones_like(ids)
    mask[-1, length - padding :] = 0
    ids[mask == 0] = pad
    return ids, mask


def _states_checks(model: Model) -> list[Check]:
    batch, structure = sample(model), model.structure
    sites = [site for site in structure.sites() if site != FINAL]
    row, position = batch.row, batch.position
    with Capture(structure, sites) as capture:
        capture.start(row * batch.input_ids.shape[1] + position)
        hidden, logits = _hugging_face(model, batch)
        states = capture.take()
    levels = [(states[Site(level)], hidden[level][row, position]) for level in range(model.n_blocks)]
    checks = [
        _compare("levels", "levels 0 to L−1 are Hugging Face's hidden states", levels),
        _compare("blocks", "the parts of each block add up to the next level", reassembly(model, states)),
        _compare("inputs", "attention and feed-forward read what the row says", readings(model, states)),
    ]
    if logits is None:
        return checks
    ours = structure.decode(structure.to_final(states[Site(structure.n_blocks)]))
    fact = "norm and head of level L give the model's logits"
    return [_compare("logits", fact, [(ours, logits[row, position])]), *checks]


def _encoder_checks(model: Model) -> list[Check]:
    checks = _states_checks(model.encoder_side())
    return [replace(check, name=f"encoder {check.name}") for check in checks]


def _hugging_face(model: Model, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Hidden states and logits as Hugging Face returns them; no logits for the encoder of an encoder–decoder."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if model.task == "encoder":
        output = model.hf.get_encoder()(**inputs, output_hidden_states=True)
        return output.hidden_states, None
    if model.task != "seq2seq":
        output = model.hf(**inputs, output_hidden_states=True)
        return output.hidden_states, output.logits
    output = model.hf(
        input_ids=batch.source_ids,
        attention_mask=batch.source_mask,
        **{f"decoder_{name}": value for name, value in inputs.items()},
        output_hidden_states=True,
    )
    return output.decoder_hidden_states, output.logits


def reassembly(model: Model, states: dict[Site, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(rebuilt, captured) of every block: its parts added up in the order of the family's row."""
    pairs = []
    row = model.structure.family
    for index, block in enumerate(model.structure.blocks, start=1):
        at = {site.part: state for site, state in states.items() if site.index == index}
        stream = states[Site(index - 1)]
        if row.kind == "parallel":
            rebuilt = stream + at["attn.out"] + at["ffn.out"]
            pairs.append((apply_attached(block, rebuilt), at["level"]))
            continue
        for part, norm, after in row.additions():
            rebuilt = stream + at[f"{part}.out"]
            if row.kind == "post":
                assert norm is not None
                rebuilt = block.get_submodule(norm)(rebuilt)
            if after == "level":
                rebuilt = apply_attached(block, rebuilt)
            stream = at[after]
            pairs.append((rebuilt, stream))
    return pairs


def readings(model: Model, states: dict[Site, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(expected, captured) inputs of attention and feed-forward, and outputs of the attention output projection."""
    pairs = []
    row = model.structure.family
    for index, block in enumerate(model.structure.blocks, start=1):
        at = {site.part: state for site, state in states.items() if site.index == index}
        normed_first = row.kind != "post"
        attn_in = at["ln1.out"] if normed_first and row.ln1 else states[Site(index - 1)]
        if row.xattn:
            xattn_in = at["lnx.out"] if normed_first and row.lnx else at["mid"]
            pairs.append((xattn_in, at["xattn.in"]))
        stream = at["ln1.out"] if row.kind == "parallel" else at["mid2" if row.xattn else "mid"]
        ffn_in = at["ln2.out"] if normed_first and row.ln2 else stream
        pairs += [(attn_in, at["attn.in"]), (ffn_in, at["ffn.in"])]
        added = at.get("attn_raw", at["attn.out"])
        pairs.append((block.get_submodule(row.attn_out_proj)(at["heads"]), added))
    return pairs


def _causality(model: Model) -> Check:
    fact = "changing a later token changes no earlier state"
    if not model.causal:
        return Check("causality", fact, None, True, note="not for an encoder")
    batch = sample(model, rows=1)
    changed = batch.input_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % model.hf.config.vocab_size
    sites = [Site(index) for index in range(model.structure.n_blocks + 1)]
    mask = torch.ones_like(batch.attention_mask)
    source_mask = None if batch.source_ids is None else torch.ones_like(batch.source_ids)
    earlier = torch.arange(changed.shape[1] - 1)
    runs = []
    with Capture(model.structure, sites) as capture:
        for ids in (batch.input_ids, changed):
            capture.start(earlier)
            model.run_body(ids, mask, batch.source_ids, source_mask)
            runs.append(capture.take())
    return _compare("causality", fact, [(runs[0][site], runs[1][site]) for site in sites])


def _compare(name: str, fact: str, pairs: list[tuple[Tensor, Tensor]]) -> Check:
    worst, passed = 0.0, True
    for ours, theirs in pairs:
        scale = theirs.abs().max().item() or 1.0
        difference = (ours - theirs).abs().max().item() / scale
        # `not <=` rather than `>`: a NaN must fail.
        if not difference <= TOLERANCE[theirs.dtype]:
            passed = False
        worst = difference if not difference <= worst else worst
    return Check(name, fact, worst, passed)


@contextmanager
def hooks_as_before(hf: Any) -> Iterator[None]:
    """Remove the forward hooks that transformers installs for good at the first `output_hidden_states`.

    They would cost time at every block, and fail once a block is swapped.
    """
    flag = "_output_capturing_hooks_installed"
    before = {module: set(module._forward_hooks) for module in hf.modules()}
    flagged = {module for module in hf.modules() if flag in vars(module)}
    try:
        yield
    finally:
        for module, hooks in before.items():
            for key in set(module._forward_hooks) - hooks:
                del module._forward_hooks[key]
            if flag in vars(module) and module not in flagged:
                delattr(module, flag)

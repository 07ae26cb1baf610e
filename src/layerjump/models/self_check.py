"""Prove at load that the captured states are those that the model computes with.

The captured parts of every block must add up to the next level, in the order that discovery found, and level L must
lead to the model's own logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.errors import BadModel, LayerjumpError, SelfCheckFailed, one_line
from layerjump.models.discovery import main_output
from layerjump.models.fully_sharded import gathered
from layerjump.models.hooks import Capture, apply_attached
from layerjump.models.hugging_face_config import vocabulary_size
from layerjump.models.sites import FINAL, Site
from layerjump.models.structure import Structure, as_a_whole, rebuild_streams, to_rows, without_parts
from layerjump.models.weight_forms import mixes_rows, quantized_weights

if TYPE_CHECKING:
    from layerjump.models.model import Model

# Largest difference allowed, as a share of the compared tensor's largest entry.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

QUANTIZED_TOLERANCE = TOLERANCE[torch.bfloat16]
"""Kernels of quantised layers compute in bfloat16, whatever type the states have."""
MIXED_ROWS_TOLERANCE = 0.1
"""bitsandbytes' int8 computes whole columns of a batch in float16 where one of its rows has an outlier. So a state
changes, by some rounding errors of int8, with rows and tokens that it does not depend on: by 0.02 at most in the models
that were tried."""


def tolerance(model: Model, dtype: torch.dtype) -> float:
    """The largest difference, relative to the largest entry, that the format of a model's weights explains."""
    if mixes_rows(model.hf):
        return MIXED_ROWS_TOLERANCE
    quantized = QUANTIZED_TOLERANCE if quantized_weights(model.hf) else 0.0
    return max(TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]), quantized)


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
        checks, levels = _states_checks(model)
        return [
            *checks,
            *(_encoder_checks(model) if model.task == "seq2seq" else ()),
            *_body_checks(model, levels),
            Check(
                "weights",
                "every weight between level L and the logits was in the checkpoint",
                None,
                not model.no_predictions,
                note=model.no_predictions or "",
            ),
        ]


def prove(model: Model) -> Model:
    """Return the model with the parts that the self-check proves; `SelfCheckFailed` if levels or logits are wrong.

    A body that computes other levels by itself is not used: the model runs as a whole.
    Parts that do not add up are left out, and the degree of the structure is `levels`. A missing unembedding does not
    count: all but predictions works, and those raise `NoPredictions`.
    """
    checks = _run(model)
    if any(check.name == "body" and not check.passed for check in checks):
        model = replace(model, structure=as_a_whole(model.structure))
        checks = _run(model)
    wrong_parts = [check for check in checks if not check.passed and check.name in ("blocks", "inputs")]
    if wrong_parts and model.structure.degree == "full":
        fact, difference = wrong_parts[0].fact, wrong_parts[0].difference
        model = replace(model, structure=without_parts(model.structure, f"not proven: {fact} ({difference:.2g})"))
        checks = _run(model)
    for check in checks:
        if not check.passed and check.difference is not None:
            advice = (
                "Its quantised layers are not exact enough for this proof; load the model unquantised, or in another "
                "format."
                if quantized_weights(model.hf)
                else "The structure that discovery found does not describe this model; please report it, or describe "
                "the model by hints (docs/families.md)."
            )
            raise SelfCheckFailed(
                f"{model.name}: self-check {check.name!r} failed: {check.fact}, but the relative difference is "
                f"{check.difference:.2g}. {advice}"
            )
    return model


def _run(model: Model) -> list[Check]:
    try:
        return self_check(model)
    except LayerjumpError:
        raise
    except Exception as error:  # a model that loads may still not run
        raise BadModel(
            f"{model.name} loads, but does not run: {type(error).__name__}: {one_line(error)}; its configuration and "
            "its weights do not belong together"
        ) from error


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
    vocab_size = vocabulary_size(model.hf)
    ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    pad = getattr(getattr(model.hf, "config", None), "pad_token_id", None) or 0
    pad = pad if 0 <= pad < vocab_size else 0  # some configurations have −1 for none
    # A pad id inside the text would change the positions of families that count from it (RoBERTa).
    ids[ids == pad] = (pad + 1) % vocab_size
    mask = torch.ones_like(ids)
    mask[-1, length - padding :] = 0
    ids[mask == 0] = pad
    return ids, mask


def _states_checks(model: Model) -> tuple[list[Check], dict[Site, Tensor]]:
    """Compare the states of one pass with each other and with the model's output; the states of the levels too."""
    batch, structure = sample(model), model.structure
    sites = [site for site in structure.sites() if site != FINAL]
    row, position = batch.row, batch.position
    with Capture(structure, sites) as capture:
        capture.start(row * batch.input_ids.shape[1] + position, batch.input_ids.shape[1])
        hidden, logits = _hugging_face(model, batch)
        states = capture.take()
    levels = {Site(level): states[Site(level)] for level in range(structure.n_blocks + 1)}
    checks = [
        _levels_check(model, batch, states, hidden),
        _compare(model, "blocks", "the parts of each block add up to the next level", reassembly(model, states)),
        _compare(model, "inputs", "every part reads the stream or the norm before it", readings(model, states)),
    ]
    if logits is None or structure.degree == "states":
        return checks, levels
    last, theirs = states[Site(structure.n_blocks)], logits
    if structure.anatomy.pooled is None:
        theirs = logits[row, position]
    else:
        lengths = batch.attention_mask.sum(1).cpu()[row]
        is_read = position == (0 if structure.anatomy.pooled == "first" else lengths - 1)
        if structure.anatomy.pooled == "last":
            # Some models take the last position of a padded row, whatever is there.
            is_read &= lengths == batch.input_ids.shape[1]
        last, theirs = last[is_read], logits[row[is_read]]
    ours = structure.decode(structure.to_final(last))
    fact = "norm and head of level L give the model's logits"
    return [_compare(model, "logits", fact, [(ours, theirs)]), *checks], levels


def _levels_check(model: Model, batch: Batch, states: dict[Site, Tensor], hidden: Any) -> Check:
    """Compare levels with `output_hidden_states` where the model returns as many, in the same order."""
    fact = "levels 0 to L−1 are Hugging Face's hidden states"
    n_blocks = model.n_blocks
    layout = model.structure.anatomy.layout
    ours = [states[Site(level)] for level in range(n_blocks)]
    try:
        theirs = [to_rows(state, layout)[batch.row, batch.position] for state in hidden or ()]
    except (IndexError, RuntimeError, TypeError):
        return Check("levels", fact, None, True, note="the model returns hidden states of another shape")
    starts = [i for i, state in enumerate(theirs) if state.shape == ours[0].shape and _is_close(model, ours[0], state)]
    if starts and 0 not in starts:
        worst = _compare(model, "levels", fact, [(ours[0], theirs[0])]) if theirs[0].shape == ours[0].shape else None
        note = f"level 0 is hidden state {starts[0]}: blocks before it are missing"
        return Check("levels", fact, worst.difference if worst else math.inf, False, note=note)
    if len(theirs) not in (n_blocks, n_blocks + 1):
        return Check("levels", fact, None, True, note="the model returns no hidden states of its blocks")
    theirs = theirs[:n_blocks]
    if theirs[0].shape != ours[0].shape:
        return Check("levels", fact, None, True, note="the model returns hidden states of another width")
    check = _compare(model, "levels", fact, list(zip(ours, theirs, strict=True)))
    if check.passed:
        return check
    # Some models list the stream after each block instead (Mamba, RWKV), or another stream.
    late = _compare(model, "levels", fact, list(zip(ours[1:], theirs, strict=False)))
    if late.passed and n_blocks > 1:
        return replace(late, note="Hugging Face lists the output of each block, from level 1")
    return replace(check, difference=None, passed=True, note="Hugging Face lists another stream")


def _encoder_checks(model: Model) -> list[Check]:
    try:
        encoder = model.encoder_side()
    except LayerjumpError as error:
        return [Check("encoder", "the encoder has levels too", None, True, note=str(error))]
    checks, levels = _states_checks(encoder)
    checks.append(_body_check(encoder, levels))
    return [replace(check, name=f"encoder {check.name}") for check in checks]


def _hugging_face(model: Model, batch: Batch) -> tuple[Any, Tensor | None]:
    """Hidden states and logits as the model returns them; no logits for the encoder of an encoder–decoder."""
    if model.task == "encoder":
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        output = model.hf.get_encoder()(**inputs, output_hidden_states=True)
        return output.hidden_states, None
    output = model.run_whole(batch, output_hidden_states=True)
    name = "decoder_hidden_states" if model.task == "seq2seq" else "hidden_states"
    return getattr(output, name, None), (model.structure.anatomy.read_logits or main_output)(output)


def reassembly(model: Model, states: dict[Site, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(rebuilt, captured) of the streams in every block: its parts added up in their order."""
    pairs, structure = [], model.structure
    for index, (block, anatomy) in enumerate(zip(structure.blocks, structure.anatomy.blocks, strict=True), start=1):
        if anatomy.problem:
            continue
        with gathered(block):
            streams = rebuild_streams(structure, index, states)
            pairs += [(streams[count], states[Site(index, name)]) for name, count in anatomy.mids]
            pairs.append((apply_attached(block, streams[-1]), states[Site(index)]))
    return pairs


def readings(model: Model, states: dict[Site, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(expected, captured) inputs of the parts, outputs of norms, and outputs of the parts' output layers."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for index, (block, anatomy) in enumerate(zip(model.structure.blocks, model.structure.anatomy.blocks, strict=True)):
        if not anatomy.problem:
            with gathered(block):
                pairs += _block_readings(model.structure, index + 1, states)
    return pairs


def _block_readings(structure: Structure, index: int, states: dict[Site, Tensor]) -> list[tuple[Tensor, Tensor]]:
    pairs, anatomy = [], structure.anatomy.blocks[index - 1]
    at = {site.part: state for site, state in states.items() if site.index == index}
    streams, points = rebuild_streams(structure, index, states), dict(anatomy.points)
    for write in anatomy.writes:
        read = streams[write.steps_before]
        if write.norm:
            path = points[f"{write.norm}.in"].path
            # A norm of the sum reads the stream as its step finds it.
            after = [n for n, step in enumerate(anatomy.steps) if step.kind == "norm" and step.name == path]
            pairs.append((read if write.norm_first else streams[after[0]], at[f"{write.norm}.in"]))
            pairs.append((structure.module(path)(at[f"{write.norm}.in"]), at[f"{write.norm}.out"]))
        if write.norm and write.norm_first:
            read = at[f"{write.norm}.out"]
        if f"{write.name}.in" in at:
            pairs.append((read, at[f"{write.name}.in"]))
        heads = write.name.replace("attn", "heads") if write.role == "attn" else ""
        if heads in at and write.output_layer:
            added = at.get(f"{write.name}_raw", at[f"{write.name}.out"])
            pairs.append((structure.module(write.output_layer)(at[heads]), added))
    return pairs


_BODY = "the body alone computes the levels that it computes in the whole model"


def _body_checks(model: Model, levels: dict[Site, Tensor]) -> list[Check]:
    """Compare the levels with those of the body alone, and with those of rows whose last token is another.

    One pass of the body on the changed rows proves both where all is well.
    """
    fact = "changing a later token changes no earlier state"
    is_inner = bool(model.structure.anatomy.entry)
    if not model.causal:
        note = "this model reads both ways" if model.task in ("causal", "classification") else "not for an encoder"
        same_levels = [_body_check(model, levels)] if is_inner else []
        return [*same_levels, Check("causality", fact, None, True, note=note)]
    batch = sample(model)
    rows, last = torch.arange(len(batch.input_ids)), batch.attention_mask.sum(1).cpu() - 1
    changed = batch.input_ids.clone()
    changed[rows, last] = (changed[rows, last] + 1) % vocabulary_size(model.hf)
    try:
        others = _run_body(model, replace(batch, input_ids=changed), list(levels))
    except Exception as error:  # the model's own code
        if not is_inner:
            raise
        return [Check("body", _BODY, math.inf, False, note=one_line(error))]
    earlier = batch.position < last[batch.row]
    causality = _compare(model, "causality", fact, [(others[site][earlier], levels[site][earlier]) for site in levels])
    if not is_inner:
        return [causality]
    body = replace(causality, name="body", fact=_BODY) if causality.passed else _body_check(model, levels)
    return [body, causality]


def _body_check(model: Model, levels: dict[Site, Tensor]) -> Check:
    try:
        body = _run_body(model, sample(model), list(levels))
    except Exception as error:  # the model's own code
        return Check("body", _BODY, math.inf, False, note=one_line(error))
    return _compare(model, "body", _BODY, [(body[site], states) for site, states in levels.items()])


def _run_body(model: Model, batch: Batch, sites: list[Site]) -> dict[Site, Tensor]:
    n_positions = batch.input_ids.shape[1]
    with Capture(model.structure, sites) as capture:
        capture.start(batch.row * n_positions + batch.position, n_positions)
        model.run_body(batch.input_ids, batch.attention_mask, batch.source_ids, batch.source_mask)
        return capture.take()


def _compare(model: Model, name: str, fact: str, pairs: list[tuple[Tensor, Tensor]]) -> Check:
    worst, passed = 0.0, True
    for ours, theirs in pairs:
        scale = theirs.abs().max().item() or 1.0
        difference = (ours - theirs.to(ours.device)).abs().max().item() / scale
        # `not <=` rather than `>`: a NaN must fail.
        if not difference <= tolerance(model, theirs.dtype):
            passed = False
        worst = difference if not difference <= worst else worst
    return Check(name, fact, worst, passed)


def _is_close(model: Model, ours: Tensor, theirs: Tensor) -> bool:
    return _compare(model, "", "", [(ours, theirs)]).passed


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

"""Prove at load that the captured states are what the model computes."""

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
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}


@dataclass(frozen=True)
class Check:
    """One fact of the self-check, and how far it is from holding exactly."""

    name: str
    fact: str
    difference: float | None
    """As a share of the largest entry compared; None where the check does not apply."""
    passed: bool
    note: str = ""


def self_check(model: Model) -> list[Check]:
    """Run every check and return what was found; nothing is raised."""
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
    """Raise `SelfCheckFailed` naming the first check whose difference is too large.

    A missing head is no such check: the model serves all work but predictions, which are refused when asked for.
    """
    for check in _run_checks(model):
        if not check.passed and check.difference is not None:
            raise SelfCheckFailed(
                f"{model.name}: self-check {check.name!r} failed: {check.fact}, but the relative difference is "
                f"{check.difference:.2g}. Its family's row (inputs/families.py) does not describe this model; "
                f"please report it."
            )


def _run_checks(model: Model) -> list[Check]:
    """A model that loads may still not run: sizes in its configuration that its weights do not have."""
    try:
        return self_check(model)
    except LayerjumpError:
        raise
    except Exception as error:
        raise BadModel(
            f"{model.name} loads, but does not run: {type(error).__name__}: {one_line(error)}; its configuration and "
            "its weights do not belong together"
        ) from error


def sample(model: Model, *, rows: int = 2, length: int = 12) -> Batch:
    """A short seeded batch; its last row is padded, and every real position is picked."""
    generator = torch.Generator().manual_seed(0)
    length = min(length, model.max_positions)
    ids, mask = _padded(model, generator, rows, length, length // 4)
    row, position = mask.nonzero(as_tuple=True)
    token = ids[row, position]
    ids, mask = ids.to(model.device), mask.to(model.device)
    batch = Batch(ids, mask, row, position, row, token)
    if model.task != "seq2seq":
        return batch
    # Another length and another padding than the decoder's, so that a mix-up of the two shows.
    source = max(1, length - 3)
    ids, mask = _padded(model, generator, rows, source, source // 3)
    return replace(batch, source_ids=ids.to(model.device), source_mask=mask.to(model.device))


def _padded(
    model: Model, generator: torch.Generator, rows: int, length: int, padding: int
) -> tuple[Tensor, Tensor]:
    vocabulary = model.hf.config.vocab_size
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    pad = getattr(model.hf.config, "pad_token_id", None) or 0
    pad = pad if 0 <= pad < vocabulary else 0  # some configurations say −1 for none
    # A pad id inside the text would change the positions of families that count from it (RoBERTa).
    ids[ids == pad] = (pad + 1) % vocabulary
    mask = torch.ones_like(ids)
    mask[-1, length - padding :] = 0
    ids[mask == 0] = pad
    return ids, mask


def _states_checks(model: Model) -> list[Check]:
    batch, structure = sample(model), model.structure
    sites = [site for site in structure.sites() if site != FINAL]
    flat = batch.row * batch.input_ids.shape[1] + batch.position
    with Capture(structure, sites) as capture:
        capture.start(flat)
        hidden, logits = _hugging_face(model, batch)
        found = capture.take()
    row, position = batch.row, batch.position
    levels = [
        (found[Site(index)], hidden[index][row, position]) for index in range(structure.n_blocks)
    ]
    checks = [
        _compare("levels", "levels 0 to L−1 are Hugging Face's hidden states", levels),
        _compare(
            "blocks", "the parts of each block add up to the next level", reassembly(model, found)
        ),
        _compare(
            "inputs", "attention and feed-forward read what the row says", readings(model, found)
        ),
    ]
    if logits is None:
        return checks
    ours = structure.decode(structure.to_final(found[Site(structure.n_blocks)]))
    fact = "norm and head of level L give the model's logits"
    return [_compare("logits", fact, [(ours, logits[row, position])]), *checks]


def _encoder_checks(model: Model) -> list[Check]:
    found = _states_checks(model.encoder_side())
    return [replace(check, name=f"encoder {check.name}") for check in found]


def _hugging_face(model: Model, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Hidden states and logits as Hugging Face gives them; an encoder beside a decoder has no logits."""
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


def reassembly(model: Model, found: dict[Site, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(rebuilt, captured) for every block: the family's own order of sums and norms."""
    pairs = []
    row = model.structure.family
    for index, block in enumerate(model.structure.blocks, start=1):
        at = {site.part: state for site, state in found.items() if site.index == index}
        stream = found[Site(index - 1)]
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


def readings(model: Model, found: dict[Site, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(expected, captured) inputs of attention and feed-forward, and what the heads' projection adds."""
    pairs = []
    row = model.structure.family
    for index, block in enumerate(model.structure.blocks, start=1):
        at = {site.part: state for site, state in found.items() if site.index == index}
        normed_first = row.kind != "post"
        attn_in = at["ln1.out"] if normed_first and row.ln1 else found[Site(index - 1)]
        if row.xattn:
            xattn_in = at["lnx.out"] if normed_first and row.lnx else at["mid"]
            pairs.append((xattn_in, at["xattn.in"]))
        stream = at["ln1.out"] if row.kind == "parallel" else at["mid2" if row.xattn else "mid"]
        ffn_in = at["ln2.out"] if normed_first and row.ln2 else stream
        pairs += [(attn_in, at["attn.in"]), (ffn_in, at["ffn.in"])]
        added = at.get("attn_raw", at["attn.out"])
        pairs.append((block.get_submodule(row.heads)(at["heads"]), added))
    return pairs


def _causality(model: Model) -> Check:
    fact = "changing a later token changes no earlier state"
    if not model.causal:
        return Check("causality", fact, None, True, note="not asked of an encoder")
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
            model.body(ids, mask, batch.source_ids, source_mask)
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
    """Take away the forward hooks that asking for `output_hidden_states` installs for good.

    Left in place they would cost time at every block and go wrong once a block is swapped.
    """
    flag = "_output_capturing_hooks_installed"
    before = {module: set(module._forward_hooks) for module in hf.modules()}
    flagged = {module for module in hf.modules() if flag in vars(module)}
    try:
        yield
    finally:
        for module, kept in before.items():
            for key in set(module._forward_hooks) - kept:
                del module._forward_hooks[key]
            if flag in vars(module) and module not in flagged:
                delattr(module, flag)

"""Patching replaces the selected hidden states and nothing else, in every family; the model is restored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.family_table import family_of
from helpers.tiny_models import CASES, tiny_model

from layerjump.data.batches import Batch
from layerjump.errors import BadModel
from layerjump.interventions.change_states import (
    add_noise,
    change_states,
    replace_by_constant,
    replace_by_map,
    restrict_to,
)
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.models.discovery import discover
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample
from layerjump.models.sites import Site, parse_pairs

EXACT = 1e-12


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def model(request: pytest.FixtureRequest) -> Model:
    hf = tiny_model(*request.param)
    return Model(hf, discover(hf), "-".join(request.param))


@pytest.fixture(scope="module")
def batch(model: Model) -> Batch:
    return sample(model, rows=3, length=14)


@pytest.fixture(scope="module")
def rerun(model: Model, batch: Batch) -> Rerun:
    return Rerun(model, batch)


def hooks(model: Model) -> dict:
    return {module: (list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.hf.modules()}


def last_level(model: Model, batch: Batch) -> torch.Tensor:
    (found,) = capture_states(model, [batch], [model.n_blocks])
    return found[model.n_blocks]


def untouched(source: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return exact


def every_part(model: Model) -> list:
    pairs = parse_pairs("submodules", model.structure)
    blocks = range(1, model.n_blocks + 1)
    return pairs + [(Site(block, "attn.in"), Site(block, "heads")) for block in blocks]


def test_a_rerun_has_the_levels_of_the_model(model, batch, rerun):
    (found,) = capture_states(model, [batch], range(model.n_blocks + 1))
    assert len(rerun.levels) == model.n_blocks + 1
    for level in range(model.n_blocks + 1):
        assert torch.equal(rerun.pick(rerun.levels[level]), found[level])


def test_a_rerun_from_any_level_has_identical_bits(model, rerun):
    for level in range(model.n_blocks + 1):
        assert torch.equal(rerun.from_level(level), rerun.levels[-1])
        for to in range(level, model.n_blocks + 1):
            assert torch.equal(rerun.from_level(level, to=to), rerun.levels[to])
        assert torch.equal(rerun.from_level(level, changes={}), rerun.levels[-1])


def test_replacing_nothing_changes_nothing(model, batch):
    before = last_level(model, batch)
    with change_states(model, {}):
        assert torch.equal(last_level(model, batch), before)


def test_replacing_sub_modules_by_their_own_output_changes_nothing(model, batch, rerun):
    changes = dict.fromkeys(every_part(model), untouched)
    assert torch.equal(rerun.from_level(0, changes=changes), rerun.levels[-1])
    with change_states(model, changes):
        assert torch.equal(last_level(model, batch), rerun.pick(rerun.levels[-1]))


def test_a_norm_replaced_by_itself_changes_nothing(model, rerun):
    """The change reads the input of the norm, so the norm itself can be the map."""
    family = family_of(model.hf.config)
    changes = {}
    for block, module in enumerate(model.structure.blocks, start=1):
        for name, path in (("ln1", family.ln1), ("lnx", family.lnx), ("ln2", family.ln2)):
            if path is not None:
                norm = module.get_submodule(path)
                changes[Site(block, f"{name}.in"), Site(block, f"{name}.out")] = replace_by_map(norm.forward)
    assert torch.allclose(rerun.from_level(0, changes=changes), rerun.levels[-1], atol=EXACT)


@pytest.mark.parametrize("part", ["attn", "xattn", "ffn"])
def test_a_sub_module_replaced_by_zero_adds_nothing(model, rerun, part):
    """In the last block, compared with the block's arithmetic written out."""
    crossed = family_of(model.hf.config).xattn is not None
    if part == ("attn" if crossed else "xattn"):
        pytest.skip("cross-attention, if there is any, reads the output of attention")
    block = model.n_blocks
    pair = Site(block, f"{part}.in"), Site(block, f"{part}.out")
    zero = replace_by_constant(torch.zeros(model.d_model))
    found = rerun.pick(rerun.from_level(block - 1, changes={pair: zero}))
    assert torch.allclose(found, by_hand(model, rerun, without=part), rtol=0, atol=EXACT)
    assert not torch.allclose(found, rerun.pick(rerun.levels[-1]), atol=1e-3)


def by_hand(model: Model, rerun: Rerun, *, without: str) -> torch.Tensor:
    """The last block's output without attention or without feed-forward, computed from its sub-modules."""
    block, row = model.n_blocks, family_of(model.hf.config)
    module = model.structure.blocks[-1]
    parts = {name: Site(block, name) for name in ("attn.in", "attn.out", "ffn.in", "ffn.out")}
    (found,) = capture_states(model, [rerun.batch], [block - 1, *parts.values()])
    stream = found[block - 1]
    attn, ffn = found[parts["attn.out"]], found[parts["ffn.out"]]
    if row.xattn is not None:
        return by_hand_with_cross_attention(model, rerun, without=without)

    def norm(path, x):
        return x if path is None else module.get_submodule(path)(x)

    with torch.no_grad():
        if row.kind == "parallel":
            return stream + (ffn if without == "attn" else attn)
        if row.kind == "post":
            middle = norm(row.ln1, stream if without == "attn" else stream + attn)
            added = feed_forward(model, middle) if without == "attn" else 0
            return norm(row.ln2, middle + added)
        if without == "ffn":
            return stream + attn
        return stream + feed_forward(model, norm(row.ln2, stream))


def by_hand_with_cross_attention(model: Model, rerun: Rerun, *, without: str) -> torch.Tensor:
    block, row = model.n_blocks, family_of(model.hf.config)
    (found,) = capture_states(model, [rerun.batch], [Site(block, "mid"), Site(block, "mid2")])
    lnx, ln2 = (model.structure.blocks[-1].get_submodule(path) for path in (row.lnx, row.ln2))
    with torch.no_grad():
        if without == "ffn":
            stream = found[Site(block, "mid2")]
            return ln2(stream) if row.kind == "post" else stream
        stream = found[Site(block, "mid")]
        if row.kind == "post":
            stream = lnx(stream)
            return ln2(stream + feed_forward(model, stream))
        return stream + feed_forward(model, ln2(stream))


def feed_forward(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The last block's feed-forward output for an input."""
    module, row = model.structure.blocks[-1], family_of(model.hf.config)
    kind = model.hf.config.model_type
    if kind in ("opt", "bart"):
        return module.fc2(module.activation_fn(module.fc1(x)))
    if kind in ("bert", "roberta", "electra"):
        return module.output.dense(module.intermediate(x))
    if kind == "albert":
        return module.ffn_output(module.activation(module.ffn(x)))
    if kind == "bloom":
        return module.mlp(x[None], torch.zeros_like(x)[None])[0]
    raw = module.get_submodule(row.ffn)(x[None])[0]
    return module.get_submodule(row.ffn_adds)(raw) if row.ffn_adds != row.ffn else raw


def test_zero_ablation_of_an_attention_head_equals_zero_weights(model, rerun):
    block, heads = model.n_blocks, model.hf.config.num_attention_heads
    size = model.structure.width(Site(block, "heads")) // heads
    columns = slice(size, 2 * size)
    pair = Site(block, "attn.in"), Site(block, "heads")
    found = rerun.from_level(block - 1, changes={pair: restrict_to(columns, replace_by_constant(torch.zeros(size)))})
    projection = model.structure.tap(pair[1]).module
    weight = projection.weight.data
    kept = weight.clone()
    transposed = type(projection).__name__ == "Conv1D"
    (weight if transposed else weight.T)[columns] = 0
    try:
        expected = rerun.from_level(block - 1)
    finally:
        weight.copy_(kept)
    assert torch.allclose(found, expected, rtol=0, atol=EXACT)
    assert not torch.allclose(found, rerun.levels[-1], atol=1e-6)


def test_an_attention_head_replaced_by_its_own_output_changes_nothing(model, rerun):
    pair = Site(2, "attn.in"), Site(2, "heads")
    same = rerun.from_level(1, changes={pair: restrict_to(slice(0, 8), untouched)})
    assert torch.equal(same, rerun.levels[-1])


def test_only_the_selected_block_changes(model, batch, rerun):
    """Blocks may share their modules (ALBERT); the call selects the block, in a rerun and in a full pass."""
    pair = Site(2, "attn.in"), Site(2, "attn.out")
    twice = lambda source, exact: 2 * exact  # noqa: E731
    changed = rerun.from_level(1, changes={pair: twice}, to=2)
    assert not torch.allclose(changed, rerun.levels[2], atol=1e-6)
    expected = rerun.from_level(2, changed)
    assert torch.equal(rerun.from_level(0, changes={pair: twice}), expected)
    with change_states(model, {pair: twice}):
        for _ in range(2):  # calls are counted anew in every pass
            (found,) = capture_states(model, [batch], [1, 2, model.n_blocks])
    assert torch.equal(found[1], rerun.pick(rerun.levels[1]))
    assert torch.equal(found[2], rerun.pick(changed))
    assert torch.equal(found[model.n_blocks], rerun.pick(expected))


def test_a_patched_level_replaces_the_blocks_before_it(model, batch, rerun):
    weight = 0.1 * torch.randn(model.d_model, model.d_model, dtype=torch.float64)
    jump = torch.nn.Linear(model.d_model, model.d_model, bias=False, dtype=torch.float64)
    jump.weight.data = weight
    with torch.no_grad(), change_states(model, {(0, 2): replace_by_map(jump)}):
        found = last_level(model, batch)
    expected = rerun.from_level(2, rerun.levels[0] @ weight.T)
    assert torch.allclose(found, rerun.pick(expected), rtol=0, atol=EXACT)


def test_a_change_reads_the_source_at_every_position(model, rerun):
    """A linear replacement of attention, compared with the captured input times its weight."""
    pair = Site(1, "attn.in"), Site(1, "attn.out")
    weight = torch.randn(model.d_model, model.d_model, dtype=torch.float64)
    seen = []

    def change(source, exact):
        seen.append(source @ weight.T)
        return seen[-1]

    rerun.from_level(0, changes={pair: change}, to=1)
    (found,) = capture_states(model, [rerun.batch], [pair[0]])
    grid = seen[0].reshape(*rerun.batch.input_ids.shape, -1)
    assert torch.allclose(rerun.pick(grid), found[pair[0]] @ weight.T, rtol=0, atol=1e-10)


def test_no_hook_remains(model, batch, rerun):
    before, whole = hooks(model), last_level(model, batch)
    pair = Site(1, "ffn.in"), Site(1, "ffn.out")

    def broken(source, exact):
        raise ZeroDivisionError

    rerun.from_level(0, changes={pair: untouched})
    with pytest.raises(ZeroDivisionError):
        rerun.from_level(0, changes={pair: broken})
    with pytest.raises(ZeroDivisionError), change_states(model, {pair: broken}):
        last_level(model, batch)
    with pytest.raises(KeyError), change_states(model, {pair: untouched}):
        raise KeyError
    with pytest.raises(IndexError):
        Rerun(model, replace(batch, input_ids=10**6 + batch.input_ids))
    assert hooks(model) == before
    assert torch.equal(last_level(model, batch), whole)


@pytest.fixture(scope="module")
def gpt2() -> Model:
    hf = tiny_model("gpt2")
    return Model(hf, discover(hf), "gpt2")


def test_noise_is_as_long_as_the_maps_error(gpt2):
    zero = torch.nn.Linear(32, 32, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(zero.weight)
    exact = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        made = add_noise(zero, seed=1)(exact, exact)
        again = add_noise(zero, seed=1)(exact, exact)
    assert torch.equal(made, again)
    assert torch.allclose((made - exact).norm(dim=-1), exact.norm(dim=-1))
    assert abs(torch.nn.functional.cosine_similarity(made - exact, exact, dim=-1).mean()) < 0.5


def test_a_float32_map_in_a_float64_model(gpt2):
    jump = torch.nn.Linear(32, 32)
    source = torch.randn(3, 32, dtype=torch.float64)
    with torch.no_grad():
        made = replace_by_map(jump)(source, source)
        assert made.dtype == torch.float64
        assert torch.equal(made, jump(source.float()).double())


def test_a_source_after_its_target_is_refused(gpt2):
    batch = sample(gpt2)
    with pytest.raises(BadModel, match="only later"), change_states(gpt2, {("2.attn.in", "1.attn.out"): untouched}):
        last_level(gpt2, batch)


def test_a_rerun_refuses_changes_between_blocks(gpt2):
    rerun = Rerun(gpt2, sample(gpt2))
    with pytest.raises(BadModel, match="inside one block"):
        rerun.from_level(0, changes={(Site(0), Site(2)): untouched})

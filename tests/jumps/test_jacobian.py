"""The Jacobian lens: exact where the answer is known on paper, equal to autograd's own Jacobian elsewhere."""

import pytest
import torch
from helpers import synthetic_jumps
from helpers.tiny_models import tiny_model
from transformers import AutoTokenizer

import layerjump as lj
from layerjump.data.batches import batch_from_ids
from layerjump.errors import BadModel, TextTooShort
from layerjump.jumps.estimators import jacobian
from layerjump.models.model import Model

TEXT = lj.Corpus(
    "stories",
    (
        "Once upon a time there was a little dog who liked to run in the park with his friend.",
        "The boy saw a big red ball and wanted to play with it all day long.",
        "One day the sun was hot. Mom said we can go to the sea and swim.",
        "Lily had a cat.",
    ),
    "made for the test",
)
ALL = {"split": "100/0/0", "tokens": 50}


@pytest.fixture(scope="module")
def tiny(data_folder) -> Model:
    return lj.load(data_folder / "tiny-gpt2", dtype="float64")


@pytest.fixture(scope="module")
def tokenizer(data_folder):
    return AutoTokenizer.from_pretrained(data_folder / "tiny-gpt2")


def with_vocabulary(family: str, tokenizer, **changes) -> Model:
    """A tiny model with random weights that reads the repository's own tokenizer."""
    hf = tiny_model(family, vocab_size=len(tokenizer), max_position_embeddings=64, **changes)
    return Model.wrap(hf, tokenizer, name=family)


def rows(model: Model, *, skip_first: int, max_length: int = 128, tokens: int = 50) -> list[list[int]]:
    """The sequences that these settings read."""
    chosen = lj.make_batches(
        TEXT,
        model.tokenization,
        lj.Positions("all", skip_first=skip_first),
        documents=lj.split_indices(len(TEXT.documents), "100/0/0").fit,
        tokens=tokens,
        max_length=max_length,
    )
    pairs = [pair for b in chosen for pair in zip(b.input_ids, b.attention_mask, strict=True)]
    return [ids[: int(mask.sum())].tolist() for ids, mask in pairs]


def by_hand(model: Model, ids: list[int], level: int, skip_first: int) -> torch.Tensor:
    """J of one sequence, from the whole Jacobian of the remaining blocks: mean over sources, sum over later targets."""
    state = next(lj.capture_states(model, [batch_from_ids(ids)], [level]))[level]

    def rest(source):
        stream = source[None]
        for block in model.structure.blocks[level:]:
            stream = block(stream)  # without a mask GPT-2 makes its own, a causal one
            stream = stream[0] if isinstance(stream, tuple) else stream
        return stream[0]

    whole = torch.func.jacrev(rest)(state)  # (target, dy, source, dx)
    counted = range(skip_first, len(ids) - 1)
    sums = [sum(whole[t, :, s] for t in counted if t >= s) for s in counted]
    return torch.stack(sums).mean(0)


@pytest.mark.parametrize("skip_first", [1, 4])
def test_it_is_the_mean_of_autograds_own_jacobian(tiny, skip_first):
    settings = {"skip_first": skip_first, "max_length": 8, "tokens": 12}
    found = lj.fit_jacobian(tiny, TEXT, split="100/0/0", **settings)
    read = [ids for ids in rows(tiny, **settings) if len(ids) > skip_first + 1]
    assert len(read) > 1
    for level in (0, 3):
        wanted = torch.stack([by_hand(tiny, ids, level, skip_first) for ids in read]).mean(0)
        weight = found[level, 4].weight
        torch.testing.assert_close(weight, wanted.float(), rtol=1e-5, atol=1e-6)


def test_on_an_exactly_linear_network_it_is_the_product_of_the_matrices(tokenizer):
    model = linear_gpt2(tokenizer)
    factors = [mixing(block) for block in model.hf.transformer.h]
    found = lj.fit_jacobian(model, TEXT, skip_first=2, **ALL)
    product = torch.eye(model.d_model, dtype=torch.float64)
    for level in reversed(range(model.n_blocks)):
        product = product @ factors[level]
        torch.testing.assert_close(found[level, 3].weight, product.float(), rtol=1e-5, atol=1e-5)
    assert (product - torch.eye(model.d_model)).norm() > 1  # and not by being the identity


def linear_gpt2(tokenizer) -> Model:
    """A GPT-2 whose blocks add M h to each position: no attention, no norms, no bend in the feed-forward."""
    hf = tiny_model("gpt2", vocab_size=len(tokenizer), activation_function="linear")
    for block in hf.transformer.h:
        torch.nn.init.zeros_(block.attn.c_proj.weight)
        torch.nn.init.zeros_(block.attn.c_proj.bias)
        block.ln_2 = torch.nn.Identity()
    return Model.wrap(hf, tokenizer, name="linear")


def mixing(block) -> torch.Tensor:
    """What such a block multiplies states by (GPT-2's weights multiply from the right)."""
    added = (block.mlp.c_fc.weight @ block.mlp.c_proj.weight).mT
    return torch.eye(len(added), dtype=torch.float64) + added.detach()


# Llama's and Gemma's norms round to float32, which small differences would be lost in.
@pytest.mark.parametrize(
    ("family", "step", "close"),
    [("gpt_neox", 1e-5, 1e-5), ("falcon", 1e-5, 1e-5), ("llama", 1e-2, 3e-3), ("gemma2", 1e-2, 3e-3)],
)
def test_finite_differences_agree_in_other_families(tokenizer, family, step, close):
    """Push the sources along a direction, one by one: what level L gains at the targets is J times the direction."""
    model = with_vocabulary(family, tokenizer)
    settings = {"skip_first": 3, "max_length": 9, "tokens": 12}
    weight = lj.fit_jacobian(model, TEXT, levels=[1], split="100/0/0", **settings)[1, 3].weight
    direction = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gains = [pushed(model, ids, direction, step) for ids in rows(model, **settings) if len(ids) > 4]
    wanted = torch.stack(gains).mean(0)
    torch.testing.assert_close(weight.double() @ direction, wanted, rtol=close, atol=close)


def pushed(model: Model, ids: list[int], direction: torch.Tensor, step: float):
    counted = range(3, len(ids) - 1)
    changes = []
    for source in counted:
        ends = [last_level(model, ids, source, sign * step * direction) for sign in (1, -1)]
        difference = (ends[0] - ends[1]) / (2 * step)
        changes.append(difference[counted.start : counted.stop].sum(0))
    return torch.stack(changes).mean(0)


def last_level(model: Model, ids: list[int], position: int, push: torch.Tensor) -> torch.Tensor:
    def hook(block, args, output):
        output = output.clone() if torch.is_tensor(output) else (output[0].clone(), *output[1:])
        (output if torch.is_tensor(output) else output[0])[0, position] += push
        return output

    handle = model.structure.blocks[0].register_forward_hook(hook)
    try:
        return next(lj.capture_states(model, [batch_from_ids(ids)], [3]))[3].clone()
    finally:
        handle.remove()


def test_batches_and_copies_change_rounding_alone(tiny, monkeypatch):
    whole = lj.fit_jacobian(tiny, TEXT, skip_first=2, **ALL)
    for cells in (40, 5000):
        monkeypatch.setattr(jacobian, "_MAX_POSITIONS", cells)
        again = lj.fit_jacobian(tiny, TEXT, skip_first=2, **ALL)
        for pair in whole:
            torch.testing.assert_close(again[pair].weight, whole[pair].weight)


def test_a_seed_gives_the_same_bits_and_another_seed_another_text(tiny):
    one, again = (lj.fit_jacobian(tiny, TEXT, tokens=20, seed=3) for _ in range(2))
    assert synthetic_jumps.same(one, again)
    others = [lj.fit_jacobian(tiny, TEXT, tokens=20, seed=seed) for seed in range(3)]
    assert not all(torch.equal(one[0, 4].weight, other[0, 4].weight) for other in others)


def test_the_model_is_left_as_it_was(tiny):
    parameter = next(tiny.hf.parameters())
    before = parameter.requires_grad, parameter.grad
    calls = []
    lj.fit_jacobian(tiny, TEXT, levels=[2], progress=lambda *told: calls.append(told), **ALL)
    assert (parameter.requires_grad, parameter.grad) == before
    assert all(p.grad is None for p in tiny.hf.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny.structure.blocks)
    assert calls[-1][0] == calls[-1][1] >= 50


def test_it_knows_where_it_comes_from_and_the_lens_reads_through_it(tiny, tmp_path):
    found = lj.fit_jacobian(tiny, TEXT, skip_first=2, **ALL)
    known = found.provenance
    lengths = [len(ids) for ids in rows(tiny, skip_first=2)]
    assert known.estimator == "jacobian"
    assert known.text_sha256 == TEXT.sha256
    assert known.tokens == sum(lengths)
    assert known.n_fit == sum(length - 1 - max(2, tiny.tokenization.n_added) for length in lengths)
    assert known.settings["n_prompts"] == len(lengths)
    found.save_pretrained(tmp_path)
    kept = lj.Jumps.from_pretrained(tmp_path, model=tiny)
    assert synthetic_jumps.same(kept, found)
    lens = lj.Lens(tiny, kept)
    states = torch.randn(5, tiny.d_model, dtype=torch.float64)
    mapped = (states.float() @ found[1, 4].weight.mT).double()
    torch.testing.assert_close(lens.logits(1, states), tiny.logits(mapped))
    assert lens("Once upon a time").first_fitted_position == 2


def test_what_it_cannot_do_is_said(tiny, data_folder):
    with pytest.raises(BadModel, match="masked model"):
        lj.fit_jacobian(lj.load(data_folder / "tiny-bert"), TEXT)
    with pytest.raises(BadModel, match="levels from 0 to 3"):
        lj.fit_jacobian(tiny, TEXT, levels=[4])
    with pytest.raises(TextTooShort):
        lj.fit_jacobian(tiny, TEXT, skip_first=100, split="100/0/0")
    short = lj.Corpus("short", ("Lily had a",), "made for the test")
    length = len(tiny.tokenization.wrap(tiny.tokenization.encode(["Lily had a"])[0]))
    with pytest.raises(TextTooShort, match="two positions"):
        lj.fit_jacobian(tiny, short, skip_first=length - 1, tokens=1, split="100/0/0")

"""Directions of tokens, and the effect of ablating them."""

import pytest
import torch

import layerjump as lj
from layerjump.errors import BadModel

TEXTS = [
    "Once upon a time, there was a little girl named",
    "One day, Tom went to the park with his",
    "She said, I like your red",
    "They played with the ball all",
    "The dog was very happy and ran to the",
    "Her mom smiled and gave her a",
]
TOKENS = [" the", " a", " dog", " big", " and", " her", " day"]


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2", dtype="float64")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=150)


@pytest.fixture(scope="module")
def lens(model, text):
    return lj.Lens(model, lj.fit(model, text, split="100/0/0"))


def state_at(model, level, text):
    ids = model.tokenization.wrap(model.tokenization.encode([text])[0])
    (found,) = lj.capture_states(model, [lj.batch_from_ids(ids)], [level])
    return found[level][-1]


def test_the_direction_is_the_gradient_up_to_the_norms_length(lens, model):
    """The norm divides by the length, so the gradient lacks the component along the mapped state."""
    token, level = model.tokenization.token_id(" dog"), 2
    found = lens.direction(" dog", level)
    assert float(found.norm()) == pytest.approx(1)
    weight = lens.jumps[level, 4].weight.double()
    mapped = (weight @ state_at(model, level, TEXTS[0])).requires_grad_()
    logits = model.logits(mapped)
    (gradient,) = torch.autograd.grad(logits[token] - logits.mean(), mapped)
    at_last = lj.Lens(model).direction(token, 4)
    along = mapped.detach() - mapped.detach().mean()
    along = along / along.norm()
    rest = at_last - (at_last @ along) * along
    assert float(torch.cosine_similarity(rest, gradient, dim=0)) == pytest.approx(1, abs=1e-4)
    pulled = weight.mT @ at_last
    torch.testing.assert_close(found, pulled / pulled.norm())


def test_at_the_last_level_prediction_and_effect_are_equal(lens):
    found = lj.measure_ablation(lens, TOKENS, 4, TEXTS)
    assert found.actual.shape == (len(TEXTS), len(TOKENS))
    assert found.actual.abs().max() > 0.1
    torch.testing.assert_close(found.predicted, found.actual, rtol=1e-9, atol=1e-9)


def test_at_late_levels_prediction_and_effect_correlate(lens, model):
    ids = torch.tensor([model.tokenization.encode([TEXTS[0]])[0]])
    before = model.hf(ids).logits
    late = lj.measure_ablation(lens, TOKENS, 3, TEXTS)
    assert late.correlation > 0.9
    assert late.actual.abs().max() > 0.5
    assert torch.equal(model.hf(ids).logits, before)  # no hook is left


def test_directions_are_causal_in_stories15m(real_folder, text):
    model = lj.load(real_folder("stories15M"))
    found = lj.measure_ablation(lj.Lens(model), TOKENS, 5, TEXTS)
    assert found.correlation > 0.8
    early = lj.measure_ablation(lj.Lens(model), TOKENS, 0, TEXTS)
    assert early.correlation < found.correlation


def test_one_token_and_one_text(lens):
    one = lj.measure_ablation(lens, " dog", 3, TEXTS[4])
    many = lj.measure_ablation(lens, TOKENS, 3, TEXTS)
    torch.testing.assert_close(one.predicted[0, 0], many.predicted[4, 2])
    torch.testing.assert_close(one.actual[0, 0], many.actual[4, 2])


def test_masked_models_need_jumps_to_final(data_folder, text):
    model = lj.load(data_folder / "tiny-bert", dtype="float64")
    with pytest.raises(BadModel, match="3:final"):
        lj.Lens(model).direction("dog", 3)
    jumps = lj.fit(model, text, pairs="3:final", positions="15%", split="100/0/0")
    lens, prompt = lj.Lens(model, jumps), "Lily had a [MASK] ball."
    found = lj.measure_ablation(lens, "dog", 3, prompt)
    # The unembedding is linear, so the prediction has a closed form.
    ids = model.tokenizer(prompt)["input_ids"]
    (at,) = lj.capture_states(model, [lj.batch_from_ids(ids)], [3])
    state = at[3][ids.index(model.tokenizer.mask_token_id)]
    head = model.structure.unembedding.weight.double()
    row = head[model.tokenization.token_id("dog")] - head.mean(0)
    pulled = jumps[3, "final"].weight.double().mT @ row
    expected = -(state @ pulled)
    torch.testing.assert_close(found.predicted[0, 0], expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_missing_level_is_refused(lens):
    with pytest.raises(BadModel, match="levels 0 to 4"):
        lj.measure_ablation(lens, " dog", 5, TEXTS[0])

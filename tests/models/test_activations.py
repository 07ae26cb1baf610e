"""Capturing: exact, at picked positions only, and without a trace."""

import pytest
import torch
from helpers.tiny_models import tiny_model

import layerjump as lj
from layerjump.errors import BadModel, NoPredictions
from layerjump.models.hooks import Capture
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample
from layerjump.models.sites import Site


@pytest.fixture
def model():
    return Model.wrap(tiny_model("llama"), name="tiny")


def hooks(model):
    return {module: (list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.hf.modules()}


def test_only_the_picked_rows_come_back_in_their_order(model):
    batch = sample(model)
    (everything,) = capture_states(model, [batch], [2])
    picks = torch.tensor([7, 3, 11])
    few = lj.Batch(
        batch.input_ids,
        batch.attention_mask,
        batch.row[picks],
        batch.position[picks],
        batch.document[picks],
        batch.token[picks],
    )
    (some,) = capture_states(model, [few], [2])
    assert torch.equal(some[2], everything[2][picks])


def test_with_room_states_are_the_same_and_stay_in_one_place(model):
    whole = sample(model)
    few = lj.Batch(
        whole.input_ids,
        whole.attention_mask,
        *(part[:5] for part in (whole.row, whole.position, whole.document, whole.token)),
    )
    batches, places = [few, whole, few], set()
    plain = [found.at for found in capture_states(model, batches, [0, 2])]
    for found, expected in zip(
        capture_states(model, batches, [0, 2], reuse_buffer_rows=len(whole.row)), plain, strict=True
    ):
        assert all(torch.equal(found.at[site], expected[site]) for site in expected)
        places.add(tuple(state.data_ptr() for state in found.at.values()))
    assert len(places) == 1
    (outside,) = capture_states(model, [whole], [2], reuse_buffer_rows=3)  # a batch that is larger than was said
    assert torch.equal(outside[2], plain[1][Site(2)])


def test_nothing_runs_behind_the_last_site_asked_for(model):
    ran = []
    for number, block in enumerate(model.structure.blocks, start=1):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    batch = sample(model)
    list(capture_states(model, [batch, batch], [1, 0]))
    assert ran == [1, 1]
    list(capture_states(model, [batch], [0, "final"]))
    assert ran == [1, 1, *range(1, model.n_blocks + 1)]


def test_no_hook_is_left_after_success_or_failure(model):
    def own(module, args, output):
        return None

    model.structure.blocks[1].register_forward_hook(own)
    before = hooks(model)
    list(capture_states(model, [sample(model)], [0, 1, "2.attn.in"]))
    assert hooks(model) == before

    unfinished = capture_states(model, [sample(model)] * 2, [0, 1])
    next(unfinished)
    assert hooks(model) != before
    unfinished.close()
    assert hooks(model) == before


def test_an_exception_inside_the_forward_pass_leaves_no_hook(model):
    before = hooks(model)
    bad = sample(model)
    bad.input_ids[0, 0] = 10_000  # outside the vocabulary
    with pytest.raises(IndexError):
        list(capture_states(model, [bad], [1]))
    assert hooks(model) == before


def test_weights_and_outputs_are_untouched(model):
    batch = sample(model)
    weights = {name: value.clone() for name, value in model.hf.state_dict().items()}
    with torch.no_grad():
        plain = model.hf(batch.input_ids, attention_mask=batch.attention_mask).logits
        with Capture(model.structure, model.structure.sites()[:-1]) as capture:
            capture.start(torch.arange(4))
            hooked = model.hf(batch.input_ids, attention_mask=batch.attention_mask).logits
    assert torch.equal(plain, hooked)
    assert all(torch.equal(weights[name], value) for name, value in model.hf.state_dict().items())


def test_the_vocabulary_product_does_not_run_unless_logits_are_asked_for(model):
    calls = []
    model.structure.unembedding.register_forward_hook(lambda module, args, output: calls.append(args[0].shape))
    batch = sample(model)
    list(capture_states(model, [batch], [0, 3, "final"]))
    assert calls == []
    (found,) = capture_states(model, [batch], [0], logits=True)
    assert calls == [(batch.n_picks, model.d_model)]
    assert found.logits.shape == (batch.n_picks, 61)


def test_predictions_of_a_headless_model_are_refused_but_states_are_not():
    model = Model.wrap(tiny_model("bert"), no_predictions="saved without its head")
    batch = sample(model)
    assert len(list(capture_states(model, [batch], [1]))) == 1
    with pytest.raises(NoPredictions, match="without its head"):
        list(capture_states(model, [batch], [1], logits=True))
    with pytest.raises(NoPredictions):
        model.logits(torch.zeros(1, 32, dtype=torch.float64))


@pytest.mark.parametrize(
    ("site", "message"),
    [(4, "levels 0 to 3"), ("4.attn.in", "blocks are 1 to 3"), ("1.attn_raw", "no site 1.attn_raw")],
)
def test_a_site_the_model_lacks_is_named(model, site, message):
    with pytest.raises(BadModel, match=message):
        list(capture_states(model, [sample(model)], [site]))


@pytest.mark.parametrize("name", ["five", "-1", "3.nose", "3.attn", ""])
def test_a_name_that_is_no_site_is_refused(name):
    with pytest.raises(BadModel, match="expected a site"):
        Site.parse(name)


def test_site_names_round_trip():
    for name in ("0", "12", "3.attn.in", "3.mid", "3.heads", "final"):
        assert str(Site.parse(name)) == name


def test_float32_states_agree_with_float64_ones():
    """float32 rounds at about 1e-7 an operation; three tiny blocks stay within 1e-4 of the largest entry."""
    exact, float32_products = (Model.wrap(tiny_model("llama")), Model.wrap(tiny_model("llama", dtype=torch.float32)))
    batch = sample(exact)
    (a,), (b,) = capture_states(exact, [batch], [3]), capture_states(float32_products, [batch], [3])
    assert b[3].dtype == torch.float32
    assert (a[3] - b[3]).abs().max() < 1e-4 * a[3].abs().max()

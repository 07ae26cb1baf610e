"""The parts of a refinement: the sampled softmax, the tuner's state and checkpoint, and maps to two targets."""

import math

import numpy as np
import pytest
import torch
from helpers import fitted_gpt2
from helpers.story_text import stories
from helpers.tiny_models import tiny_model
from torch import nn

import layerjump as lj
from layerjump.errors import BadArtifact
from layerjump.jumps.maps import to_affine
from layerjump.lens.refine import (
    CHECKPOINT_NAME,
    KLObjective,
    SampledTarget,
    TrainableMap,
    Tuner,
    select_refined,
    tunable_pairs,
)
from layerjump.models.sites import FINAL, Site

TEXT = stories(400)

model = fitted_gpt2.model  # a fixture


@pytest.fixture(scope="module")
def structure():
    return lj.Model.wrap(tiny_model("llama", vocab_size=3000, dtype=torch.float32)).structure


@pytest.fixture(scope="module")
def states(structure):
    draw = torch.Generator().manual_seed(0)
    width = structure.unembedding.get_parameter("weight").shape[1]
    final, other = 2 * torch.randn(2, 8, width, generator=draw)
    return final, 0.8 * final + 0.2 * other  # what a map that is not bad lands on


def gradient(target, mapped):
    """The KL, and its gradient with respect to the output of a map."""
    mapped = mapped.clone().requires_grad_(True)
    logits = target.logits(mapped, needs_final_norm=False)
    kl, slope = target.kl(logits.detach())
    logits.backward(slope)
    return kl, mapped.grad


def test_kl_and_its_gradient_equal_autograd(structure, states):
    final, mapped = states
    kl, found = gradient(SampledTarget.full(structure, final), mapped)
    mapped = mapped.clone().requires_grad_(True)
    own = structure.decode(final).log_softmax(-1).detach()
    guess = structure.decode(mapped).log_softmax(-1)
    expected = torch.nn.functional.kl_div(guess, own, reduction="sum", log_target=True)
    expected.backward()
    assert kl == pytest.approx(float(expected.detach()), rel=1e-5)
    assert torch.allclose(found, mapped.grad, atol=1e-5)


def test_the_sampled_softmax_is_unbiased_on_average(structure, states):
    final, mapped = states
    whole, expected = gradient(SampledTarget.full(structure, final), mapped)
    draws = [
        gradient(SampledTarget.full(structure, final).sample(np.random.default_rng(seed), 300, 300), mapped)
        for seed in range(200)
    ]
    mean = torch.stack([slope for _, slope in draws]).mean(0)
    one = draws[0][1]
    assert float((one - expected).norm() / expected.norm()) > 0.1  # a single one is off
    assert float((mean - expected).norm() / expected.norm()) < 0.04
    assert np.mean([kl for kl, _ in draws]) == pytest.approx(whole, rel=0.02)
    # Taken for the whole vocabulary, the same tokens would lead astray.
    few = SampledTarget.full(structure, final).sample(np.random.default_rng(0), 300, 300)
    unweighted = SampledTarget(few.structure, few.probabilities / few.probabilities.sum(-1, keepdim=True))
    assert float((gradient(unweighted, mapped)[1] - expected).norm() / expected.norm()) > 0.08


def test_a_small_vocabulary_is_not_sampled(structure, states):
    target = SampledTarget.full(structure, states[0])
    assert target.sample(np.random.default_rng(0)) is target


def both(one, other):
    """Values for the maps of two levels."""
    return {(Site(0), FINAL): one, (Site(1), FINAL): other}


def test_a_map_whose_kl_is_always_nan_keeps_its_start():
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    starts = [one.to_affine().factors[0] for one in tuned.values()]
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    tuner.record_validation(both(1.0, math.nan))
    for step in range(3):
        for one in tuned.values():
            one(rows).square().sum().backward()
        tuner.update(both(1.0, 1.0))
        tuner.record_validation(both(0.9 - 0.1 * step, math.nan))
    best = [jump.factors[0] for jump in tuner.best_maps().values()]
    assert not torch.equal(best[0], starts[0])
    assert torch.equal(best[1], starts[1])
    assert not tuner.is_finished(patience=2)  # the other level still falls


def test_a_map_whose_kl_rises_is_reset_with_a_lower_learning_rate():
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)

    def step():
        """How far each level's weights have gone."""
        before = [one.to_affine().factors[0] for one in tuned.values()]
        for one in tuned.values():
            one(rows).square().sum().backward()
        tuner.update(both(1.0, 1.0))
        after = [one.to_affine().factors[0] for one in tuned.values()]
        return [float((b - a).norm()) for a, b in zip(before, after, strict=True)]

    tuner.record_validation(both(1.0, 1.0))
    starts = [one.to_affine().factors[0] for one in tuned.values()]
    first = step()
    tuner.record_validation(both(0.9, 1.1))
    now = [one.to_affine().factors[0] for one in tuned.values()]
    assert not torch.equal(now[0], starts[0])
    assert torch.equal(now[1], starts[1])
    second = step()
    assert second[0] == pytest.approx(first[0], rel=0.1)
    assert second[1] < 0.5 * first[1]


@pytest.mark.parametrize("broken", ["loss", "gradient", "square"])
def test_a_step_that_is_not_finite_is_skipped(broken):
    """Adam skips it too: an infinite second moment would stay."""
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    for step in range(3):
        before = [one.to_affine().factors[0] for one in tuned.values()]
        for one in tuned.values():
            one(rows).square().sum().backward()
        second = list(tuned.values())[1]
        if step == 1 and broken != "loss":
            value = math.nan if broken == "gradient" else 1e30
            next(second.parameters()).grad[0] = value
        tuner.update(both(1.0, math.nan if step == 1 and broken == "loss" else 1.0))
        moved = [not torch.equal(a, one.to_affine().factors[0]) for a, one in zip(before, tuned.values(), strict=True)]
        assert moved == [True, step != 1]
        assert all(bool(p.isfinite().all()) for one in tuned.values() for p in one.parameters())


def test_it_finishes_when_validations_no_longer_lower_the_mean():
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    for validation in range(6):
        tuner.record_validation(both(1.0 - 0.1 * min(validation, 2), 1.0))
        # Validations 0, 1 and 2 lower it; from then on two in a row do not.
        assert tuner.is_finished(patience=2) == (validation >= 4)
    assert tuner.step == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda parameters: parameters.clear(),
        lambda parameters: parameters.update({name: value[None] for name, value in parameters.items()}),
        lambda parameters: parameters.update({name: value * math.nan for name, value in parameters.items()}),
        lambda parameters: parameters.update(dict.fromkeys(parameters, 3)),
    ],
)
def test_a_checkpoint_with_broken_parameters_is_refused(damage, tmp_path):
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    tuner.record_validation(both(1.0, 1.0))
    tuner.save(tmp_path, "mine")
    tuner.restore(tmp_path, "mine")
    state = torch.load(tmp_path / CHECKPOINT_NAME)
    damage(state["kept"]["1>final"])
    torch.save(state, tmp_path / CHECKPOINT_NAME)
    with pytest.raises(BadArtifact, match="damaged"):
        tuner.restore(tmp_path, "mine")


def test_a_checkpoint_with_a_negative_kl_is_refused(tmp_path):
    tuner = Tuner(both(*(TrainableMap(nn.Linear(4, 4), torch.randn(50, 4)) for _ in range(2))), 0.1, 9)
    tuner.record_validation(both(1.0, 1.0))
    tuner.best_kl[0] = -100.0  # which no validation would ever undercut
    tuner.save(tmp_path, "mine")
    with pytest.raises(BadArtifact, match="below 0"):
        tuner.restore(tmp_path, "mine")


@pytest.fixture(scope="module")
def start(model):
    return lj.fit(model, TEXT, estimator="calibrated", keep_both_targets=True, tokens=12_000)


@pytest.fixture(scope="module")
def late(model):
    return Site(model.n_blocks - 2), Site(model.n_blocks - 1)


@pytest.fixture(scope="module")
def last(model):
    return Site(model.n_blocks)


def test_both_targets_of_late_levels_are_tunable(model, start, late, last):
    two = {(site, target) for site in late for target in (last, FINAL)}
    assert {pair for pair in start if pair[0] in late} == two
    assert two <= set(tunable_pairs(start, model))
    plain = lj.fit(model, TEXT, estimator="calibrated", tokens=12_000)
    assert len(plain) == model.n_blocks


def test_the_target_with_the_lower_final_kl_is_kept(model, start, late, last):
    pairs = tunable_pairs(start, model)
    tuned = {pair: TrainableMap(start[pair], torch.randn(50, model.d_model)) for pair in pairs}
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    begins = {(late[0], last): 0.5, (late[1], FINAL): 0.5}
    tuner.record_validation({pair: begins.get(pair, 1.0) for pair in pairs})
    for one in tuned.values():
        for parameter in one.parameters():
            parameter.data += 0.5
    ends = {(late[0], FINAL): 0.2, (late[1], last): 0.2}
    tuner.record_validation({pair: ends.get(pair, 0.4) for pair in pairs})
    refined = select_refined(start, tuner, TEXT)
    assert [pair for pair in refined if pair[0] in late] == [*ends]
    assert refined.provenance.settings["refine"]["kl_before"][-2:] == [0.5, 0.5]
    assert refined.provenance.settings["refine"]["kl_after"][-2:] == [0.2, 0.2]
    for pair in ends:  # as it was tuned, and not as it began
        assert torch.equal(to_affine(refined[pair]).weight, tuned[pair].to_affine().weight)
        assert not torch.allclose(to_affine(refined[pair]).weight, to_affine(start[pair]).weight)
    # A factor is temperatures of maps onto `final` alone.
    temperatures = set(refined.provenance.settings["temperature"])
    assert temperatures == {str(source) for source, target in refined if target == FINAL}


def test_no_temperature_remains_without_a_map_to_final(model, start, late, last):
    pairs = [(site, target) for site in late for target in (last, FINAL)]
    maps = {pair: to_affine(start[pair]) for pair in pairs}
    only = lj.Jumps.from_maps(maps, {pair: start.info[pair] for pair in pairs}, start.provenance)
    tuner = Tuner({pair: TrainableMap(only[pair], torch.randn(50, model.d_model)) for pair in pairs}, 0.1, 9)
    tuner.record_validation({pair: 0.5 if pair[1] == last else 1.0 for pair in pairs})
    temperatures = select_refined(only, tuner, TEXT).provenance.settings["temperature"]
    assert not {str(site) for site in late} & set(temperatures)


def test_the_reported_kl_is_that_of_the_lens(model, start):
    """Validation KL of the refined lens, on the same rows."""
    tuned = lj.refine(model, start, TEXT, steps=50)
    objective = KLObjective(model, tuned, tunable_pairs(tuned, model))
    rows = objective.validation_rows(objective.make_batches(TEXT, 0, None)[1])
    own = model.structure.decode(rows.final).log_softmax(-1)
    after = tuned.provenance.settings["refine"]["kl_after"]
    for level, expected in enumerate(after):
        guess = lj.Lens(model, tuned).logits(level, rows.states[Site(level)]).log_softmax(-1)
        assert float((own.exp() * (own - guess)).sum(-1).mean()) == pytest.approx(expected, rel=1e-4)


def test_a_resumed_run_ends_with_the_same_bits(model, start, tmp_path):
    def stop(done, whole, kl):
        raise KeyboardInterrupt

    whole = lj.refine(model, start, TEXT, steps=50)
    with pytest.raises(KeyboardInterrupt):
        lj.refine(model, start, TEXT, steps=50, checkpoint_folder=tmp_path, progress=stop)
    # Stopped before it was saved: the first look is taken again. Then stopped after it.
    with pytest.raises(KeyboardInterrupt):
        lj.refine(
            model,
            start,
            TEXT,
            steps=50,
            checkpoint_folder=tmp_path,
            progress=lambda done, *_: stop(done, 0, 0) if done == 50 else None,
        )
    taken_up = lj.refine(model, start, TEXT, steps=50, checkpoint_folder=tmp_path)
    assert list(taken_up) == list(whole)
    assert all(torch.equal(a, b) for a, b in zip(taken_up.parameters(), whole.parameters(), strict=True))


def test_a_worse_target_does_not_end_the_refinement(late, last):
    """One target has a high constant KL, the other a falling one: the lower of the two counts."""
    rows = torch.randn(50, 4)
    pairs = [(late[0], last), (late[0], FINAL)]
    tuner = Tuner({pair: TrainableMap(torch.nn.Linear(4, 4), rows) for pair in pairs}, 0.1, 1_000)
    for validation in range(20):
        tuner.record_validation({pairs[0]: 6.0, pairs[1]: 0.05 * 0.99**validation})
    assert not tuner.is_finished(patience=8)


def test_requested_maps_that_are_not_refined_stay(model, last):
    jumps = lj.fit(model, TEXT, estimator="affine", pairs=f"0:{last},0:final,1:{last}", tokens=6_000)
    tuned = lj.refine(model, jumps, TEXT, steps=5)
    assert set(tuned) == set(jumps)
    first = Site(0), FINAL  # not what a lens reads level 0 by
    assert torch.equal(to_affine(tuned[first]).weight, to_affine(jumps[first]).weight)


def test_a_kl_that_is_not_finite_is_saved_as_null(model, start, tmp_path):
    pairs = tunable_pairs(start, model)
    tuned = {pair: TrainableMap(start[pair], torch.randn(50, model.d_model)) for pair in pairs}
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    tuner.record_validation({pair: float("nan") if pair[0] == Site(0) else 1.0 for pair in pairs})
    refined = select_refined(start, tuner, TEXT)
    refined.save_pretrained(tmp_path)
    again = lj.Jumps.from_pretrained(tmp_path)
    assert again.provenance.settings["refine"]["kl_after"][0] is None

"""Two maps of one level, onto level L and onto `final`: a tuner keeps the one that ends lower."""

import pytest
import torch
from helpers import fitted_gpt2
from helpers.story_text import stories

import layerjump as lj
from layerjump.jumps.maps import to_affine
from layerjump.lens.tuning import KLObjective, TrainableMap, Tuner, select_refined, tunable_pairs
from layerjump.models.structure import FINAL, Site

TEXT = stories(400)


model = fitted_gpt2.model  # a fixture


@pytest.fixture(scope="module")
def start(model):
    return lj.fit(model, TEXT, estimator="calibrated", how="to-tune", tokens=12_000)


@pytest.fixture(scope="module")
def late(model):
    return Site(model.n_blocks - 2), Site(model.n_blocks - 1)


@pytest.fixture(scope="module")
def last(model):
    return Site(model.n_blocks)


def test_both_are_there_to_be_tuned(model, start, late, last):
    two = {(site, target) for site in late for target in (last, FINAL)}
    assert {pair for pair in start if pair[0] in late} == two
    assert two <= set(tunable_pairs(start, model))
    plain = lj.fit(model, TEXT, estimator="calibrated", tokens=12_000)
    assert len(plain) == model.n_blocks


def test_what_ends_lower_is_kept_whatever_it_began_with(model, start, late, last):
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
    made = select_refined(start, tuner, TEXT)
    assert [pair for pair in made if pair[0] in late] == [*ends]
    assert made.provenance.settings["refine"]["kl_before"][-2:] == [0.5, 0.5]
    assert made.provenance.settings["refine"]["kl_after"][-2:] == [0.2, 0.2]
    for pair in ends:  # as it was tuned, and not as it began
        assert torch.equal(to_affine(made[pair]).weight, tuned[pair].to_affine().weight)
        assert not torch.allclose(to_affine(made[pair]).weight, to_affine(start[pair]).weight)
    # A factor is told of maps onto `final` alone.
    told = set(made.provenance.settings["temperature"])
    assert told == {str(source) for source, target in made if target == FINAL}


def test_no_factor_is_told_where_none_is_left(model, start, late, last):
    pairs = [(site, target) for site in late for target in (last, FINAL)]
    maps = {pair: to_affine(start[pair]) for pair in pairs}
    only = lj.Jumps.of(maps, {pair: start.info[pair] for pair in pairs}, start.provenance)
    tuner = Tuner(
        {pair: TrainableMap(only[pair], torch.randn(50, model.d_model)) for pair in pairs}, 0.1, 9
    )
    tuner.record_validation({pair: 0.5 if pair[1] == last else 1.0 for pair in pairs})
    told = select_refined(only, tuner, TEXT).provenance.settings["temperature"]
    assert not {str(site) for site in late} & set(told)


def test_what_is_told_is_what_the_lens_does(model, start):
    """Held-out KL of the lens that comes out, on the rows that were watched."""
    tuned = lj.refine(model, start, TEXT, steps=50)
    objective = KLObjective(model, tuned, tunable_pairs(tuned, model))
    rows = objective.validation_rows(objective.make_batches(TEXT, 0, None)[1])
    own = model.structure.decode(rows.final).log_softmax(-1)
    after = tuned.provenance.settings["refine"]["kl_after"]
    for level, wanted in enumerate(after):
        guess = lj.Lens(model, tuned).logits(level, rows.states[Site(level)]).log_softmax(-1)
        assert float((own.exp() * (own - guess)).sum(-1).mean()) == pytest.approx(wanted, rel=1e-4)


def test_an_interruption_changes_nothing(model, start, tmp_path):
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
    assert all(
        torch.equal(a, b) for a, b in zip(taken_up.parameters(), whole.parameters(), strict=True)
    )


def test_a_landing_that_loses_does_not_end_the_tuning(late, last):
    """A high and flat KL beside one that falls: it is the level's lowest that counts."""
    rows = torch.randn(50, 4)
    pairs = [(late[0], last), (late[0], FINAL)]
    tuner = Tuner({pair: TrainableMap(torch.nn.Linear(4, 4), rows) for pair in pairs}, 0.1, 1_000)
    for look in range(20):
        tuner.record_validation({pairs[0]: 6.0, pairs[1]: 0.05 * 0.99**look})
    assert not tuner.is_finished(patience=8)


def test_maps_that_were_asked_for_stay(model, last):
    jumps = lj.fit(
        model, TEXT, estimator="affine", pairs=f"0:{last},0:final,1:{last}", tokens=6_000
    )
    tuned = lj.refine(model, jumps, TEXT, steps=5)
    assert set(tuned) == set(jumps)
    first = Site(0), FINAL  # not what a lens reads level 0 by
    assert torch.equal(to_affine(tuned[first]).weight, to_affine(jumps[first]).weight)


def test_a_level_without_a_number_can_be_kept(model, start, tmp_path):
    pairs = tunable_pairs(start, model)
    tuned = {pair: TrainableMap(start[pair], torch.randn(50, model.d_model)) for pair in pairs}
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    tuner.record_validation({pair: float("nan") if pair[0] == Site(0) else 1.0 for pair in pairs})
    made = select_refined(start, tuner, TEXT)
    made.save_pretrained(tmp_path)
    again = lj.Jumps.from_pretrained(tmp_path)
    assert again.provenance.settings["refine"]["kl_after"][0] is None

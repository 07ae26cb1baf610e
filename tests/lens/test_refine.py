"""Tuner by KL."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers import fitted_gpt2
from helpers.processes import printed_by
from helpers.story_text import stories

import layerjump as lj
from layerjump.errors import BadArtifact, BadEstimator, BadJumps
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.maps import to_affine
from layerjump.lens.refine import CHECKPOINT_NAME, KLObjective, TrainableMap, TrainingRows, tunable_pairs
from layerjump.metrics.logits import LOGITS_MEMORY
from layerjump.models.sites import FINAL, Site

TEXT = stories(400)


model = fitted_gpt2.model  # a fixture


@pytest.fixture(scope="module")
def jumps(model):
    return lj.fit(model, TEXT, estimator="calibrated", tokens=12_000)


@pytest.fixture(scope="module")
def refined(model, jumps):
    return lj.refine(model, jumps, TEXT, steps=75)


@torch.no_grad()
def mean_kl(model, jumps):
    """The mean KL on documents used neither to fit nor to refine nor to stop."""
    documents = lj.split_indices(len(TEXT.documents), "80/10/10", seed=0).test
    found = lj.make_batches(TEXT, model.tokenization, lj.Positions("all"), documents=documents)
    lens, last, total = lj.Lens(model, jumps), model.n_blocks, []
    for each in lj.capture_states(model, found, range(last + 1)):
        own = model.logits(each.at[Site(last)]).log_softmax(-1)
        for level in range(last):
            guess = lens.logits(level, each.at[Site(level)]).log_softmax(-1)
            total.append((own.exp() * (own - guess)).sum(-1).mean())
    return float(torch.stack(total).mean())


def test_refinement_lowers_kl_on_unseen_text(model, jumps, refined):
    assert mean_kl(model, refined) < 0.98 * mean_kl(model, jumps)
    about = refined.provenance.settings["refine"]
    assert all(b <= a for a, b in zip(about["kl_before"], about["kl_after"], strict=True))
    assert refined.provenance.estimator == "calibrated+kl"
    assert refined.info[1, "final"].r2 is None
    assert lj.Lens(model, refined).name == "calibrated+kl"


def test_the_input_jumps_do_not_change(model, jumps):
    before = {pair: to_affine(jumps[pair]).weight.clone() for pair in jumps}
    lj.refine(model, jumps, TEXT, steps=2)
    assert all(torch.equal(before[pair], to_affine(jumps[pair]).weight) for pair in jumps)
    assert not any(parameter.requires_grad for parameter in jumps.parameters())


@pytest.mark.parametrize(
    ("estimator", "settings"),
    [("mat", {}), ("low-rank", {"rank": 4, "pairs": "to-final"}), ("n-njtc", {}), ("affine", {})],
)
def test_maps_of_every_form_are_refined(model, estimator, settings):
    closed = lj.fit(model, TEXT, estimator=estimator, tokens=12_000, **settings)
    tuned = lj.refine(model, closed, TEXT, steps=25)
    assert tuned.n_parameters == closed.n_parameters
    assert mean_kl(model, tuned) < mean_kl(model, closed)


@pytest.mark.parametrize("landing", [FINAL, Site(4)])
def test_gradients_are_finite_differences(model, jumps, landing):
    """For maps to `final`, and for maps to level L, which the final norm follows."""
    if landing != FINAL:
        jumps = lj.fit(model, TEXT, estimator="affine", tokens=4_000)
    objective = KLObjective(model, jumps, tunable_pairs(jumps, model))
    fit, _ = objective.make_batches(TEXT, 0, None)
    rows = objective.sample_rows(fit, 0, 12)
    pair = Site(1), landing
    tuned = TrainableMap(jumps[pair], rows.states[pair[0]])
    objective.mean_kl(rows, {pair: tuned}, (0,))
    draw = torch.Generator().manual_seed(0)
    for parameter in tuned.parameters():
        along = torch.randn(parameter.shape, generator=draw)
        slope = float((parameter.grad * along).sum())
        ends = []
        for size in (-1e-3, 1e-3):
            moved = copy.deepcopy(tuned)
            same = dict(tuned.named_parameters())
            for name, other in moved.named_parameters():
                if same[name] is parameter:
                    other.data.add_(size * along)
            ends.append(objective.mean_kl(rows, {pair: moved})[pair])
        assert (ends[1] - ends[0]) / 2e-3 == pytest.approx(slope, rel=0.02, abs=1e-3)


def test_a_trainable_map_converts_to_the_same_map(model, jumps):
    rows = torch.randn(20, model.d_model)
    tuned = TrainableMap(jumps[1, FINAL], rows)
    for _ in range(2):
        taken = tuned.to_affine()
        assert torch.allclose(taken.weight, to_affine(jumps[1, FINAL]).weight, rtol=1e-5)
        assert torch.allclose(tuned(rows), jumps[1, FINAL](rows), atol=1e-4)


def test_kl_is_the_mean_over_positions(model, jumps):
    objective = KLObjective(model, jumps, tunable_pairs(jumps, model))
    _, held = objective.make_batches(TEXT, 0, None)
    rows, site, pair = objective.validation_rows(held), Site(1), (Site(1), FINAL)
    own = model.structure.decode(rows.final).log_softmax(-1)
    guess = lj.Lens(model, jumps).logits(1, rows.states[site]).log_softmax(-1)
    expected = float((own.exp() * (own - guess)).sum(-1).mean())
    tuned = TrainableMap(jumps[pair], rows.states[site])
    assert objective.mean_kl(rows, {pair: tuned})[pair] == pytest.approx(expected, rel=1e-4)
    half = TrainingRows({site: rows.states[site][:7]}, rows.final[:7])
    assert objective.mean_kl(half, {pair: tuned})[pair] == pytest.approx(
        float((own.exp() * (own - guess)).sum(-1)[:7].mean()), rel=1e-4
    )


def test_the_model_is_decoded_once_for_all_levels(model, jumps):
    objective = KLObjective(model, jumps, tunable_pairs(jumps, model))
    rows = objective.sample_rows(objective.make_batches(TEXT, 0, None)[0], 0, 12)
    tuned = {pair: TrainableMap(jumps[pair], rows.states[pair[0]]) for pair in objective.pairs}
    calls = []
    handle = model.structure.unembedding.register_forward_hook(lambda *_: calls.append(1))
    objective.mean_kl(rows, tuned, (0,))
    handle.remove()
    assert len(calls) == model.n_blocks + 1


def test_the_documents_are_those_of_the_fit(model, jumps):
    """The same number of tokens selects the same documents as in a fit."""
    objective = KLObjective(model, jumps, tunable_pairs(jumps, model))
    found = objective.make_batches(TEXT, 0, 6_000)
    planned = plan_run(model, TEXT, tokens=6_000).batches
    for mine, name in zip(found, ("fit", "validation"), strict=True):
        assert mine.sequences.ids.tolist() == planned[name].sequences.ids.tolist()


def test_runs_are_reproducible_and_resumable(model, jumps, refined, tmp_path):
    def stop(done, whole, kl):
        if done == 50:
            raise KeyboardInterrupt

    again = lj.refine(model, jumps, TEXT, steps=75)
    with pytest.raises(KeyboardInterrupt):
        lj.refine(model, jumps, TEXT, steps=75, checkpoint_folder=tmp_path, progress=stop)
    assert (tmp_path / CHECKPOINT_NAME).is_file()
    taken_up = lj.refine(model, jumps, TEXT, steps=75, checkpoint_folder=tmp_path)
    for made in (again, taken_up):
        assert all(torch.equal(a, b) for a, b in zip(made.parameters(), refined.parameters(), strict=True))
    with pytest.raises(BadArtifact, match="other settings"):
        lj.refine(model, jumps, TEXT, steps=80, checkpoint_folder=tmp_path)
    other = lj.fit(model, TEXT, estimator="ridge", strength=1.0)  # as wide, but other numbers
    with pytest.raises(BadArtifact, match="other settings"):
        lj.refine(model, other, TEXT, steps=75, checkpoint_folder=tmp_path)
    (tmp_path / CHECKPOINT_NAME).write_bytes((tmp_path / CHECKPOINT_NAME).read_bytes()[:1000])
    with pytest.raises(BadArtifact, match="damaged"):
        lj.refine(model, jumps, TEXT, steps=75, checkpoint_folder=tmp_path)


def test_a_learning_rate_that_is_too_high_does_no_harm(model, jumps):
    wild = lj.refine(model, jumps, TEXT, steps=50, learning_rate=100)
    about = wild.provenance.settings["refine"]
    assert all(b <= a for a, b in zip(about["kl_before"], about["kl_after"], strict=True))
    assert all(bool(torch.isfinite(p).all()) for p in wild.parameters())


def test_masked_models_are_refined(data_folder):
    bert = lj.load(data_folder / "tiny-bert")
    closed = lj.fit(bert, TEXT, estimator="calibrated", positions="15%", tokens=12_000)
    tuned = lj.refine(bert, closed, TEXT, steps=25)
    about = tuned.provenance.settings["refine"]
    assert sum(about["kl_after"]) < sum(about["kl_before"])


def test_jumps_that_cannot_be_refined_are_refused(model):
    for estimator in ("identity", "ojfa"):
        closed = lj.fit(model, TEXT, estimator=estimator, tokens=4_000)
        with pytest.raises(BadEstimator):
            lj.refine(model, closed, TEXT, steps=1)
    apart = lj.fit(model, TEXT, pairs="0:1,1:2", tokens=4_000)
    with pytest.raises(BadJumps, match="'to-last' or pairs='to-final'"):
        lj.refine(model, apart, TEXT, steps=1)
    with pytest.raises(BadEstimator, match="1 or more"):
        lj.refine(model, lj.fit(model, TEXT, tokens=4_000), TEXT, steps=0)


def test_another_text_is_split_in_the_default_ratio(model, tmp_path):
    known = lj.fit(model, TEXT, estimator="affine", tokens=12_000, split="300/50/50")
    lj.export_lens(known, model, tmp_path / "lens", "tuned-lens")
    other = stories(60)
    for jumps in (known, lj.import_lens(tmp_path / "lens", model)):
        tuned = lj.refine(model, jumps, other, steps=2)
        assert tuned.provenance.settings["refine"]["text_sha256"] == other.sha256


def test_patience_must_be_positive(model, jumps):
    with pytest.raises(BadEstimator, match="patience of 1 or more, got 0"):
        lj.refine(model, jumps, TEXT, steps=2, patience=0)


PEAK = """
from pathlib import Path
import torch
import layerjump as lj
from helpers.tiny_models import tiny_model
from layerjump.lens.refine import KLObjective, TrainableMap, TrainingRows

def peak():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if "VmHWM" in line).split()[1]) * 1024

model = lj.Model.wrap(tiny_model("llama", vocab_size=262_144, dtype=torch.float32))
width, draw = model.d_model, torch.Generator().manual_seed(0)
site = lj.Site(1)
jump = torch.nn.Linear(width, width)
at = torch.randn(600, width, generator=draw)
pair = site, lj.Site(model.n_blocks)
objective = KLObjective(model, None, [pair])
tuned = {pair: TrainableMap(jump, at)}
few = TrainingRows({site: at[:2]}, at[:2])
objective.mean_kl(few, tuned, (0,))  # loads what is loaded on first use
before = peak()
objective.mean_kl(TrainingRows({site: at}, at), tuned, (0,))
objective.mean_kl(TrainingRows({site: at}, at), tuned)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's high-water mark")
def test_peak_memory_is_bounded_for_a_vocabulary_of_262_144():
    """600 rows of logits are 630 MB a buffer, and a gradient needs several."""
    assert int(printed_by(PEAK)) < 1.2 * LOGITS_MEMORY

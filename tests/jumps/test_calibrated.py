"""Maps that land after the final norm."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.cli import run
from helpers.story_text import stories
from sklearn.linear_model import Ridge

import layerjump as lj
from layerjump.errors import BadEstimator, BadMoments
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.estimators.calibrated import fit_calibrated
from layerjump.jumps.estimators.least_squares import ridge, strength_unit
from layerjump.jumps.estimators.registry import EstimatorSettings
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.maps import compute_features, to_affine
from layerjump.jumps.moments import Moments
from layerjump.jumps.moments_of_splits import SplitMoments, merge_moments
from layerjump.jumps.score_from_moments import residual
from layerjump.models.sites import FINAL, Site

TOKENS = 30_000


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def text():
    return stories(900)


@pytest.fixture(scope="module")
def collected(model, text):
    return lj.collect_moments(model, text, pairs="to-final", features="both", float32_products=True, tokens=TOKENS)


@pytest.fixture(scope="module")
def jumps(model, collected):
    return solve_jumps(collected, "calibrated", model=model)


def states_of(model, text, part):
    sites = [*map(Site, range(model.n_blocks + 1)), FINAL]
    documents = getattr(lj.split_indices(len(text.documents), "80/10/10", seed=0), part)
    wanted = max(1, TOKENS * len(documents) // len(text.documents))
    found = lj.make_batches(text, model.tokenization, lj.Positions("all"), documents=documents, tokens=wanted)
    parts = [each.at for each in lj.capture_states(model, found, sites)]
    return {site: torch.cat([at[site] for at in parts]) for site in sites}


def test_sums_of_features_are_those_of_the_features(model, text, collected):
    rows = states_of(model, text, "fit")
    x, y = compute_features(rows[Site(2)], "both").double(), rows[FINAL].double()
    source, target = collected.fit.pair_moments((Site(2), FINAL), "both")
    assert source.n == len(x)
    assert torch.allclose(source.mean, x.mean(0), rtol=1e-5, atol=1e-6)
    x, y = x - x.mean(0), y - y.mean(0)
    assert torch.allclose(source.scatter, x.mT @ x, rtol=1e-4, atol=1e-2)
    assert torch.allclose(target.cross, x.mT @ y, rtol=1e-4, atol=1e-2)


def test_the_map_is_scikit_learns_ridge_on_these_features(model, text, collected, jumps):
    rows = states_of(model, text, "fit")
    for level in (0, 2, 3):
        info = jumps.info[level, "final"]
        x = compute_features(rows[Site(level)], info.features).double()
        source, _ = collected.fit.pair_moments((Site(level), FINAL), info.features)
        theirs = Ridge(alpha=info.strength * strength_unit(source)).fit(x.numpy(), rows[FINAL].numpy())
        mine = jumps[level, "final"](rows[Site(level)][:500])
        factor = jumps.provenance.settings["temperature"][str(level)]
        wanted = factor * torch.as_tensor(theirs.predict(x[:500].numpy()))
        assert float((mine - wanted).abs().max() / wanted.std()) < 1e-3


def test_features_are_those_that_err_least_on_the_validation_split(collected):
    pair = (Site(1), FINAL)
    made, kind = fit_calibrated(collected.fit, collected.validation, pair)
    errors = {}
    for each in ("raw", "rms", "both"):
        source, target = collected.fit.pair_moments(pair, each)
        held = collected.validation.pair_moments(pair, each)
        (alone,) = ridge(source, [target], validation=(held[0], [held[1]]))
        errors[each] = float(residual(alone, *held).sum())
    assert kind == min(errors, key=errors.__getitem__)
    assert len(set(errors.values())) == 3  # there is something to choose
    assert made.shape == (80, 160 if kind == "both" else 80)


def test_it_is_better_calibrated_than_mat_at_every_level(model, text, jumps):
    mat = lj.fit(model, text, tokens=TOKENS)
    rows = states_of(model, text, "test")
    own = model.logits(rows[Site(model.n_blocks)]).log_softmax(-1)
    for level in range(model.n_blocks):
        kl = {}
        for name, fitted in (("mat", mat), ("calibrated", jumps)):
            guess = lj.Lens(model, fitted).logits(level, rows[Site(level)]).log_softmax(-1)
            kl[name] = float((own.exp() * (own - guess)).sum(-1).mean())
        assert kl["calibrated"] < kl["mat"], level


def test_sums_of_features_are_kept_and_merged(model, text, collected, tmp_path):
    collected.save(tmp_path / "a.safetensors")
    again = SplitMoments.load(tmp_path / "a.safetensors")
    assert again.fit.features == "both"
    other = lj.collect_moments(model, stories(200, seed=5), pairs="to-final", features="both")
    both = merge_moments([again, other])
    assert both.fit.n == again.fit.n + other.fit.n
    made = solve_jumps(both, "calibrated", model=model)
    assert len(made) == model.n_blocks
    raw = lj.collect_moments(model, stories(200, seed=6), pairs="to-final")
    with pytest.raises(BadMoments, match="same pairs and features"):
        merge_moments([again, raw])


def test_jumps_with_features_are_kept(model, jumps, tmp_path):
    jumps.save_pretrained(tmp_path)
    again = lj.Jumps.from_pretrained(tmp_path, model=model)
    for pair in jumps:
        assert again.info[pair].features == jumps.info[pair].features
        assert torch.equal(to_affine(again[pair]).weight, to_affine(jumps[pair]).weight)
    read = lj.Lens(model, again)("One day, Tom went to the")
    assert len(read.levels) == model.n_blocks + 1


def test_one_kind_of_features_alone(model, text):
    for kind in ("raw", "rms"):
        made = lj.fit(model, text, estimator="calibrated", features=kind, tokens=8_000)
        assert {made.info[pair].features for pair in made} == {kind}
        # h / rms(h) taken for the target would not be the identity, and is not scored as such.
        assert all((made.info[pair].r2_identity is None) == (kind != "raw") for pair in made)
        affine = lj.fit(model, text, estimator="affine", pairs="to-final", features=kind, tokens=8_000)
        assert {affine.info[pair].features for pair in affine} == {kind}


def test_what_it_cannot_do_is_one_line(model, text, collected):
    with pytest.raises(BadEstimator, match="to-final"):
        lj.fit(model, text, estimator="calibrated", pairs="to-last", features="raw", tokens=3_000)
    with pytest.raises(BadEstimator, match="no setting rank, it takes keep_both_targets"):
        solve_jumps(collected, "calibrated", EstimatorSettings(rank=3), model=model)
    with pytest.raises(BadEstimator, match="pass the model that these moments come from"):
        solve_jumps(collected, "calibrated")
    with pytest.raises(BadMoments, match="others start"):
        Moments([(Site(0), Site(1)), (Site(1), Site(2))], features="both")
    with pytest.raises(BadMoments, match="others start"):
        plan_run(model, text, pairs="adjacent", features="rms")


def test_the_command_line_fits_and_refines(data_folder, tmp_path):
    name, text = str(data_folder / "tiny-gpt2"), tmp_path / "t.jsonl"
    text.write_text("\n".join(json.dumps({"text": d}) for d in stories(300, seed=4).documents))
    folder = str(tmp_path / "jumps")
    given = ("fit", name, "--text", str(text), "-o", folder, "--estimator", "calibrated")
    done = run(*given, "--refine", "--refine-steps", "25", "--json")
    assert done.returncode == 0, done.stderr
    assert "held-out KL" in done.stderr
    about = lj.Jumps.from_pretrained(folder).provenance
    assert about.estimator == "calibrated+kl"
    assert about.settings["how"] == "to-tune"  # both landings were there to be tuned
    assert sorted(path.name for path in (tmp_path / "jumps").iterdir()) == ["jumps.json", "jumps.safetensors"]
    wrong_ones = (
        "--ojfa-pooling magic",
        "--source-scaling magic",
        "--pairs to-last",
        "--ojfa-pooling to-tune",
        "--refine --ojfa-pooling pooled",
    )
    for extra in map(str.split, wrong_ones):
        wrong = run(*given, *extra)
        assert wrong.returncode == 1
        assert "Traceback" not in wrong.stderr

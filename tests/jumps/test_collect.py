"""The pass over text: exact against scikit-learn, whatever the processes, and whatever stops it."""

import numpy as np
import pytest
import torch
from helpers import fitted_gpt2
from helpers.comparisons import assert_same_predictions, kept, same_bytes
from helpers.tiny_models import silent_gpt2, tiny_model
from helpers.tokenizers import byte_tokenizer
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

import layerjump as lj
from layerjump.errors import (
    BadArtifact,
    BadEstimator,
    BadMoments,
    BadText,
    LayerjumpError,
    TextTooShort,
    TooLarge,
    WrongModel,
)
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.cost_estimate import CostEstimate
from layerjump.jumps.estimators.registry import EstimatorSettings
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.moments_of_splits import SplitMoments, merge_moments
from layerjump.models.sites import Site, parse_pairs

model, text = fitted_gpt2.model, fitted_gpt2.text  # fixtures


@pytest.fixture(scope="module")
def collected(model, text):
    return lj.collect_moments(model, text, pairs="all", positions="all")


@pytest.mark.parametrize("skip_first", [0, 1])
@pytest.mark.parametrize("name", ["tiny-gpt2", "stories15M"])
def test_mat_equals_scikit_learn_on_the_same_states(name, skip_first, data_folder, real_folder):
    """Also with attention-sink rows (skip_first 0): predictions within 1e-4 of their standard deviation."""
    folder = real_folder(name) if name == "stories15M" else data_folder / name
    model, text = lj.load(folder), lj.load_text("pydoc")
    positions = lj.Positions("sample", 9, skip_first=skip_first, special=True)
    jumps = lj.fit(model, text, positions=positions, split="1000/0/100")
    parts = lj.split_indices(len(text.documents), "1000/0/100")
    here, last = Site(1), Site(model.n_blocks)
    train = kept(model, text, [here, last], parts.fit, positions)
    test = kept(model, text, [here, last], parts.test, positions)
    # tol=0: by default scikit-learn 1.9 cuts off directions that are small beside the largest.
    theirs = LinearRegression(fit_intercept=False, tol=0).fit(train[here], train[last])
    expected = theirs.predict(test[here])
    ours = jumps[here, last].double()(torch.from_numpy(test[here])).numpy()
    assert np.abs(ours - expected).max() <= 1e-4 * expected.std()
    info = jumps.info[here, last]
    assert info.r2[0] == pytest.approx(r2_score(test[last], expected), abs=1e-6)
    weighted = r2_score(test[last], expected, multioutput="variance_weighted")
    assert info.r2[1] == pytest.approx(weighted, abs=1e-6)
    assert info.r2_identity[0] == pytest.approx(r2_score(test[last], test[here]), rel=1e-5)


def test_mat_beats_identity_at_every_level(model, collected):
    jumps = solve_jumps(collected, "mat")
    assert len(jumps) == 10
    for info in jumps.info.values():
        assert info.r2[0] > info.r2_identity[0]


def test_an_affine_model_is_recovered():
    """With attention and feed-forward silenced a block is the identity; between norms' inputs all is linear."""
    hf = silent_gpt2()
    model = lj.Model.wrap(hf, byte_tokenizer())
    jumps = lj.fit(model, lj.load_text("pydoc", limit=120), pairs="to-last", estimator="affine", max_length=32)
    for info in jumps.info.values():
        assert info.r2[0] == pytest.approx(1, abs=1e-8)
    states = torch.randn(5, 32, dtype=torch.float64)
    shift = sum(block.attn.c_proj.bias + block.mlp.c_proj.bias for block in hf.transformer.h)
    assert torch.allclose(jumps[0, 3].double()(states), states + shift, atol=1e-5)


@pytest.mark.parametrize(
    "estimator", ["identity", "mean-shift", "mat", "affine", "ridge", "orthogonal", "n-njtc", "ojfa"]
)
def test_every_estimator_makes_jumps(collected, estimator):
    to_last = [(a, b) for a, b in collected.fit.pairs if b == Site(4)]
    assert len(to_last) == 4
    if estimator == "ojfa":
        with pytest.raises(BadEstimator, match="to-last"):
            solve_jumps(collected, "ojfa")
        return
    jumps = solve_jumps(collected, estimator)
    assert all(np.isfinite(info.r2).all() for info in jumps.info.values())


@pytest.mark.parametrize("pooling", ["pooled", "best-level"])
def test_one_jump_for_all(model, text, pooling):
    jumps = solve_jumps(lj.collect_moments(model, text), "ojfa", EstimatorSettings(rank=8, ojfa_pooling=pooling))
    assert len({tuple(jumps[level, 4][0].weight.flatten()[:9].tolist()) for level in range(4)}) == 1
    assert all(info.rank == 8 for info in jumps.info.values())


def test_one_jump_for_all_is_pooled_by_default(model, text):
    moments = lj.collect_moments(model, text)
    default, pooled, best = (
        solve_jumps(moments, "ojfa", EstimatorSettings(rank=8, ojfa_pooling=pooling))
        for pooling in (None, "pooled", "best-level")
    )
    states = torch.ones(1, model.d_model)
    assert torch.equal(default[0, 4](states), pooled[0, 4](states))
    assert not torch.equal(default[0, 4](states), best[0, 4](states))


def test_low_rank_in_the_unembeddings_metric_predicts_better(model, text):
    """At the same small rank, the metric's map has the smaller error in logits, on held-out text."""
    run = lj.collect_moments(model, text, positions="all")
    plain = solve_jumps(run, "low-rank", EstimatorSettings(rank=4))
    metric = solve_jumps(run, "low-rank", EstimatorSettings(rank=4, metric="unembedding"), model=model)
    parts = lj.split_indices(len(text.documents))
    test = kept(model, text, [Site(1), Site(4)], parts.test, lj.Positions("all"))
    x, y = (torch.from_numpy(test[site]).float() for site in (Site(1), Site(4)))
    scale = model.hf.transformer.ln_f.weight * model.hf.lm_head.weight
    scale = scale - scale.mean(0)
    errors = [((jumps[1, 4](x) - y) @ scale.mT).square().sum() for jumps in (plain, metric)]
    assert errors[1] < errors[0]
    with pytest.raises(BadEstimator, match="unembedding"):
        solve_jumps(run, "low-rank", EstimatorSettings(rank=4, metric="unembedding"))


def test_sub_modules_are_paired_input_to_output_with_position_0(model, text):
    run = lj.collect_moments(model, text, pairs="submodules", tokens=6000)
    assert len(run.fit.pairs) == 16
    assert run.info.skip_first == 0
    jumps = solve_jumps(run, "affine")
    assert jumps.info["1.attn.in", "1.attn.out"].lands == "site"
    assert jumps.info["2.ln1.in", "2.ln1.out"].r2[1] > 0.5


def test_pairs_are_parsed_and_bad_ones_named(model):
    structure = model.structure
    assert len(parse_pairs("all", structure)) == 10
    assert parse_pairs("adjacent", structure)[0] == (Site(0), Site(1))
    assert parse_pairs("0:4, 2.attn.in:final", structure)[1][0] == Site(2, "attn.in")
    for bad, message in [("0", "expected pairs to-last"), ("0:9", "levels 0 to 4"), ("3:3", "to itself")]:
        with pytest.raises(LayerjumpError, match=message):
            parse_pairs(bad, structure)


def test_all_pairs_sample_positions_by_themselves(model):
    run = plan_run(model, "pydoc", pairs="all")
    share = lj.Positions.parse(run.info.positions).amount
    assert share == 0.15
    assert run.batches["fit"].n_picks >= 44 * model.d_model
    few = plan_run(model, lj.load_text("pydoc", limit=60), pairs="all")
    assert lj.Positions.parse(few.info.positions).amount > 0.15
    assert few.batches["fit"].n_picks == pytest.approx(44 * model.d_model, rel=0.05)


def test_few_positions_are_warned_about(model, caplog):
    with caplog.at_level("WARNING", logger="layerjump"):
        plan_run(model, lj.load_text("pydoc", limit=60), positions="one")
    assert "inflated by 1 + d/(n−d−1)" in caplog.text


def test_a_run_that_does_not_fit_in_memory_is_refused(model, text):
    run = plan_run(model, text, pairs="all", positions="all")
    entries = 64 * 64 * (4 + 10) if model.d_model == 64 else model.d_model**2 * 14
    assert run.cost.sums_bytes == 3 * (8 * entries + 4 * 2000 * 5 * model.d_model)
    assert run.cost.jumps_bytes == 4 * 10 * model.d_model**2
    assert "positions; memory" in str(run.cost)
    with pytest.raises(TooLarge, match="fewer pairs"):
        CostEstimate(10**15, 0, 1, 1, 1, 1).require_memory()


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma2", "albert"])
def test_widths_are_known_before_the_run(family):
    wrapped = lj.Model.wrap(tiny_model(family))
    from layerjump.models.self_check import sample

    (found,) = lj.capture_states(wrapped, [sample(wrapped)], wrapped.structure.sites())
    for site in wrapped.structure.sites():
        assert wrapped.structure.width(site) == found[site].shape[1], site


def test_text_shorter_than_asked_for(model):
    with pytest.raises(TextTooShort, match="expected 8,000,000 tokens"):
        lj.collect_moments(model, lj.load_text("pydoc", limit=50), tokens=10**7)


def test_bad_states_name_level_and_batch(model, text):
    hf = tiny_model("gpt2", dtype=torch.float32)
    wrapped = lj.Model.wrap(hf, byte_tokenizer())
    with torch.no_grad():
        hf.transformer.h[1].mlp.c_proj.bias[3] = float("nan")
    with pytest.raises(BadMoments, match=r"site 2 hold NaN .* in batch 0 of the test split"):
        lj.collect_moments(wrapped, text, max_length=32)


# -- saved sums


def test_saved_sums_give_the_same_jumps(collected, tmp_path):
    collected.save(tmp_path / "m.safetensors")
    loaded = SplitMoments.load(tmp_path / "m.safetensors")
    assert loaded.info == collected.info
    assert loaded.max_length == collected.max_length
    totals, read = collected.fit.sums.named(), loaded.fit.sums.named()
    assert list(totals) == list(read)
    assert all(torch.equal(totals[name], read[name]) for name in totals)
    assert torch.equal(loaded.test.reservoir.states[Site(2)], collected.test.reservoir.states[Site(2)])
    for folder, run in (("a", collected), ("b", loaded)):
        solve_jumps(run, "ridge").save_pretrained(tmp_path / folder)
    assert same_bytes(tmp_path / "a", tmp_path / "b")


def test_two_halves_merge_to_the_whole(model, text):
    """Documents of two runs add up to the run over both: the same maps to float tolerance."""
    half = [lj.Corpus(name, docs, "") for name, docs in (("a", text.documents[:150]), ("b", text.documents[150:]))]
    whole = merge_moments([lj.collect_moments(model, corpus, split="100/0/0") for corpus in half])
    once = lj.collect_moments(model, text, split="100/0/0")
    assert whole.fit.n == once.fit.n
    assert whole.info.text == "a + b"
    assert_same_predictions(solve_jumps(whole, "mat"), solve_jumps(once, "mat"), model, text)


def test_what_cannot_be_merged_is_said(collected, model, text, data_folder):
    with pytest.raises(BadMoments, match="count them twice"):
        merge_moments([collected, collected])
    other = lj.collect_moments(lj.load(data_folder / "tiny-bert"), text, pairs="all", tokens=3000)
    with pytest.raises(WrongModel, match="different weights"):
        merge_moments([collected, other])
    few = lj.collect_moments(model, lj.load_text("pydoc", limit=80), pairs="to-last")
    with pytest.raises(BadMoments, match="same pairs"):
        merge_moments([collected, few])


def test_damaged_and_foreign_files_are_named(collected, tmp_path):
    path = tmp_path / "m.safetensors"
    collected.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadArtifact):
        SplitMoments.load(path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(BadArtifact):
        SplitMoments.load(path)


@pytest.mark.parametrize("tokens", [0, -5])
def test_no_tokens_at_all_are_refused(tokens, data_folder, study_text):
    with pytest.raises(BadText, match=f"tokens of 1 or more, .* got {tokens}"):
        lj.collect_moments(lj.load(data_folder / "tiny-gpt2"), study_text, tokens=tokens)


def test_products_are_rough_for_calibrated_alone(data_folder, study_text):
    """Its penalty is far above float32's rounding; `affine` of both features has none, and keeps float64."""
    model = lj.load(data_folder / "tiny-gpt2")
    settings = {"estimator": "calibrated", "tokens": 2_000}
    float32_products = plan_run(model, study_text, **settings)
    exact = plan_run(model, study_text, estimator="affine", pairs="to-final", features="both", tokens=2_000)
    single = plan_run(model, study_text, **settings, features="rms")
    found = [one.moments["fit"].products for one in (float32_products, exact, single)]
    assert found == [torch.float32, torch.float64, torch.float64]

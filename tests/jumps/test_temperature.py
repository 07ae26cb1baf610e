"""What is chosen by KL on held-out states: a level's temperature, and where its map lands."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers.cli import run
from helpers.story_text import stories
from helpers.tiny_models import tiny_model

import layerjump as lj
from layerjump.data.positions import MASKED_SHARE
from layerjump.jumps.estimators.calibrated import MIN_ROWS, HeldOutKL, fit_calibrated
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.maps import Affine, compute_features
from layerjump.models.discovery import discover
from layerjump.models.model import Model
from layerjump.models.sites import FINAL, Site

TEXT = stories(900)


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-bert"])
def model(request, data_folder):
    return lj.load(data_folder / request.param)


@pytest.fixture(scope="module")
def collected(model):
    positions = MASKED_SHARE if model.masked else None
    return lj.collect_moments(
        model, TEXT, pairs="to-final", features="both", float32_products=True, positions=positions
    )


@pytest.fixture(scope="module")
def jumps(model, collected):
    return solve_jumps(collected, "calibrated", model=model)


@torch.no_grad()
def kl(model, rows, final):
    """Of what maps predict to what the model does, a number a row."""
    own = model.structure.decode(rows[FINAL]).log_softmax(-1)
    guess = model.structure.decode(final.float()).log_softmax(-1)
    return (own.exp() * (own - guess)).sum(-1)


def test_it_is_the_least_kl_on_held_out_rows(model, collected, jumps):
    rows = {site: states[:256] for site, states in collected.validation.reservoir.states.items()}
    for level in range(model.n_blocks):
        jump, kind = fit_calibrated(collected.fit, collected.validation, (Site(level), FINAL))
        final = jump(compute_features(rows[Site(level)], kind).double())
        grid = [0.2 + 0.01 * step for step in range(111)]
        best = min(grid, key=lambda factor: float(kl(model, rows, factor * final).mean()))
        found = jumps.provenance.settings["temperature"][str(level)]
        gain = kl(model, rows, final) - kl(model, rows, best * final)
        if gain.mean() > 2.2 * gain.std() / 16:
            assert found == pytest.approx(best, abs=0.03)
        elif gain.mean() < 1.8 * gain.std() / 16:
            assert found == 1
        mine = jumps[level, "final"](rows[Site(level)])
        # A weak penalty leaves large weights, which float32 rounds.
        assert torch.allclose(mine, (found * final).float(), rtol=1e-3, atol=5e-3)


def test_kl_on_unseen_text_is_lower_for_it(model, collected, jumps):
    rows = collected.test.reservoir.states
    lower = 0.0
    for level in range(model.n_blocks):
        final = jumps[level, "final"](rows[Site(level)])
        factor = jumps.provenance.settings["temperature"][str(level)]
        lower += float((kl(model, rows, final / factor) - kl(model, rows, final)).mean())
    # The small decoder is as sure as it should be; the masked model too sure.
    assert lower > (1e-3 if model.masked else -1e-4)


def test_a_soft_cap_counts():
    """Gemma 2 bends its logits: the factor is the best of what is left after that."""
    hf = tiny_model("gemma2", "")
    model = Model(hf, discover(hf), "gemma2")
    draw = torch.Generator().manual_seed(0)
    final = 3 * torch.randn(200, model.d_model, generator=draw)
    # The model's own states are 0.6 of what the map says: that is what must be found.
    rows = {Site(1): final, FINAL: 0.6 * final}
    same = Affine.of(torch.eye(model.d_model, dtype=torch.float64))
    assert HeldOutKL(model, rows).best_factor(Site(1), same, "raw") == pytest.approx(0.6, abs=0.02)
    few = {site: states[: MIN_ROWS - 1] for site, states in rows.items()}
    assert HeldOutKL(model, few).best_factor(Site(1), same, "raw") == 1
    assert HeldOutKL(model, {}).best_factor(Site(1), same, "raw") == 1


def test_the_last_levels_land_where_kl_is_least(model):
    """Of a map onto `final` and one onto level L, by the lens that each makes, on rows of the select split."""
    positions = MASKED_SHARE if model.masked else None
    found = lj.collect_moments(
        model, TEXT, pairs="predictions", features="both", float32_products=True, positions=positions
    )
    last = Site(model.n_blocks)
    late = {source for source, target in found.fit.pairs if target == last}
    assert late == {Site(model.n_blocks - 2), Site(model.n_blocks - 1)}
    made = solve_jumps(found, "calibrated", model=model)
    assert {source for source, _ in made} == {Site(level) for level in range(model.n_blocks)}
    assert len(made) == model.n_blocks
    rows = {site: states[:256] for site, states in found.validation.reservoir.states.items()}
    only = solve_jumps(found_to_final(found), "calibrated", model=model)
    for site in late:
        onto_last, kind = fit_calibrated(found.fit, found.validation, (site, last))
        landed = onto_last(compute_features(rows[site], kind).double()).float()
        kls = {
            last: float(kl(model, rows, model.structure.to_final(landed)).mean()),
            FINAL: float(kl(model, rows, only[site, FINAL](rows[site])).mean()),
        }
        chosen = min(kls, key=lambda target: kls[target])
        assert (site, chosen) in made
        guess = lj.Lens(model, made).logits(site, rows[site]).log_softmax(-1)
        own = model.structure.decode(rows[FINAL]).log_softmax(-1)
        mine = float((own.exp() * (own - guess)).sum(-1).mean())
        assert mine == pytest.approx(kls[chosen], rel=1e-3)
        assert (str(site) in made.provenance.settings["temperature"]) == (chosen == FINAL)


def found_to_final(found):
    """The same sums without the pairs that lead to level L."""
    splits = {}
    for name, sums in found.splits.items():
        splits[name] = less = copy.copy(sums)
        less.pairs = [pair for pair in sums.pairs if pair[1] == FINAL]
    return replace(found, **splits)


def test_saved_sums_want_the_model_that_they_are_of(data_folder, tmp_path):
    name, text = str(data_folder / "tiny-gpt2"), tmp_path / "t.txt"
    text.write_text("\n\n".join(stories(150, seed=4).documents))
    whole, again = str(tmp_path / "whole"), str(tmp_path / "again")
    fitted = ("fit", name, "--text", str(text), "--estimator", "calibrated", "--save-moments")
    assert run(*fitted, "-o", whole).returncode == 0
    given = ("--from-moments", f"{whole}/moments.safetensors", "--estimator", "calibrated", "-o", again)
    alone = run("fit", *given)
    assert alone.returncode == 1
    assert "pass the model" in alone.stderr
    assert run("fit", name, *given).returncode == 0
    ours, theirs = lj.Jumps.from_pretrained(whole), lj.Jumps.from_pretrained(again)
    assert ours.provenance.settings["temperature"] == theirs.provenance.settings["temperature"]
    other = run("fit", str(data_folder / "tiny-bert"), *given, "--force")
    assert other.returncode == 1
    assert "other weights" in other.stderr
    assert "Traceback" not in alone.stderr + other.stderr

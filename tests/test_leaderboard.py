"""Scores of the leaderboard equal those of the library, at positions whose true tokens are those of the text."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import layerjump as lj
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.metrics.logits import calibration_error, marginal_kl

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from leaderboard import peers
from leaderboard.held_out import POSITIONS_PER_DOCUMENT, held_out, model_calibration
from leaderboard.ours import LensFitter
from leaderboard.peers import record_scores, recorded_scores, sequences_of, write_job
from leaderboard.scores import difference, score
from leaderboard.show import name_sides

POSITIONS = 120


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-bert"])
def model(request, data_folder):
    return lj.load(data_folder / request.param)


@pytest.fixture(scope="module")
def causal(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def jumps(causal, study_text):
    return lj.fit(causal, study_text, tokens=6_000)


def test_targets_are_tokens_of_the_text(model, study_text):
    held = held_out(model, study_text, POSITIONS)
    documents = lj.split_documents(len(study_text.documents)).test
    assert set(held.document.tolist()) <= set(documents)
    for document in held.document.unique().tolist():
        ids = model.tokenization.wrap(model.tokenization.encode([study_text.documents[document]])[0])
        wanted = held.target[held.document == document]
        assert len(wanted) <= POSITIONS_PER_DOCUMENT * (1 + len(ids) // 100)
        assert set(wanted.tolist()) <= {*ids, -1}
    assert (held.target >= 0).float().mean() > 0.8


def test_the_target_follows_the_token_whose_state_is_captured(causal, study_text):
    """Level 0 of a GPT-2 is token and position embedding: the token at each state can be read off."""
    held = held_out(causal, study_text, POSITIONS)
    embedded, places = causal.hf.transformer.wte.weight, causal.hf.transformer.wpe.weight
    for state, wanted, document in zip(held.levels[0], held.target, held.document, strict=True):
        ids = causal.tokenization.wrap(causal.tokenization.encode([study_text.documents[int(document)]])[0])
        room = len(places)  # a long document is cut into sequences, each counted from 0
        rows = [ids[start : start + room] for start in range(0, len(ids), room)]
        after = {
            row[place + 1] if place + 1 < len(row) else -1
            for row in rows
            for place, token in enumerate(row)
            if torch.allclose(embedded[token] + places[place], state, atol=1e-5)
        }
        assert int(wanted) in after


def test_scores_are_the_librarys_readings(causal, study_text, jumps):
    held = held_out(causal, study_text, POSITIONS)
    found = score(causal, lj.Lens(causal, jumps), held)
    documents = lj.split_documents(len(study_text.documents)).test[: POSITIONS // POSITIONS_PER_DOCUMENT]
    whole = lj.make_batches(study_text, causal.tokenization, lj.Positions("all"), documents=documents)
    batches = whole.with_picks_at(lj.Positions("sample", POSITIONS_PER_DOCUMENT))
    read = evaluate_lenses(causal, {"mat": lj.Lens(causal, jumps)}, batches)
    for name in ("kl", "surprisal"):
        wanted = getattr(read, name)[0, :-1].double().mean(-1)
        assert getattr(found, name).mean(-1) == pytest.approx(wanted.numpy(), rel=1e-4)
    assert found.summary()["p5"][0] == pytest.approx(read.hits(5)[0, 1:-1].double().mean())


def test_calibration_and_marginals_are_those_of_whole_softmaxes(causal, study_text, jumps):
    held = held_out(causal, study_text, POSITIONS)
    lens = lj.Lens(causal, jumps)
    found = score(causal, lens, held).levels()[2]
    with torch.no_grad():
        q = lens.logits(2, held.levels[2]).softmax(-1)
        p = causal.logits(held.levels[-1]).softmax(-1)
    known = held.target >= 0
    best = q[known].max(-1)
    hit = best.indices == held.target[known]
    assert found["ece"][0] == pytest.approx(calibration_error(best.values, hit), rel=1e-5)
    assert found["marginal_kl"][0] == pytest.approx(float(marginal_kl(p.sum(0), q.sum(0))), rel=1e-4)
    best = p[known].max(-1)
    wanted = calibration_error(best.values, best.indices == held.target[known])
    assert model_calibration(causal, held) == pytest.approx(wanted, rel=1e-5)
    for mean, low, high in found.values():
        assert low <= mean <= high


def test_a_lens_without_level_0_is_scored_above_it(causal, study_text):
    last = causal.n_blocks
    pairs = ",".join(f"{level}:{last}" for level in range(1, last))
    found = lj.fit(causal, study_text, tokens=6_000, pairs=pairs)
    held = held_out(causal, study_text, POSITIONS)
    scores = score(causal, lj.Lens(causal, found), held)
    assert np.isnan(scores.kl[0]).all()
    json.dumps(scores.levels() + [difference(scores, scores)], allow_nan=False)
    assert np.isfinite([value for each in scores.summary().values() for value in each]).all()


def test_a_difference_is_paired(causal, study_text, jumps):
    held = held_out(causal, study_text, POSITIONS)
    fitted = score(causal, lj.Lens(causal, jumps), held)
    plain = score(causal, lj.Lens(causal), held)
    apart, back = difference(fitted, plain), difference(plain, fitted)
    mean = fitted.summary()["kl"][0] - plain.summary()["kl"][0]
    assert apart["mean"][0] == pytest.approx(mean) == pytest.approx(-back["mean"][0])
    assert difference(fitted, fitted)["mean"] == [0, 0, 0]
    assert len(apart["levels"]) == causal.n_blocks


def test_recorded_scores_are_compared_with_new_ones_at_the_same_positions(
    causal, study_text, jumps, tmp_path, monkeypatch
):
    monkeypatch.setattr(peers, "RECORD", tmp_path / "recorded.json")
    held = held_out(causal, study_text, POSITIONS)
    fitted = score(causal, lj.Lens(causal, jumps), held)
    plain = score(causal, lj.Lens(causal), held)
    record_scores("tiny", "stories", "identity", plain)
    again = recorded_scores("tiny", "stories", "identity", held)
    for measure in ("kl", "p1"):
        wanted = difference(fitted, plain, measure)["mean"]
        assert difference(fitted, again, measure)["mean"] == pytest.approx(wanted, abs=2e-3)
    others = held_out(causal, study_text, POSITIONS // 2)
    assert recorded_scores("tiny", "stories", "identity", others) is None


def test_lenses_are_cached_for_a_later_run_with_the_same_settings(causal, study_text, tmp_path):
    def fit_mat(tokens):
        fitter = LensFitter(causal, study_text, tokens, folder=tmp_path)
        return dict(fitter.fit(["mat"]))["mat"], fitter.forward_seconds

    (first, unit), (again, same_unit), (other, _) = fit_mat(6_000), fit_mat(6_000), fit_mat(4_000)
    assert (again.seconds, same_unit) == (first.seconds, unit)
    pairs = zip(first.lens.jumps.parameters(), again.lens.jumps.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert other.lens.jumps.provenance.tokens < first.lens.jumps.provenance.tokens


def test_a_job_holds_the_fit_documents_and_a_check(causal, study_text, tmp_path):
    fitter = LensFitter(causal, study_text, 6_000)
    write_job(fitter, tmp_path / "text")
    job = json.loads((tmp_path / "text" / "tokens.json").read_text())
    assert job["fit"] == sequences_of(fitter.plan.batches["fit"])
    assert sum(map(len, job["fit"])) == fitter.plan.batches["fit"].n_tokens
    held = {tuple(ids) for ids in job["select"]}
    assert not held & {tuple(ids) for ids in job["fit"]}
    again = lj.load(tmp_path / "text" / job["model"])
    with torch.no_grad():
        logits = again.hf(torch.tensor([job["check"]["ids"]])).logits[0, -1].log_softmax(-1)
    found = logits[job["check"]["tokens"]].tolist()
    assert found == pytest.approx(job["check"]["log_probabilities"], abs=1e-4)


def test_labels_of_similar_lenses_do_not_overlap():
    """Labels in the figure of quality against cost."""
    kl = [2.0, 1.9, 2.1]
    names = [f"lens {place}" for place in range(6)]
    board = {name: {"kl": kl, "cost": 1.3} for name in names}
    board["far"] = {"kl": [9.0, 8.0, 10.0], "cost": 50.0}
    across = (-1.0, 2.5)
    sides = name_sides(board, across)
    assert len({sides[name] for name in names}) == len(names)
    assert sides["far"] == "middle right"

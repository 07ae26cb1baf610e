"""Scores of the leaderboard equal those of the library, at positions whose true tokens are those of the text."""

import json

import numpy as np
import pytest
import torch
from leaderboard import peers
from leaderboard.causal import causal_board, causal_table, matrix_line
from leaderboard.causal_lenses import LENSES, CausalBudget, CausalLenses
from leaderboard.held_out import POSITIONS_PER_DOCUMENT, held_out, model_calibration
from leaderboard.ours import LensFitter
from leaderboard.peers import record_scores, recorded_scores, sequences_of, write_job
from leaderboard.scores import difference, score
from leaderboard.show import name_sides
from leaderboard.two_hop import items

import layerjump as lj
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.metrics.logits import calibration_error, marginal_kl

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
    test_set = held_out(model, study_text, POSITIONS)
    documents = lj.split_indices(len(study_text.documents)).test
    assert set(test_set.document.tolist()) <= set(documents)
    for document in test_set.document.unique().tolist():
        ids = model.tokenization.wrap(model.tokenization.encode([study_text.documents[document]])[0])
        expected = test_set.target[test_set.document == document]
        assert len(expected) <= POSITIONS_PER_DOCUMENT * (1 + len(ids) // 100)
        assert set(expected.tolist()) <= {*ids, -1}
    assert (test_set.target >= 0).float().mean() > 0.8


def test_the_target_follows_the_token_whose_state_is_captured(causal, study_text):
    """Level 0 of a GPT-2 is token and position embedding: the token at each state can be read off."""
    test_set = held_out(causal, study_text, POSITIONS)
    embedded, position_embeddings = causal.hf.transformer.wte.weight, causal.hf.transformer.wpe.weight
    for state, expected, document in zip(test_set.levels[0], test_set.target, test_set.document, strict=True):
        ids = causal.tokenization.wrap(causal.tokenization.encode([study_text.documents[int(document)]])[0])
        room = len(position_embeddings)  # a long document is cut into sequences, each counted from 0
        rows = [ids[start : start + room] for start in range(0, len(ids), room)]
        after = {
            row[index + 1] if index + 1 < len(row) else -1
            for row in rows
            for index, token in enumerate(row)
            if torch.allclose(embedded[token] + position_embeddings[index], state, atol=1e-5)
        }
        assert int(expected) in after


def test_scores_are_the_librarys_readings(causal, study_text, jumps):
    test_set = held_out(causal, study_text, POSITIONS)
    scores = score(causal, lj.Lens(causal, jumps), test_set)
    documents = lj.split_indices(len(study_text.documents)).test[: POSITIONS // POSITIONS_PER_DOCUMENT]
    whole = lj.make_batches(study_text, causal.tokenization, lj.Positions("all"), documents=documents)
    batches = whole.with_picks_at(lj.Positions("sample", POSITIONS_PER_DOCUMENT))
    read = evaluate_lenses(causal, {"mat": lj.Lens(causal, jumps)}, batches)
    for name in ("kl", "surprisal"):
        expected = getattr(read, name)[0, :-1].double().mean(-1)
        assert getattr(scores, name).mean(-1) == pytest.approx(expected.numpy(), rel=1e-4)
    assert scores.summary()["p5"][0] == pytest.approx(read.hits(5)[0, 1:-1].double().mean())


def test_calibration_and_marginals_are_those_of_whole_softmaxes(causal, study_text, jumps):
    test_set = held_out(causal, study_text, POSITIONS)
    lens = lj.Lens(causal, jumps)
    at_level = score(causal, lens, test_set).levels()[2]
    with torch.no_grad():
        q = lens.logits(2, test_set.levels[2]).softmax(-1)
        p = causal.logits(test_set.levels[-1]).softmax(-1)
    known = test_set.target >= 0
    best = q[known].max(-1)
    hit = best.indices == test_set.target[known]
    assert at_level["ece"][0] == pytest.approx(calibration_error(best.values, hit), rel=1e-5)
    assert at_level["marginal_kl"][0] == pytest.approx(float(marginal_kl(p.sum(0), q.sum(0))), rel=1e-4)
    best = p[known].max(-1)
    expected = calibration_error(best.values, best.indices == test_set.target[known])
    assert model_calibration(causal, test_set) == pytest.approx(expected, rel=1e-5)
    for mean, low, high in at_level.values():
        assert low <= mean <= high


def test_a_lens_without_level_0_is_scored_above_it(causal, study_text):
    last = causal.n_blocks
    pairs = ",".join(f"{level}:{last}" for level in range(1, last))
    fitted = lj.fit(causal, study_text, tokens=6_000, pairs=pairs)
    test_set = held_out(causal, study_text, POSITIONS)
    scores = score(causal, lj.Lens(causal, fitted), test_set)
    assert np.isnan(scores.kl[0]).all()
    json.dumps(scores.levels() + [difference(scores, scores)], allow_nan=False)
    assert np.isfinite([value for each in scores.summary().values() for value in each]).all()


def test_a_difference_is_paired(causal, study_text, jumps):
    test_set = held_out(causal, study_text, POSITIONS)
    fitted = score(causal, lj.Lens(causal, jumps), test_set)
    plain = score(causal, lj.Lens(causal), test_set)
    apart, back = difference(fitted, plain), difference(plain, fitted)
    mean = fitted.summary()["kl"][0] - plain.summary()["kl"][0]
    assert apart["mean"][0] == pytest.approx(mean) == pytest.approx(-back["mean"][0])
    assert difference(fitted, fitted)["mean"] == [0, 0, 0]
    assert len(apart["levels"]) == causal.n_blocks


def test_recorded_scores_are_compared_with_new_ones_at_the_same_positions(
    causal, study_text, jumps, tmp_path, monkeypatch
):
    monkeypatch.setattr(peers, "RECORD", tmp_path / "recorded.json")
    test_set = held_out(causal, study_text, POSITIONS)
    fitted = score(causal, lj.Lens(causal, jumps), test_set)
    plain = score(causal, lj.Lens(causal), test_set)
    record_scores("tiny", "stories", "identity", plain)
    again = recorded_scores("tiny", "stories", "identity", test_set)
    for measure in ("kl", "p1"):
        expected = difference(fitted, plain, measure)["mean"]
        assert difference(fitted, again, measure)["mean"] == pytest.approx(expected, abs=2e-3)
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
    test_set = {tuple(ids) for ids in job["select"]}
    assert not test_set & {tuple(ids) for ids in job["fit"]}
    again = lj.load(tmp_path / "text" / job["model"])
    with torch.no_grad():
        logits = again.hf(torch.tensor([job["check"]["ids"]])).logits[0, -1].log_softmax(-1)
    computed = logits[job["check"]["tokens"]].tolist()
    assert computed == pytest.approx(job["check"]["log_probabilities"], abs=1e-4)


def test_labels_of_similar_lenses_do_not_overlap():
    """Labels in the figure of quality against cost."""
    kl = [2.0, 1.9, 2.1]
    names = [f"lens {index}" for index in range(6)]
    board = {name: {"kl": kl, "cost": 1.3} for name in names}
    board["far"] = {"kl": [9.0, 8.0, 10.0], "cost": 50.0}
    across = (-1.0, 2.5)
    sides = name_sides(board, across)
    assert len({sides[name] for name in names}) == len(names)
    assert sides["far"] == "middle right"


def test_questions_never_state_their_intermediate():
    asked = items()
    assert len(asked) > 500
    assert len({item.prompt for item in asked}) == len(asked)
    for item in asked:
        assert item.intermediate.lower() not in item.prompt.lower()
        assert item.prompt.startswith(item.start)


def test_every_lens_is_on_the_causal_board(causal, study_text, tmp_path):
    budget = CausalBudget(tokens=3_000, refine_steps=2, tuned_steps=3, difference_tokens=800, jacobian_tokens=120)
    fitter = CausalLenses(causal, study_text, (1, 3), budget, tmp_path)
    board = causal_board(fitter, 8, n_questions=3)
    assert tuple(board.lenses) == LENSES
    for scores in board.lenses.values():
        for mean, low, high in (scores.swap, scores.alignment, scores.disturbance):
            assert low <= mean <= high
    assert all(0 < scores.cosine[0] <= 1 for scores in board.lenses.values())
    # Late in the network mat and Jacobian agree more than early; no cosine of two matrices beats its noise by much.
    assert board.matrices[3]["cosine"] > board.matrices[1]["cosine"]
    assert "level 3" in matrix_line(board)
    assert len(causal_table(board).splitlines()) == len(LENSES) + 2
    again = CausalLenses(causal, study_text, (1, 3), budget, tmp_path)
    for first, second in zip(fitter.lens("mat").jumps.parameters(), again.lens("mat").jumps.parameters(), strict=True):
        assert torch.equal(first, second)

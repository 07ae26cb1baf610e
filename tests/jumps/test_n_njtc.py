"""N-NJTC as published, by gradient descent."""

from __future__ import annotations

import pytest
import torch
from helpers.story_text import stories
from typer.testing import CliRunner

import layerjump as lj
from layerjump.cli.main import app
from layerjump.errors import BadEstimator
from layerjump.jumps.estimators.n_njtc import LowRankBatchNorm, train_n_njtc
from layerjump.models.sites import Site

TEXT = stories(300)


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


def r2(jumps, model, level):
    """On test documents."""
    documents = lj.split_indices(len(TEXT.documents), "80/10/10", seed=0).test
    batches = lj.make_batches(TEXT, model.tokenization, lj.Positions("all"), documents=documents)
    parts = [each.at for each in lj.capture_states(model, batches, [level, model.n_blocks])]
    x, y = (torch.cat([at[Site(s)] for at in parts]) for s in (level, model.n_blocks))
    left = (jumps[level, model.n_blocks](x) - y).square().sum()
    return float(1 - left / (y - y.mean(0)).square().sum())


def test_folded_it_is_the_same_map():
    draw = torch.Generator().manual_seed(0)
    jump = LowRankBatchNorm(6, 2, torch.rand(6, generator=draw) + 0.5, draw)
    with torch.no_grad():
        for _ in range(5):
            jump(3 + 2 * torch.randn(40, 6, generator=draw))
        jump.norm.weight.uniform_(0.5, 2)
        jump.norm.bias.uniform_(-1, 1)
        rows = torch.randn(9, 6, generator=draw)
        assert torch.allclose(jump.eval().fold()(rows), jump(rows), atol=1e-5)


def test_it_comes_close_to_the_closed_form_from_below(model):
    trained = train_n_njtc(model, TEXT, steps=150, rank=8)
    closed = lj.fit(model, TEXT, estimator="low-rank", rank=8)
    for level in (0, 2, 3):
        mine, best = (r2(jumps, model, level) for jumps in (trained, closed))
        assert mine > 0.75 * best
        assert mine < best + 0.02
    assert trained.info[1, 4].rank == 8
    lj.Lens(model, trained)("One day, Tom")


def test_of_rank_one_it_has_none_left_for_more_than_the_mean(model):
    """As published nothing is added after the product: what the closed form's intercept does costs a rank."""
    trained = train_n_njtc(model, TEXT, steps=400)
    closed = lj.fit(model, TEXT, estimator="n-njtc")
    for level in (1, 3):
        assert trained.info[level, 4].rank == closed.info[level, 4].rank == 1
        assert -0.1 < r2(trained, model, level) < r2(closed, model, level)


def test_it_is_trained_by_command(data_folder, model, tmp_path):
    command = ["fit", str(data_folder / "tiny-gpt2"), "--estimator", "n-njtc-trained", "--rank=2"]
    done = CliRunner().invoke(app, [*command, "--tokens=2000", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    wanted = lj.train_n_njtc(model, "pydoc", tokens=2_000, rank=2)
    found = lj.Jumps.from_pretrained(tmp_path, model=model)
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert found.provenance.estimator == "n-njtc-trained"
    given = ["--debug", *command, "--refine", "-o", str(tmp_path / "other")]
    refused = CliRunner().invoke(app, given)
    assert isinstance(refused.exception, BadEstimator)
    assert "n-njtc-trained has no option --refine" in str(refused.exception)


def test_it_is_the_same_every_time_and_rank_is_the_papers(model):
    one, other = (train_n_njtc(model, TEXT, steps=5, tokens=2_000) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one.info[0, 4].rank == 1
    with pytest.raises(BadEstimator, match="1 or more"):
        train_n_njtc(model, TEXT, steps=0)


def test_a_batch_of_one_position_is_passed_over(model):
    two = str(model.tokenizer.decode(model.tokenization.encode(TEXT.documents[:1])[0][:2]))
    lone = lj.Corpus("lone", (two, *TEXT.documents[:4]), "made here")
    batches = lj.make_batches(lone, model.tokenization, lj.Positions("all"))
    assert min(batch.n_picks for batch in batches) == 1
    jumps = train_n_njtc(model, lone, steps=3 * len(batches), split="100/0/0")
    assert all(bool(torch.isfinite(each).all()) for each in jumps.parameters())


def test_a_rank_that_no_map_has_is_one_line(model):
    with pytest.raises(BadEstimator, match="rank from 1 to .*, got 0"):
        train_n_njtc(model, TEXT, steps=2, rank=0)
    with pytest.raises(BadEstimator, match="rank from 1 to .*, got 0"):
        lj.fit(model, TEXT, tokens=2_000, estimator="ojfa", rank=0)

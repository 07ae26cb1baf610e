"""Causal tests equal what the intervention functions do, and tell a lens that is the model from one that is not."""

import pytest
import torch

import layerjump as lj
from layerjump.data.batches import Batch
from layerjump.errors import BadIntervention
from layerjump.interventions.causal_tests import (
    measure_alignment,
    measure_response,
    measure_swaps,
    resample_coordinates,
)
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.models.hooks import hidden_input

LENGTH = 9


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=150)


@pytest.fixture(scope="module")
def rerun(model, text):
    rows = [model.tokenization.encode([document])[0][:LENGTH] for document in text.documents[:60]]
    ids = torch.tensor([row for row in rows if len(row) == LENGTH][:20])
    row = torch.arange(len(ids))
    position = torch.full_like(row, LENGTH - 1)
    return Rerun(model, Batch(ids, torch.ones_like(ids), row, position, row, ids[:, -1]))


@pytest.mark.parametrize("estimator", ["mat", "calibrated"])
def test_swaps_equal_the_intervention(model, text, rerun, estimator):
    """`lj.swap` at the last position of each row changes the model's top token in the same rows."""
    lens = lj.Lens(model, lj.fit(model, text, estimator=estimator))
    tokens = torch.arange(40, 40 + len(rerun.batch.row))
    effect = measure_swaps(lens, rerun, 3, tokens)
    for row in (0, 4, 11):
        ids = rerun.batch.input_ids[row : row + 1]
        with torch.no_grad():
            before = model.hf(ids).logits[0, -1]
            with lj.swap(lens, int(before.argmax()), int(tokens[row]), levels=[3], positions=[LENGTH - 1]):
                after = model.hf(ids).logits[0, -1]
        assert int(effect.first[row]) == int(before.argmax())
        assert bool(effect.success[row]) == (int(after.argmax()) == int(tokens[row]))
        others = [i for i in range(len(before)) if i not in (int(effect.first[row]), int(tokens[row]))]
        log_before, log_after = (logits[others].double().log_softmax(-1) for logits in (before, after))
        kl = float((log_before.exp() * (log_before - log_after)).sum())
        assert float(effect.disturbance[row]) == pytest.approx(kl, rel=1e-3, abs=1e-5)


def test_one_coordinate_of_each_state_comes_from_another_row():
    states = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    change = resample_coordinates(states, seed=3) - states
    directions = torch.linalg.svd(states - states.mean(0), full_matrices=False).Vh
    coordinates = change @ directions.mT
    assert ((coordinates.abs() > 1e-4).sum(1) == 1).all()
    new = (states + change) @ directions.mT
    for row, column in (coordinates.abs() > 1e-4).nonzero().tolist():
        old = states @ directions[column]
        assert float((old - new[row, column]).abs().min()) < 1e-4


def test_alignment_is_one_where_the_lens_is_the_model(model, rerun):
    """With a last block that hands its input on, the logit lens of the level before it is the model."""
    hook = model.structure.blocks[-1].register_forward_hook(lambda module, args, output: hidden_input(args, {}))
    try:
        response = measure_response(Rerun(model, rerun.batch), model.n_blocks - 1)
    finally:
        hook.remove()
    assert measure_alignment(lj.Lens(model), response).min() > 0.999
    assert measure_alignment(lj.Lens(model), measure_response(rerun, 1)).mean() < 0.9


@pytest.mark.parametrize("level", [-1, 4])
def test_levels_after_which_no_block_runs_are_refused(model, rerun, level):
    with pytest.raises(BadIntervention, match="expected level from 0 to 3"):
        measure_response(rerun, level)


def test_a_batch_with_several_positions_in_a_row_is_refused(model):
    rerun = Rerun(model, lj.batch_from_ids([5, 6, 7, 8]))
    with pytest.raises(BadIntervention, match="one picked position in each row"):
        measure_swaps(lj.Lens(model), rerun, 1, torch.tensor([1, 2, 3, 4]))


def test_as_many_tokens_as_rows_are_expected(model, rerun):
    with pytest.raises(BadIntervention, match="expected tokens for"):
        measure_swaps(lj.Lens(model), rerun, 1, torch.tensor([1]))

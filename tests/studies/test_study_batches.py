"""The test positions a run scores: about as many as asked for, whatever the model and however short the text."""

from __future__ import annotations

import pytest
from helpers.story_text import letters, stories

from layerjump.data.positions import Positions
from layerjump.lens.lens import Lens
from layerjump.models.loading import load
from layerjump.studies.runner import STUDIES, run_studies, select_studies
from layerjump.studies.setup import Settings, Setup


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-bert"])
def setup(data_folder, request):
    return Setup(load(data_folder / request.param), stories(200), Settings(score_positions=60))


def test_about_as_many_picks_as_asked_for(setup):
    assert setup.test_batches().n_picks == pytest.approx(60, rel=0.25)


def test_one_a_document_is_exact(setup):
    assert setup.batches(positions=Positions("one"), picks=7).n_picks == 7


def test_picks_of_nearly_all_the_test_tokens(setup):
    """Sequences end at their last pick, so that as many tokens as before cannot be asked for again."""
    whole = setup.batches(positions=Positions("all"))
    found = setup.batches(positions=Positions("all"), tokens=whole.n_tokens - 1, picks=30)
    # A masked model would mask a share, so it reads all positions of fewer documents.
    assert 20 <= found.n_picks <= (100 if setup.model.masked else 45)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_lens_reads_a_model_in_any_precision(data_folder, dtype):
    setup = Setup(
        load(data_folder / "tiny-gpt2", dtype=dtype), stories(60), Settings(score_positions=30)
    )
    readings = setup.lens_scores()
    assert readings.n_levels == 5
    assert isinstance(setup.lenses()["mat"], Lens)
    assert bool((readings.rank[:, -1] == 0).all())


def test_all_studies_run(setup, tmp_path):
    both = setup.with_empty_cache(
        others=[letters(60)], settings=Settings(score_positions=60, score_tokens=400)
    )
    results = run_studies(both, select_studies("all"), tmp_path)
    assert list(results["studies"]) == list(STUDIES)
    for name, study in results["studies"].items():
        if name in (
            "dynamics",
            "finetune",
            "architecture",
        ):  # they need more than a model and a text
            assert study["skipped"], name
            continue
        assert study["skipped"] is None, name
        assert study["tables"], name
        assert all(study["tables"].values()), name

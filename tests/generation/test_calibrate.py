"""Calibration on a small trained model: its guarantee, its text, its file, its command."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import fitted_gpt2
from helpers.cli import run
from helpers.story_text import stories
from helpers.synthetic_jumps import jumps as other_jumps
from helpers.tiny_models import tiny_model

import layerjump as lj
from layerjump.errors import BadArtifact, BadExit, TextTooShort, WrongModel
from layerjump.generation.calibration import serialization
from layerjump.generation.calibration.calibrate import calibrate, calibration_curve
from layerjump.generation.calibration.cost_model import Costs, measure_costs
from layerjump.generation.calibration.dataset import OPENING, generate_text, split_documents_by_role, unseen_documents
from layerjump.generation.loop import ACCEPTANCE_WINDOW
from layerjump.generation.rules import ExitConfig, Fixed, Never
from layerjump.models.model import Model

model, jumps = fitted_gpt2.model, fitted_gpt2.jumps  # fixtures

COSTS = Costs(block=1.0, queued_token=0.1, unembedding=1.0, probe=0.01)


@pytest.fixture(scope="module")
def found(model, jumps):
    return calibrate(model, jumps, stories(900, seed=1, name="more"), target=0.9, costs=COSTS)


def test_drafting_pauses_below_the_minimal_acceptance(model, jumps):
    """Drafts at level 0 are nearly all rejected: with a minimal acceptance rate they soon stop."""
    settings = {"verify": True, "do_sample": False, "max_new_tokens": 60, "min_new_tokens": 60}
    always = Fixed(0)
    always_drafting = lj.generate(model, jumps, "One day, Tom", exit=always, **settings)
    pausing = lj.generate(model, jumps, "One day, Tom", exit=ExitConfig(always, min_acceptance=0.99), **settings)
    assert pausing.ids == always_drafting.ids
    assert ACCEPTANCE_WINDOW <= pausing.counts.drafts < ACCEPTANCE_WINDOW + 4
    assert always_drafting.counts.drafts > 40
    never_pausing = lj.generate(model, jumps, "One day, Tom", exit=ExitConfig(always), **settings)
    assert never_pausing.counts.drafts == always_drafting.counts.drafts


def test_documents_of_the_fit_are_excluded(model, jumps):
    text = stories(300)
    unseen = unseen_documents(jumps, text)
    assert set(unseen).isdisjoint(lj.split_documents(300, "80/10/10", seed=0).fit)
    assert len(unseen) == 60
    assert unseen_documents(jumps, stories(40, seed=5)) == tuple(range(40))
    roles = split_documents_by_role(unseen, 0)
    parts = roles.probes, roles.selection, roles.thresholds, roles.test
    assert sorted(document for part in parts for document in part) == sorted(unseen)


def test_calibration_keeps_its_guarantee_on_other_text(model, jumps, found):
    report = found.report
    assert report.test.agreement >= 0.87
    assert set(found.exit.rule.levels or ()) <= {0, 1, 2, 3}
    assert report.test.cost <= 1
    assert report.positions.thresholds == 540
    made = lj.generate(model, jumps, "One day, Tom went to the", exit=found.exit, max_new_tokens=12)
    assert made.n_tokens <= 12


def test_a_calibration_is_saved_and_loaded(model, jumps, found, tmp_path):
    serialization.save_calibration(found, tmp_path)
    again = serialization.load_calibration(tmp_path, model=model)
    assert again.report == found.report
    assert again.exit.rule.levels == found.exit.rule.levels
    assert again.verified_exit.min_acceptance == found.verified_exit.min_acceptance
    settings = {"max_new_tokens": 20, "do_sample": False}
    for one, other in ((found.exit, again.exit), (found.verified_exit, again.verified_exit)):
        a, b = (lj.generate(model, jumps, "One day, Lily", exit=e, **settings) for e in (one, other))
        assert (a.ids, a.exit_levels) == (b.ids, b.exit_levels)
    with pytest.raises(BadArtifact, match="layerjump calibrate"):
        serialization.load_calibration(tmp_path / "nothing")
    with torch.no_grad():
        model.structure.unembedding.weight.add_(1)
        try:
            with pytest.raises(WrongModel):
                serialization.load_calibration(tmp_path, model=model)
        finally:
            model.structure.unembedding.weight.sub_(1)


def test_a_rule_calibrated_with_other_jumps_is_refused(jumps, found, tmp_path):
    jumps.save_pretrained(tmp_path)
    serialization.save_calibration(found, tmp_path)
    assert serialization.load_calibration(tmp_path).report == found.report
    jumps.save_pretrained(tmp_path)  # the same again
    assert serialization.load_calibration(tmp_path).report == found.report
    other_jumps().save_pretrained(tmp_path)
    with pytest.raises(BadArtifact, match="calibrated with other jumps than those in it now"):
        serialization.load_calibration(tmp_path)


def test_positions_of_self_generated_text_are_those_that_the_model_wrote(model):
    text = stories(40, seed=6)
    (first, *_) = batches = generate_text(model, text, range(40), tokens=10, picks=4)
    assert 120 < sum(batch.n_picks for batch in batches) <= 160  # some texts end early
    assert first.position.min() >= OPENING - 1
    for batch in batches:
        at = next(iter(lj.capture_states(model, [batch], [model.n_blocks])))[model.n_blocks]
        following = batch.input_ids[batch.row, batch.position + 1]
        assert torch.equal(model.logits(at).argmax(-1), following)
        opening = [text.documents[document] for document in batch.document.tolist()]
        ids = model.tokenization.encode(opening)
        for row, document in zip(batch.row.tolist(), ids, strict=True):
            assert batch.input_ids[row, :OPENING].tolist() == document[:OPENING]


def test_calibration_on_self_generated_text(model, jumps):
    text = stories(500, seed=7)
    found = calibrate(model, jumps, text, target=0.9, costs=COSTS, self_generated_tokens=12)
    assert found.report.self_generated_tokens == 12
    assert found.report.positions.thresholds == 300
    assert found.report.test.agreement >= 0.85
    with pytest.raises(BadExit, match="what its context holds"):
        calibrate(model, jumps, text, target=0.9, costs=COSTS, self_generated_tokens=10_000)


def test_probe_curves_are_of_the_test_documents(found):
    for points in found.report.probe_curves.values():
        assert all(0 <= point.predicted <= 1 for point in points)
    curve = calibration_curve(torch.tensor([0.1, 0.9, 0.8, 0.2]), torch.tensor([0, 1, 1, 0]), bins=2)
    assert [point.observed for point in curve] == [0, 1]


def test_no_drafts_where_verification_does_not_pay(model, jumps):
    expensive = Costs(block=1, queued_token=1, unembedding=5, probe=0)
    text = stories(500, seed=2, name="other")
    assert isinstance(calibrate(model, jumps, text, target=0.9, costs=expensive).verified_exit.rule, Never)


def test_measured_costs_are_positive(model, jumps):
    costs = measure_costs(model, jumps)
    assert min(costs.block, costs.unembedding, costs.probe) > 0
    assert costs.full_model(4) == pytest.approx(4 * costs.block + costs.unembedding)


def test_costs_are_measured_within_the_models_positions():
    """A table of 20 positions is shorter than the usual context."""
    short = tiny_model("gpt2", dtype=torch.float32, max_position_embeddings=20)
    assert measure_costs(Model.wrap(short, name="short"), None).block > 0


def test_bad_arguments_are_refused(model, jumps):
    with pytest.raises(TextTooShort, match="59 documents"):
        calibrate(model, jumps, stories(60, seed=3), costs=COSTS)
    with pytest.raises(BadExit, match="between 0 and 1"):
        calibrate(model, jumps, stories(60, seed=3), target=1.0)
    with pytest.raises(BadExit, match="gap, probe, two-stage"):
        calibrate(model, jumps, stories(60, seed=3), rule_types=("magic",))


def test_the_command_line_calibrates_and_writes(data_folder, jumps, tmp_path):
    name, folder, text = str(data_folder / "tiny-gpt2"), str(tmp_path), tmp_path / "t.jsonl"
    jumps.save_pretrained(folder)
    text.write_text("\n".join(json.dumps({"text": d}) for d in stories(500, seed=4).documents))
    done = run("calibrate", name, "--jumps", folder, "--text", str(text), "--target", "0.9", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row["value"] for row in json.loads(done.stdout)}
    assert rows["test agreement"] > 0.8
    assert "wrote" in done.stderr
    made = run("generate", name, "One day,", "--jumps", folder, "--verify", "--stream", "--colour")
    assert made.returncode == 0, made.stderr
    early = run("generate", name, "One day,", "--jumps", folder, "--exit", "fixed:1", "--colour")
    assert "\x1b[38;2;32;160;32m" in early.stdout
    whole = run("generate", name, "One day,", "--exit", "never", "--colour")
    assert "\x1b" not in whole.stdout  # in the terminal's own colour
    plain = run("generate", name, "One day,", "--json", "--max-new-tokens", "64")
    assert json.loads(plain.stdout)["texts"][0]["text"] in made.stdout
    wrong = run("generate", name, "One day,", "--exit", "fixed:9")
    assert wrong.returncode == 1
    assert wrong.stderr.count("\n") == 1

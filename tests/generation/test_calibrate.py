"""Calibration on a small trained model: its guarantee, its text, its file, its command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers import fitted_gpt2
from helpers.cli import run
from helpers.story_text import stories
from helpers.synthetic_jumps import jumps as other_jumps
from helpers.tiny_models import tiny_model

import layerjump as lj
from layerjump.errors import BadArtifact, BadExit, TextTooShort, WrongModel
from layerjump.generation.calibration import calibration_file
from layerjump.generation.calibration.calibrate import calibrate, calibration_curve
from layerjump.generation.calibration.calibrate_drafts import calibrate_drafts
from layerjump.generation.calibration.dataset import OPENING, generate_text, split_documents_by_role, unseen_documents
from layerjump.generation.calibration.fit_drafters import HEAD_STRENGTH, continue_openings, fit_head, head_sites
from layerjump.generation.calibration.measure_costs import measure_costs
from layerjump.generation.calibration.result import Calibration, Costs
from layerjump.generation.combine_drafters import ACCEPTANCE_WINDOW, FREE
from layerjump.generation.exit_rules import ExitConfig, Fixed, Never
from layerjump.models.model import Model
from layerjump.models.sites import FINAL

model, jumps = fitted_gpt2.model, fitted_gpt2.jumps  # fixtures

COSTS = Costs(block=1.0, queued_token=0.1, unembedding=1.0, probe=0.01)


@pytest.fixture(scope="module")
def found(model, jumps):
    return calibrate(model, jumps, stories(900, seed=1, name="more"), target=0.9, costs=COSTS, draft_documents=0)


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
    assert set(unseen).isdisjoint(lj.split_indices(300, "80/10/10", seed=0).fit)
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
    calibration_file.save_calibration(found, tmp_path)
    again = calibration_file.load_calibration(tmp_path, model=model)
    assert again.report == found.report
    assert again.exit.rule.levels == found.exit.rule.levels
    assert again.verified_exit.min_acceptance == found.verified_exit.min_acceptance
    settings = {"max_new_tokens": 20, "do_sample": False}
    for one, other in ((found.exit, again.exit), (found.verified_exit, again.verified_exit)):
        a, b = (lj.generate(model, jumps, "One day, Lily", exit=e, **settings) for e in (one, other))
        assert (a.ids, a.exit_levels) == (b.ids, b.exit_levels)
    with pytest.raises(BadArtifact, match="layerjump calibrate"):
        calibration_file.load_calibration(tmp_path / "nothing")
    with torch.no_grad():
        model.structure.unembedding.weight.add_(1)
        try:
            with pytest.raises(WrongModel):
                calibration_file.load_calibration(tmp_path, model=model)
        finally:
            model.structure.unembedding.weight.sub_(1)


def test_drafters_are_calibrated_saved_and_loaded(model, found, tmp_path):
    """Nothing but the speed depends on the machine: text, file and head are those of the seed."""
    text = stories(200, seed=8)
    drafts = calibrate_drafts(model, text, range(120), range(120, 168))
    assert [jump.depth for jump in drafts.config.head] in ([], [1, 2, 3, 4])
    written = continue_openings(model, text, range(40), head_sites(model), tokens=40)
    heads = fit_head(model, written, head_sites(model))
    config = replace(drafts.config, drafters=("lookup", "recycled", "head"), head=heads)
    record = drafts.record.model_copy(
        update={"drafters": list(config.drafters), "head_sites": [str(site) for site in head_sites(model)]}
    )
    report = found.report.model_copy(update={"drafts": record})
    calibration = Calibration(found.exit, ExitConfig(Never(), drafts=config), report)
    calibration_file.save_calibration(calibration, tmp_path)
    again = calibration_file.load_calibration(tmp_path)
    assert again.report == report
    loaded = again.verified_exit.drafts
    assert (loaded.drafters, loaded.max_tokens, loaded.costs) == (config.drafters, config.max_tokens, config.costs)
    assert torch.equal(loaded.candidates, config.candidates)
    for one, other in zip(loaded.head, heads, strict=True):
        assert (one.source, one.depth) == (other.source, other.depth)
        assert torch.equal(one.jump.weight, other.jump.weight)
    plain, drafted = (
        lj.generate(model, None, "One day, Lily", do_sample=False, max_new_tokens=40, **settings)
        for settings in ({}, {"exit": replace(again.verified_exit, drafts=replace(loaded, costs=FREE)), "verify": True})
    )
    assert drafted.ids == plain.ids
    assert drafted.counts.accepted > 5


@torch.no_grad()
def test_a_draft_head_is_the_ridge_map_of_scaled_inputs(model):
    """By hand, at depth 2: states where they are known, two embeddings, the final state two tokens later."""
    sites = head_sites(model)
    written = continue_openings(model, stories(30, seed=9), range(30), sites, tokens=20)
    head = fit_head(model, written, sites)[1]
    assert str(head.source) == "+".join([*(f"{site}@-2" for site in sites), "embedding@-1", "embedding"])
    x, y = [], []
    for part in written:
        new = part.tokens[part.n_opening :]
        for at in range(len(new) - 2):
            embedded = model.structure.embed(torch.tensor(new[at : at + 2]))
            x.append(torch.cat([*(part.states[site][at] for site in sites), *embedded]))
            y.append(part.states[FINAL][at + 2])
    x, y = torch.stack(x).double(), torch.stack(y).double()
    scales = torch.cat(
        [torch.full((model.d_model,), float(part.var(0).mean()) ** -0.5) for part in x.split(model.d_model, 1)]
    )
    scaled = (x - x.mean(0)) * scales
    penalty = HEAD_STRENGTH * float((scaled**2).sum(0).mean())
    rows = torch.cat([scaled, penalty**0.5 * torch.eye(scaled.shape[1], dtype=torch.float64)])
    targets = torch.cat([y - y.mean(0), torch.zeros(scaled.shape[1], y.shape[1], dtype=torch.float64)])
    solution = torch.linalg.lstsq(rows, targets).solution
    expected = scaled @ solution + y.mean(0)
    assert torch.allclose(head.jump(x.float()).double(), expected, atol=1e-3 * float(y.std()))


def test_a_rule_calibrated_with_other_jumps_is_refused(jumps, found, tmp_path):
    jumps.save_pretrained(tmp_path)
    calibration_file.save_calibration(found, tmp_path)
    assert calibration_file.load_calibration(tmp_path).report == found.report
    jumps.save_pretrained(tmp_path)  # the same again
    assert calibration_file.load_calibration(tmp_path).report == found.report
    other_jumps().save_pretrained(tmp_path)
    with pytest.raises(BadArtifact, match="calibrated with other jumps than those in it now"):
        calibration_file.load_calibration(tmp_path)


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
    found = calibrate(model, jumps, text, target=0.9, costs=COSTS, self_generated_tokens=12, draft_documents=0)
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
    found = calibrate(model, jumps, text, target=0.9, costs=expensive, draft_documents=0)
    assert isinstance(found.verified_exit.rule, Never)


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
    done = run(
        "calibrate",
        name,
        "--jumps",
        folder,
        "--text",
        str(text),
        "--target",
        "0.9",
        "--json",
        "--draft-documents",
        "40",
    )
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

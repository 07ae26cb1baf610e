"""`submodules` and `attention_heads` on small trained models: properties that hold for any numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.study_results import check_figures

import layerjump as lj
from layerjump.data.positions import Positions
from layerjump.interventions.change_states import replace_by_map
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.studies import attention_heads, submodules
from layerjump.studies.compare_variants import small_batches
from layerjump.studies.setup import Setup, StudySettings

SETTINGS = StudySettings(tokens=12_000, n_test_positions=150, rerun_tokens=600)


def setup_of(folder, name: str, **changes) -> Setup:
    text = lj.load_text("pydoc", limit=400)
    return Setup(lj.load(folder / name), text, replace(SETTINGS, **changes))


@pytest.fixture(scope="module")
def gpt2(data_folder) -> Setup:
    return setup_of(data_folder, "tiny-gpt2")


@pytest.fixture(scope="module")
def bert(data_folder) -> Setup:
    return setup_of(data_folder, "tiny-bert")


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-bert"])
def setup(request) -> Setup:
    return request.getfixturevalue(request.param.removeprefix("tiny-"))


@pytest.fixture(scope="module")
def result(setup):
    return submodules.run(setup).to_json()


def hooks(setup) -> list:
    modules = setup.model.hf.modules()
    return [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in modules]


def test_rows_cover_every_part_level_and_block(setup, result):
    rows = result["tables"]["suffix"]
    parts = ["attn", "ffn", "norms", "jump to last", "identity"]
    assert [(r["part"], r["level"]) for r in rows] == [(p, lv) for p in parts for lv in range(5)]
    assert [(r["part"], r["block"]) for r in result["tables"]["one block"]] == [
        (p, b) for p in parts[:3] for b in range(1, 5)
    ]
    assert {r["part"] for r in result["tables"]["why"]} == {"ln1", "attn", "ln2", "ffn"}
    assert hooks(setup) == [([], [])] * len(hooks(setup))


def test_finding_names_the_most_tolerant_part(result):
    study = submodules.STUDY
    finding = study.finding(study.from_json(result))
    means = {part: result["headline"][f"mean_p@1_{part}"] for part in ("attn", "ffn", "norms")}
    names = {"attn": "attention", "ffn": "feed-forward", "norms": "norms"}
    best = max(means, key=lambda part: means[part])
    assert finding.answer == names[best]
    assert all(name in finding.detail for part, name in names.items() if part != best)
    assert study.finding(study.from_json(result | {"headline": {}})) is None


def test_at_the_last_level_nothing_is_replaced(result):
    for row in result["tables"]["suffix"]:
        assert row["p@1"] <= row["p@5"] <= row["p@10"]
        assert row["p@1 low"] <= row["p@1"] <= row["p@1 high"]
        if row["level"] == 4:
            assert row["p@1"] == 1
            assert row["kl"] == pytest.approx(0, abs=1e-5)


def test_one_block_is_the_suffix_of_the_last_block(setup):
    """Replacing from level L − 1 on is replacing in block L alone."""
    model, part = setup.model, "attn"
    jumps = setup.all_position_jumps("mat", "submodules")
    rerun = Rerun(model, small_batches(setup)[0])
    (pair,) = submodules.submodule_pairs(model, 4, part)
    alone = rerun.from_level(3, changes={pair: replace_by_map(jumps[pair])})
    later = rerun.from_level(3, changes=submodules.changes_from_maps(model, jumps, part))
    assert torch.equal(alone, later)


def test_maps_cost_less_than_means(result):
    """Least squares is at least as good as the best constant, the mean, on the fit text; here also on the test text."""
    why = [row for row in result["tables"]["why"] if row["part"] in ("attn", "ffn")]
    assert sum(r["kl of the map"] for r in why) < sum(r["kl of the mean"] for r in why)
    for row in result["tables"]["why"]:
        assert row["r2"] <= 1
        assert row["output norm over stream norm"] > 0
        assert min(row["kl of the map"], row["kl of noise of the same norm"]) > 0


def test_attention_mass_is_a_share(setup, result):
    for row in result["tables"]["why"]:
        if row["part"] == "attn":
            assert 0 < row["attention on self"] < 1
            assert 0 < row["attention on sink"] < 1
            assert row["attention on self"] + row["attention on sink"] <= 1 + 1e-6
        else:
            assert row["attention on self"] is None


def test_attention_mass_equals_output_attentions(gpt2, data_folder):
    from transformers import AutoModelForCausalLM

    batches = small_batches(gpt2, 0.1)
    mass, note = submodules.attention_mass(gpt2.model, batches)
    assert note is None
    assert gpt2.model.hf.config._attn_implementation == "sdpa"
    eager = AutoModelForCausalLM.from_pretrained(data_folder / "tiny-gpt2", attn_implementation="eager")
    on_self, on_sink, n = torch.zeros(4), torch.zeros(4), 0
    for batch in batches:
        with torch.no_grad():
            output = eager(batch.input_ids, attention_mask=batch.attention_mask, output_attentions=True)
        for row, position in zip(batch.row, batch.position, strict=True):
            weights = torch.stack([layer[row, :, position] for layer in output.attentions]).mean(1)
            on_self, on_sink, n = on_self + weights[:, position], on_sink + weights[:, 0], n + 1
    assert torch.allclose(
        torch.tensor(list(mass.values())), torch.stack([on_self / n, on_sink / n], 1).double().float()
    )


def test_maps_fitted_with_position_0_keep_the_sink(gpt2):
    """Maps fitted with position 0 preserve its state, to which other positions attend, better than maps without."""
    rerun = Rerun(gpt2.model, small_batches(gpt2)[0])
    exact = rerun.levels[-1][:, 0]

    def error(jumps, part):
        changes = submodules.changes_from_maps(gpt2.model, jumps, part)
        changed = rerun.from_level(0, changes=changes)[:, 0]
        return float((changed - exact).norm() / exact.norm())

    with_sink = gpt2.all_position_jumps("mat", "submodules")
    without_sink = lj.fit(gpt2.model, gpt2.corpus, pairs="submodules")
    errors = [[error(jumps, part) for part in submodules.PARTS] for jumps in (with_sink, without_sink)]
    assert max(errors[0]) < 0.55, errors
    assert sum(errors[0]) < sum(errors[1]), errors


def test_encoders_are_fitted_at_all_positions_of_masked_text(bert):
    plan = bert.all_position_plan("submodules")
    batch = plan.batches["fit"][0]
    assert batch.n_picks == batch.n_tokens
    masked = (batch.input_ids == bert.model.tokenization.mask).sum()
    assert 0.1 < int(masked) / batch.n_tokens < 0.2
    # The same tokens are masked as when only masked positions are picked.
    masks = Positions.parse("15%", skip_first=0, special=True)
    plain = bert.plan(bert.corpus, "submodules", positions=masks)
    assert torch.equal(plain.batches["fit"][0].input_ids, batch.input_ids)


def test_a_sampled_look_holds_as_many_masks_as_the_text(bert):
    plan = bert.plan(bert.corpus, "submodules", positions=Positions.parse("15%", skip_first=0, special=True))
    everywhere = plan.batches["fit"].with_picks_at(Positions("share", 0.3, skip_first=0, special=True))
    masks = picks = 0
    for batch in everywhere:
        masks += int((batch.input_ids[batch.row, batch.position] == bert.model.tokenization.mask).sum())
        picks += batch.n_picks
    assert picks == everywhere.n_picks
    assert 0.12 < masks / picks < 0.18


def test_heads_are_ranked_by_damage(setup):
    result = attention_heads.run(setup).to_json()
    rows = result["tables"]["heads"]
    assert len(rows) == 3 * 4 * 4
    for how in attention_heads.REPLACEMENTS:
        group = [row for row in rows if row["how"] == how]
        assert [row["rank"] for row in group] == list(range(1, 17))
        assert [row["kl"] for row in group] == sorted((row["kl"] for row in group), reverse=True)
    kl = {how: sum(row["kl"] for row in rows if row["how"] == how) for how in attention_heads.REPLACEMENTS}
    assert kl["linear"] < kl["mean"]
    check_figures(attention_heads.STUDY, result)
    assert hooks(setup) == [([], [])] * len(hooks(setup))


def test_a_deep_model_starts_from_chosen_levels():
    assert submodules.start_levels(4) == [0, 1, 2, 3, 4]
    deep = submodules.start_levels(30)
    assert deep[0] == 0
    assert deep[-1] == 30
    assert len(deep) == submodules.MAX_LEVELS + 1


def test_settings_state_the_cost(result):
    for cost in (result["settings"]["suffix"], result["settings"]["one block"]):
        assert cost["block_runs"] > 0
        assert cost["expected_seconds"] > 0
    assert result["settings"]["suffix"]["block_runs"] == 3 * (4 + 3 + 2 + 1)


def test_more_score_tokens_than_the_text_has_take_all(gpt2):
    settings = StudySettings(tokens=2_000, rerun_tokens=10**7, n_test_positions=50)
    few = gpt2.with_empty_cache(settings=settings)
    assert small_batches(few).n_picks > 0


def test_every_table_has_a_figure(result):
    check_figures(submodules.STUDY, result)

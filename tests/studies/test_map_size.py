"""`map_size`: parameters, bytes and operations of maps and shortcuts, and their quality."""

from __future__ import annotations

import pytest
import torch
from helpers.regression_data import noisy, random, sums
from helpers.story_text import stories
from helpers.study_results import check_figures

from layerjump.jumps.estimators.low_rank import low_rank, truncate_rank
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.maps import Affine, dequantize_int8, quantize_int8, quantize_map
from layerjump.models.loading import load
from layerjump.studies import layer_skipping, map_size
from layerjump.studies.setup import Setup, StudySettings

D, L = 80, 4


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-bert"])
def setup(data_folder, request):
    return Setup(load(data_folder / request.param), stories(160), StudySettings(n_test_positions=150))


@pytest.fixture(scope="module")
def result(setup):
    return map_size.run(setup).to_json()


@pytest.fixture(scope="module")
def maps(result):
    return {row["map"]: row for row in result["tables"]["maps"]}


def test_parameters_and_bytes(maps):
    assert maps["mat"]["parameters"] == L * D * D
    assert maps["mat"]["bytes"] == 4 * L * D * D
    assert maps["affine"]["parameters"] == L * (D * D + D)
    assert maps["low-rank 40"]["parameters"] == L * (2 * 40 * D + D)
    assert maps["low-rank 40"]["rank"] == 40
    assert maps["n-njtc"]["parameters"] == L * (2 * D + D)  # rank 80 // 100, but at least 1
    assert maps["ojfa pooled"]["parameters"] == 2 * D + D  # one map for all levels
    assert maps["mat in float16"]["bytes"] == 2 * L * D * D
    assert maps["mat in int8"]["bytes"] == L * (D * D + 4 * D)


def test_quality_falls_with_rank_and_hardly_with_storage(setup, maps):
    # On the text it is fitted on, a lower rank is never better; on other text, nearly so.
    scores = [maps[f"low-rank {rank}"]["r2 weighted"] for rank in (40, 20, 10, 5, 2, 1)]
    assert all(lower < higher + 0.005 for higher, lower in zip(scores, scores[1:], strict=False))
    full = maps["mat"]
    if setup.model.masked:
        # [MASK]s at level 0 differ by position alone: such maps have huge weights that cancel, unless rounded.
        assert maps["mat in bfloat16"]["r2"] < maps["mat in float16"]["r2"] < full["r2"]
        assert maps["ridge in bfloat16"]["r2"] == pytest.approx(maps["ridge"]["r2"], abs=0.01)
        assert maps["ridge in int8"]["r2"] == pytest.approx(maps["ridge"]["r2"], abs=0.05)
        return
    for name, far in (("float16", 0.001), ("bfloat16", 0.01), ("int8", 0.02)):
        half = maps[f"mat in {name}"]
        assert half["r2"] == pytest.approx(full["r2"], abs=far)
        assert half["p@1"] == pytest.approx(full["p@1"], abs=0.05)
    assert maps["n-njtc"]["r2"] == pytest.approx(maps["low-rank 1"]["r2"], abs=1e-5)


def test_unembedding_metric_needs_a_single_final_norm(setup, maps, result):
    has = any("metric" in name for name in maps)
    assert has == (not setup.model.masked)
    assert any("metric" in note for note in result["notes"]) == setup.model.masked


def test_exits_cost_more_the_later_they_are(setup, result):
    rows = result["tables"]["exits"]
    assert [row["blocks"] for row in rows] == list(range(L + 1))
    blocks, head = 12 * D * D * 2, 1024 * D * 2
    head += D * D * 2 if setup.model.masked else 0  # BERT's head has a dense layer before the product
    assert rows[0]["flops per token"] == head + 2 * D * D
    assert rows[2]["flops per token"] == 2 * blocks + head + 2 * D * D
    assert rows[L]["flops per token"] == L * blocks + head
    assert rows[L]["share of flops"] == 1
    assert rows[L]["map bytes"] == 0
    assert rows[0]["map bytes"] == 4 * D * D
    assert rows[L]["p@1"] == 1


def test_without_validation_documents_ojfa_is_left_out(setup):
    bare = setup.with_empty_cache(settings=StudySettings(n_test_positions=50, split="90/0/10"))
    result = map_size.run(bare).to_json()
    assert not any("ojfa" in row["map"] for row in result["tables"]["maps"])
    assert any("ojfa" in note for note in result["notes"])


def test_schedules_are_listed_if_alternation_ran(setup, result):
    assert "schedules" not in result["tables"]
    assert any("layer_skipping" in note for note in result["notes"])
    scores = {"p@1": 0.5, "p@1 low": 0.4, "p@1 high": 0.6, "p@5": 1, "p@10": 1, "surprisal": 1, "kl": 1}
    rows = [
        {"rule": "single jump", "blocks run": 1, "schedule": "0-1 → 4", **scores},
        {"rule": "round robin", "blocks run": 2, "schedule": "0-1 → 2-3 → 4", **scores},
    ]
    rows = [row | {"a": None, "b": None} for row in rows]
    saved = {"tables": {"schedules": rows, "pairs": []}, "headline": {}, "notes": [], "settings": {}}
    setup.add_outcome(layer_skipping.STUDY.from_json(saved))
    again = map_size.run(setup).to_json()["tables"]["schedules"]
    exit_row = result["tables"]["exits"][1]
    assert again[0]["flops per token"] == exit_row["flops per token"]
    assert again[0]["map bytes"] == exit_row["map bytes"]
    one_block_more = sum(map_size.block_flops(setup.model)[2:3]) + 2 * D * D
    assert again[1]["flops per token"] == again[0]["flops per token"] + one_block_more
    assert again[1]["map bytes"] == 2 * again[0]["map bytes"]


def test_every_table_has_a_figure(result):
    check_figures(map_size.STUDY, result)


def test_lower_ranks_come_out_of_a_higher_one():
    source, (target,) = sums(*noisy(300, 12, 9))
    metric = random(9, 9).mT @ random(9, 9)
    for options in ({}, {"metric": metric}):
        (wide,) = low_rank(source, [target], rank=9, **options)
        for rank in (1, 4, 9):
            (direct,) = low_rank(source, [target], rank=rank, **options)
            cut = truncate_rank(wide, rank, source, target)
            torch.testing.assert_close(cut.weight, direct.weight)
            torch.testing.assert_close(cut.bias, direct.bias)


def test_full_rank_is_affine():
    source, (target,) = sums(*noisy(300, 9, 9))
    (full,) = solve("affine", source, [target])
    (wide,) = low_rank(source, [target], rank=9)
    torch.testing.assert_close(truncate_rank(wide, 9, source, target).weight, full.weight)


def test_int8_is_off_by_at_most_half_a_step():
    matrix = random(7, 30) * torch.logspace(-3, 3, 7, dtype=torch.float64)[:, None]
    matrix[3] = 0
    codes, scales = quantize_int8(matrix)
    assert codes.dtype == torch.int8
    assert codes.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    error = (dequantize_int8(codes, scales) - matrix).abs()
    assert (error <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize(
    ("storage", "n_bytes"),
    [("float32", 4 * 36), ("float16", 2 * 36), ("bfloat16", 2 * 36), ("int8", 30 + 4 * 6 + 4 * 6)],
)
def test_stored_maps_come_back_rounded(storage, n_bytes):
    jump = Affine.of(random(6, 5), bias=random(6))
    back = quantize_map(jump, storage)
    assert back.n_bytes == n_bytes
    assert back.affine.weight.dtype == back.affine.bias.dtype == torch.float64
    close = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2}[storage]
    torch.testing.assert_close(back.affine.weight, jump.weight, atol=close, rtol=close)
    assert not torch.equal(back.affine.weight, jump.weight)

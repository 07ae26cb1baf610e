"""Studies of parts, and pruning, on a trained hybrid: its blocks have different parts."""

from __future__ import annotations

import pytest
from helpers.pretraining import HELD_OUT, TEXT
from helpers.study_results import check_figures

import layerjump as lj
from layerjump.models.sites import Site
from layerjump.studies import attention_heads, submodules
from layerjump.studies.setup import Setup, StudySettings
from layerjump.training.pretrain import Recipe, pretrain

RECIPE = Recipe(
    arch="lfm2", layers=4, hidden_size=64, max_positions=32, vocab_size=300, length=32, steps=60, batch_size=8,
    learning_rate=3e-3, eval_every=60,
)  # fmt: skip


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    pretrain(TEXT, folder, RECIPE, eval_text=HELD_OUT, device="cpu")
    return Setup(lj.load(folder), TEXT, StudySettings(tokens=4_000, n_test_positions=100, rerun_tokens=300))


def test_submodules_of_each_block(setup):
    sites = set(setup.model.structure.sites())
    mixers = [block for block in range(1, 5) if Site(block, "mixer.in") in sites]
    attention = [block for block in range(1, 5) if Site(block, "attn.in") in sites]
    assert sorted(mixers + attention) == [1, 2, 3, 4]
    assert mixers
    assert attention
    result = submodules.run(setup)
    tables = result.to_json()["tables"]
    for table in ("one block", "why"):
        rows = tables[table]
        assert [row["block"] for row in rows if row["part"] == "mixer"] == mixers
        assert [row["block"] for row in rows if row["part"] == "attn"] == attention
        assert [row["block"] for row in rows if row["part"] == "ffn"] == [1, 2, 3, 4]
    for row in tables["why"]:
        assert (row["attention on self"] is not None) == (row["part"] == "attn")
        assert row["kl of the map"] <= row["kl of the mean"] * 1.5 + 1e-3
        assert row["output norm over stream norm"] > 0
    suffix = {(row["part"], row["level"]): row["p@1"] for row in tables["suffix"]}
    assert {part for part, _ in suffix} == {"attn", "mixer", "ffn", "norms", "jump to last", "identity"}
    # No block after the last mixer has one to replace.
    assert all(suffix["mixer", level] == suffix["mixer", 4] for level in range(max(mixers), 5))
    assert suffix["mixer", 0] <= suffix["mixer", 4]
    check_figures(submodules.STUDY, result.to_json())


def test_heads_of_the_blocks_with_attention(setup):
    assert attention_heads.cannot_run(setup) is None
    rows = attention_heads.run(setup).to_json()["tables"]
    blocks = {row["block"] for table in rows.values() for row in table}
    assert blocks == {block for block in range(1, 5) if Site(block, "heads") in set(setup.model.structure.sites())}


@pytest.mark.parametrize("method", ["remove", "fold"])
def test_one_block_is_pruned_and_the_checkpoint_loads_again(setup, method, tmp_path):
    pruned = lj.prune(setup.model, TEXT, drop=1, method=method, tokens=4_000)
    pruned.save(tmp_path / "pruned")
    model = lj.load(tmp_path / "pruned")
    assert model.n_blocks == 3
    kinds = [[write.role for write in model.structure.writes(block)] for block in range(1, 4)]
    before = [[write.role for write in setup.model.structure.writes(block)] for block in range(1, 5)]
    assert kinds == [roles for block, roles in enumerate(before, start=1) if block not in pruned.dropped]
    assert pruned.loss.ratio < 3

"""Runs over parts of one text, and merging their moments: every document once."""

import logging

import pytest
from helpers import fitted_gpt2
from helpers.cli import run
from helpers.comparisons import assert_same_predictions

import layerjump as lj
from layerjump.errors import BadMoments, BadText, TextTooShort
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.moments_of_splits import SplitMoments, merge_moments, merge_moments_files, read_header

model, text = fitted_gpt2.model, fitted_gpt2.text  # fixtures


@pytest.fixture(scope="module")
def files(model, text, tmp_path_factory):
    """The moments of three shards, and of the first two of them merged."""
    folder = tmp_path_factory.mktemp("shards")
    for index in range(3):
        lj.collect_moments(model, text, pairs="all", shard=f"{index}/3").save(folder / f"{index}")
    merge_moments_files([folder / "0", folder / "1"]).save(folder / "01")
    return folder


def test_shards_merge_to_the_whole_text(files, model, text):
    """The same documents in the same splits, at the same positions; in other batches, so states round apart."""
    whole = lj.collect_moments(model, text, pairs="all")
    merged = merge_moments_files([files / name for name in "201"])
    assert {name: moments.n for name, moments in merged.splits.items()} == {n: m.n for n, m in whole.splits.items()}
    assert merged.info == whole.info
    for pair in whole.fit.pairs:
        (x, y), (expected_x, expected_y) = (run.fit.pair_moments(pair, "raw") for run in (merged, whole))
        for ours, theirs in ((x.scatter, expected_x.scatter), (y.cross, expected_y.cross)):
            assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    assert_same_predictions(solve_jumps(merged), solve_jumps(whole), model, text)


def test_merging_in_stages_and_again_counts_every_document_once(files, tmp_path, caplog):
    once = merge_moments_files([files / name for name in "012"])
    once.save(tmp_path / "once")
    staged = merge_moments_files([files / "01", files / "2"])
    staged.save(tmp_path / "staged")
    with caplog.at_level(logging.WARNING, logger="layerjump"):
        again = merge_moments_files([files / "0", tmp_path / "once", files / "01"])
    assert caplog.text.count("left out") == 2
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "once").read_bytes()
    assert (tmp_path / "staged").read_bytes() == (tmp_path / "once").read_bytes()


def test_documents_that_are_in_two_runs_are_refused(files, model, text, tmp_path):
    zero, merged = SplitMoments.load(files / "0"), SplitMoments.load(files / "01")
    for runs in ([merged, zero], [zero, merged], [zero, zero]):
        with pytest.raises(BadMoments, match="count them twice"):
            merge_moments(runs)
    merge_moments_files([files / "1", files / "2"]).save(tmp_path / "12")
    with pytest.raises(BadMoments, match=r"shard 1/3\)' are in more than one"):
        merge_moments_files([files / "01", tmp_path / "12"])
    lj.collect_moments(model, text, pairs="all", shard="3/6").save(tmp_path / "half")  # half of shard 0 of 3
    with pytest.raises(BadMoments, match="count them twice"):
        merge_moments_files([files / "0", tmp_path / "half"])


def test_shards_with_different_splits_are_refused(files, model, text, tmp_path):
    """A document to fit on in one run would be a test document in the other."""
    lj.collect_moments(model, text, pairs="all", shard="1/3", seed=1).save(tmp_path / "other")
    with pytest.raises(BadMoments, match="seed 0, and 80/10/10 with seed 1"):
        merge_moments_files([files / "0", tmp_path / "other"])


@pytest.mark.parametrize("shard", ["3/3", "1", "-1/3", "a/b", "0/0", "1/2/3"])
def test_shards_that_make_no_sense(shard, model, text):
    with pytest.raises(BadText, match="such as 0/8"):
        lj.collect_moments(model, text, shard=shard)


def test_more_shards_than_documents(model):
    with pytest.raises(TextTooShort, match="80 documents in the fit split|at least 90 documents"):
        lj.collect_moments(model, lj.load_text("pydoc", limit=100), shard="0/90")


def test_the_command_line_collects_merges_and_solves(data_folder, tmp_path):
    folder = str(data_folder / "tiny-gpt2")
    shards = []
    for index in range(2):
        out = tmp_path / f"shard-{index}"
        run("fit", folder, "--tokens", "4000", "--shard", f"{index}/2", "-o", str(out))
        assert [path.name for path in out.iterdir()] == ["moments.safetensors"]
        shards.append(str(out / "moments.safetensors"))
    run("merge", *shards, "-o", str(tmp_path / "all"))
    merged = tmp_path / "all" / "moments.safetensors"
    assert read_header(merged).info.text == "pydoc"
    run("fit", "--from-moments", str(merged), "-o", str(tmp_path / "a"))
    run("fit", "--from-moments", shards[1], "--from-moments", shards[0], "-o", str(tmp_path / "b"))
    a, b = (lj.Jumps.from_pretrained(tmp_path / name) for name in "ab")
    assert a.provenance == b.provenance
    assert a.provenance.tokens >= 4000

"""Jumps that need no fitting: in the package, in the cache, on a hub; and how they get to a hub."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.hub_endpoint import local_hub
from helpers.synthetic_jumps import jumps as synthetic_jumps
from helpers.synthetic_jumps import same

import layerjump as lj
from layerjump.errors import BadJumps, JumpsNotFound, WrongModel
from layerjump.jumps import serialization
from layerjump.jumps.default_jumps import PACKAGED, cached_jumps, pretrained_jumps
from layerjump.jumps.model_card import HeldOutScores, hub_name, model_card
from layerjump.lens.score_jumps import with_held_out_scores


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def home(model, tmp_path_factory):
    """A cache with jumps of the model."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAYERJUMP_HOME", str(folder))
        cached_jumps(model)
    return folder


# The package


needs_packaged = pytest.mark.skipif(
    not (PACKAGED / "smollm2").is_dir(),
    reason="this tree has no lens of the bundled model: benchmarks/packaged_lens.py",
)


@needs_packaged
def test_the_bundled_model_brings_jumps():
    jumps = lj.load_jumps("smollm2")
    assert same(jumps, lj.load_jumps("HuggingFaceTB/SmolLM2-135M-Instruct"))
    assert (jumps.provenance.n_blocks, jumps.provenance.width) == (30, 576)
    assert {source.index for source, _ in jumps} == set(range(0, 30, 4))
    assert not jumps.provenance.text.startswith(("/", "~"))
    assert sum(file.stat().st_size for file in (PACKAGED / "smollm2").iterdir()) < 3_000_000


@needs_packaged
def test_they_are_better_than_the_logit_lens_at_every_level():
    scores = HeldOutScores.of(lj.load_jumps("smollm2"))
    assert scores.positions >= 400
    assert scores.level == list(range(0, 30, 4))
    assert all(ours < theirs for ours, theirs in zip(scores.kl, scores.kl_identity, strict=True))
    assert sum(scores.agreement) > sum(scores.agreement_identity)


@needs_packaged
def test_they_are_of_no_other_model(model):
    with pytest.raises(WrongModel, match="30 blocks"):
        lj.Jumps.from_pretrained(PACKAGED / "smollm2", model=model)


# The cache


def test_jumps_in_the_cache_are_taken_and_others_are_missed_with_a_remedy(model, home, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERJUMP_HOME", str(home))
    fitted = cached_jumps(model)["mat"]
    assert same(lj.load_jumps(model), fitted)
    assert same(lj.Lens.from_pretrained(model).jumps, fitted)
    monkeypatch.setenv("LAYERJUMP_HOME", str(tmp_path))
    assert pretrained_jumps(model) is None
    with pytest.raises(JumpsNotFound, match=r"in the package or in the cache; fit some with lj.fit"):
        lj.Lens.from_pretrained(model)
    with pytest.raises(JumpsNotFound, match=r"in the package or as layerjump/nobody-has-it on the hub; fit"):
        lj.load_jumps("someone/nobody-has-it")


def test_names_on_the_hub(tmp_path):
    assert hub_name("gpt2") == "layerjump/gpt2"
    assert hub_name("Qwen/Qwen3-0.6B") == "layerjump/Qwen3-0.6B"
    assert hub_name(str(tmp_path)) is None
    assert hub_name("./gpt2") is None


# 8 bits


def test_int8_takes_a_quarter_of_the_bytes_and_reads_nearly_the_same(model, home, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERJUMP_HOME", str(home))
    jumps = lj.load_jumps(model)
    sizes = {}
    for storage in serialization.STORAGES:
        jumps.save_pretrained(tmp_path / storage, storage=storage)
        sizes[storage] = (tmp_path / storage / serialization.TENSORS).stat().st_size
    assert sizes["int8"] < 0.4 * sizes["float32"]
    coded = lj.Jumps.from_pretrained(tmp_path / "int8", model=model)
    assert coded.provenance == jumps.provenance
    lazy = lj.Jumps.from_pretrained(tmp_path / "int8", model=model, lazy=True)
    assert all(torch.equal(lazy[pair].weight, coded[pair].weight) for pair in coded)
    for pair in jumps:
        step = jumps[pair].weight.abs().amax(1, keepdim=True) / 127
        assert ((coded[pair].weight - jumps[pair].weight).abs() <= 0.5001 * step).all()
    text = "Once upon a time, there was a little girl"
    one, other = (lj.Lens(model, read)(text) for read in (jumps, coded))
    assert (one.top[..., 0] == other.top[..., 0]).double().mean() > 0.95
    again = tmp_path / "again"
    coded.save_pretrained(again, storage="int8")
    assert same(lj.Jumps.from_pretrained(again), coded)
    assert json.loads((again / serialization.TEXT).read_text())["format_version"] == 3


def test_an_unknown_storage_and_damaged_codes_are_errors(tmp_path):
    with pytest.raises(BadJumps, match="expected storage of float32 or int8, got 'int4'"):
        synthetic_jumps().save_pretrained(tmp_path, storage="int4")
    synthetic_jumps().save_pretrained(tmp_path, storage="int8")
    file = tmp_path / serialization.TENSORS
    tensors, metadata = serialization.io.read_tensors(file)
    scale = next(name for name in tensors if name.endswith(".scale"))
    for damaged in (
        {name: tensor for name, tensor in tensors.items() if name != scale},
        tensors | {scale: tensors[scale].double()},
        tensors | {scale: torch.full_like(tensors[scale], torch.inf)},
    ):
        serialization.io.write_tensors(file, damaged, metadata)
        (tmp_path / serialization.TEXT).unlink(missing_ok=True)
        with pytest.raises(serialization.BadArtifact, match="again"):
            serialization.load(tmp_path)


# The hub


@pytest.fixture(scope="module")
def hub():
    with local_hub() as (address, repositories):
        yield address, repositories


def run(hub, folder, *command, offline="0"):
    environment = os.environ | {
        "HF_ENDPOINT": hub[0],
        "HF_HUB_OFFLINE": offline,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_of_nobody",
        "LAYERJUMP_HOME": str(folder / "home"),
    }
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_fit_and_push_then_another_machine_loads_it(hub, data_folder, tmp_path):
    """The real client of the hub, against an endpoint on this machine."""
    folder = tmp_path / "tiny-gpt2"
    shutil.copytree(data_folder / "tiny-gpt2", folder)
    fit = ["fit", str(folder), "--tokens", "3000", "--storage", "int8", "--push-to-hub", "layerjump/tiny-gpt2"]
    done = run(hub, tmp_path, "-m", "layerjump", *fit, "-o", str(tmp_path / "jumps"))
    assert f"uploaded to {hub[0]}/layerjump/tiny-gpt2/commit/" in done.stderr
    files = hub[1]["layerjump/tiny-gpt2"]
    assert set(files) >= {"README.md", *serialization.FILES}
    for name in serialization.FILES:
        assert files[name] == (tmp_path / "jumps" / name).read_bytes()
    card = files["README.md"].decode()
    assert "library_name: layerjump" in card
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", card, flags=re.MULTILINE)
    scores = HeldOutScores.of(lj.Jumps.from_pretrained(tmp_path / "jumps"))
    assert [int(row[0]) for row in rows] == scores.level == [0, 1, 2, 3]
    assert [row[1] for row in rows] == [f"{kl:.3f}" for kl in scores.kl]
    # A model of that name, as if it came from the hub, in another home.
    code = (
        "import layerjump as lj, sys; model = lj.load(sys.argv[1]); from dataclasses import replace; "
        "model = replace(model, name='someone/tiny-gpt2'); lens = lj.Lens.from_pretrained(model); "
        "print(lens.jumps.provenance.estimator, len(lens.jumps), lens('Once upon').settled_level)"
    )
    other = tmp_path / "other"
    first = run(hub, other, "-c", code, str(folder))
    assert first.stdout.startswith("mat 4 ")
    assert run(hub, other, "-c", code, str(folder), offline="1").stdout == first.stdout  # from the client's cache


def test_held_out_scores_are_the_lens_against_the_model(model, home, monkeypatch):
    monkeypatch.setenv("LAYERJUMP_HOME", str(home))
    jumps = lj.load_jumps(model)
    scored = with_held_out_scores(model, jumps, lj.load_text("pydoc"), positions=300)
    scores = HeldOutScores.of(scored)
    assert all(torch.equal(scored[pair].weight, jumps[pair].weight) for pair in jumps)
    assert scores.text == "pydoc"
    assert all(0 <= share <= 1 for share in scores.agreement)
    assert sum(scores.kl) < sum(scores.kl_identity)
    documents = lj.load_text("pydoc").documents
    test = lj.split_indices(len(documents), jumps.provenance.split, seed=jumps.provenance.seed).test
    assert not set(test) & set(lj.split_indices(len(documents), seed=jumps.provenance.seed).fit)
    card = model_card(scored, "someone/jumps")
    assert f"| 0 | {scores.kl[0]:.3f} | {scores.kl_identity[0]:.3f} |" in card
    assert "R² of the identity" in model_card(jumps, "someone/jumps")  # without scores as a lens

"""Exported checkpoints load in Hugging Face alone, without a warning, with the logits of the model in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import processes
from helpers.story_text import numbers
from helpers.tiny_models import CASES, tiny_model
from helpers.tokenizers import llama as llama_words
from safetensors.torch import load_file

import layerjump as lj
from layerjump.errors import BadArtifact, BadPruning, WrongModel
from layerjump.io import replace_folder
from layerjump.jumps.jumps import RunInfo
from layerjump.models.discovery import discover
from layerjump.models.model import Model
from layerjump.models.self_check import sample
from layerjump.pruning.checkpoint import PruningRecord, model_card, save
from layerjump.pruning.drop_blocks import cannot_drop, without_blocks
from layerjump.pruning.prune import Pruned

ALONE = """
import sys, warnings
sys.modules["layerjump"] = None  # as if layerjump were not installed
warnings.simplefilter("error")
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
ids = torch.tensor([[5, 9, 17, 23, 31, 8, 44, 12]])
results = {}
for folder in sys.argv[2:]:
    kind, _, path = folder.partition("=")
    auto = AutoModelForMaskedLM if kind == "masked" else AutoModelForCausalLM
    model, report = auto.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        results[path] = model.eval()(ids).logits
    if kind == "causal":
        results["tokens " + path] = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
save_file(results, sys.argv[1])
"""
IDS = torch.tensor([[5, 9, 17, 23, 31, 8, 44, 12]])
REBUILT = 1e-5
"""Loading computes constants (rotary frequencies, Gemma's √d) in float32; a float64 model in memory has float64."""


def tiny(family: str, variant: str) -> Model:
    hf = tiny_model(family, variant)
    words = llama_words() if family not in ("bert",) else None
    return Model(hf, discover(hf), f"{family}-{variant}", words)


def removed(model: Model) -> Pruned:
    """Drop block 2 without fitting or measuring: the encoders here have no tokenizer."""
    info = RunInfo(
        model=model.name,
        revision=None,
        fingerprint="0" * 64,
        tokenizer=None,
        family=model.hf.config.model_type,
        n_blocks=model.n_blocks,
        width=model.d_model,
        text="none",
        text_sha256="",
        tokens=0,
        positions="all",
        skip_first=0,
        special=True,
        split="none",
        seed=0,
    )
    return Pruned(without_blocks(model, [2]), model, ((1, 2),), "remove", "given", info)


def pruned(family: str, variant: str) -> Pruned | None:
    model = tiny(family, variant)
    if model.task == "causal":
        return lj.prune(model, numbers(80), drop=1, criterion="deepest", split="70/15/15")
    return None if cannot_drop(model) else removed(model)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, tuple[Pruned, Path]]:
    root = tmp_path_factory.mktemp("exported")
    results = {}
    for family, variant in CASES:
        result = pruned(family, variant)
        if result is not None:
            name = "-".join(filter(None, (family, variant)))
            save(result, root / name)
            results[name] = result, root / name
    return results


def load_without_layerjump(folders: list[tuple[str, Path]], out: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Load the folders in a process without layerjump; return its logits and its standard error."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    named = [f"{kind}={folder}" for kind, folder in folders]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(out), *named], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return load_file(out), done.stderr


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.hf(IDS).logits


def test_every_family_loads_without_layerjump(exported, tmp_path):
    folders = [(result.model.task, folder) for result, folder in exported.values()]
    results, stderr = load_without_layerjump(folders, tmp_path / "logits.safetensors")
    # transformers imports torchao where it is installed, which warns of its kernels for other devices.
    assert not [line for line in stderr.splitlines() if "torchao" not in line and "_pytree" not in line]
    assert len(exported) > 30
    for result, folder in exported.values():
        assert torch.allclose(results[str(folder)], logits(result.model), rtol=0, atol=REBUILT), folder
        assert not torch.allclose(results[str(folder)], logits(result.original), atol=1e-3), folder
        if result.model.task == "causal":
            ours = result.model.hf.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert torch.equal(results[f"tokens {folder}"], ours)


def test_each_family_gets_its_best_method(exported):
    methods = {name: result.method for name, (result, _) in exported.items()}
    assert {methods[name] for name in ("gpt2", "opt", "bloom", "falcon-rw", "gptj")} == {"fold"}
    assert {methods[name] for name in ("gemma2", "olmo2", "bert", "opt-350m")} == {"remove"}
    assert methods["mistral"] == "rotation"


def test_model_card_and_record_describe_the_pruning(exported):
    result, folder = exported["llama"]
    record = json.loads((folder / "pruning.json").read_text())
    assert record["dropped"] == [2]
    assert record["loss"]["ratio"] == pytest.approx(result.loss.ratio)
    assert PruningRecord.load(folder).to_json() == record
    card = (folder / "README.md").read_text()
    for stderr in ("2 of 3 blocks", "counted from 1: 2", result.method, "Perplexity ratio", "toy"):
        assert stderr in card
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_the_former_name_of_rotation_is_read(exported):
    """`pruning.json` named the method `turn`, and an unmeasured loss is an empty object."""
    result, folder = exported["bert"]
    record = json.loads((folder / "pruning.json").read_text())
    assert record["loss"] == record["distilled"] == {}
    loaded = PruningRecord.model_validate(record | {"method": "turn"})
    assert (loaded.method, loaded.loss) == ("rotation", None)
    assert "rotation of the residual stream" in model_card(loaded)


def test_tied_weights_stay_tied_without_rotation(exported):
    result, folder = exported["gpt2"]
    assert result.model.structure.unembedding.weight is result.model.hf.get_input_embeddings().weight
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


def test_linear_replacements_are_saved_as_base_and_jumps(tmp_path):
    model = tiny("llama", "")
    result = lj.prune(model, numbers(80), drop=1, method="linear", criterion="deepest", split="70/15/15")
    result.save(tmp_path / "linear")
    again = lj.load(tmp_path / "linear", dtype="float64")
    # Jumps are stored in float32.
    assert torch.allclose(logits(again), logits(result.model), rtol=0, atol=1e-4)
    base = lj.load(tmp_path / "linear/base", dtype="float64")
    assert not torch.allclose(logits(base), logits(again), atol=1e-2)
    ours = again.hf.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    plain = again.hf.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(ours, plain)
    head = json.loads((tmp_path / "linear/linear.json").read_text())
    (tmp_path / "linear/linear.json").write_text(json.dumps(head | {"fingerprint": "0"}))
    with pytest.raises(WrongModel, match="other weights"):
        lj.load(tmp_path / "linear")


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "phi3", "olmo2"])
def test_a_draft_model_is_its_jump_and_its_unembedding(family, tmp_path):
    """Compared with the closed form: the norm without its weight, the least-squares map, the unembedding."""
    model = tiny(family, "")
    result = lj.make_draft_model(model, numbers(80), 2, split="70/15/15")
    assert result.model.n_blocks == 2
    result.save(tmp_path / "short")
    again = lj.load(tmp_path / "short", dtype="float64")
    assert torch.allclose(logits(again), logits(result.model), rtol=0, atol=REBUILT)
    batch = sample(model)
    (original,) = lj.capture_states(model, [batch], [2, "final"])
    (short,) = lj.capture_states(result.model, [batch], [2, "final"], logits=True)
    assert torch.allclose(short[2], original[2], rtol=0, atol=1e-12)
    core = short["final"]  # the norm with a weight of one
    assert torch.allclose(core.square().mean(-1), torch.ones(()).double(), atol=1e-3)
    head = model.structure.unembedding.weight.double()
    product = torch.linalg.lstsq(head, result.model.structure.unembedding.weight.double()).solution
    decoded = model.structure.decode(core @ product.T)
    assert torch.allclose(short.logits, decoded, rtol=0, atol=1e-8)


def test_a_draft_model_assists_the_original():
    model = tiny("llama", "")
    short = lj.make_draft_model(model, numbers(80), 2, split="70/15/15").model
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.hf.generate(IDS, **settings)
    assert torch.equal(model.hf.generate(IDS, assistant_model=short.hf, **settings), plain)


def test_models_without_a_draft_are_refused(data_folder):
    with pytest.raises(BadPruning, match="keep 1 to 2"):
        lj.make_draft_model(tiny("llama", ""), numbers(80), 3)
    with pytest.raises(BadPruning, match="use `prune`"):
        lj.make_draft_model(lj.load(data_folder / "tiny-bert"), numbers(80), 2)


def test_a_folder_is_not_overwritten_without_force(exported, tmp_path):
    result, _ = exported["gpt2"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine.txt").write_text("keep")
    with pytest.raises(BadArtifact, match="force=True"):
        result.save(tmp_path / "there")
    assert (tmp_path / "there/mine.txt").read_text() == "keep"
    result.save(tmp_path / "there", force=True)
    assert (tmp_path / "there/config.json").is_file()
    assert not (tmp_path / "there/mine.txt").exists()


def test_an_interrupted_export_leaves_no_partial_checkpoint(tmp_path):
    root = tmp_path / "models"
    (root / "model").mkdir(parents=True)
    (root / "model/config.json").write_text("original")
    started = tmp_path / "started"

    def write(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        started.touch()
        time.sleep(60)

    for name in ("model", "new"):
        child = processes.start(lambda name=name: replace_folder(root / name, write, force=True))
        while not started.exists():
            time.sleep(0.01)
        started.unlink()
        os.kill(child, signal.SIGINT)
        assert processes.end_of(child) == 1
    assert [path.name for path in root.iterdir()] == ["model"]
    assert (root / "model/config.json").read_text() == "original"

"""Exported checkpoints: loaded by Hugging Face alone, without a warning, they give what the model in memory gives."""

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
from layerjump.models.model import Model
from layerjump.models.self_check import sample
from layerjump.models.structure import Structure
from layerjump.pruning.checkpoint import save
from layerjump.pruning.edit_model import cannot_drop, without_blocks
from layerjump.pruning.prune import Pruned

ALONE = """
import sys, warnings
sys.modules["layerjump"] = None  # as if it were not installed
warnings.simplefilter("error")
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
ids = torch.tensor([[5, 9, 17, 23, 31, 8, 44, 12]])
found = {}
for folder in sys.argv[2:]:
    kind, _, path = folder.partition("=")
    auto = AutoModelForMaskedLM if kind == "masked" else AutoModelForCausalLM
    model, report = auto.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        found[path] = model.eval()(ids).logits
    if kind == "causal":
        found["tokens " + path] = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
save_file(found, sys.argv[1])
"""
IDS = torch.tensor([[5, 9, 17, 23, 31, 8, 44, 12]])
REBUILT = 1e-5
"""Loading makes tables (rotary frequencies, Gemma's √d) anew in float32, which a float64 model in memory has not."""


def tiny(family: str, variant: str) -> Model:
    hf = tiny_model(family, variant)
    words = llama_words() if family not in ("bert",) else None
    return Model(hf, Structure(hf), f"{family}-{variant}", words)


def removed(model: Model) -> Pruned:
    """Block 2 taken out, with nothing fitted or measured: an encoder here has no tokenizer."""
    about = {"fingerprint": "0" * 64, "text": "none", "text_sha256": "", "tokens": 0}
    about |= {"split": "none", "seed": 0}
    return Pruned(without_blocks(model, [2]), model, ((1, 2),), "remove", "given", about)


def pruned(family: str, variant: str) -> Pruned | None:
    model = tiny(family, variant)
    if model.task == "causal":
        return lj.prune(model, numbers(80), drop=1, criterion="deepest", split="70/15/15")
    return None if cannot_drop(model) else removed(model)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, tuple[Pruned, Path]]:
    root = tmp_path_factory.mktemp("exported")
    found = {}
    for family, variant in CASES:
        made = pruned(family, variant)
        if made is not None:
            name = "-".join(filter(None, (family, variant)))
            save(made, root / name)
            found[name] = made, root / name
    return found


def alone(folders: list[tuple[str, Path]], out: Path) -> tuple[dict[str, torch.Tensor], str]:
    """What a process without layerjump reads from the folders, and what it says on standard error."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    named = [f"{kind}={folder}" for kind, folder in folders]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(out), *named],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return load_file(out), done.stderr


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.hf(IDS).logits


def test_every_family_loads_without_us(exported, tmp_path):
    folders = [(made.model.task, folder) for made, folder in exported.values()]
    found, said = alone(folders, tmp_path / "logits.safetensors")
    assert said == ""
    assert len(exported) > 30
    for made, folder in exported.values():
        assert torch.allclose(found[str(folder)], logits(made.model), rtol=0, atol=REBUILT), folder
        assert not torch.allclose(found[str(folder)], logits(made.original), atol=1e-3), folder
        if made.model.task == "causal":
            ours = made.model.hf.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert torch.equal(found[f"tokens {folder}"], ours)


def test_the_methods_are_those_that_each_family_can_do(exported):
    methods = {name: made.method for name, (made, _) in exported.items()}
    assert {methods[name] for name in ("gpt2", "opt", "bloom", "falcon-rw", "gptj")} == {"fold"}
    assert {methods[name] for name in ("gemma2", "olmo2", "bert", "opt-350m")} == {"remove"}
    assert methods["mistral"] == "rotation"


def test_the_card_and_the_record_say_what_was_done(exported):
    made, folder = exported["llama"]
    record = json.loads((folder / "pruning.json").read_text())
    assert record["dropped"] == [2]
    assert record["loss"]["ratio"] == pytest.approx(made.loss.ratio)
    card = (folder / "README.md").read_text()
    for said in ("2 of 3 blocks", "counted from 1: 2", made.method, "Perplexity ratio", "toy"):
        assert said in card
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }


def test_tied_weights_stay_tied_where_nothing_turns(exported):
    made, folder = exported["gpt2"]
    assert made.model.structure.unembedding.weight is made.model.hf.get_input_embeddings().weight
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


def test_a_linear_stand_in_is_saved_as_base_and_jumps(tmp_path):
    model = tiny("llama", "")
    made = lj.prune(
        model, numbers(80), drop=1, method="linear", criterion="deepest", split="70/15/15"
    )
    made.save(tmp_path / "linear")
    again = lj.load(tmp_path / "linear", dtype="float64")
    # Jumps are stored in float32.
    assert torch.allclose(logits(again), logits(made.model), rtol=0, atol=1e-4)
    base = lj.load(tmp_path / "linear/base", dtype="float64")
    assert not torch.allclose(logits(base), logits(again), atol=1e-2)
    ours = again.hf.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    plain = again.hf.generate(
        IDS, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False
    )
    assert torch.equal(ours, plain)
    head = json.loads((tmp_path / "linear/linear.json").read_text())
    (tmp_path / "linear/linear.json").write_text(json.dumps(head | {"fingerprint": "0"}))
    with pytest.raises(WrongModel, match="other weights"):
        lj.load(tmp_path / "linear")


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "phi3", "olmo2"])
def test_a_truncated_model_is_its_jump_and_its_head(family, tmp_path):
    """Against the closed form written out: the norm's core, the least-squares map, the head."""
    model = tiny(family, "")
    made = lj.make_draft_model(model, numbers(80), 2, split="70/15/15")
    assert made.model.n_blocks == 2
    made.save(tmp_path / "short")
    again = lj.load(tmp_path / "short", dtype="float64")
    assert torch.allclose(logits(again), logits(made.model), rtol=0, atol=REBUILT)
    batch = sample(model)
    (whole,) = lj.capture_states(model, [batch], [2, "final"])
    (short,) = lj.capture_states(made.model, [batch], [2, "final"], logits=True)
    assert torch.allclose(short[2], whole[2], rtol=0, atol=1e-12)
    core = short["final"]  # the norm with a weight of one
    assert torch.allclose(core.square().mean(-1), torch.ones(()).double(), atol=1e-3)
    head = model.structure.unembedding.weight.double()
    product = torch.linalg.lstsq(head, made.model.structure.unembedding.weight.double()).solution
    decoded = model.structure.decode(core @ product.T)
    assert torch.allclose(short.logits, decoded, rtol=0, atol=1e-8)


def test_a_truncated_model_drafts_for_the_whole_one():
    model = tiny("llama", "")
    short = lj.make_draft_model(model, numbers(80), 2, split="70/15/15").model
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.hf.generate(IDS, **settings)
    assert torch.equal(model.hf.generate(IDS, assistant_model=short.hf, **settings), plain)


def test_what_cannot_be_truncated_is_refused(data_folder):
    with pytest.raises(BadPruning, match="keep 1 to 2"):
        lj.make_draft_model(tiny("llama", ""), numbers(80), 3)
    with pytest.raises(BadPruning, match="use `prune`"):
        lj.make_draft_model(lj.load(data_folder / "tiny-bert"), numbers(80), 2)


def test_a_folder_is_not_overwritten_unasked(exported, tmp_path):
    made, _ = exported["gpt2"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine.txt").write_text("keep")
    with pytest.raises(BadArtifact, match="force=True"):
        made.save(tmp_path / "there")
    assert (tmp_path / "there/mine.txt").read_text() == "keep"
    made.save(tmp_path / "there", force=True)
    assert (tmp_path / "there/config.json").is_file()
    assert not (tmp_path / "there/mine.txt").exists()


def test_an_interrupted_export_leaves_no_half_checkpoint(tmp_path):
    root = tmp_path / "models"
    (root / "model").mkdir(parents=True)
    (root / "model/config.json").write_text("whole")
    started = tmp_path / "started"

    def write(place: Path) -> None:
        (place / "config.json").write_text("half")
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
    assert (root / "model/config.json").read_text() == "whole"

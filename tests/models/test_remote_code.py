"""Checkpoints with code of their own: an architecture that transformers does not know, in a folder on disk."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers.tokenizers import llama as llama_words
from transformers import AutoConfig, AutoModelForCausalLM

import layerjump as lj
from layerjump.errors import BadModel, NoPredictions, SelfCheckFailed
from layerjump.models.self_check import sample, self_check

CODE = Path(__file__).resolve().parents[1] / "fixtures" / "own-code"
AUTO_MAP = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}
WORDS = [" ".join(str((7 * line + step) % 50) for step in range(24)) for line in range(60)]


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """A function that writes a folder of code, configuration, weights and tokenizer, as on the hub."""
    patch = pytest.MonkeyPatch()
    patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    patch.setattr("sys.path", list(sys.path))

    def save(name: str, **settings: object) -> Path:
        folder = Path(shutil.copytree(CODE, tmp_path_factory.mktemp(name) / name))
        config = {"model_type": "parallel-toy", "auto_map": AUTO_MAP, "bos_token_id": 5, **settings}
        (folder / "config.json").write_text(json.dumps(config))
        hf = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
        )
        torch.manual_seed(0)
        for parameter in hf.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        hf.save_pretrained(folder)
        llama_words().save_pretrained(folder)
        return folder

    yield save
    patch.undo()


@pytest.fixture(scope="module")
def folder(save) -> Path:
    return save("toy")


@pytest.fixture(scope="module")
def model(folder) -> lj.Model:
    return lj.load(folder, trust_remote_code=True)


def test_an_unknown_architecture_is_discovered_and_proven(model):
    structure = model.structure
    assert (model.n_blocks, model.d_model, structure.degree, structure.anatomy.entry) == (4, 48, "full", "body")
    assert [(w.name, w.phase, w.factor, w.norm) for w in structure.writes(1)] == [
        ("attn", 0, 0.35, "ln1"),
        ("ffn", 0, 0.35, "ln1"),
    ]
    assert [check.name for check in self_check(model) if not check.passed] == []


def test_its_states_and_logits_are_those_that_its_own_code_computes(model):
    batch = sample(model, rows=3, length=17)
    (states,) = lj.capture_states(model, [batch], [0, 1, "2.attn.out", "2.ffn.out", 2, 4, "final"], logits=True)
    body, row, position = model.hf.body, batch.row, batch.position
    with torch.no_grad():
        places = torch.arange(17)
        x = body.words(batch.input_ids) + body.places(places)
        seen = (places[:, None] >= places) & batch.attention_mask[:, None, None].bool()
        assert torch.allclose(states[0], x[row, position])
        x = body.cells[0](x, seen)
        read = body.cells[1].gauge(x)
        assert torch.allclose(states["2.attn.out"], body.cells[1].mingle(read, seen)[row, position], atol=1e-5)
        assert torch.allclose(states["2.ffn.out"], body.cells[1].think(read)[row, position], atol=1e-5)
        final, _ = body(batch.input_ids, batch.attention_mask)
        assert torch.allclose(states["final"], final[row, position], atol=1e-5)
        logits = model.hf(batch.input_ids, batch.attention_mask).logits
    assert torch.allclose(states.logits, logits[row, position], atol=1e-4)
    assert float(logits.abs().max()) <= 8  # its soft-cap
    rebuilt = states[1] + 0.35 * (states["2.attn.out"] + states["2.ffn.out"])
    assert torch.allclose(rebuilt, states[2], atol=1e-5)


def test_jumps_are_fitted_and_a_text_is_read(model):
    jumps = lj.fit(model, lj.load_text(WORDS), pairs="to-last")
    assert [str(source) for source, _ in jumps] == ["0", "1", "2", "3"]
    r2 = [jumps.info[pair].r2 for pair in jumps]
    assert r2 == sorted(r2)
    trajectory = lj.Lens(model, jumps)("1 2 3 4 5 6")
    assert trajectory.levels[-1] == "4"
    with torch.no_grad():
        expected = model.hf(torch.tensor([trajectory.prompt.ids])).logits[0, list(trajectory.positions)].argmax(-1)
    assert trajectory.top[-1, :, 0].tolist() == expected.tolist()


def test_its_code_is_not_run_unless_that_is_allowed(folder):
    with pytest.raises(BadModel, match=r"brings code of its own.*pass trust_remote_code") as caught:
        lj.load(folder)
    assert "\n" not in str(caught.value)


def test_logits_that_read_more_than_the_last_level_are_no_predictions(save):
    model = lj.load(save("toy-skip", variant="skip"), trust_remote_code=True)
    assert model.structure.degree == "states"
    assert model.structure.anatomy.no_logits == "the path to the logits reads more than the last level"
    with pytest.raises(NoPredictions, match="the path to the logits reads more than the last level"):
        lj.Lens(model)("1 2 3 4")
    assert len(lj.fit(model, lj.load_text(WORDS), pairs="to-last")) == 4


def test_a_model_that_computes_otherwise_on_other_lengths_is_refused_with_the_equation(save):
    """The factor that discovery reads off its own few tokens is another for the tokens of the self-check."""
    with pytest.raises(SelfCheckFailed, match="'logits' failed: norm and head of level L give the model's logits"):
        lj.load(save("toy-length", variant="length"), trust_remote_code=True)

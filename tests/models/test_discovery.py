"""Models that transformers does not know: a plain module, checkpoints with their own code, hints."""

from __future__ import annotations

import pytest
import torch
from helpers.tokenizers import llama as llama_words
from torch import Tensor, nn

import layerjump as lj
from layerjump.errors import LayerjumpError, UnsupportedModel
from layerjump.models.discovery import StructureHints, discover
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample, self_check
from layerjump.models.sites import Site


class PlainBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mix = nn.MultiheadAttention(d, 4, batch_first=True)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + 0.5 * self.mix(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.down(self.up(self.second(x)).relu())


class Plain(nn.Module):
    """A language model as one writes it by hand."""

    def __init__(self, d: int = 32, vocab: int = 61, n_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(vocab, d), nn.Embedding(64, d)
        self.stages = nn.ModuleList(PlainBlock(d) for _ in range(n_blocks))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x)) / 2


class Renamed(Plain):
    """The same, but its output hides the logits."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"distances": self.tokens(input_ids), "scores": super().forward(input_ids)}


def test_a_plain_module_is_discovered_proven_and_read():
    model = Model.wrap(Plain(), llama_words())
    assert (model.n_blocks, model.d_model, model.structure.degree) == (3, 32, "full")
    assert [write.name for write in model.structure.writes(1)] == ["attn", "ffn"]
    assert model.structure.writes(1)[0].factor == 0.5
    assert all(check.passed for check in self_check(model))
    trajectory = lj.Lens(model)("1 2 3 4 5")
    assert len(trajectory.positions) == trajectory.top.shape[1]


def test_an_override_names_the_logits_of_an_output_that_hides_them():
    hints = StructureHints(logits=lambda output: output["scores"])
    model = Model.wrap(Renamed(), hints=hints)
    batch = sample(model)
    (states,) = capture_states(model, [batch], [3], logits=True)
    theirs = model.hf(batch.input_ids)["scores"][batch.row, batch.position]
    assert torch.allclose(states.logits, theirs, atol=1e-5)


def test_an_override_names_the_list_of_blocks():
    assert discover(Plain(), hints=StructureHints(blocks="stages")).n_blocks == 3
    with pytest.raises(UnsupportedModel, match="no chain of blocks"):
        discover(Plain(), hints=StructureHints(blocks="heads"))


class Body(Plain):
    """Reads the tokens, but is told more than its defaults by the model around it."""

    def forward(self, input_ids: Tensor, gain: float = 1.0) -> Tensor:  # type: ignore[override]
        x = gain * (self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1])))
        for stage in self.stages:
            x = stage(x)
        return x


class Around(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.body, self.gain = Body(), gain

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.body.head(self.body(input_ids, self.gain))


@pytest.mark.parametrize(("gain", "entry"), [(1.0, "body"), (0.5, "")])
def test_a_body_runs_alone_only_if_it_computes_the_same_levels(gain, entry):
    model = Model.wrap(Around(gain))
    assert model.structure.anatomy.entry == entry
    batch = sample(model)
    (states,) = capture_states(model, [batch], [3], logits=True)
    theirs = model.hf(batch.input_ids)[batch.row, batch.position]
    assert torch.allclose(states.logits, theirs, atol=1e-5)


def test_a_model_without_blocks_is_refused_with_the_reason():
    bag = nn.Sequential(nn.Embedding(61, 16), nn.Linear(16, 61))
    with pytest.raises(LayerjumpError, match="no chain of blocks"):
        Model.wrap(bag)


def test_a_body_without_head_has_states_and_no_predictions():
    from helpers.tiny_models import tiny_model

    body = tiny_model("gpt2", dtype=torch.float32).transformer
    model = Model.wrap(body, name="body")
    assert model.structure.degree == "states"
    (states,) = capture_states(model, [sample(model)], [0, 3])
    assert states[Site(3)].shape[-1] == 32
    with pytest.raises(lj.errors.NoPredictions, match="predicts no tokens"):
        model.logits(states[Site(3)])


def test_discovery_leaves_training_mode_gradients_and_frozen_weights_alone():
    hf = Plain().train()
    hf.requires_grad_(False)
    discover(hf)
    assert hf.training
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in hf.parameters())

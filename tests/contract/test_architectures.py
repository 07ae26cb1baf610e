"""The contract on small models of many architectures: blocks of every kind, discovered and proven."""

from __future__ import annotations

import pytest
import torch
from misreadings import MISREADINGS, is_accepted

from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample, self_check
from layerjump.models.sites import FINAL, Site
from layerjump.models.small_models import Architecture, list_architectures, small_model
from layerjump.models.support_table import read_table

CAUSAL = (
    # mixtures of experts
    *("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "granitemoe", "olmoe", "glm4_moe", "phimoe"),
    # state spaces, linear attention, convolutions, and hybrids of them
    *("mamba", "mamba2", "falcon_h1", "jamba", "bamba", "zamba2", "nemotron_h", "lfm2", "qwen3_next", "rwkv"),
    *("recurrent_gemma", "granitemoehybrid", "minimax"),
    # scaled residuals, sandwich norms, soft-caps, parallel blocks, other norms
    *("granite", "minicpm3", "cohere", "cohere2", "olmo", "olmo2", "olmo3", "smollm3", "glm", "glm4", "gemma4_text"),
    *("stablelm", "starcoder2", "persimmon", "codegen", "mpt", "nemotron", "exaone4", "ernie4_5", "xglm", "biogpt"),
    # several residual streams; both ways
    *("gemma3n_text", "deepseek_v4", "xlnet"),
)
MASKED = ("modernbert", "deberta", "deberta-v2", "mpnet", "xlm-roberta", "camembert", "longformer", "fnet", "yoso")
SEQ2SEQ = ("mbart", "m2m_100", "mt5", "pegasus", "blenderbot", "fsmt", "led")
IMAGE_TEXT = ("gemma3", "qwen2_vl", "qwen2_5_vl", "llava", "paligemma", "idefics3", "internvl", "mistral3")
EXAMPLES = {"causal": CAUSAL, "masked": MASKED, "seq2seq": SEQ2SEQ, "image-text": IMAGE_TEXT}
CASES = [a for a in list_architectures() if a.model_type in EXAMPLES[a.task]]


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    return small_model(request.param)


def test_every_example_is_an_architecture_of_transformers():
    assert len(CASES) >= 60
    listed = {(a.task, a.model_type) for a in list_architectures()}
    assert [(t, name) for t, names in EXAMPLES.items() for name in names if (t, name) not in listed] == []


def test_the_self_check_proves_the_structure_and_the_table_has_its_degree(model):
    assert [check for check in self_check(model) if not check.passed] == []
    (row,) = [row for row in read_table() if f"{row.task}:{row.model_type}" == model.name]
    assert row.degree == model.structure.degree


def test_the_last_level_leads_to_the_models_own_logits(model):
    batch = sample(model, rows=3, length=11)  # of another length than discovery's
    if model.extra_inputs is not None:
        pytest.skip("its further inputs are made for two rows")
    (ours,) = capture_states(model, [batch], [model.n_blocks], logits=True)
    with torch.no_grad():
        theirs = model.run_whole(batch).logits[batch.row, batch.position]
    assert torch.allclose(ours.logits, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_no_hook_is_left_behind_and_the_same_run_gives_the_same_structure(model):
    def hooks():
        return {m: (list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.hf.modules()}

    before = hooks()
    again = small_model(next(a for a in CASES if str(a) == model.name))
    self_check(model)
    assert hooks() == before
    assert [str(site) for site in again.structure.sites()] == [str(site) for site in model.structure.sites()]


def test_experts_have_a_router_and_an_output():
    model = small_model(next(a for a in CASES if str(a) == "causal:qwen3_moe"))
    block = next(b for b in range(1, model.n_blocks + 1) if any(w.is_routed for w in model.structure.writes(b)))
    (states,) = capture_states(model, [sample(model)], [Site(block, "moe.router"), Site(block, "moe.out")])
    assert states[Site(block, "moe.router")].shape[-1] == model.hf.config.num_experts
    assert states[Site(block, "moe.out")].shape[-1] == model.d_model


def test_a_hybrid_names_its_mixers_by_their_role():
    model = small_model(next(a for a in CASES if str(a) == "causal:falcon_h1"))
    assert {write.name for write in model.structure.writes(1)} == {"attn", "mixer", "ffn"}
    assert {write.phase for write in model.structure.writes(1) if write.name != "ffn"} == {0}


def test_a_residual_multiplier_is_found():
    model = small_model(next(a for a in CASES if str(a) == "causal:granite"))
    assert {write.factor for write in model.structure.writes(1)} == {0.7}


MISREAD = ("llama", "gpt2", "gptj", "gemma2", "granite", "qwen3_moe", "falcon_h1", "bert")


@pytest.fixture(scope="module")
def misread_models() -> list[Model]:
    types = [Architecture("masked" if name == "bert" else "causal", name, "") for name in MISREAD]
    return [small_model(a) for a in list_architectures() for t in types if str(a) == str(t)]


@pytest.mark.parametrize("name", MISREADINGS)
def test_a_misread_structure_is_refused(name, misread_models):
    possible = [model for model in misread_models if MISREADINGS[name](model.structure.anatomy) is not None]
    assert possible
    assert [model.name for model in possible if is_accepted(model, MISREADINGS[name])] == []


def test_sites_of_the_final_state_are_there(model):
    assert FINAL in model.structure.sites()

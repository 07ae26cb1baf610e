"""Scores of lenses: the model itself at the last level, and the same numbers for every way of chunking."""

from pathlib import Path

import pytest
import torch
from helpers.processes import printed_by
from transformers import BertModel

import layerjump as lj
from layerjump.errors import BadJumps, NoPredictions
from layerjump.lens.evaluate import LensScores, evaluate_lenses
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import chunk_rows


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2", dtype="float64")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=60)


@pytest.fixture(scope="module")
def lenses(model, text):
    return {"identity": Lens(model), "mat": Lens(model, lj.fit(model, text, split="100/0/0"))}


@pytest.fixture(scope="module")
def batches(model, text):
    return lj.make_batches(text, model.tokenization, lj.Positions("sample", 6), documents=range(20))


@pytest.fixture(scope="module")
def scores(model, lenses, batches):
    return evaluate_lenses(model, lenses, batches)


def in_order(scores: LensScores) -> dict[str, torch.Tensor]:
    """Every field, examples sorted by document, position and token."""
    about = torch.stack([scores.document, scores.position, scores.token])
    names = sorted(zip(*about.tolist(), range(scores.n_examples), strict=True))
    order = torch.tensor([name[-1] for name in names])
    fields = {name: value for name, value in vars(scores).items() if name != "lenses"}
    return {name: value.index_select(-1, order) for name, value in fields.items()}


def assert_same(one: LensScores, other: LensScores) -> None:
    one, other = in_order(one), in_order(other)
    for name, value in one.items():
        if value.dtype == torch.int64:
            assert torch.equal(value, other[name]), name
        else:  # jumps are float32, and rounding depends on the chunks
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5, msg=name)


def test_shapes_of_the_scores(scores, batches, model):
    assert scores.lenses == ("identity", "mat")
    assert scores.n_examples == batches.n_picks
    assert scores.top.shape == (2, model.n_blocks + 1, scores.n_examples)
    assert scores.model_entropy.min() > 0


def test_at_the_last_level_every_lens_is_the_model(scores, model, batches):
    own = torch.cat([found.logits for found in lj.capture_states(model, batches, [0], logits=True)])
    assert torch.equal(scores.model_top, own.argmax(-1))
    assert torch.equal(scores.top[:, -1], scores.model_top.expand(2, -1))
    for k in (1, 5, 10):
        assert scores.hits(k)[:, -1].all()
    assert scores.kl[:, -1].max() < 1e-9
    entropy = torch.distributions.Categorical(logits=own).entropy()
    torch.testing.assert_close(scores.model_entropy, entropy, rtol=1e-9, atol=1e-12)


def test_precision_grows_with_k(scores):
    one, five, ten = (scores.hits(k) for k in (1, 5, 10))
    assert (one <= five).all()
    assert (five <= ten).all()
    assert 0 < one[:, :-1].double().mean() < ten[:, :-1].double().mean() < 1
    with pytest.raises(ValueError, match="at most 10, got 11"):
        scores.hits(11)


def test_logits_are_norm_and_unembedding_of_the_mapped_state(model, lenses, batches):
    (found, *_) = lj.capture_states(model, batches, range(5))
    hf, jumps = model.hf, lenses["mat"].jumps
    for level in range(4):
        mapped = jumps[level, 4](found[level].float()).double()
        expected = hf.lm_head(hf.transformer.ln_f(mapped))
        torch.testing.assert_close(lenses["mat"].logits(level, found[level]), expected)
        same = hf.lm_head(hf.transformer.ln_f(found[level]))
        torch.testing.assert_close(lenses["identity"].logits(level, found[level]), same)


@pytest.mark.parametrize("memory", [1, 200_000, 1 << 40])
def test_the_memory_budget_does_not_change_the_numbers(memory, model, lenses, batches, scores):
    assert_same(evaluate_lenses(model, lenses, batches, memory=memory), scores)


@pytest.mark.parametrize("budget", [1, 600])
def test_the_batch_size_does_not_change_the_numbers(budget, model, text, lenses, scores):
    positions = lj.Positions("sample", 6)
    cut = lj.make_batches(text, model.tokenization, positions, documents=range(20), max_batch_tokens=budget)
    assert_same(evaluate_lenses(model, lenses, cut), scores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_of_lower_precision_are_scored(dtype, data_folder, text, scores, lenses, batches):
    model = lj.load(data_folder / "tiny-gpt2", dtype=dtype)
    jumps = lenses["mat"].jumps
    found = evaluate_lenses(model, {"identity": Lens(model), "mat": Lens(model, jumps)}, batches)
    assert found.kl.dtype == torch.float32
    assert found.hits(10)[:, -1].all()
    difference = (found.kl - scores.kl).abs().mean()
    assert difference < (1e-4 if dtype == "float32" else 0.1)


def test_jumps_to_final_are_decoded_by_the_unembedding_alone(model, text, batches):
    jumps = lj.fit(model, text, pairs="0:final,2:final", split="100/0/0")
    lens = Lens(model, jumps)
    (found, *_) = lj.capture_states(model, batches, [2])
    expected = model.hf.lm_head(jumps[2, "final"](found[2].float()).double())
    torch.testing.assert_close(lens.logits(2, found[2]), expected)
    with pytest.raises(BadJumps, match="no jump from level 1"):
        lens.logits(1, found[2])


def test_a_model_without_an_unembedding_has_no_lens(tmp_path):
    from helpers.tiny_models import tiny_config

    BertModel(tiny_config("bert")).save_pretrained(tmp_path)
    with pytest.raises(NoPredictions, match="without its prediction head"):
        Lens(lj.load(tmp_path))


def test_chunk_rows_stays_within_the_budget(model, data_folder):
    half = lj.load(data_folder / "tiny-gpt2", dtype="bfloat16")
    assert chunk_rows(half, 1 << 20) // 2 == chunk_rows(model, 1 << 20)
    assert chunk_rows(model, 1 << 20) * model.structure.vocab_size * 8 < 1 << 20
    assert chunk_rows(model, 1) == 1


PEAK = """
import torch, layerjump as lj
from pathlib import Path
from helpers.tiny_models import tiny_model
from layerjump.lens.lens import Lens
from layerjump.lens.evaluate import evaluate_lenses

def peak():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if "VmHWM" in line).split()[1]) * 1024

model = lj.Model.wrap(tiny_model("gpt2", vocab_size=30_000, dtype=torch.float32))
ids = torch.randint(3, 30_000, (40, 40), generator=torch.Generator().manual_seed(0))
row, position = torch.ones_like(ids).nonzero(as_tuple=True)
batch = lj.Batch(ids, torch.ones_like(ids), row, position, row, ids.reshape(-1))
lens = {"identity": Lens(model)}
evaluate_lenses(model, lens, [lj.batch_from_ids(range(3, 8))])  # what is loaded on first use
before = peak()
assert evaluate_lenses(model, lens, [batch], memory=BUDGET).n_examples == 1600
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's high-water mark")
def test_peak_memory_stays_within_the_budget():
    """1,600 rows of 30,000 logits are 192 MB a buffer; the budget is 170 MB for all buffers together.

    A smaller budget would measure the C library, which caches freed blocks of up to 32 MB.
    """
    budget = 170_000_000
    code = PEAK.replace("BUDGET", str(budget))
    assert int(printed_by(code)) < 1.2 * budget

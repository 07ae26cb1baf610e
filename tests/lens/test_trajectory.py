"""Trajectories: the model's own words at level L, norm and head of its hidden states below, cell by cell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import trajectory_inputs
from helpers.trajectory_inputs import NUMBERS, STORY, made

import layerjump as lj
from layerjump.lens.lens import read_trajectories
from layerjump.lens.trajectory import LensQuery, compute_stats

gpt2, text, jumps = (
    trajectory_inputs.gpt2,
    trajectory_inputs.text,
    trajectory_inputs.jumps,
)  # fixtures

GAP = "Lily went to the [MASK] with her mom and saw a [MASK] dog."


@pytest.fixture(scope="module")
def bert(data_folder):
    return lj.load(data_folder / "tiny-bert", dtype="float64")


def naive(model: lj.Model, ids, jumps=None) -> torch.Tensor:
    """(levels, positions, vocabulary): Hugging Face's own hidden states through norm and head; its logits at L."""
    with torch.no_grad():
        out = model.hf(input_ids=torch.tensor([ids]), output_hidden_states=True)
        hidden = [states[0] for states in out.hidden_states[: model.n_blocks]]
        if jumps is not None:
            hidden = [jumps[i, model.n_blocks](h.float()).double() for i, h in enumerate(hidden)]
        return torch.stack([*(model.logits(h) for h in hidden), out.logits[0]])


def assert_equals_naive(found, logits):
    """Every number of a trajectory against its definition, in double precision; jumps are float32."""
    rtol = 1e-6 if found.name == "identity" else 1e-4
    atol = rtol / 1000
    logits = logits[:, list(found.positions)]
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    top = p.topk(found.query.k)
    assert torch.equal(found.top, top.indices)
    wanted = {
        "probability": top.values,
        "confidence": p.topk(2).values @ torch.tensor([1.0, -1.0], dtype=torch.float64),
        "entropy": -(p * log_p).sum(-1),
        "kl": (p[-1] * (log_p[-1] - log_p)).sum(-1),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(getattr(found, name), value, rtol=rtol, atol=atol, msg=name)
    middle = ((p + p[-1]) / 2).log()
    js = ((p * (log_p - middle)).sum(-1) + (p[-1] * (log_p[-1] - middle)).sum(-1)) / 2
    torch.testing.assert_close(found.jensen_shannon(), js, rtol=rtol, atol=atol)
    for level, site in enumerate(found.levels):
        for row, place in enumerate(found.positions):
            one = found.distribution(site, place)
            torch.testing.assert_close(one, p[level, row], rtol=rtol, atol=atol)
            mine = logits[level, row]
            for each in found.tracked:
                assert int(each.rank[level, row]) == int((mine > mine[each.id]).sum())
                share = float(p[level, row, each.id])
                assert float(each.probability[level, row]) == pytest.approx(share, rel=rtol)
    assert found.settled_level.tolist() == [
        min(
            start
            for start in range(len(logits))
            if (found.top[start:, row, 0] == logits[-1, row].argmax()).all()
        )
        for row in range(len(found.positions))
    ]


def test_the_plain_lens_is_norm_and_head_of_hugging_faces_hidden_states(gpt2):
    found = lj.Lens(gpt2)(STORY, tokens=[" ball", "."], jensen_shannon=True)
    ids = gpt2.tokenizer(STORY)["input_ids"]
    assert list(found.prompt.ids) == ids
    assert "".join(found.tokens) == STORY
    logits = naive(gpt2, ids)
    hf = gpt2.hf.transformer
    with torch.no_grad():
        hidden = gpt2.hf(torch.tensor([ids]), output_hidden_states=True).hidden_states[2][0]
        torch.testing.assert_close(logits[2], gpt2.hf.lm_head(hf.ln_f(hidden)))
    assert_equals_naive(found, logits)
    following = -logits.log_softmax(-1)[:, range(len(ids) - 1), ids[1:]]
    torch.testing.assert_close(found.cross_entropy[:, :-1], following, rtol=1e-6, atol=1e-9)
    assert found.cross_entropy[:, -1].isnan().all()
    assert found.kl[-1].max() < 1e-12
    assert found.fitted_from == 0


def test_a_fitted_lens_reads_the_mapped_states(gpt2, jumps):
    found = lj.Lens(gpt2, jumps)(STORY, k=3, tokens=[5])
    assert_equals_naive(found, naive(gpt2, found.prompt.ids, jumps))
    assert (
        found.fitted_from == jumps.provenance.skip_first == 0
    )  # a sub-module site is among the pairs
    assert found.name == "mat"


def test_masks_are_read_and_nothing_else(bert):
    found = lj.Lens(bert)(GAP)
    ids = bert.tokenizer(GAP)["input_ids"]
    assert list(found.prompt.ids) == ids
    assert [ids[place] for place in found.positions] == [bert.tokenizer.mask_token_id] * 2
    assert_equals_naive(found, naive(bert, ids))
    assert found.cross_entropy.isnan().all()
    everywhere = lj.Lens(bert)("Lily went to the park.")
    assert everywhere.positions == tuple(range(len(everywhere.prompt.ids)))
    assert_equals_naive(everywhere, naive(bert, everywhere.prompt.ids))


CASES = ["gemma2", "opt projected", "opt 350m", "albert", "gpt_neox", "falcon", "llama"]


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_read_as_hugging_face_runs_it(case):
    """Soft-caps, projections, shared blocks, parallel blocks."""
    model = made(*case.split())
    text = NUMBERS.replace("9", "[MASK]") if model.masked else NUMBERS
    found = lj.Lens(model)(text, tokens=["35"])
    assert_equals_naive(found, naive(model, found.prompt.ids))


@pytest.mark.parametrize("memory", [1, 100_000])
def test_neither_memory_nor_long_texts_change_the_numbers(memory, gpt2, jumps):
    found = lj.Lens(gpt2, jumps)(STORY * 5, jensen_shannon=True)
    assert len(found.positions) > 64
    readouts = {"mat": found.readouts}
    best, again = compute_stats(
        gpt2, readouts, found.states, LensQuery(10, jensen_shannon=True), memory=memory
    )
    assert torch.equal(best, found.model_top)
    assert torch.equal(again["mat"].top, found.top)
    for name in ("kl", "entropy", "cross_entropy", "jensen_shannon"):
        one, other = getattr(again["mat"], name), getattr(found.stats, name)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7, equal_nan=True)
    assert_equals_naive(found, naive(gpt2, found.prompt.ids, jumps))


def test_several_texts_are_read_as_each_alone(gpt2, bert):
    for model, texts in ((gpt2, [STORY, "The", STORY * 4, "One day"]), (bert, [GAP, "A [MASK]."])):
        lens = lj.Lens(model)
        for text, found in zip(texts, lens(texts, k=2), strict=True):
            alone = lens(text, k=2)
            assert found.prompt.ids == alone.prompt.ids
            assert torch.equal(found.top, alone.top)
            torch.testing.assert_close(found.kl, alone.kl, rtol=1e-6, atol=1e-9)


def test_the_last_positions_are_read_behind_the_whole_text(gpt2, jumps):
    lenses = {"mat": lj.Lens(gpt2, jumps)}
    whole = read_trajectories(lenses, [STORY])[0]["mat"]
    end = read_trajectories(lenses, [STORY], last=3)[0]["mat"]
    assert end.positions == whole.positions[-3:]
    assert end.tokens == whole.tokens
    torch.testing.assert_close(end.kl, whole.kl[:, -3:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        end.cross_entropy, whole.cross_entropy[:, -3:], rtol=1e-4, atol=1e-5, equal_nan=True
    )


def test_several_lenses_share_one_forward_pass(gpt2, jumps):
    runs = []
    handle = gpt2.stack.register_forward_pre_hook(lambda *_: runs.append(1))
    lenses = {"plain": lj.Lens(gpt2), "mat": lj.Lens(gpt2, jumps)}
    (both,) = read_trajectories(lenses, [STORY], k=4)
    handle.remove()
    assert len(runs) == 1
    assert torch.equal(both["plain"].top, lj.Lens(gpt2)(STORY, k=4).top)
    assert torch.equal(both["mat"].top, lj.Lens(gpt2, jumps)(STORY, k=4).top)
    assert both["plain"].states is both["mat"].states


PEAK = """
import torch, layerjump as lj
from pathlib import Path
from helpers.tiny_models import tiny_model
from layerjump.lens.trajectory import LensQuery, PromptStates, compute_stats

def peak():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if "VmHWM" in line).split()[1]) * 1024

model = lj.Model.wrap(tiny_model("gpt2", vocab_size=30_000, dtype=torch.float32))
sites = tuple(lj.Site(level) for level in range(4))
readouts = {"identity": [lj.Lens(model).readout(site) for site in sites]}

def read(n):
    states = torch.randn(4, n, 32)
    text = PromptStates(sites, tuple(states), states[-1], torch.full((n,), -1))
    return compute_stats(model, readouts, text, LensQuery(10, (5, 6), jensen_shannon=True), memory=BUDGET)

read(3)  # what is loaded on first use
before = peak()
assert read(700)[1]["identity"].top.shape == (4, 700, 10)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's high-water mark")
def test_peak_memory_keeps_to_the_budget_whatever_the_vocabulary():
    """700 positions at 4 levels are 336 MB of logits a buffer; the budget is 170 MB for all buffers together."""
    budget = 170_000_000
    done = subprocess.run(
        [sys.executable, "-c", PEAK.replace("BUDGET", str(budget))],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert int(done.stdout) < 1.2 * budget

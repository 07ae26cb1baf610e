"""Trajectories against their definition, cell by cell: at level L the model's logits, below them those of the lens."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import tokenizers
from helpers.story_text import stories
from helpers.tiny_models import tiny_model

import layerjump as lj
from layerjump.errors import BadJumps, BadModel, BadText
from layerjump.lens.lens import read_trajectories
from layerjump.lens.readout import LensQuery, compute_stats

STORY = "Once upon a time, there was a little girl named Lily. She had a red ball."
NUMBERS = "3 1 4 1 5 9 2 6 5 35"


@pytest.fixture(scope="module")
def gpt2(data_folder):
    return lj.load(data_folder / "tiny-gpt2", dtype="float64")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=80)


@pytest.fixture(scope="module")
def jumps(gpt2, text):
    pairs = "0:4,1:4,2:4,3:4,2.mid:4,0:2,1:3"
    return lj.fit(gpt2, text, pairs=pairs, split="100/0/0")


def build_model(family: str, variant: str = "") -> lj.Model:
    """A tiny random model of a family, with a tokenizer of numbers."""
    masked = family in ("bert", "albert", "distilbert", "roberta")
    tokenizer = tokenizers.bert() if masked else tokenizers.llama()
    hf = tiny_model(family, variant, vocab_size=1007, pad_token_id=tokenizers.PAD)
    return lj.Model.wrap(hf, tokenizer, name=f"tiny {family}")


GAP = "Lily went to the [MASK] with her mom and saw a [MASK] dog."


@pytest.fixture(scope="module")
def bert(data_folder):
    return lj.load(data_folder / "tiny-bert", dtype="float64")


def naive(model: lj.Model, ids, jumps=None) -> torch.Tensor:
    """(levels, positions, vocabulary): final norm and unembedding of Hugging Face's hidden states; its logits at L."""
    with torch.no_grad():
        out = model.hf(input_ids=torch.tensor([ids]), output_hidden_states=True)
        hidden = [states[0] for states in out.hidden_states[: model.n_blocks]]
        if jumps is not None:
            hidden = [jumps[i, model.n_blocks](h.float()).double() for i, h in enumerate(hidden)]
        return torch.stack([*(model.logits(h) for h in hidden), out.logits[0]])


def assert_equals_naive(trajectory, logits):
    """Every number of a trajectory against its definition, in double precision; jumps are float32."""
    rtol = 1e-6 if trajectory.name == "identity" else 1e-4
    atol = rtol / 1000
    logits = logits[:, list(trajectory.positions)]
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    top = p.topk(trajectory.query.k)
    assert torch.equal(trajectory.top, top.indices)
    expected = {
        "probability": top.values,
        "confidence": p.topk(2).values @ torch.tensor([1.0, -1.0], dtype=torch.float64),
        "entropy": -(p * log_p).sum(-1),
        "kl": (p[-1] * (log_p[-1] - log_p)).sum(-1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(trajectory, name), value, rtol=rtol, atol=atol, msg=name)
    middle = ((p + p[-1]) / 2).log()
    js = ((p * (log_p - middle)).sum(-1) + (p[-1] * (log_p[-1] - middle)).sum(-1)) / 2
    torch.testing.assert_close(trajectory.jensen_shannon(), js, rtol=rtol, atol=atol)
    for level, site in enumerate(trajectory.levels):
        for row, position in enumerate(trajectory.positions):
            one = trajectory.distribution(site, position)
            torch.testing.assert_close(one, p[level, row], rtol=rtol, atol=atol)
            cell_logits = logits[level, row]
            for track in trajectory.tracked:
                assert int(track.rank[level, row]) == int((cell_logits > cell_logits[track.id]).sum())
                share = float(p[level, row, track.id])
                assert float(track.probability[level, row]) == pytest.approx(share, rel=rtol)
    assert trajectory.settled_level.tolist() == [
        min(start for start in range(len(logits)) if (trajectory.top[start:, row, 0] == logits[-1, row].argmax()).all())
        for row in range(len(trajectory.positions))
    ]


def test_the_logit_lens_decodes_hugging_faces_hidden_states(gpt2):
    trajectory = lj.Lens(gpt2)(STORY, tokens=[" ball", "."], jensen_shannon=True)
    ids = gpt2.tokenizer(STORY)["input_ids"]
    assert list(trajectory.prompt.ids) == ids
    assert "".join(trajectory.tokens) == STORY
    logits = naive(gpt2, ids)
    hf = gpt2.hf.transformer
    with torch.no_grad():
        hidden = gpt2.hf(torch.tensor([ids]), output_hidden_states=True).hidden_states[2][0]
        torch.testing.assert_close(logits[2], gpt2.hf.lm_head(hf.ln_f(hidden)))
    assert_equals_naive(trajectory, logits)
    following = -logits.log_softmax(-1)[:, range(len(ids) - 1), ids[1:]]
    torch.testing.assert_close(trajectory.cross_entropy[:, :-1], following, rtol=1e-6, atol=1e-9)
    assert trajectory.cross_entropy[:, -1].isnan().all()
    assert trajectory.kl[-1].max() < 1e-12
    assert trajectory.first_fitted_position == 0


def test_a_lens_with_jumps_decodes_the_mapped_states(gpt2, jumps):
    trajectory = lj.Lens(gpt2, jumps)(STORY, k=3, tokens=[5])
    assert_equals_naive(trajectory, naive(gpt2, trajectory.prompt.ids, jumps))
    assert trajectory.first_fitted_position == jumps.provenance.skip_first == 0  # a sub-module site is among the pairs
    assert trajectory.name == "mat"


def test_masked_models_are_read_at_masked_positions_only(bert):
    trajectory = lj.Lens(bert)(GAP)
    ids = bert.tokenizer(GAP)["input_ids"]
    assert list(trajectory.prompt.ids) == ids
    assert [ids[p] for p in trajectory.positions] == [bert.tokenizer.mask_token_id] * 2
    assert_equals_naive(trajectory, naive(bert, ids))
    assert trajectory.cross_entropy.isnan().all()
    everywhere = lj.Lens(bert)("Lily went to the park.")
    assert everywhere.positions == tuple(range(len(everywhere.prompt.ids)))
    assert_equals_naive(everywhere, naive(bert, everywhere.prompt.ids))


CASES = ["gemma2", "opt projected", "opt 350m", "albert", "gpt_neox", "falcon", "llama"]


@pytest.mark.parametrize("case", CASES)
def test_every_family_agrees_with_hugging_face(case):
    """Soft-caps, projections, shared blocks, parallel blocks."""
    model = build_model(*case.split())
    text = NUMBERS.replace("9", "[MASK]") if model.masked else NUMBERS
    trajectory = lj.Lens(model)(text, tokens=["35"])
    assert_equals_naive(trajectory, naive(model, trajectory.prompt.ids))


@pytest.mark.parametrize("memory", [1, 100_000])
def test_chunking_does_not_change_the_numbers(memory, gpt2, jumps):
    trajectory = lj.Lens(gpt2, jumps)(STORY * 5, jensen_shannon=True)
    assert len(trajectory.positions) > 64
    readouts = {"mat": trajectory.readouts}
    best, again = compute_stats(gpt2, readouts, trajectory.states, LensQuery(10, jensen_shannon=True), memory=memory)
    assert torch.equal(best, trajectory.model_top)
    assert torch.equal(again["mat"].top, trajectory.top)
    for name in ("kl", "entropy", "cross_entropy", "jensen_shannon"):
        one, other = getattr(again["mat"], name), getattr(trajectory.stats, name)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7, equal_nan=True)
    assert_equals_naive(trajectory, naive(gpt2, trajectory.prompt.ids, jumps))


def test_a_batch_of_texts_equals_single_texts(gpt2, bert):
    for model, texts in ((gpt2, [STORY, "The", STORY * 4, "One day"]), (bert, [GAP, "A [MASK]."])):
        lens = lj.Lens(model)
        for text, trajectory in zip(texts, lens(texts, k=2), strict=True):
            alone = lens(text, k=2)
            assert trajectory.prompt.ids == alone.prompt.ids
            assert torch.equal(trajectory.top, alone.top)
            torch.testing.assert_close(trajectory.kl, alone.kl, rtol=1e-6, atol=1e-9)


def test_last_selects_positions_but_runs_the_whole_text(gpt2, jumps):
    lenses = {"mat": lj.Lens(gpt2, jumps)}
    full = read_trajectories(lenses, [STORY])[0]["mat"]
    end = read_trajectories(lenses, [STORY], last=3)[0]["mat"]
    assert end.positions == full.positions[-3:]
    assert end.tokens == full.tokens
    torch.testing.assert_close(end.kl, full.kl[:, -3:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end.cross_entropy, full.cross_entropy[:, -3:], rtol=1e-4, atol=1e-5, equal_nan=True)


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
from layerjump.lens.readout import LensQuery, PromptStates, compute_stats

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
def test_peak_memory_stays_within_the_budget():
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


def test_sites_inside_blocks_are_decoded(gpt2, jumps):
    sites = ["0", "2.mid", "2.attn.out", 2, "final", 4]
    trajectory = lj.Lens(gpt2)(STORY, levels=sites)
    assert trajectory.levels == ("0", "2.mid", "2.attn.out", "2", "final", "4")
    batch = lj.batch_from_ids(trajectory.prompt.ids)
    (at,) = lj.capture_states(gpt2, [batch], ["2.mid", "2.attn.out"])
    for index, site in ((1, "2.mid"), (2, "2.attn.out")):
        assert torch.equal(trajectory.top[index, :, 0], gpt2.logits(at[site]).argmax(-1))
    assert torch.equal(trajectory.top[4], trajectory.top[5])
    mapped = lj.Lens(gpt2, jumps)(STORY, levels=["2.mid"])
    through = gpt2.logits(jumps["2.mid", 4](at["2.mid"].float()).double())
    assert torch.equal(mapped.top[0, :, 0], through.argmax(-1))
    with pytest.raises(BadJumps, match=r"fit with pairs='3\.mid:4'"):
        lj.Lens(gpt2, jumps)(STORY, levels=["3.mid"])


def test_a_cross_level_lens_maps_the_source_to_the_target(gpt2, jumps):
    lens = lj.Lens(gpt2, jumps)
    between = lens.between(1, 3)
    trajectory = between(STORY, k=3)
    assert trajectory.levels == ("1",)
    (at,) = lj.capture_states(gpt2, [lj.batch_from_ids(trajectory.prompt.ids)], [1])
    mapped = jumps[3, 4](jumps[1, 3](at[1].float())).double()
    assert torch.equal(trajectory.top[0], gpt2.logits(mapped).topk(3).indices)
    assert torch.equal(between.map_states(at[1]), jumps[1, 3](at[1].float()).double())
    assert torch.equal(lens.between(2, 4)(STORY).top, lens(STORY, levels=[2]).top)
    assert torch.equal(lj.Lens(gpt2).between(1, 3)(STORY).top, lj.Lens(gpt2)(STORY, levels=[1]).top)
    with pytest.raises(BadJumps, match="fit with pairs='2:3,3:4'"):
        lens.between(2, 3)(STORY)


def test_settled_level_is_the_first_level_with_the_final_top_token(gpt2):
    top = torch.tensor([[7, 7, 1, 2], [7, 3, 1, 2], [7, 7, 7, 7], [7, 7, 7, 9]])
    trajectory = lj.Lens(gpt2)("Once")
    stats = trajectory.stats._replace(top=top[:, :, None])
    trajectory = replace(trajectory, stats=stats, model_top=torch.tensor([7, 7, 7, 7]))
    assert trajectory.settled_level.tolist() == [0, 2, 2, -1]


def test_settled_level_is_minus_one_if_no_level_agrees(gpt2):
    trajectory = lj.Lens(gpt2)(STORY, levels=[0])
    right = trajectory.top[0, :, 0] == trajectory.model_top
    assert trajectory.settled_level.tolist() == [0 if fine else -1 for fine in right]
    assert None in trajectory.to_dict()["decided_at"]


def test_any_token_can_be_tracked_later(gpt2):
    trajectory = lj.Lens(gpt2)(STORY)
    later, asked = trajectory.track(" ball"), lj.Lens(gpt2)(STORY, tokens=[" ball"]).tracked[0]
    assert (later.id, later.text) == (asked.id, " ball")
    assert torch.equal(later.rank, asked.rank)
    assert torch.equal(later.probability, asked.probability)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_precision_models_are_decoded(dtype, data_folder, gpt2, jumps):
    model = lj.load(data_folder / "tiny-gpt2", dtype=dtype)
    trajectory, expected = lj.Lens(model, jumps)(STORY), lj.Lens(gpt2, jumps)(STORY)
    assert (trajectory.kl - expected.kl).abs().mean() < (1e-3 if dtype == "float32" else 0.1)
    assert trajectory.kl[-1].max() < 1e-5


def test_errors_are_one_line(gpt2, jumps, data_folder):
    lens = lj.Lens(gpt2)
    longest = gpt2.tokenization.max_length
    for action, error, message in (
        (lambda: lens("ball " * 200), BadText, rf"reads at most {longest}; shorten"),
        (lambda: lens(""), BadText, "no tokens"),
        (lambda: lens("a", k=0), BadText, "1 or more, got 0"),
        (lambda: lens("a", levels=[]), BadText, "at least one"),
        (lambda: lens("a", levels=[9]), BadModel, "levels 0 to 4"),
        (lambda: lens("a", tokens=["once upon"]), BadText, r"which is \d tokens \('.*'\)"),
        (lambda: lens("a", tokens=[99_999]), BadText, "vocabulary has 1,024"),
        (lambda: lens("a").distribution(2, 7), BadText, "was not read"),
        (lambda: lj.Lens(build_model("llama"), jumps), BadJumps, "4 blocks"),
    ):
        with pytest.raises(error, match=message) as caught:
            action()
        assert "\n" not in str(caught.value)


def test_jumps_lower_the_kl_of_a_trained_model(gpt2):
    lens = lj.Lens(gpt2, lj.fit(gpt2, stories(200), split="100/0/0"))
    assert lens.first_fitted_position == 1
    plain, mapped = lj.Lens(gpt2)(STORY), lens(STORY)
    assert mapped.kl[1:-1, 1:].mean() < plain.kl[1:-1, 1:].mean() / 2
    assert mapped.entropy.max() <= math.log(gpt2.structure.vocab_size) + 1e-9

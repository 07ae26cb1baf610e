"""The public functions on simulated CUDA devices: one, and two that accelerate spreads the model over.

Operations that CUDA refuses are refused (`helpers/simulated_cuda.py`), values are those of a CPU. So what a device
computes is compared with the same on the CPU, and reads by the host, for which a real device stops, are counted.
"""

from __future__ import annotations

import copy
import signal
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from helpers.simulated_cuda import SimulatedDevices, simulated_cuda
from helpers.small_llama import save_small_llama
from helpers.story_text import stories
from transformers import AutoModelForCausalLM

import layerjump as lj
from layerjump.errors import RunStopped
from layerjump.evaluation.perplexity import perplexity
from layerjump.generation.calibration.measure_costs import measure_costs
from layerjump.generation.combine_drafters import measure_step_costs
from layerjump.generation.exit_rules import ExitConfig, Shortlist, parse_rule
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.estimators.registry import ESTIMATORS
from layerjump.jumps.maps import to_affine
from layerjump.jumps.moments_checkpoint import Checkpoint
from layerjump.metrics.timing import time_alternately
from layerjump.models.fingerprint import fingerprint
from layerjump.pruning.fit_replacements import METHODS, REFITTED_METHODS

PROMPT = "One day, Tom went to the park with Lily."
PROMPTS = [PROMPT, "Once upon a time"]
GREEDY = {"do_sample": False, "max_new_tokens": 8}
RULES = ("never", "fixed:2", "gap:0.2", "maxprob:0.3", "entropy:3", "agree:2")
TEXT = stories(90)
TOKENS = 2_500
FIT = {name: {} for name in ESTIMATORS} | {"low-rank": {"rank": 8}}
FROM_TEXT = {
    "jacobian": lambda model: lj.fit_jacobian(model, TEXT, tokens=150),
    "differences": lambda model: lj.fit_finite_differences(model, TEXT, tokens=600),
    "n-njtc-trained": lambda model: lj.train_n_njtc(model, TEXT, tokens=600, steps=4),
}
SETUPS = [(n_devices, dtype) for n_devices in (1, 2) for dtype in ("float32", "bfloat16")]


@dataclass
class Setup:
    """The same model on simulated devices and on the CPU, and jumps of both."""

    devices: SimulatedDevices
    ours: lj.Model
    cpu: lj.Model
    _jumps: dict[str, tuple[lj.Jumps, lj.Jumps]] = field(default_factory=dict)

    def fit(self, estimator: str, **settings: Any) -> tuple[lj.Jumps, lj.Jumps]:
        """Jumps of the devices and of the CPU, fitted once."""
        key = f"{estimator} {settings}"
        if key not in self._jumps:
            self._jumps[key] = tuple(self._fit(model, estimator, settings) for model in (self.ours, self.cpu))
        return self._jumps[key]

    def _fit(self, model: lj.Model, estimator: str, settings: dict[str, Any]) -> lj.Jumps:
        if estimator in FROM_TEXT:
            return FROM_TEXT[estimator](model)
        return lj.fit(model, TEXT, estimator=estimator, tokens=TOKENS, **(FIT[estimator] | settings))

    def same_jumps(self, estimator: str, **settings: Any) -> tuple[lj.Jumps, lj.Jumps]:
        """The CPU's jumps, for the devices and for the CPU."""
        jumps = self.fit(estimator, **settings)[1]
        return copy.deepcopy(jumps), jumps


@pytest.fixture(scope="module")
def devices(device_guard):
    with simulated_cuda() as devices:
        yield devices


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: f"{setup[0]}-{setup[1]}")
def setup(request, devices, folder) -> Setup:
    n_devices, dtype = request.param
    cpu = lj.load(folder, device="cpu", dtype=dtype)
    ours = lj.load(folder, device="cuda", dtype=dtype) if n_devices == 1 else load_on_two(folder, cpu)
    if dtype == "bfloat16":  # fused attention of a CPU rounds otherwise
        for model in (ours, cpu):
            model.hf.set_attn_implementation("eager")
    return Setup(devices, ours, cpu)


def load_on_two(folder, cpu: lj.Model) -> lj.Model:
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=cpu.dtype)
    places = {f"model.layers.{block}": block // 2 for block in range(4)}
    # The tied unembedding is with the embedding, as accelerate itself places them.
    hf = dispatch_model(hf, places | {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0})
    return lj.Model.wrap(hf, cpu.tokenizer, name=str(folder))


def difference(ours: lj.Jumps, theirs: lj.Jumps) -> float:
    """The largest relative difference of maps, in the Frobenius norm of weight and bias."""
    differences = []
    for pair in theirs:
        maps = [to_affine(jumps[pair]).to(torch.float64) for jumps in (ours, theirs)]
        for name in ("weight", "bias"):
            first, second = (getattr(affine, name) for affine in maps)
            if second is not None:
                differences.append(float((first.cpu() - second).norm() / second.norm().clamp_min(1e-12)))
    return max(differences)


def test_it_is_the_same_model(setup):
    assert setup.ours.device.type == "cuda"
    assert setup.ours.structure.degree == setup.cpu.structure.degree == "full"
    assert fingerprint(setup.ours.hf) == fingerprint(setup.cpu.hf)
    assert all(check.passed for check in lj.self_check(setup.ours))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_jumps_are_those_of_the_cpu(setup, estimator):
    ours, theirs = setup.fit(estimator)
    assert set(ours) == set(theirs)
    # Gradients of a bfloat16 model are rounded to bfloat16, in another order on each device.
    is_rounded = estimator == "jacobian" and setup.ours.dtype == torch.bfloat16
    assert difference(ours, theirs) <= (torch.finfo(torch.bfloat16).eps if is_rounded else 1e-5)
    for pair, info in theirs.info.items():
        if info.r2 is not None:
            assert ours.info[pair].r2 == pytest.approx(info.r2, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"pairs": "all"}, {"pairs": "submodules"}, {"sources": "final@-1+embedding", "target": "final"}],
    ids=["all", "submodules", "joint"],
)
def test_jumps_of_other_pairs(setup, settings):
    # Products are float32 on this device, and states of some sub-modules hardly vary in some directions.
    assert difference(*setup.fit("affine", **settings)) <= (3e-5 if settings.get("pairs") == "submodules" else 1e-5)


def test_products_are_float64_where_that_is_fast(setup, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    ours = lj.fit(setup.ours, TEXT, estimator="affine", tokens=TOKENS, pairs="submodules")
    assert difference(ours, setup.fit("affine", pairs="submodules")[1]) <= 1e-6


def test_sums_are_with_their_sources(setup):
    moments = plan_run(setup.ours, TEXT, tokens=TOKENS).run().fit
    places = {site: str(gram.device) for site, gram in moments.sums.gram.items()}
    blocks = {site: max(site.index - 1, 0) for site in moments.sources}
    n_devices = len({str(weight.device) for weight in setup.ours.hf.parameters()})
    assert places == {site: f"cuda:{block // 2 if n_devices == 2 else 0}" for site, block in blocks.items()}


@pytest.mark.parametrize("estimator", ["affine", "calibrated"])
def test_a_resumed_run_ends_in_the_same_bytes(setup, tmp_path, estimator):
    def plan():
        return plan_run(setup.ours, TEXT, estimator=estimator, tokens=4_000)

    def stop(done, total):
        if done > total / 3:
            signal.raise_signal(signal.SIGINT)

    plan().run().save(tmp_path / "whole")
    with pytest.raises(RunStopped):
        plan().run(progress=stop, checkpoint=Checkpoint(tmp_path))
    plan().run(checkpoint=Checkpoint(tmp_path, resume=True)).save(tmp_path / "resumed")
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("kind", ["identity", "mat", "calibrated"])
def test_a_lens_reads_the_same(setup, kind):
    jumps = (None, None) if kind == "identity" else setup.same_jumps(kind)
    ours, theirs = (lj.Lens(m, j)(PROMPT) for m, j in zip((setup.ours, setup.cpu), jumps, strict=True))
    torch.testing.assert_close(ours.entropy.cpu(), theirs.entropy, rtol=1e-4, atol=1e-4)
    assert (ours.top[..., 0].cpu() == theirs.top[..., 0]).float().mean() >= 0.98  # but for ties
    assert "<html" in ours.to_html().lower()


def test_an_attribution_is_the_same(setup):
    jumps = setup.same_jumps("affine")
    ours, theirs = (
        lj.Lens(m, j)(PROMPT).attribution(-1, 3, token=" park")
        for m, j in zip((setup.ours, setup.cpu), jumps, strict=True)
    )
    assert [c.name for c in ours.parts] == [c.name for c in theirs.parts]
    values = [torch.tensor([c.value for c in (*found.parts, *found.heads, *found.sources)]) for found in (ours, theirs)]
    torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3 * float(values[1].abs().max()))


def test_interventions_act_the_same(setup):
    jumps = setup.same_jumps("mat")
    logits = []
    for model, own in zip((setup.ours, setup.cpu), jumps, strict=True):
        lens = lj.Lens(model, own)
        interventions = [
            lj.steer(lens, " cat", levels=[1, 3]),
            lj.swap(lens, " cat", " dog", levels=[2]),
            lj.ablate(lens, [" cat"], levels=[2, 3], positions=[4]),
            lj.patch(lens, lens("Once upon a time, there"), levels=[1, 3], positions=[3]),
            lj.skip_blocks(model, own, 2, 4),
        ]
        for intervention in interventions:
            with intervention, torch.no_grad():
                ids = torch.tensor([lens(PROMPT).prompt.ids], device=model.device)
                logits.append(model.hf(ids).logits.cpu().float())
        lj.measure_ablation(lens, [" cat"], 2, PROMPT)
    half = len(logits) // 2
    for ours, theirs in zip(logits[:half], logits[half:], strict=True):
        tolerance = 1e-3 if setup.cpu.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def test_parts_are_linearised(setup):
    jumps = setup.same_jumps("affine", pairs="submodules")[0]
    for parts in ("attn", "ffn", "norms"):
        with lj.linearize(setup.ours, jumps, parts=parts):
            assert lj.Lens(setup.ours)(PROMPT).entropy.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_generation_exits_where_the_cpu_does(setup, rule):
    found = []
    for model, jumps in zip((setup.ours, setup.cpu), setup.same_jumps("mat", pairs="all"), strict=True):
        for prompts in (PROMPT, PROMPTS):
            generated = lj.generate(model, jumps, prompts, exit=rule, **GREEDY)
            found.append((generated.ids, generated.exit_levels))
    assert found[:2] == found[2:]


def test_levels_are_read_with_a_shortlist(setup):
    config = ExitConfig(parse_rule("gap:0.2"), Shortlist(torch.arange(0, 1_000, 2)))
    found = [
        lj.generate(model, jumps, PROMPTS, exit=config, **GREEDY).ids
        for model, jumps in zip((setup.ours, setup.cpu), setup.same_jumps("mat"), strict=True)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("cache", ["jump", "copy"])
def test_caches_are_filled(setup, cache):
    found = [
        lj.generate(model, jumps, PROMPTS, exit="gap:0.2", cache=cache, **GREEDY).ids
        for model, jumps in zip((setup.ours, setup.cpu), setup.same_jumps("mat", pairs="all"), strict=True)
    ]
    assert found[0] == found[1]


def test_sampling(setup):
    jumps = setup.same_jumps("mat")[0]
    for verify in (False, True):
        generated = lj.generate(setup.ours, jumps, PROMPT, exit="gap:0.2", verify=verify, max_new_tokens=4)
        assert generated.n_tokens


@pytest.mark.parametrize("drafts", ["lookup", "recycled", "head", "exit", "lookup,recycled,head"])
def test_verified_text_is_the_models_own(setup, drafts):
    settings = {"sources": "final@-1+embedding", "target": "final"} if "head" in drafts else {}
    jumps = setup.same_jumps("affine", **settings)[0]
    rule = "gap:0.2" if drafts == "exit" else "never"
    for prompts in (PROMPT, PROMPTS):
        ours = lj.generate(setup.ours, jumps, prompts, exit=rule, verify=True, drafts=drafts, **GREEDY).ids
        assert ours == lj.generate(setup.cpu, None, prompts, **GREEDY).ids
        inputs = setup.ours.tokenization.generation_inputs([prompts] if isinstance(prompts, str) else prompts)
        inputs = {name: tensor.to(setup.ours.device) for name, tensor in inputs.items()}
        full = setup.ours.hf.generate(**inputs, pad_token_id=setup.ours.tokenization.pad, **GREEDY)
        assert ours == full[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("self_generated_tokens", [None, 4])
def test_calibration(setup, self_generated_tokens):
    jumps = setup.same_jumps("mat")[0]
    settings = {"target": 0.6, "confidence": 0.6, "documents": 40, "draft_documents": 8}
    settings["self_generated_tokens"] = self_generated_tokens
    calibration = lj.calibrate(setup.ours, jumps, stories(60, seed=5, sentences=2), **settings)
    assert lj.generate(setup.ours, jumps, PROMPTS, exit=calibration.exit, **GREEDY).n_tokens
    verified = lj.generate(setup.ours, jumps, PROMPT, exit=calibration.verified_exit, verify=True, **GREEDY)
    assert verified.ids == lj.generate(setup.cpu, None, PROMPT, **GREEDY).ids


def test_timings_wait_for_the_device(setup):
    """Otherwise they are those of launching kernels, and calibration would choose rules by them."""
    measurements = {
        "costs": lambda: measure_costs(setup.ours, None),
        "steps": lambda: measure_step_costs(setup.ours, repeats=1),
        "rivals": lambda: time_alternately({"one": lambda: None}, repeats=1),
    }
    for name, measure in measurements.items():
        before = setup.devices.synchronizations
        measure()
        assert setup.devices.synchronizations >= before + 2, name


@pytest.mark.parametrize("method", [method for method in METHODS if method not in REFITTED_METHODS])
def test_blocks_are_dropped(setup, tmp_path, method):
    settings = {"drop": 1, "method": method, "criterion": "influence", "tokens": TOKENS}
    pruned, theirs = (lj.prune(model, TEXT, **settings) for model in (setup.ours, setup.cpu))
    assert pruned.spans == theirs.spans
    assert pruned.loss.loss_after == pytest.approx(theirs.loss.loss_after, rel=1e-3)
    pruned.save(tmp_path / "pruned")
    loaded = lj.load(tmp_path / "pruned", device="cpu")
    found = perplexity(loaded, PROMPT, window=32).loss
    assert found == pytest.approx(perplexity(theirs.model, PROMPT, window=32).loss, rel=5e-3)


@pytest.mark.parametrize("criterion", ["loss", "linearity", "linearity-iterative", "angle", "deepest"])
def test_blocks_are_chosen(setup, criterion):
    settings = {"drop": 2, "method": "linear", "criterion": criterion, "tokens": TOKENS}
    pruned, theirs = (lj.prune(model, TEXT, **settings) for model in (setup.ours, setup.cpu))
    assert pruned.spans == theirs.spans


def test_a_draft_model(setup):
    draft, theirs = (lj.make_draft_model(model, TEXT, 2, tokens=TOKENS) for model in (setup.ours, setup.cpu))
    assert draft.loss.loss_after == pytest.approx(theirs.loss.loss_after, rel=1e-3)


def test_refinement(setup):
    settings = {"steps": 6, "tokens": TOKENS, "positions_per_step": 32}
    start = setup.same_jumps("mat")
    ours, theirs = (lj.refine(m, j, TEXT, **settings) for m, j in zip((setup.ours, setup.cpu), start, strict=True))
    assert difference(ours, theirs) <= 1e-3
    assert difference(ours, start[1]) > 1e-3


def test_a_survey_and_perplexity(setup):
    jumps = setup.same_jumps("mat")
    tables = [lj.survey(m, j, TEXT, tokens=300) for m, j in zip((setup.ours, setup.cpu), jumps, strict=True)]
    assert len(tables[0].by_level()) == len(tables[1].by_level())
    losses = [perplexity(model, " ".join(TEXT.documents[:4]), window=64).loss for model in (setup.ours, setup.cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_fit_reads_little(setup):
    """Every read stops the host until the device has caught up."""
    reads, n_batches = [], []
    for tokens in (2_000, 4_000):
        plan = plan_run(setup.ours, TEXT, tokens=tokens)
        n_batches.append(sum(map(len, plan.batches.values())))
        setup.devices.reads.clear()
        plan.run()
        # transformers' own, for attention masks, are not counted.
        own = {place: n for place, n in setup.devices.reads.items() if " models/model.py:" not in place}
        reads.append(sum(own.values()))
    n_devices = len({weight.device for weight in setup.ours.hf.parameters()})
    # Whether states are finite, which rows are outlying, and from each device the rows of the reservoir.
    assert (reads[1] - reads[0]) / (n_batches[1] - n_batches[0]) <= 2 + n_devices


@pytest.mark.parametrize(
    ("settings", "ceiling"),
    [
        ({}, 1),  # the token, and whether the text ends
        ({"exit": "gap:0.2@1,2"}, 3),  # and a decision at each level
        ({"exit": "entropy:3"}, 4),
        ({"verify": True, "drafts": "lookup"}, 1),  # for each column
        ({"verify": True, "drafts": "recycled"}, 2),  # and the predictions of the step
    ],
    ids=["full", "gap", "entropy", "lookup", "recycled"],
)
def test_a_decode_step_reads_little(setup, settings, ceiling):
    """The reads per new token grow by no more than a few."""
    jumps = setup.same_jumps("mat")[0]
    reads = []
    for n_tokens in (2, 4, 12):
        setup.devices.reads.clear()
        lj.generate(setup.ours, jumps, PROMPT, do_sample=False, max_new_tokens=n_tokens, **settings)
        reads.append(setup.devices.reads.total())
    assert (reads[2] - reads[1]) / 8 <= ceiling

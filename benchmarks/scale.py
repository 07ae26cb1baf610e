"""Memory, resumption and distribution: what a fit takes, and that no plan changes its result.

    python benchmarks/scale.py [--only PART] [--quick]

Parts, each in processes of its own:
  all-pairs    SmolLM2, all pairs of levels: peak memory beyond the model with all sums in memory and with states on
               disk, both next to the estimate; whether both have the same jumps
  calibrated   a random Llama of width 4096 and 4 blocks, `calibrated`, states on disk: peak memory and estimate
  strengths    the solution of one of its levels, next to strengths chosen by eigendecompositions (the former way)
  estimates    estimate and measured peak of fits with several estimators, and of a pruning
  offload      a random Llama that does not fit under an enforced limit of memory: fitted from the disk under it, and
               compared with the fit of the same model in memory
  elastic      1 → 3 → 2 processes, one killed (SIGKILL) in each leg, then finished: compared with one undisturbed run
  mesh         two copies of a model, each spread over two processes: compared with one process
  quantized    int8 and nf4: what works, and how far lenses fitted on a quantised model are from the full model's
  simulated    the tests on simulated accelerators
Memory is anonymous resident memory, sampled every 5 ms. `--quick`: small
sizes, without `strengths` and `estimates`, within two minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import torch

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
WIKITEXT = SHARED / "text/wikitext-2/wikitext2_train_first1MB.txt"
STORIES = SHARED / "text/tinystories/tinystories_train_sample.txt"
STORIES15M = str(SHARED / "models/stories15M")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
GB = 1e9


@dataclass(frozen=True)
class Child:
    """What a process of this script printed, and its memory: when its model was loaded, and at most after that."""

    answer: dict[str, Any]
    loaded_bytes: int
    peak_bytes: int

    @property
    def beyond_model(self) -> float:
        """Peak in GB beyond the loaded model."""
        return (self.peak_bytes - self.loaded_bytes) / GB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="one part of the benchmark")
    parser.add_argument("--quick", action="store_true", help="small sizes: within two minutes")
    parser.add_argument("--child", nargs=2, metavar=("TASK", "SETTINGS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child[0]](**json.loads(options.child[1]))))
        return
    from layerjump.metrics.timing import describe_machine

    print(describe_machine())
    figures: dict[str, Any] = {}
    for name, part in PARTS.items():
        if options.only == name or (options.only is None and not (options.quick and name in SLOW)):
            with tempfile.TemporaryDirectory(prefix="layerjump-scale-") as folder:
                figures |= part(Path(folder), quick=options.quick)
    print(json.dumps(figures))


# -- all pairs


def measure_all_pairs(folder: Path, *, quick: bool) -> dict[str, Any]:
    """All pairs of SmolLM2: the sums of all sources in memory, or of one after another from states on disk."""
    model, text, tokens = (STORIES15M, STORIES, 3_000) if quick else ("smollm2", WIKITEXT, 8_000)
    settings = {"model": model, "text": str(text), "tokens": tokens, "pairs": "all"}
    runs = {
        "all sums in memory": run_child("fit", settings),
        "states on disk": run_child("fit", settings | {"spill": str(folder / "spill")}),
    }
    print(f"\n{Path(model).name}, {text.name}, {tokens:,} tokens, seed 0, all pairs, mat")
    print_peaks(runs)
    peak = runs["states on disk"]
    return {
        "all_pairs_peak_gb": round(peak.beyond_model, 2),
        "all_pairs_in_memory_gb": round(runs["all sums in memory"].beyond_model, 2),
        "all_pairs_identical": len({run.answer["jumps"] for run in runs.values()}) == 1,
        "all_pairs_estimates": {name: estimate_ratio(run) for name, run in runs.items()},
    }


def fit_child(
    *,
    model: str,
    text: str,
    tokens: int,
    pairs: str | None = None,
    estimator: str = "mat",
    spill: str | None = None,
    memory: str | None = None,
) -> dict[str, Any]:
    """Fit jumps, and return the estimate of memory, the hash of the jumps and the seconds."""
    import layerjump as lj

    return fit_loaded(lj.load(model), text, tokens, pairs=pairs, estimator=estimator, spill=spill, memory=memory)


def fit_loaded(
    model: Any,
    text: Any,
    tokens: int,
    *,
    pairs: str | None = None,
    estimator: str = "mat",
    spill: str | None = None,
    memory: str | None = None,
    rank: int | None = None,
) -> dict[str, Any]:
    from layerjump.jumps.collect_moments import plan_run
    from layerjump.jumps.cost_estimate import parse_memory, plan_memory
    from layerjump.jumps.estimators.registry import EstimatorSettings
    from layerjump.jumps.fit import fit_planned

    run = plan_run(model, text, estimator=estimator, pairs=pairs, tokens=tokens)
    plan = plan_memory(
        model,
        run.moments["fit"],
        run.batches,
        estimator,
        memory=parse_memory(memory),
        spill=None if spill is None else Path(spill),
    )
    report_loaded()
    start = time.perf_counter()
    jumps = fit_planned(run, plan, estimator, EstimatorSettings(rank=rank))
    seconds = time.perf_counter() - start
    return {"estimate": plan.cost.bytes, "plan": str(plan), "jumps": hash_jumps(jumps), "seconds": seconds}


def hash_jumps(jumps: Any) -> str:
    digest = hashlib.sha256()
    for pair in jumps:
        for tensor in jumps[pair].state_dict().values():
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


# -- calibrated


def measure_calibrated(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Fit `calibrated` on wide states from the disk; at a small width also with all sums in memory."""
    width, tokens = (256, 2_000) if quick else (4096, 2_000)
    settings = {"width": width, "tokens": tokens}
    runs = {"states on disk": run_child("calibrated", settings | {"spill": str(folder / "spill")})}
    if quick:
        runs["all sums in memory"] = run_child("calibrated", settings)
    print(
        f"\nrandom Llama of width {width}, 4 blocks, float32, {tokens:,} tokens of {STORIES.name}, seed 0, calibrated"
    )
    print_peaks(runs)
    figures: dict[str, Any] = {
        f"calibrated_d{width}_peak_gb": round(runs["states on disk"].beyond_model, 2),
        "calibrated_estimates": {name: estimate_ratio(run) for name, run in runs.items()},
    }
    if quick:
        figures["calibrated_identical"] = len({run.answer["jumps"] for run in runs.values()}) == 1
    return figures


def calibrated_child(*, width: int, tokens: int, spill: str | None = None) -> dict[str, Any]:
    return fit_loaded(random_llama(width), STORIES, tokens, estimator="calibrated", spill=spill)


def measure_strengths(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Time the solution of one level, and the same by eigendecompositions."""
    child = run_child("strengths", {"width": 256 if quick else 4096, "tokens": 2_000})
    ours, before = child.answer["seconds"], child.answer["seconds_before"]
    print(
        f"\nsolution of one level of width {256 if quick else 4096}, calibrated: {ours:.1f} s; by eigendecompositions "
        f"{before:.1f} s"
    )
    return {"calibrated_level_over_eigendecompositions": round(ours / before, 3)}


def strengths_child(*, width: int, tokens: int) -> dict[str, Any]:
    from layerjump.jumps.collect_moments import plan_run
    from layerjump.jumps.estimators.calibrated import fit_calibrated
    from layerjump.jumps.estimators.least_squares import choose_strengths, ridge
    from layerjump.jumps.maps import FEATURES
    from layerjump.models.sites import FINAL, Site

    pair, model = (Site(2), FINAL), random_llama(width)
    moments = plan_run(model, STORIES, estimator="calibrated", pairs="2:final", tokens=tokens).run()
    report_loaded()
    start = time.perf_counter()
    fit_calibrated(moments.fit, moments.validation, pair)
    middle = time.perf_counter()
    for features in FEATURES:
        source, target = moments.fit.pair_moments(pair, features)
        held_source, held_target = moments.validation.pair_moments(pair, features)
        (strength,) = choose_strengths(source, [target], held_source, [held_target])
    next(ridge(source, [target], strength=strength))
    return {"seconds": middle - start, "seconds_before": time.perf_counter() - middle}


def random_llama(width: int, n_blocks: int = 4) -> Any:
    """A Llama of random weights with the tokenizer of stories15M."""
    import layerjump as lj

    return lj.Model.wrap(*random_weights(width, n_blocks))


def random_weights(width: int, n_blocks: int) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=n_blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config), AutoTokenizer.from_pretrained(STORIES15M)


# -- estimates


def measure_estimates(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Compare estimates with measured peaks over estimators and plans."""
    width = 512 if quick else 768
    cases: dict[str, dict[str, Any]] = {
        "mat, all pairs": {"estimator": "mat", "pairs": "all"},
        "mat, all pairs, states on disk": {"estimator": "mat", "pairs": "all", "spill": str(folder / "spill")},
        "ridge, to-last": {"estimator": "ridge"},
        "orthogonal, to-last": {"estimator": "orthogonal"},
        "low-rank, to-last": {"estimator": "low-rank", "rank": 8},
        "calibrated": {"estimator": "calibrated"},
    }
    if quick:
        cases = dict(list(cases.items())[:2])
    runs = {name: run_child("estimate", settings | {"width": width}) for name, settings in cases.items()}
    if not quick:
        runs["prune, fold, drop 1 of 4"] = run_child("prune", {"width": width})
    print(f"\nestimates: random Llamas of width {width}, 4 blocks, float32, {STORIES.name}, seed 0")
    print_peaks(runs)
    return {"estimates_over_peaks": {name: estimate_ratio(run) for name, run in runs.items()}}


def estimate_child(*, width: int, **settings: Any) -> dict[str, Any]:
    return fit_loaded(random_llama(width), STORIES, 1_500, **settings)


def prune_child(*, width: int) -> dict[str, Any]:
    """Prune a model, and return the estimate that the pruning logs."""
    import layerjump as lj
    from layerjump.pruning.estimate_memory import PruningMemory

    estimates: list[int] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            estimates.extend(value.bytes for value in record.args or () if isinstance(value, PruningMemory))

    logger = logging.getLogger("layerjump")
    logger.addHandler(Listener())
    logger.setLevel(logging.INFO)
    model = random_llama(width)
    report_loaded()
    start = time.perf_counter()
    lj.prune(model, STORIES, drop=1, method="fold", protect=[1, 4], tokens=3 * width)
    return {"estimate": estimates[0], "seconds": time.perf_counter() - start}


# -- offload


def measure_offload(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Fit a model that is larger than a limit on the memory of the process, and the same model in memory."""
    width, n_blocks, limit = (512, 16, 200) if quick else (1024, 20, 600)
    hf, tokenizer = random_weights(width, n_blocks)
    size = sum(weight.numel() * weight.itemsize for weight in hf.parameters())
    hf.save_pretrained(folder / "model", max_shard_size="50MB")
    tokenizer.save_pretrained(folder / "model")
    del hf
    settings = {"model": str(folder / "model"), "tokens": 3_000, "spill": str(folder / "spill")}
    plain = run_child("offload", settings)
    limited = run_child("offload", settings | {"limit": limit * 10**6, "device_map": "disk"})
    refused = run_child("offload", settings | {"limit": limit * 10**6}, may_fail=True)
    identical = plain.answer["jumps"] == limited.answer["jumps"]
    print(
        f"\nrandom Llama of width {width}, {n_blocks} blocks, {size / GB:.2f} GB of float32 weights, "
        f"{settings['tokens']:,} tokens of {STORIES.name}, seed 0, to-last, mat\n"
        f"  data limit of {limit / 1000} GB beyond the imported libraries (RLIMIT_DATA): in memory "
        f"{'fits, so the limit shows nothing' if refused.answer else 'does not fit'}; from the disk, layer by layer: "
        f"{'identical' if identical else 'other'} jumps, peak {limited.beyond_model:.2f} GB of memory, loading included"
    )
    return {
        "offload_peak_gb": round(limited.beyond_model, 2),
        "offload_model_gb": round(size / GB, 2),
        "offload_limit_gb": limit / 1000,
        "offload_identical": identical and not refused.answer,
    }


def offload_child(
    *, model: str, tokens: int, spill: str, limit: int | None = None, device_map: str | None = None
) -> dict[str, Any]:
    import layerjump as lj
    import layerjump.jumps.fit
    import layerjump.jumps.layer_pass  # noqa: F401  all libraries are loaded before the limit is set

    report_loaded()
    if device_map is None:
        limit_data(limit)
    loaded = lj.load(model, device_map=device_map)
    if device_map is not None:  # loading maps all files of the checkpoint into the address space, which counts as data
        limit_data(limit)
    return {"jumps": hash_jumps(lj.fit(loaded, STORIES, tokens=tokens, spill=spill))}


def limit_data(limit: int | None) -> None:
    """Limit the data of this process to `limit` bytes beyond what it holds now."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + limit,) * 2)


# -- several processes


def measure_elastic(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Kill a process in each of three legs with another number of processes, and finish with a fourth."""
    model, tokens = (str(ROOT / "tests/fixtures/tiny-gpt2"), "60000") if quick else (STORIES15M, "30000")
    settings = ["-m", "layerjump", "fit", model, "--text", str(STORIES), "--tokens", tokens]
    settings += ["--estimator", "calibrated", "--checkpoint-seconds", "0"]
    run_quietly([*TORCHRUN, "1", *settings, "-o", str(folder / "whole")])
    legs: list[int] = []
    for n_processes in (1, 3, 2):
        resume = ("--resume",) if legs else ()
        kill_one([*TORCHRUN, str(n_processes), *settings, *resume, "-o", str(folder / "legs")], folder, n_processes)
        legs.append(n_processes)
    run_quietly([*TORCHRUN, "2", *settings, "--resume", "-o", str(folder / "legs")])
    identical = same_bytes(folder / "whole", folder / "legs")
    print(
        f"\n{Path(model).name}, {tokens} tokens, calibrated: 1, 3 and 2 processes, one killed in each leg, then "
        f"resumed with 2: {'the same' if identical else 'other'} bytes as one undisturbed process"
    )
    return {"elastic_identical": identical}


def kill_one(command: Sequence[str], folder: Path, n_processes: int) -> None:
    """Start processes, and kill the last of them when all have saved sums."""
    files = [folder / "legs" / f"unfinished-{rank}-of-{n_processes}.safetensors" for rank in range(n_processes)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    while not all(path.exists() for path in files):
        if run.poll() is not None:
            raise SystemExit(f"{' '.join(command)} ended before it could be killed")
        time.sleep(0.02)
    for child in psutil.Process(run.pid).children(recursive=True):
        if child.environ().get("RANK") == str(n_processes - 1):
            child.kill()
    run.wait()


def measure_mesh(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Compare two copies of a model on two processes each with one process."""
    import layerjump as lj
    from layerjump.jumps.maps import to_affine

    tokens = "2000" if quick else "20000"
    settings = ("-m", "layerjump", "fit", STORIES15M, "--text", str(STORIES), "--tokens", tokens)
    for n_processes, spread in (("1", ()), ("4", ("--tensor-parallel", "2"))):
        run_quietly([*TORCHRUN, n_processes, *settings, *spread, "-o", str(folder / n_processes)])
    one, four = (lj.Jumps.from_pretrained(folder / name) for name in "14")
    weights = [[to_affine(jumps[pair]).weight for jumps in (one, four)] for pair in one]
    difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in weights)
    print(
        f"\nstories15M, {tokens} tokens, to-last, mat: two copies of two processes each (gloo) differ from one process "
        f"by {difference:.1e} of the largest weight"
    )
    return {"mesh_difference": float(f"{difference:.1e}")}


# -- quantised weights


def measure_quantized(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Run every use of a model on quantised weights, and compare lenses fitted on them with the full model's."""
    import layerjump as lj
    from layerjump.evaluation.perplexity import perplexity

    tokens = 4_000 if quick else 60_000
    corpus = lj.load_text(STORIES)
    held_out = split_documents(corpus)[: 10 if quick else 100]
    full = lj.load(STORIES15M)
    rows: dict[str, dict[str, str | float]] = {}
    for kind in ("none", "int8", "nf4", "torchao-int8"):
        model = full if kind == "none" else lj.load(STORIES15M, quantization=kind)
        jumps = lj.fit(model, corpus, tokens=tokens, estimator="calibrated")
        jumps.save_pretrained(folder / kind)
        on_full, full_ones = (
            lj.Jumps.from_pretrained(folder / name, model=other, allow_other_weights=True)
            for name, other in ((kind, full), ("none", model))
        )
        uses: dict[str, Callable[[], object]] = {
            "generate": partial(lj.generate, model, jumps, "Once upon a time", max_new_tokens=8),
            "prune remove": partial(lj.prune, model, corpus, drop=1, method="remove", tokens=4_000),
            "prune fold": partial(lj.prune, model, corpus, drop=1, method="fold", tokens=4_000),
            "jacobian": partial(lj.fit_jacobian, model, corpus, tokens=64),
        }
        rows[kind] = {
            "perplexity": perplexity(model, "\n".join(held_out), limit=4).value,
            "KL of its lens": mean_kl(model, jumps, held_out),
            "KL of the full model's lens": mean_kl(model, full_ones, held_out),
            "KL of its lens on the full model": mean_kl(full, on_full, held_out),
        }
        rows[kind] |= {use: works(action) for use, action in uses.items()}
    print(
        f"\n{full}, {STORIES.name}, {tokens:,} tokens, seed 0, calibrated; KL in nats, mean over levels and positions"
    )
    for name in rows["none"]:
        cells = [row[name] for row in rows.values()]
        print(f"  {name:34}" + "".join(f"{cell if isinstance(cell, str) else f'{cell:.3f}':>14}" for cell in cells))
    return {"quantized": rows}


def split_documents(corpus: Any) -> list[str]:
    """The test documents of a corpus, which no fit reads."""
    from layerjump.data.corpus import split_indices

    return [corpus.documents[index] for index in split_indices(len(corpus.documents)).test]


def mean_kl(model: Any, jumps: Any, documents: Sequence[str]) -> float:
    """KL(model ‖ lens), mean over positions and levels below the last."""
    import layerjump as lj

    lens = lj.Lens(model, jumps)
    return float(torch.cat([lens(document).kl[:-1].flatten() for document in documents]).mean())


def works(action: Callable[[], object]) -> str:
    from layerjump.errors import LayerjumpError

    try:
        action()
    except LayerjumpError:
        return "refused"
    return "works"


# -- simulated accelerators


def count_simulated_failures(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Run the tests on simulated accelerators."""
    files = sorted(ROOT.glob("tests/**/test_*simulated*.py"))
    if not files:
        return {"simulated_device_failures": None}
    report = folder / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *map(str, files), f"--junitxml={report}"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    (suite,) = ElementTree.parse(report).getroot()
    failures = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    print(f"\ntests on simulated accelerators: {suite.attrib['tests']}, failures {failures}")
    return {"simulated_device_failures": failures}


# -- processes


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run_child(task: str, settings: dict[str, Any], *, may_fail: bool = False) -> Child:
    """Run a task in a process of its own, and sample its memory."""
    command = [sys.executable, __file__, "--child", task, json.dumps(settings)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, stdout=output, stderr=messages, env=ENVIRONMENT)
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous_memory(process.pid))
            time.sleep(0.005)
        output.seek(0)
        messages.seek(0)
        lines, error = output.read().splitlines(), messages.read()
    if process.returncode and not may_fail:
        raise SystemExit(f"{task} {settings} failed:\n{error[-3000:]}")
    loaded = [int(line.split()[1]) for line in lines if line.startswith("loaded ")]
    answer = {} if process.returncode else json.loads(lines[-1])
    return Child(answer, loaded[0] if loaded else 0, peak)


def anonymous_memory(pid: int | str = "self") -> int:
    """Anonymous resident memory of a process in bytes: without files that are mapped, which the system can drop."""
    try:
        return status_bytes("RssAnon", pid)
    except OSError:  # it has ended
        return 0


def status_bytes(name: str, pid: int | str = "self") -> int:
    """A size in Linux's description of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))


def report_loaded() -> None:
    """Tell the parent how much memory is taken before the work starts."""
    print(f"loaded {anonymous_memory()}", flush=True)


def print_peaks(runs: dict[str, Child]) -> None:
    for name, run in runs.items():
        print(
            f"  {name:31} peak {run.beyond_model:5.2f} GB beyond the model, estimate "
            f"{run.answer['estimate'] / GB:5.2f} ({estimate_ratio(run):.2f} of the peak), {run.answer['seconds']:.0f} s"
        )


def estimate_ratio(run: Child) -> float:
    """The estimate over the measured peak."""
    return round(run.answer["estimate"] / GB / run.beyond_model, 2)


def run_quietly(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


def same_bytes(one: Path, other: Path) -> bool:
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors")) for folder in (one, other)]
    return files[0] == files[1] and all((one / path).read_bytes() == (other / path).read_bytes() for path in files[0])


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "all-pairs": measure_all_pairs,
    "calibrated": measure_calibrated,
    "strengths": measure_strengths,
    "estimates": measure_estimates,
    "offload": measure_offload,
    "elastic": measure_elastic,
    "mesh": measure_mesh,
    "quantized": measure_quantized,
    "simulated": count_simulated_failures,
}
SLOW = ("strengths", "estimates")
"""Parts that `--quick` leaves out."""
CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "fit": fit_child,
    "calibrated": calibrated_child,
    "strengths": strengths_child,
    "estimate": estimate_child,
    "prune": prune_child,
    "offload": offload_child,
}


if __name__ == "__main__":
    main()

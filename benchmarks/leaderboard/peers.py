"""Lenses of other tools (peers): each package fits on the same tokens in its own environment; we import its lens."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import layerjump as lj
from layerjump.errors import BadModel
from layerjump.pruning.checkpoint import save_checkpoint
from leaderboard.held_out import HeldOut
from leaderboard.ours import FittedLens, LensFitter
from leaderboard.scores import Scores

HERE = Path(__file__).parents[1] / "peers"
RECORD = HERE / "recorded.json"


@dataclass(frozen=True)
class Peer:
    """Another package: the name of its environment, our script that runs it, and the file of its lens."""

    environment: str
    script: str
    lens: str


PEERS = {
    "tuned_lens": Peer("tuned_lens", "tuned.py", "."),
    "jacobian_transformerlens": Peer("jacobian", "jacobian.py", "lens.pt"),
}


@dataclass(frozen=True)
class Budget:
    """How much computation a peer may spend."""

    steps: int = 60
    tokens_per_step: int = 1_024
    times_ours: float = 10.0
    """CPU seconds of the tuned lens' last run, as a multiple of our most expensive fit."""
    most_minutes: float = 240.0
    jacobian_tokens: int = 2_000
    skip_first: int = 16

    def arguments(self, name: str, our_seconds: float) -> list[str]:
        if name == "tuned_lens":
            options: dict[str, float] = {
                "steps": self.steps,
                "tokens-per-step": self.tokens_per_step,
                "least-cpu": round(self.times_ours * our_seconds),
                "most-cpu": 60 * self.most_minutes,
            }
        else:
            options = {"tokens": self.jacobian_tokens, "skip-first": self.skip_first}
        return [word for option, value in options.items() for word in (f"--{option}", str(value))]


def run_peers(
    fitter: LensFitter, names: list[str], *, environments: Path, work: Path, budget: Budget, our_seconds: float
) -> Iterator[tuple[str, FittedLens, dict[str, Any]]]:
    """Yield each peer's lens with its CPU seconds, and its report about the fit."""
    write_job(fitter, work)
    for name in names:
        peer, out = PEERS[name], work / PEERS[name].environment
        _run(peer, environments, work, out, budget.arguments(name, our_seconds))
        cost = json.loads((out / "cost.json").read_text())
        lens = lj.Lens(fitter.model, lj.import_lens(out / peer.lens, fitter.model))
        yield name, FittedLens(lens, cost["cpu_seconds"]), cost


def _run(peer: Peer, environments: Path, work: Path, out: Path, arguments: list[str]) -> None:
    """Run a peer, unless its lens already exists, fitted on these tokens with these settings."""
    python = environments / peer.environment / "bin" / "python"
    if not python.exists():
        raise BadModel(
            f"there is no environment {python.parents[1]}; create it with benchmarks/peers/setup.sh {environments}"
        )
    job = json.loads((work / "tokens.json").read_text())
    digest = hashlib.sha256(json.dumps([job["fit"], job["select"]]).encode()).hexdigest()
    done, cost = out / "settings.txt", out / "cost.json"
    # An earlier fit may have had more time than this run asks for: our own CPU seconds differ from run to run.
    requested = dict(zip(arguments[::2], arguments[1::2], strict=True))
    least = float(requested.pop("--least-cpu", 0))
    settings = f"{digest} {requested}"
    same = cost.exists() and done.exists() and done.read_text() == settings
    if same and json.loads(cost.read_text())["cpu_seconds"] >= least:
        return
    command = [str(python), str(HERE / peer.script), str(work), str(out), *arguments]
    # Our own path would let the peer import the packages of this environment.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = inherited | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    subprocess.run(command, check=True, env=environment)
    done.write_text(settings)


def write_job(fitter: LensFitter, work: Path) -> None:
    """Write the checkpoint and the tokens in the form that `peers/job.py` reads."""
    checkpoint = work.parent / "model"
    write_checkpoint(fitter.model, checkpoint)
    batches = fitter.plan.batches
    splits = {"fit": "fit", "select": "validation"}
    tokens = {name: sequences_of(batches[split]) for name, split in splits.items()}
    check = _check(fitter.model, tokens["fit"][0])
    work.mkdir(parents=True, exist_ok=True)
    job = tokens | {"model": f"../{checkpoint.name}", "check": check}
    (work / "tokens.json").write_text(json.dumps(job))


def write_checkpoint(model: lj.Model, folder: Path) -> None:
    """Write a plain float32 checkpoint that transformers 4 and 5 read in the same way."""
    if (folder / "config.json").exists():
        return
    hf: Any = model.hf
    # Weights from a GGUF file are plain tensors by now, but transformers would refuse to save them.
    hf.hf_quantizer, hf.is_quantized = None, False
    hf.config.__dict__.pop("quantization_config", None)
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # transformers 5 moved `rope_theta`; version 4 would use its default, and compute other rotary embeddings.
    config |= {k: v for k, v in config.get("rope_parameters", {}).items() if k == "rope_theta"}
    path.write_text(json.dumps(config, indent=2))
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.exists():
        tokenizer_config = json.loads(tokenizer.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        tokenizer.write_text(json.dumps(tokenizer_config, indent=2))


def sequences_of(batches: lj.Batches) -> list[list[int]]:
    """Return every sequence as the model runs it, in the order of the documents."""
    sequences = batches.sequences
    spans = zip(sequences.start, sequences.length, strict=True)
    return [sequences.ids[start : start + length].tolist() for start, length in spans]


@torch.no_grad()
def _check(model: lj.Model, ids: list[int], k: int = 50) -> dict[str, Any]:
    top = model.hf(torch.tensor([ids])).logits[0, -1].log_softmax(-1).topk(k)
    return {"ids": ids, "tokens": top.indices.tolist(), "log_probabilities": top.values.tolist()}


def recorded_scores(model: str, text: str, lens: str, held: HeldOut) -> Scores | None:
    """Return the recorded scores of a peer at each position, or None if they are of other positions."""
    path = RECORD.with_name(f"{model}-{text}-{lens}.npz")
    if not path.exists():
        return None
    with np.load(path) as arrays:
        kl, rank, document = arrays["kl"].astype(np.float64), arrays["place"], arrays["document"]
    if document.tolist() != held.document.tolist():
        return None
    missing = np.full_like(kl, np.nan)
    return Scores(
        kl,
        np.where(rank < 0, np.nan, rank),
        surprisal=missing,
        probability=missing,
        hit=missing,
        marginal=missing[:, 0],
        marginal_draws=missing,
        has_target=np.ones(len(held)),
        document=held.document.double().numpy(),
    )


def record_scores(model: str, text: str, lens: str, scores: Scores) -> None:
    """Save the scores that paired differences need."""
    np.savez_compressed(
        RECORD.with_name(f"{model}-{text}-{lens}.npz"),
        kl=scores.kl.astype(np.float16),
        place=np.nan_to_num(scores.rank, nan=-1).clip(max=20).astype(np.int8),
        document=scores.document.astype(np.int32),
    )


def recorded(model: str, text: str) -> dict[str, dict[str, Any]]:
    """Return the recorded results of peers on this model and text, by lens."""
    return json.loads(RECORD.read_text()).get(model, {}).get(text, {})


def record(model: str, text: str, results: dict[str, dict[str, Any]]) -> None:
    """Record peers' results for runs without the peers' environments."""
    records = json.loads(RECORD.read_text())
    records.setdefault(model, {}).setdefault(text, {}).update(results)
    RECORD.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")

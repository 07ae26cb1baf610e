"""Peers' lenses: the same tokens handed to each package in its own environment, its lens read back, its cost kept."""

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
from leaderboard.ours import Made, Workshop
from leaderboard.scores import Scores

HERE = Path(__file__).parents[1] / "peers"
RECORD = HERE / "recorded.json"


@dataclass(frozen=True)
class Peer:
    """A package: the environment it lives in, our script that drives it, and the file of its lens."""

    environment: str
    script: str
    lens: str


PEERS = {
    "tuned_lens": Peer("tuned_lens", "tuned.py", "."),
    "jacobian_transformerlens": Peer("jacobian", "jacobian.py", "lens.pt"),
}


@dataclass(frozen=True)
class Budget:
    """How much a peer may spend."""

    steps: int = 60
    tokens_per_step: int = 1_024
    times_ours: float = 10.0
    """CPU seconds of the tuned lens' last run, as a multiple of our dearest fit."""
    most_minutes: float = 240.0
    jacobian_tokens: int = 2_000
    skip_first: int = 16

    def arguments(self, name: str, our_seconds: float) -> list[str]:
        if name == "tuned_lens":
            given: dict[str, float] = {
                "steps": self.steps,
                "tokens-per-step": self.tokens_per_step,
                "least-cpu": round(self.times_ours * our_seconds),
                "most-cpu": 60 * self.most_minutes,
            }
        else:
            given = {"tokens": self.jacobian_tokens, "skip-first": self.skip_first}
        return [word for option, value in given.items() for word in (f"--{option}", str(value))]


def run_peers(
    workshop: Workshop, names: list[str], *, environments: Path, work: Path, budget: Budget, our_seconds: float
) -> Iterator[tuple[str, Made, dict[str, Any]]]:
    """Each peer's lens, its CPU seconds, and all it reports about its fit."""
    write_job(workshop, work)
    for name in names:
        peer, out = PEERS[name], work / PEERS[name].environment
        _run(peer, environments, work, out, budget.arguments(name, our_seconds))
        cost = json.loads((out / "cost.json").read_text())
        lens = lj.Lens(workshop.model, lj.import_lens(out / peer.lens, workshop.model))
        yield name, Made(lens, cost["cpu_seconds"]), cost


def _run(peer: Peer, environments: Path, work: Path, out: Path, arguments: list[str]) -> None:
    """Run a peer, unless its lens is there already and was fitted on these tokens with these settings."""
    python = environments / peer.environment / "bin" / "python"
    if not python.exists():
        raise BadModel(
            f"there is no environment {python.parents[1]}; make it with benchmarks/peers/setup.sh {environments}"
        )
    job = json.loads((work / "tokens.json").read_text())
    digest = hashlib.sha256(json.dumps([job["fit"], job["select"]]).encode()).hexdigest()
    done, cost = out / "settings.txt", out / "cost.json"
    # It may have had more time than is wanted now: our own seconds differ from run to run.
    wanted = dict(zip(arguments[::2], arguments[1::2], strict=True))
    least = float(wanted.pop("--least-cpu", 0))
    settings = f"{digest} {wanted}"
    same = cost.exists() and done.exists() and done.read_text() == settings
    if same and json.loads(cost.read_text())["cpu_seconds"] >= least:
        return
    command = [str(python), str(HERE / peer.script), str(work), str(out), *arguments]
    # Our own path would let the peer import the packages of this environment.
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = free | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    subprocess.run(command, check=True, env=environment)
    done.write_text(settings)


def write_job(workshop: Workshop, work: Path) -> None:
    """The checkpoint and the tokens, as `peers/job.py` reads them."""
    checkpoint = work.parent / "model"
    write_checkpoint(workshop.model, checkpoint)
    batches = workshop.plan.batches
    splits = {"fit": "fit", "select": "validation"}
    tokens = {name: sequences_of(batches[split]) for name, split in splits.items()}
    check = _check(workshop.model, tokens["fit"][0])
    work.mkdir(parents=True, exist_ok=True)
    job = tokens | {"model": f"../{checkpoint.name}", "check": check}
    (work / "tokens.json").write_text(json.dumps(job))


def write_checkpoint(model: lj.Model, folder: Path) -> None:
    """A plain float32 checkpoint that transformers 4 and 5 read alike."""
    if (folder / "config.json").exists():
        return
    hf: Any = model.hf
    # What was read from a GGUF file is plain by now, but transformers would not save it.
    hf.hf_quantizer, hf.is_quantized = None, False
    hf.config.__dict__.pop("quantization_config", None)
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # transformers 5 has moved this; version 4 would take its own default, and every rotation would be another.
    config |= {k: v for k, v in config.get("rope_parameters", {}).items() if k == "rope_theta"}
    path.write_text(json.dumps(config, indent=2))
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.exists():
        known = json.loads(tokenizer.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        tokenizer.write_text(json.dumps(known, indent=2))


def sequences_of(batches: lj.Batches) -> list[list[int]]:
    """Every sequence as it is run, in the order of the documents."""
    all_of = batches.sequences
    spans = zip(all_of.start, all_of.length, strict=True)
    return [all_of.ids[start : start + length].tolist() for start, length in spans]


@torch.no_grad()
def _check(model: lj.Model, ids: list[int], many: int = 50) -> dict[str, Any]:
    found = model.hf(torch.tensor([ids])).logits[0, -1].log_softmax(-1).topk(many)
    return {"ids": ids, "tokens": found.indices.tolist(), "log_probabilities": found.values.tolist()}


def recorded_scores(model: str, text: str, lens: str, held: HeldOut) -> Scores | None:
    """A recorded peer's scores, position by position, if they are of these very positions."""
    path = RECORD.with_name(f"{model}-{text}-{lens}.npz")
    if not path.exists():
        return None
    with np.load(path) as known:
        kl, rank, document = known["kl"].astype(np.float64), known["place"], known["document"]
    if document.tolist() != held.document.tolist():
        return None
    nothing = np.full_like(kl, np.nan)
    level = nothing[:, 0]
    return Scores(
        kl,
        np.where(rank < 0, np.nan, rank),
        surprisal=nothing,
        probability=nothing,
        hit=nothing,
        marginal=level,
        marginal_draws=nothing,
        known=np.ones(len(held)),
        document=held.document.double().numpy(),
    )


def record_scores(model: str, text: str, lens: str, scores: Scores) -> None:
    """Keep what differences at the same positions are made of."""
    np.savez_compressed(
        RECORD.with_name(f"{model}-{text}-{lens}.npz"),
        kl=scores.kl.astype(np.float16),
        place=np.nan_to_num(scores.rank, nan=-1).clip(max=20).astype(np.int8),
        document=scores.document.astype(np.int32),
    )


def recorded(model: str, text: str) -> dict[str, dict[str, Any]]:
    """What peers once reached on this model and text, where somebody has recorded it."""
    return json.loads(RECORD.read_text()).get(model, {}).get(text, {})


def record(model: str, text: str, results: dict[str, dict[str, Any]]) -> None:
    """Keep peers' results for those who do not have the peers."""
    kept = json.loads(RECORD.read_text())
    kept.setdefault(model, {}).setdefault(text, {}).update(results)
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")

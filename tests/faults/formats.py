"""The formats that are read: how a good sample of each is made, how it is read, and in what ways it is spoilt.

A reader does what the commands do with such a file, up to where it is used: that a spoilt file loads is no comfort if
the next line then fails.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from helpers import synthetic_jumps
from helpers.study_results import ANY_TABLES, small_run
from safetensors.torch import load as tensors_of

import layerjump as lj
from faults import checkpoints, foreign, mutate, mutate_pickles, records, texts
from faults.mutate import Way
from faults.small import D, model
from layerjump import io
from layerjump.generation.calibration import calibration_file
from layerjump.generation.calibration.result import Calibration, CalibrationReport
from layerjump.generation.calibration.rule_search import FittedProbes, RuleCandidate
from layerjump.jumps import serialization
from layerjump.jumps.estimators.registry import EstimatorSettings
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import RunInfo
from layerjump.jumps.moments import Moments
from layerjump.jumps.moments_of_splits import SplitMoments, merge_moments
from layerjump.lens.refine import CHECKPOINT_NAME as UNFINISHED
from layerjump.lens.refine import TrainableMap, Tuner
from layerjump.models.fingerprint import fingerprint
from layerjump.models.sites import FINAL, Site
from layerjump.report.write_report import write_report
from layerjump.studies.runner import load_results

DATA = Path(__file__).resolve().parents[1] / "fixtures"


@dataclass(frozen=True)
class Format:
    """One kind of file."""

    make: Callable[[Path], object]
    """Writes good files into an empty folder."""
    read: Callable[[Path], object]
    """Is given the file that was spoilt, or the folder in which it is the only one."""
    ways: Mapping[str, tuple[Way, ...]]
    """Ends of names of the files to spoil → how; other files stay as they are."""
    memory: int = 1 << 30
    """Bytes that its reader may take."""
    may_lack: str = ""
    """A file that is sometimes taken away when another is spoilt."""


# Files of ours


def resealed(chance: Random, data: bytes) -> bytes:
    """A tensor file of ours with other content under a true checksum: what it says is then looked at."""
    resealed = Path("resealed")
    tensors = tensors_of(data)
    end = 8 + int.from_bytes(data[:8], "little")
    metadata = json.loads(json.loads(data[8:end])["__metadata__"]["layerjump"])["metadata"]
    if chance.random() < 0.7:
        key = chance.choice([key for key in metadata if metadata[key].startswith("{")])
        spoilt = mutate.json_changed(chance, metadata[key].encode())
        metadata[key] = spoilt.decode(errors="replace")
    else:
        name = chance.choice(sorted(tensors))
        _spoil(chance, tensors, name)
    io.write_tensors(resealed, tensors, metadata)
    return resealed.read_bytes()


def _spoil(chance: Random, tensors: dict[str, torch.Tensor], name: str) -> None:
    tensor = tensors[name]
    match chance.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[chance.choice(("x", f"{name} ", "fit|x", "0>1.bias", "rule.mix"))] = tensors.pop(name)
        case 2:
            tensors[name] = torch.full_like(tensor, -1)
        case 3:
            tensors[name] = tensor.to(chance.choice((torch.int64, torch.float16, torch.bool, torch.float64)))
        case 4:
            tensors[name] = tensor[chance.choice((slice(0), slice(1), slice(None, -1)))]
        case 5:
            tensors[name] = tensor.reshape(-1) if tensor.dim() > 1 else tensor[None]
        case _:
            number = chance.choice((float("nan"), float("inf"), 1e38, 0.0))
            tensors[name] = torch.full_like(tensor, 2**40 if tensor.dtype == torch.int64 else number)


SEALED = (resealed, resealed, resealed, *mutate.SAFETENSORS)


def _read_jumps(path: Path) -> None:
    jumps = serialization.load(path.parent)
    for pair in jumps:
        jumps.spectrum(*pair)
    repr(jumps)


def _make_moments(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    sites = [Site(0), Site(1), Site(2)]
    splits = {}
    for split in ("fit", "validation", "test"):
        splits[split] = Moments([(sites[0], sites[2]), (sites[1], sites[2])], reservoir=4)
        states = {site: torch.randn(20, 4, generator=draw) for site in sites}
        splits[split].add(states, keys=torch.arange(20))
    provenance = synthetic_jumps.provenance(n_blocks=2, width=4)
    names = (field.name for field in dataclasses.fields(RunInfo))
    info = RunInfo(**{name: getattr(provenance, name) for name in names})
    SplitMoments(**splits, info=info).save(folder / "moments.safetensors")


def _read_moments(path: Path) -> None:
    repr(solve_jumps(merge_moments([SplitMoments.load(path)]), "ridge", EstimatorSettings(strength=0.1)))


def _make_exit(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = {level: torch.randn(D + 3, generator=draw) for level in (1, 2)}
    combination = {level: torch.randn(3, generator=draw) for level in (1, 2)}
    probes = FittedProbes(weights, combination)
    exits = (
        RuleCandidate("two-stage", (1, 2), probes, 0.5).exit_config(0.9),
        RuleCandidate("probe", (1,), probes).exit_config(0.8, 0.3),
    )
    report = {
        "target": 0.9,
        "confidence": 0.95,
        "model": "tiny",
        "fingerprint": fingerprint(model().hf),
        "kind": "two-stage",
        "rule": {"kind": "two-stage", "levels": [1, 2], "threshold": 0.9, "worth": 0.5},
        "lossless": {"kind": "gate", "levels": [1], "threshold": 0.8, "worth": 0.0, "least": 0.3},
        "unverified": 4,
        "text": "text",
        "text_sha256": "0",
        "positions": {"gates": 9, "select": 9, "thresholds": 9, "test": 9},
        "seed": 0,
        "costs": {"block": 1.0, "waiting": 0.1, "head": 1.0, "gate": 0.01},
        "select_cost": {"two-stage": 0.7, "gate": 0.8},
        "lossless_cost": 0.9,
        "test": {"agreement": 0.9, "low": 0.8, "high": 0.95, "blocks_saved": 0.3, "cost": 0.7}
        | {"heads": 1.0, "gates": 2.0},
        "gate_curves": {"1": [{"predicted": 0.5, "found": 0.4, "n": 9}]},
    }
    validated = CalibrationReport.model_validate_json(json.dumps(report))
    calibration_file.save_calibration(Calibration(*exits, validated), folder)


def _read_exit(path: Path) -> None:
    calibration = calibration_file.load_calibration(path.parent, model=model())
    str(calibration)
    prompt = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64)}
    for rule, verify in ((calibration.exit, False), (calibration.verified_exit, True)):
        lj.generate(
            model(),
            None,
            prompt,
            exit=rule,
            verify=verify,
            max_draft_tokens=calibration.max_draft_tokens,
            max_new_tokens=2,
        )


def _make_results(folder: Path) -> None:
    """A file for every study: each is drawn by code of its own, and alone it is drawn sooner."""
    whole = small_run(DATA / "tiny-gpt2", folder / "run")
    empty = {"study": "unknown", "headline": {}, "settings": {}, "notes": [], "seconds": 0.0, "skipped": None}
    studies = whole["studies"] | {"unknown": empty | {"tables": ANY_TABLES}}
    for name, study in studies.items():
        io.write_json(folder / f"{name}.json", whole | {"studies": {name: study}})


def _read_results(path: Path) -> None:
    write_report(load_results(path), Path("report"))


def a_tuning() -> Tuner:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 4, generator=draw)
    tuned = {(Site(level), FINAL): TrainableMap(torch.nn.Linear(4, 4), rows) for level in (0, 1)}
    tuning = Tuner(tuned, 0.1, 50)
    for _ in range(2):
        for one in tuned.values():
            one(rows).square().mean().backward()
        tuning.record_validation(dict.fromkeys(tuned, 1.0 / (1 + tuning.step)))
        tuning.update(dict.fromkeys(tuned, 1.0))
    return tuning


def _read_unfinished(path: Path) -> None:
    tuning = a_tuning()
    tuning.restore(path.parent, "same")
    tuning.is_finished(1)
    for one in tuning.maps.values():
        one(torch.ones(1, 4)).sum().backward()
    tuning.update(dict.fromkeys(tuning.maps, 1.0))
    tuning.record_validation(dict.fromkeys(tuning.maps, 0.1))
    tuning.best_maps()


GGUF = (*(mutate.in_the_first(1500, way) for way in mutate.BYTES), *mutate.BYTES)

FORMATS: dict[str, Format] = {
    "jumps": Format(
        lambda folder: synthetic_jumps.jumps().save_pretrained(folder),
        _read_jumps,
        {".safetensors": SEALED, ".json": mutate.JSON},
        may_lack="jumps.json",
    ),
    "moments": Format(_make_moments, _read_moments, {".safetensors": SEALED}),
    "exit": Format(_make_exit, _read_exit, {".safetensors": SEALED}),
    "results": Format(_make_results, _read_results, {".json": mutate.JSON}),
    "unfinished-refine": Format(
        lambda folder: a_tuning().save(folder, "same"), _read_unfinished, {UNFINISHED: mutate_pickles.ZIP}
    ),
    "tuned-lens": Format(
        foreign.make_tuned_lens,
        lambda path: foreign.read("tuned-lens", path),
        {".pt": mutate_pickles.ZIP, ".json": mutate.JSON},
    ),
    "mat": Format(foreign.make_mat, lambda path: foreign.read("mat", path), {".pickle": mutate_pickles.PICKLE}),
    "jacobian": Format(foreign.make_jacobian, lambda path: foreign.read("jacobian", path), {".pt": mutate_pickles.ZIP}),
    "text": Format(
        texts.make,
        texts.read,
        {
            ".txt": mutate.TEXT,
            ".csv": mutate.TEXT,
            ".tsv": mutate.TEXT,
            ".json": mutate.JSON,
            ".jsonl": mutate.JSON_LINES,
        },
    ),
    # A page of a Parquet file may claim 2 GB, which Arrow asks the system for before it looks whether they are there.
    "parquet": Format(texts.make, texts.read, {".parquet": mutate.BYTES}, memory=5 << 30),
    "model": Format(
        checkpoints.make_folder,
        checkpoints.read_folder,
        {"config.json": mutate.JSON, "tokenizer.json": mutate.JSON, ".safetensors": mutate.SAFETENSORS},
    ),
    "linear": Format(records.make_linear, records.read_linear, {"linear.json": mutate.JSON}),
    "sheet": Format(records.make_sheet, records.read_sheet, {".csv": mutate.TEXT, ".json": mutate.JSON}),
    "items": Format(records.make_items, records.read_items, {".jsonl": mutate.JSON_LINES}),
    "track": Format(records.make_track, records.read_track, {".json": mutate.JSON}),
    "gguf": Format(checkpoints.make_gguf, checkpoints.read, {".gguf": GGUF}),
}

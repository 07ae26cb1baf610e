"""The calibration file: exit rules next to the jumps they belong to.

`exit.safetensors` holds the weights of probes and draft head and the lists of tokens as tensors, and the report as JSON
in its metadata.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from layerjump import io
from layerjump.errors import BadArtifact, NewerFormat, WrongModel, one_line
from layerjump.generation.calibration.result import (
    Calibration,
    CalibrationReport,
    DraftRuleRecord,
    DraftsRecord,
    RuleRecord,
)
from layerjump.generation.calibration.rule_search import FittedProbes, RuleCandidate
from layerjump.generation.combine_drafters import DraftConfig, StepCosts
from layerjump.generation.drafters import HeadJump
from layerjump.generation.exit_rules import ExitConfig, Never, Shortlist
from layerjump.generation.probes import Probe, TwoStage
from layerjump.jumps.maps import Affine, to_affine, to_module
from layerjump.jumps.serialization import TENSORS
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model
from layerjump.models.sites import Site

FILE_NAME = "exit.safetensors"
FORMAT_VERSION = 2
"""1: files without drafters, which are still written so."""
_METADATA_KEY = "exit"
_SHORTLIST, _CANDIDATES = "shortlist", "drafts.candidates"
_HEAD, _HEAD_SHORTLIST = "drafts.head", "drafts.shortlist"


def save_calibration(calibration: Calibration, folder: str | Path) -> Path:
    """Write the calibration file of a folder of jumps."""
    path = Path(folder).expanduser() / FILE_NAME
    with io.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "format_version": 1 if calibration.report.drafts is None else FORMAT_VERSION,
        **calibration.report.model_dump(mode="json", by_alias=True),
        "jumps_sha256": _jumps_sha256(path.parent),
    }
    tensors = _weights("rule", calibration.exit) | _weights("lossless", calibration.verified_exit)
    if calibration.verified_exit.drafts is not None:
        tensors |= _draft_weights(calibration.verified_exit.drafts)
    io.write_tensors(path, tensors, {_METADATA_KEY: io.dump_json(header, path)})
    return path


def load_calibration(folder: str | Path, *, model: Model | None = None) -> Calibration:
    """Read the calibration file of a folder; with a model, check that it was calibrated for these weights."""
    path = Path(folder).expanduser() / FILE_NAME
    if not path.is_file():
        raise BadArtifact(f"{folder} holds no calibrated exit rule ({FILE_NAME}); make one with `layerjump calibrate`")
    tensors, metadata = io.read_tensors(path)
    if _METADATA_KEY not in metadata:
        raise BadArtifact(f"{path} is a file of layerjump, but holds no exit rule")
    header = io.parse_json(metadata[_METADATA_KEY], path)
    version = header.get("format_version")
    if version not in (1, FORMAT_VERSION):
        raise NewerFormat(
            f"{path} has format {str(version)[:50]}, but this library reads up to {FORMAT_VERSION}; upgrade layerjump"
        )
    if model is not None and fingerprint(model.hf) != header.get("fingerprint"):
        raise WrongModel(
            f"the exit rule in {folder} was calibrated for other weights than those of {model.name}; calibrate again"
        )
    # Files of earlier versions do not name their jumps.
    expected, actual = header.get("jumps_sha256"), _jumps_sha256(path.parent)
    if expected and actual and expected != actual:
        raise BadArtifact(
            f"the exit rule in {folder} was calibrated with other jumps than those in it now; calibrate again"
        )
    try:
        _check_tensors(tensors, None if model is None else model.d_model)
        report = CalibrationReport.model_validate_json(metadata[_METADATA_KEY])
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        if report.drafts is None:
            verified_exit = _exit_config("lossless", report.verified_rule, copies)
        else:  # the rule did not pay as well, and its weights are not in the file
            verified_exit = ExitConfig(Never(), drafts=_draft_config(report.drafts, copies))
        return Calibration(_exit_config("rule", report.rule, copies), verified_exit, report)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadArtifact(
            f"{path} is not a valid calibration file ({type(error).__name__} {one_line(error)}); make it again with "
            f"`layerjump calibrate`"
        ) from error


def _jumps_sha256(folder: Path) -> str | None:
    """The hash of the folder's jumps: a rule keeps its target only with those it was calibrated with."""
    jumps = folder / TENSORS
    return io.file_sha256(jumps) if jumps.is_file() else None


def _weights(name: str, exit: ExitConfig) -> dict[str, Tensor]:
    """The tensors of a configuration, under their names in the file."""
    tensors = {} if exit.shortlist is None else {_SHORTLIST: exit.shortlist.tokens}
    match exit.rule:
        case Probe(weights=weights):
            tensors[f"{name}.gate"] = weights
        case TwoStage(probe=probe, combination=combination):
            tensors |= {f"{name}.gate": probe.weights, f"{name}.mix": combination}
    return tensors


def _exit_config(name: str, record: RuleRecord, tensors: dict[str, Tensor]) -> ExitConfig:
    def by_level(part: str) -> dict[int, Tensor]:
        weights = tensors.get(f"{name}.{part}")
        return {} if weights is None else dict(zip(record.levels, weights, strict=True))

    shortlist = Shortlist(tensors[_SHORTLIST]) if _SHORTLIST in tensors else None
    probes = FittedProbes(by_level("gate"), by_level("mix"), shortlist)
    candidate = RuleCandidate(record.rule_type, record.levels, probes, record.unembed_above)
    min_acceptance = record.min_acceptance if isinstance(record, DraftRuleRecord) else 0.0
    return candidate.exit_config(record.threshold, min_acceptance)


def _draft_weights(drafts: DraftConfig) -> dict[str, Tensor]:
    tensors = {} if drafts.candidates is None else {_CANDIDATES: drafts.candidates}
    if drafts.head_shortlist is not None:
        tensors[_HEAD_SHORTLIST] = drafts.head_shortlist.tokens
    for head in drafts.head:
        jump = to_affine(head.jump)
        assert jump.bias is not None
        tensors |= {f"{_HEAD}.{head.depth}": jump.weight, f"{_HEAD}.{head.depth}.bias": jump.bias}
    return tensors


def _draft_config(record: DraftsRecord, tensors: dict[str, Tensor]) -> DraftConfig:
    sites, shortlist = tuple(map(Site.parse, record.head_sites)), tensors.get(_HEAD_SHORTLIST)
    heads: list[HeadJump] = []
    while (weight := tensors.get(f"{_HEAD}.{len(heads) + 1}")) is not None:
        depth = len(heads) + 1
        bias = tensors[f"{_HEAD}.{depth}.bias"]
        heads.append(HeadJump(to_module(Affine.of(weight, bias=bias)), sites, depth))
    return DraftConfig(
        tuple(record.drafters),  # type: ignore[arg-type]
        record.max_tokens,
        head=tuple(heads),
        head_shortlist=None if shortlist is None else Shortlist(shortlist),
        candidates=tensors.get(_CANDIDATES),
        priors=record.priors,
        costs=StepCosts(tuple(record.step_seconds)),
    )


def _check_tensors(tensors: dict[str, Tensor], d_model: int | None) -> None:
    for name, tensor in tensors.items():
        if name == _CANDIDATES:
            if (
                tensor.dtype != torch.int64
                or tensor.dim() != 1
                or int(tensor.min()) < -1
                or int(tensor.max()) >= len(tensor)
            ):
                raise ValueError("the candidates must hold a token id, or −1, for each token")
            continue
        if name.startswith(f"{_HEAD}."):
            n_dims = 1 if name.endswith(".bias") else 2
            if tensor.dim() != n_dims or tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} must hold finite weights of a map to final states")
            continue
        if name in (_SHORTLIST, _HEAD_SHORTLIST):
            is_list = tensor.dtype == torch.int64 and tensor.dim() == 1 and len(tensor) > 1
            if not is_list or int(tensor[0]) < 0 or not bool((tensor.diff() > 0).all()):
                raise ValueError("the shortlist must hold strictly increasing token ids")
            continue
        width = 3 if name.endswith(".mix") else None if d_model is None else d_model + 3
        has_rows = tensor.dim() == 2 and width in (None, tensor.shape[1])
        if not has_rows or not tensor.is_floating_point():
            raise ValueError(f"{name} must hold a row of weights for each level")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or infinite values")

"""The calibration file: exit rules, with the report of how they were found, next to the jumps they belong to.

`exit.safetensors` holds the probes' weights and the shortlist as tensors, and the report as JSON in its metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from torch import Tensor

from layerjump import io
from layerjump.errors import BadArtifact, NewerFormat, WrongModel, one_line
from layerjump.generation.calibration.cost_model import Costs, FileRecord, in_file
from layerjump.generation.calibration.search import FittedProbes, RuleCandidate, RuleType
from layerjump.generation.probes import Probe, TwoStage
from layerjump.generation.rules import ExitConfig, Never, Shortlist
from layerjump.jumps.serialization import TENSORS
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model

FILE_NAME, FORMAT_VERSION = "exit.safetensors", 1
_METADATA_KEY = "exit"
_SHORTLIST = "shortlist"


def _check_rising(levels: tuple[int, ...]) -> tuple[int, ...]:
    if list(levels) != sorted(set(levels)):
        raise ValueError("levels must be strictly increasing")
    return levels


_PROBE_IN_FILE = (
    BeforeValidator(lambda name: "probe" if name == "gate" else name),
    PlainSerializer(lambda name: "gate" if name == "probe" else name),
)
"""A rule with a probe has another name in the file."""
_TypeInFile = Annotated[RuleType, *_PROBE_IN_FILE]
_Share = Annotated[float, Field(ge=0, le=1)]


class RuleRecord(FileRecord):
    """A rule without its weights."""

    rule_type: _TypeInFile = in_file("kind")
    levels: Annotated[tuple[int, ...], AfterValidator(_check_rising)]
    threshold: _Share | None
    """None: never exit."""
    unembed_above: _Share = in_file("worth")


class DraftRuleRecord(RuleRecord):
    """A rule for verified generation, without its weights."""

    min_acceptance: float = in_file("least", default=0.0, ge=0)
    """The share of drafts that must be accepted to pay for them all."""


class PositionCounts(FileRecord):
    """Positions used in each role."""

    probes: int = in_file("gates")
    selection: int = in_file("select")
    thresholds: int
    test: int


class HeldOutResult(FileRecord):
    """The rule on documents that nothing was chosen on; costs are relative to the full model's."""

    agreement: float
    low: float
    high: float
    """The 95 % bootstrap interval of the agreement."""
    blocks_saved: float
    cost: float
    unembeddings: float = in_file("heads")
    """Per token, like the next."""
    probe_evaluations: float = in_file("gates")


class CurvePoint(FileRecord):
    """Examples of similar predicted probability."""

    predicted: float
    """Their mean predicted probability of the full model's token."""
    observed: float = in_file("found")
    """The share that gave it."""
    n: int


class CalibrationReport(FileRecord):
    """How a calibration was made and what it achieves."""

    target: float
    confidence: float
    model: str
    fingerprint: str
    rule_type: Annotated[Literal[RuleType, "never"], *_PROBE_IN_FILE] = in_file("kind")
    rule: RuleRecord
    verified_rule: DraftRuleRecord = in_file("lossless")
    max_draft_tokens: int = in_file("unverified", ge=1)
    text: str
    text_sha256: str
    shortlist_tokens: int | None = in_file("shortlist", default=None)
    """Tokens of the shortlist; None: early levels are read with the full vocabulary."""
    positions: PositionCounts
    seed: int
    self_generated_tokens: int | None = in_file("own", default=None)
    """Tokens that the model wrote after each document's opening; None: the documents themselves were used."""
    costs: Costs
    selection_cost: dict[_TypeInFile, float] = in_file("select_cost")
    """Each rule type's cost on the selection documents, relative to the full model's."""
    verified_cost: float = in_file("lossless_cost")
    """The same of verified generation."""
    test: HeldOutResult
    probe_curves: dict[int, list[CurvePoint]] = in_file("gate_curves")
    """Level → the probe's calibration curve on the test documents."""


@dataclass(frozen=True)
class Calibration:
    """Calibrated exit configurations, and the report of how they were found."""

    exit: ExitConfig
    """The cheapest that keeps the target agreement."""
    verified_exit: ExitConfig
    """The cheapest with `verify`; its rule is `Never` where drafts do not pay on this machine."""
    report: CalibrationReport = field(repr=False)

    @property
    def max_draft_tokens(self) -> int:
        """Drafts that may wait for verification."""
        return self.report.max_draft_tokens

    def __str__(self) -> str:
        test = self.report.test
        no_drafts = isinstance(self.verified_exit.rule, Never)
        return (
            f"{self.report.rule_type} at levels {list(self.exit.rule.levels or ())}: agreement {test.agreement:.3f} "
            f"({test.low:.3f} to {test.high:.3f}), {test.blocks_saved:.1%} of blocks saved, "
            f"{test.cost:.2f} of the full model's cost; verified: "
            f"{'no drafts' if no_drafts else f'up to {self.max_draft_tokens} drafts'}"
        )


def save_calibration(calibration: Calibration, folder: str | Path) -> Path:
    """Write the calibration file of a folder of jumps."""
    path = Path(folder).expanduser() / FILE_NAME
    with io.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "format_version": FORMAT_VERSION,
        **calibration.report.model_dump(mode="json", by_alias=True),
        "jumps_sha256": _jumps_sha256(path.parent),
    }
    tensors = _weights("rule", calibration.exit) | _weights("lossless", calibration.verified_exit)
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
    if version != FORMAT_VERSION:
        raise NewerFormat(
            f"{path} has format {str(version)[:50]}, but this library reads {FORMAT_VERSION}; upgrade layerjump"
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
        return Calibration(
            _exit_config("rule", report.rule, copies), _exit_config("lossless", report.verified_rule, copies), report
        )
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


def _check_tensors(tensors: dict[str, Tensor], d_model: int | None) -> None:
    for name, tensor in tensors.items():
        if name == _SHORTLIST:
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

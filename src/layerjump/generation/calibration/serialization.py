"""Save and load a calibration file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerjump import io
from layerjump.errors import BadArtifact, NewerFormat, WrongModel, one_line
from layerjump.generation.calibration.calibrate import RULE_TYPES, Calibration
from layerjump.generation.calibration.search import Probes, RuleCandidate
from layerjump.generation.probes import Probe, TwoStage
from layerjump.generation.rules import ExitConfig, Never
from layerjump.jumps.serialization import TENSORS
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model

FILE_NAME, FORMAT_VERSION = "exit.safetensors", 1
SHORTLIST = "shortlist"


def save_calibration(calibration: Calibration, folder: str | Path) -> Path:
    """Write a calibration into a folder."""
    path = Path(folder).expanduser() / FILE_NAME
    with io.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    about = calibration.about | {"jumps_sha256": _jumps_here(path.parent)}
    said = io.dump_json({"format_version": FORMAT_VERSION, **about}, path)
    io.write_tensors(path, _tensors(calibration), {"exit": said})
    return path


def load_calibration(folder: str | Path, *, model: Model | None = None) -> Calibration:
    """Read the calibration in a folder, made for the jumps there; with a model, check that it was for its weights."""
    path = Path(folder).expanduser() / FILE_NAME
    if not path.is_file():
        raise BadArtifact(
            f"{folder} holds no calibrated exit rule ({FILE_NAME}); make one with `layerjump calibrate`"
        )
    tensors, metadata = io.read_tensors(path)
    if "exit" not in metadata:
        raise BadArtifact(f"{path} is layerjump's, but holds no exit rule; give another folder")
    about = io.parse_json(metadata["exit"], path)
    version = about.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise NewerFormat(
            f"{path} has format {str(version)[:50]}, but this library reads {FORMAT_VERSION}; use a newer layerjump"
        )
    if model is not None and fingerprint(model.hf) != about.get("fingerprint"):
        raise WrongModel(
            f"the exit rule in {folder} was calibrated for other weights than those of {model.name}; calibrate again"
        )
    said, here = about.pop("jumps_sha256", None), _jumps_here(path.parent)
    if said and here and said != here:
        raise BadArtifact(
            f"the exit rule in {folder} was calibrated with other jumps than those in it now; calibrate again"
        )
    try:
        _check_tensors(tensors, None if model is None else model.d_model)
        return _calibration(about, {name: tensor.clone() for name, tensor in tensors.items()})
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise BadArtifact(
            f"{path} does not hold together ({type(error).__name__} {one_line(error)}); make it again with "
            f"`layerjump calibrate`"
        ) from error


def _jumps_here(folder: Path) -> str | None:
    """Which jumps the folder holds: a promise made for others means nothing."""
    jumps = folder / TENSORS
    return io.file_sha256(jumps) if jumps.is_file() else None


def _tensors(calibration: Calibration) -> dict[str, Tensor]:
    """Gates and second stages of whichever rules have them."""
    tensors = {}
    for name, exit in (("rule", calibration.exit), ("lossless", calibration.verified_exit)):
        rule = exit.rule
        if exit.shortlist is not None:
            tensors[SHORTLIST] = exit.shortlist.tokens
        if isinstance(rule, Probe):
            tensors[f"{name}.gate"] = rule.weights
        if isinstance(rule, TwoStage):
            tensors |= {f"{name}.gate": rule.gate.weights, f"{name}.mix": rule.mix}
    return tensors


def _calibration(about: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
    def rule(name: str) -> ExitConfig:
        said = about[name]
        if said["threshold"] is None:
            return ExitConfig(Never())
        _check_rule(said)
        levels = tuple(said["levels"])
        by_level = {
            part: dict(zip(levels, tensors[f"{name}.{part}"], strict=True))
            if f"{name}.{part}" in tensors
            else {}
            for part in ("gate", "mix")
        }
        probes = Probes(**by_level, tokens=tensors.get(SHORTLIST))
        made = RuleCandidate(said["kind"], levels, probes, said["worth"])
        return made.exit_config(said["threshold"], said.get("least", 0.0))

    if type(about["unverified"]) is not int or about["unverified"] < 1:
        raise ValueError("unverified is no number of tokens")
    found = Calibration(rule("rule"), rule("lossless"), about["unverified"], about)
    str(found)  # says what the test documents gave, which must be there for it
    return found


def _check_rule(said: dict[str, Any]) -> None:
    """A rule is first used at some token of some text; what would fail there is noticed here."""
    levels, kind = said["levels"], said["kind"]
    if kind not in RULE_TYPES:
        raise ValueError(f"there is no kind of rule {str(kind)[:50]!r}")
    whole = isinstance(levels, list) and all(type(level) is int for level in levels)
    if not whole or levels != sorted(set(levels)):
        raise ValueError("its levels are not rising numbers")
    for name, most in (("threshold", 1.0), ("worth", 1.0), ("least", math.inf)):
        value = said.get(name, 0.0)
        if type(value) not in (int, float) or not 0 <= value <= most:
            raise ValueError(f"{name} is {str(value)[:50]}, which is no share")


def _check_tensors(tensors: dict[str, Tensor], width: int | None) -> None:
    for name, tensor in tensors.items():
        if name == SHORTLIST:
            _check_shortlist(tensor)
            continue
        # A gate reads a state, its size, its position and a one; a second stage reads three numbers.
        wanted = 3 if name.endswith(".mix") else None if width is None else width + 3
        shaped = tensor.dim() == 2 and wanted in (None, tensor.shape[1])
        if not shaped or not tensor.is_floating_point():
            raise ValueError(f"{name} holds no row of weights for each level")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or infinite values")


def _check_shortlist(tokens: Tensor) -> None:
    rising = tokens.dtype == torch.int64 and tokens.dim() == 1 and len(tokens) > 1
    if not rising or int(tokens[0]) < 0 or not bool((tokens.diff() > 0).all()):
        raise ValueError("the shortlist holds no rising token ids")

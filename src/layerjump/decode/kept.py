"""A calibration on disk: `exit.safetensors` in the folder of the jumps it goes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from layerjump.decode.calibrate import Calibration
from layerjump.decode.contenders import Contender, Probes
from layerjump.decode.gates import Gate, TwoStage
from layerjump.decode.rules import Drafting, Never, Rule
from layerjump.errors import BadArtifact, NewerFormat, WrongModel
from layerjump.fit import files
from layerjump.fit.fingerprint import fingerprint
from layerjump.inputs.models import Model

NAME, FORMAT = "exit.safetensors", 1


def save(calibration: Calibration, folder: str | Path) -> Path:
    """Write a calibration into a folder."""
    path = Path(folder).expanduser() / NAME
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    said = files.dump_json({"format_version": FORMAT, **calibration.about}, path)
    files.write_tensors(path, _tensors(calibration), {"exit": said})
    return path


def load(folder: str | Path, *, model: Model | None = None) -> Calibration:
    """Read the calibration in a folder; with a model, check that it was made for its weights."""
    path = Path(folder).expanduser() / NAME
    if not path.is_file():
        raise BadArtifact(
            f"{folder} holds no calibrated exit rule ({NAME}); make one with `layerjump calibrate`"
        )
    tensors, metadata = files.read_tensors(path)
    if "exit" not in metadata:
        raise BadArtifact(f"{path} is layerjump's, but holds no exit rule; give another folder")
    about = files.parse_json(metadata["exit"], path)
    version = about.pop("format_version", None)
    if version != FORMAT:
        raise NewerFormat(
            f"{path} has format {version}, but this library reads {FORMAT}; use a newer layerjump"
        )
    if model is not None and fingerprint(model.hf) != about["fingerprint"]:
        raise WrongModel(
            f"the exit rule in {folder} was calibrated for other weights than those of {model.name}; calibrate again"
        )
    return _calibration(about, {name: tensor.clone() for name, tensor in tensors.items()})


def _tensors(calibration: Calibration) -> dict[str, Tensor]:
    """Gates and second stages of whichever rules have them."""
    tensors = {}
    for name, rule in (("rule", calibration.rule), ("lossless", calibration.lossless)):
        rule = rule.rule if isinstance(rule, Drafting) else rule
        if isinstance(rule, Gate):
            tensors[f"{name}.gate"] = rule.weights
        if isinstance(rule, TwoStage):
            tensors |= {f"{name}.gate": rule.gate.weights, f"{name}.mix": rule.mix}
    return tensors


def _calibration(about: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
    def rule(name: str) -> Rule:
        said = about[name]
        if said["threshold"] is None:
            return Never()
        levels = tuple(said["levels"])
        by_level = {
            part: dict(zip(levels, tensors[f"{name}.{part}"], strict=True))
            if f"{name}.{part}" in tensors
            else {}
            for part in ("gate", "mix")
        }
        made = Contender(said["kind"], levels, Probes(**by_level), said["worth"])
        plain = made.rule(said["threshold"])
        return Drafting(plain, said["least"]) if "least" in said else plain

    return Calibration(rule("rule"), rule("lossless"), about["unverified"], about)

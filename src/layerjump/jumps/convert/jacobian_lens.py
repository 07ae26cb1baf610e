"""Jacobian-lens files (`.pt`) as TransformerLens writes them.

`J` is a dictionary: layer → matrix onto the last block's output, before the final norm. Their layer k is what leaves
block k, counted from 0: our level k + 1. So level 0 has no place in such a file. An unfinished fit has `jacobian_sum`
and `n_done` instead of `J`: the sum over prompts, and their number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layerjump import __version__
from layerjump.errors import BadForeignLens, WrongModel, argument
from layerjump.jumps.convert.foreign_lens import (
    UNKNOWN,
    ForeignLens,
    check_said,
    checked,
    most_bytes,
    notes,
    plain_map,
)
from layerjump.jumps.convert.safe_unpickle import read_torch, write_torch
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine
from layerjump.jumps.pairs import Pair
from layerjump.models.model import Model
from layerjump.models.structure import Site

_THEIR_NAME = "jacobian_lens"
_MOST_PROMPTS = 1 << 53  # what a sum in double precision can be divided by


def recognises(path: Path) -> bool:
    """Whether this may be such a file."""
    return path.is_file() and path.suffix == ".pt"


def read(path: Path, model: Model) -> ForeignLens:
    """The matrices of a file as maps from levels to the last."""
    content = read_torch(path, most_bytes(model, model.n_blocks))
    matrices, n_prompts = _matrices(content, path)
    said = {"n_prompts": n_prompts}
    for place in (content, content.get("metadata")):
        said |= notes(place)
    if said.get("d_model") is not None:
        check_said("d_model", said["d_model"], model.d_model, path)
    if said.get("target_layer") is not None:
        check_said("target_layer", said["target_layer"], model.n_blocks - 1, path)
    scale = n_prompts if "J" not in content else 1
    last = Site(model.n_blocks)
    maps: dict[Pair, Affine] = {}
    for key, matrix in matrices.items():
        level = _level(key, model, path)
        if (Site(level), last) in maps:
            raise BadForeignLens(
                f"{path} has two matrices for layer {level - 1}; give a file that has one for each"
            )
        found = checked(matrix, (model.d_model, model.d_model), f"layer {key}", path)
        maps[Site(level), last] = Affine.of(found / scale)
    return ForeignLens(maps, _estimator(said), _text(said), _skipped(said), said)


def write(jumps: Jumps, model: Model, path: Path) -> list[Pair]:
    """Write the jumps from levels 1, 2, … to the last; gives back those that were written."""
    last = Site(model.n_blocks)
    pairs = [pair for pair in jumps if pair[0].part == "level" and pair[1] == last]
    pairs = [pair for pair in pairs if pair[0].index > 0]
    if not pairs:
        raise BadForeignLens(
            f"{jumps} has no jump from a level above 0 to the last, and such a file has no others; fit with "
            f"{argument('pairs', 'to-last')}"
        )
    maps = {source.index - 1: plain_map(jumps, (source, last)) for source, _ in pairs}
    for layer, affine in maps.items():
        if affine.bias is not None:
            raise BadForeignLens(
                f"the jump {layer + 1} → {last} has a bias, for which such a file has no place; export jumps without "
                f"one (mat, jacobian), or to tuned-lens"
            )
    write_torch(path, _content(jumps, model, maps))
    return pairs


def _content(jumps: Jumps, model: Model, maps: dict[int, Affine]) -> dict[str, Any]:
    known = jumps.provenance
    count = {**known.settings, **known.settings.get("said", {})}.get("n_prompts")
    return {
        "J": {layer: affine.weight.float() for layer, affine in maps.items()},
        "n_prompts": count if type(count) is int else 0,
        "source_layers": sorted(maps),
        "d_model": model.d_model,
        "metadata": {
            "model_name": model.name,
            "model_revision": model.revision,
            "corpus": known.text,
            "estimator": _THEIR_NAME if known.estimator == "jacobian" else known.estimator,
            "skip_first_positions": known.skip_first,
            "target_layer": model.n_blocks - 1,
            "layerjump": __version__,
        },
    }


def _matrices(content: Any, path: Path) -> tuple[dict[Any, Any], int]:
    held = content if isinstance(content, dict) else {}
    matrices = held.get("J", held.get("jacobian_sum"))
    if not isinstance(matrices, dict) or not matrices:
        raise BadForeignLens(
            f"{path} holds no Jacobian lens: a dictionary `J` (or `jacobian_sum`) of matrices was wanted; give another"
        )
    count = held.get("n_prompts", 0) if "J" in held else held.get("n_done")
    if type(count) is not int or not ("J" not in held) <= count <= _MOST_PROMPTS:
        raise BadForeignLens(
            f"{path} does not say how many prompts its matrices come from (n_prompts, n_done); give another file"
        )
    return matrices, count


def _level(key: Any, model: Model, path: Path) -> int:
    layer = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 5 else key
    if type(layer) is not int or not 0 <= layer < model.n_blocks - 1:
        raise WrongModel(
            f"{path} has a matrix for layer {str(key)[:50]!r}, but lenses of the model given have layers 0 to "
            f"{model.n_blocks - 2}; load the model that it was fitted on"
        )
    return layer + 1


def _estimator(said: dict[str, Any]) -> str:
    name = said.get("estimator")
    return name if isinstance(name, str) and name not in ("", _THEIR_NAME) else "jacobian"


def _text(said: dict[str, Any]) -> str:
    corpus = said.get("corpus")
    return corpus if isinstance(corpus, str) and corpus else UNKNOWN


def _skipped(said: dict[str, Any]) -> int:
    skipped = said.get("skip_first_positions", said.get("skip_first"))
    return skipped if type(skipped) is int and skipped >= 0 else 0

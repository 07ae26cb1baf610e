"""Jacobian-lens files (`.pt`) as TransformerLens writes them.

`J` is a dictionary: layer → matrix to the last block's output, before the final norm. Their layer k is the output of
block k, counted from 0: our level k + 1. So such a file cannot hold level 0. An unfinished fit has `jacobian_sum` and
`n_done` instead of `J`: the sum over prompts, and their number.
"""

from __future__ import annotations

from pathlib import Path

from layerjump import __version__
from layerjump.errors import BadForeignLens, WrongModel, argument
from layerjump.jumps.convert import foreign_lens, safe_pickle
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine
from layerjump.models.model import Model
from layerjump.models.sites import Pair, Site

_ESTIMATOR = "jacobian_lens"
_MAX_PROMPTS = 1 << 53  # what a sum in double precision can be divided by


def recognises(path: Path) -> bool:
    """Whether this may be such a file."""
    return path.is_file() and path.suffix == ".pt"


def read(path: Path, model: Model) -> foreign_lens.ForeignLens:
    """Read the matrices of a file as maps from levels to the last."""
    content = safe_pickle.read_torch(path, foreign_lens.max_bytes(model, model.n_blocks))
    record = content if isinstance(content, dict) else {}
    matrices = record.get("J", record.get("jacobian_sum"))
    if not isinstance(matrices, dict) or not matrices:
        raise BadForeignLens(
            f"{path} holds no Jacobian lens: expected a dictionary `J` (or `jacobian_sum`) of matrices"
        )
    n_prompts = record.get("n_prompts", 0) if "J" in record else record.get("n_done")
    if type(n_prompts) is not int or not ("J" not in record) <= n_prompts <= _MAX_PROMPTS:
        raise BadForeignLens(f"{path} does not record how many prompts its matrices come from (n_prompts, n_done)")
    notes = {"n_prompts": n_prompts} | foreign_lens.plain_values(content)
    notes |= foreign_lens.plain_values(content.get("metadata"))
    for name, expected in (("d_model", model.d_model), ("target_layer", model.n_blocks - 1)):
        if notes.get(name) is not None:
            foreign_lens.check_size(name, notes[name], expected, path)
    divisor = n_prompts if "J" not in content else 1
    d, last = model.d_model, Site(model.n_blocks)
    maps: dict[Pair, Affine] = {}
    for key, matrix in matrices.items():
        layer = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 5 else key
        if type(layer) is not int or not 0 <= layer < model.n_blocks - 1:
            raise WrongModel(
                f"{path} has a matrix for layer {str(key)[:50]!r}, but lenses of this model have layers 0 to "
                f"{model.n_blocks - 2}; load the model that it was fitted on"
            )
        pair = Site(layer + 1), last
        if pair in maps:
            raise BadForeignLens(f"{path} has two matrices for layer {layer}, expected one for each")
        weight = foreign_lens.check_tensor(matrix, (d, d), f"layer {key}", path)
        maps[pair] = Affine.of(weight / divisor)
    estimator, corpus = notes.get("estimator"), notes.get("corpus")
    skip_first = notes.get("skip_first_positions", notes.get("skip_first"))
    return foreign_lens.ForeignLens(
        maps,
        estimator if isinstance(estimator, str) and estimator not in ("", _ESTIMATOR) else "jacobian",
        corpus if isinstance(corpus, str) and corpus else foreign_lens.UNKNOWN,
        skip_first if type(skip_first) is int and skip_first >= 0 else 0,
        notes,
    )


def write(jumps: Jumps, model: Model, path: Path) -> list[Pair]:
    """Write the jumps from levels 1, 2, … to the last; return those that were written."""
    last = Site(model.n_blocks)
    pairs = [
        (source, target) for source, target in jumps if source.part == "level" and source.index > 0 and target == last
    ]
    if not pairs:
        raise BadForeignLens(
            f"{jumps} has no jump from a level above 0 to the last, and such a file holds no others; fit with "
            f"{argument('pairs', 'to-last')}"
        )
    maps = {source.index - 1: foreign_lens.plain_map(jumps, (source, last)) for source, _ in pairs}
    for layer, affine in maps.items():
        if affine.bias is not None:
            raise BadForeignLens(
                f"the jump {layer + 1} → {last} has a bias, which such a file cannot hold; export jumps without one "
                f"(mat, jacobian), or to tuned-lens"
            )
    provenance = jumps.provenance
    notes = provenance.settings | provenance.settings.get("said", {})
    n_prompts = notes.get("n_prompts")
    content = {
        "J": {layer: affine.weight.float() for layer, affine in maps.items()},
        "n_prompts": n_prompts if type(n_prompts) is int else 0,
        "source_layers": sorted(maps),
        "d_model": model.d_model,
        "metadata": {
            "model_name": model.name,
            "model_revision": model.revision,
            "corpus": provenance.text,
            "estimator": _ESTIMATOR if provenance.estimator == "jacobian" else provenance.estimator,
            "skip_first_positions": provenance.skip_first,
            "target_layer": model.n_blocks - 1,
            "layerjump": __version__,
        },
    }
    safe_pickle.write_torch(path, content)
    return pairs

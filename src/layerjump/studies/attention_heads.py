"""`heads`: one attention head at a time, replaced by a linear prediction, by nothing, or by its mean.

A head's output is its slice of what enters the output projection. The prediction is the affine map from attention's
own input at the same position: no head that is well predicted moves anything between tokens. Heads are ranked by the
damage of each replacement (KL; rank 1 hurts most).
"""

from __future__ import annotations

from torch import nn

from layerjump.interventions.patching import (
    Change,
    replace_by_constant,
    replace_by_map,
    restrict_to,
)
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, to_affine, to_module
from layerjump.jumps.memory import site_width
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.studies._untyped import Result, Row, to_json
from layerjump.studies.ablation import Variants, announce_cost, rerun_batches, small_batches
from layerjump.studies.setup import Setup

SHARE = 0.25
"""Of the run's budget: three replacements of every head of every block."""
HOW = ("linear", "zero", "mean")

Key = tuple[int, int, str]
"""block, head (both count from 1), how."""


def run(setup: Setup) -> Result:
    """Replace every head in three ways, and rank them."""
    model, batches = setup.model, small_batches(setup, SHARE)
    pairs = ",".join(f"{block}.attn.in:{block}.heads" for block in range(1, model.n_blocks + 1))
    jumps = setup.all_position_jumps("affine", pairs)
    changes = _changes(setup, jumps, pairs)
    cost = announce_cost(
        "heads",
        model,
        batches,
        block_runs=sum(model.n_blocks - block + 1 for block, _, _ in changes),
        unembeddings=len(changes) + 1,
    )
    variants = Variants(model)
    for rerun in rerun_batches(setup, batches, variants):
        for key, change in changes.items():
            block = key[0]
            pair = Site(block, "attn.in"), Site(block, "heads")
            last = rerun.from_level(block - 1, changes={pair: change})
            variants.add(key, rerun.pick(last))
    result = Result("heads", {"heads": _ranked(variants, list(changes))})
    result.settings = to_json(cost) | {
        "budget_share": SHARE,
        "estimator": "affine",
        "n_fit": jumps.provenance.n_fit,
    }
    result.headline = _headline(result.tables["heads"])
    return result


def unable(setup: Setup) -> str | None:
    """Why a model's heads cannot be told apart, if they cannot."""
    model = setup.model
    if model.no_predictions:
        return model.no_predictions
    width, heads = site_width(model, Site(1, "heads")), model.hf.config.num_attention_heads
    if width % heads:
        return f"the output projection reads {width} numbers, which {heads} heads cannot share"
    return None


def slices(model: Model) -> list[slice]:
    """Every head's columns of the output projection's input."""
    heads = int(model.hf.config.num_attention_heads)
    size = site_width(model, Site(1, "heads")) // heads
    return [slice(head * size, (head + 1) * size) for head in range(heads)]


def _changes(setup: Setup, jumps: Jumps, pairs: str) -> dict[Key, Change]:
    sums = setup.all_position_moments(pairs).fit
    found: dict[Key, Change] = {}
    for block in range(1, setup.model.n_blocks + 1):
        site = Site(block, "heads")
        whole, mean = to_affine(jumps[Site(block, "attn.in"), site]), sums.mean(site)
        for head, columns in enumerate(slices(setup.model), start=1):
            found[block, head, "linear"] = restrict_to(
                columns, replace_by_map(_rows(whole, columns))
            )
            found[block, head, "zero"] = restrict_to(
                columns, replace_by_constant(0 * mean[columns])
            )
            found[block, head, "mean"] = restrict_to(columns, replace_by_constant(mean[columns]))
    return found


def _rows(whole: Affine, columns: slice) -> nn.Module:
    """The part of a map that predicts some of its outputs."""
    bias = None if whole.bias is None else whole.bias[columns]
    return to_module(Affine.of(whole.weight[columns], bias=bias))


def _ranked(variants: Variants, keys: list[Key]) -> list[Row]:
    rows: list[Row] = []
    for how in HOW:
        mine: list[Row] = [
            {
                "block": block,
                "head": head,
                "how": how,
                "p@1": float((variants.examples((block, head, how), "place") < 1).mean()),
                "kl": variants.mean_kl((block, head, how)),
            }
            for block, head, this in keys
            if this == how
        ]
        mine.sort(key=lambda row: -row["kl"])
        rows += [row | {"rank": rank} for rank, row in enumerate(mine, start=1)]
    return rows


def _headline(rows: list[Row]) -> dict[str, object]:
    found: dict[str, object] = {}
    for how in HOW:
        mine = [row for row in rows if row["how"] == how]
        found[f"mean_kl_{how}"] = sum(row["kl"] for row in mine) / len(mine)
        found[f"most_harmful_{how}"] = f"block {mine[0]['block']}, head {mine[0]['head']}"
    linear = {(row["block"], row["head"]): row["kl"] for row in rows if row["how"] == "linear"}
    mean = {(row["block"], row["head"]): row["kl"] for row in rows if row["how"] == "mean"}
    found["heads"] = len(linear)
    found["heads_where_linear_halves_kl_of_mean"] = sum(
        linear[key] < mean[key] / 2 for key in linear
    )
    return found

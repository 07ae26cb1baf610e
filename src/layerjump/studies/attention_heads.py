"""`attention_heads`: which attention heads can be replaced by a linear map.

Protocol: one attention head at a time, its output is replaced by a linear prediction, by zero, or by its mean; the rest
of the model runs unchanged. The output of a head is its slice of the input of the output projection. The prediction is
the affine map from the input of attention at the same position, so a head that it predicts well moves no information
between tokens. For each replacement the heads are ranked by KL; rank 1 hurts most.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from layerjump.interventions.change_states import Change, replace_by_constant, replace_by_map, restrict_to
from layerjump.jumps.maps import Affine, to_affine, to_module
from layerjump.models.model import Model
from layerjump.models.sites import Site
from layerjump.studies.charts import Panel, draw_heat_map
from layerjump.studies.compare_variants import Variants, announce_cost, small_batches
from layerjump.studies.formatting import mean, number
from layerjump.studies.results import Column, Record, Result, Study, to_json
from layerjump.studies.setup import Setup

TOKEN_SHARE = 0.25
"""Share of the run's test tokens: every head of every block has three variants."""

Replacement = Literal["linear", "zero", "mean"]
REPLACEMENTS: tuple[Replacement, ...] = get_args(Replacement)
NAMES = {"linear": "linear prediction", "zero": "zero", "mean": "mean output"}


class HeadRow(Record):
    """One replacement of one attention head; blocks and heads count from 1."""

    block: int
    head: int
    replacement: Annotated[str, Column("how")]
    p1: Annotated[float, Column("p@1")]
    kl: float
    rank: int


class Tables(Record):
    """Rows by replacement, the most harmful first."""

    heads: list[HeadRow]


class Headline(Record):
    """Mean KL and most harmful head of each replacement, and how many heads are nearly linear."""

    mean_kl: Annotated[dict[str, float], Column("mean_kl_{}")]
    most_harmful: Annotated[dict[str, str], Column("most_harmful_{}")]
    heads: int
    heads_where_linear_halves_kl_of_mean: int


def cannot_run(setup: Setup) -> str | None:
    """Return why the heads of a model cannot be told apart, or None."""
    model = setup.model
    if model.no_predictions:
        return model.no_predictions
    blocks, heads = _blocks_with_heads(model), model.text_config.num_attention_heads
    if not blocks:
        return f"the blocks of {model.model_type} have no attention whose heads are known"
    for block in blocks:
        if (width := model.structure.width(Site(block, "heads"))) % heads:
            return f"the input of the output projection has width {width}, not a multiple of {heads} heads"
    return None


def _blocks_with_heads(model: Model) -> list[int]:
    """All blocks, but for a hybrid of attention and other mixers."""
    present = set(model.structure.sites())
    return [block for block in range(1, model.n_blocks + 1) if Site(block, "heads") in present]


def run(setup: Setup) -> Result[Tables, Headline]:
    """Replace every head in three ways, and rank the heads."""
    model, batches = setup.model, small_batches(setup, TOKEN_SHARE)
    blocks = _blocks_with_heads(model)
    pairs = ",".join(f"{block}.attn.in:{block}.heads" for block in blocks)
    jumps = setup.all_position_jumps("affine", pairs)
    moments, n_heads = setup.all_position_moments(pairs).fit, int(model.text_config.num_attention_heads)
    changes: dict[tuple[int, int, Replacement], Change] = {}
    for block in blocks:
        site = Site(block, "heads")
        size = model.structure.width(site) // n_heads
        jump, means = to_affine(jumps[Site(block, "attn.in"), site]), moments.mean(site)
        for head in range(1, n_heads + 1):
            columns = slice((head - 1) * size, head * size)  # of the head, in the input of the output projection
            bias = None if jump.bias is None else jump.bias[columns]
            predicted = replace_by_map(to_module(Affine.of(jump.weight[columns], bias=bias)))
            changes[block, head, "linear"] = restrict_to(columns, predicted)
            changes[block, head, "zero"] = restrict_to(columns, replace_by_constant(0 * means[columns]))
            changes[block, head, "mean"] = restrict_to(columns, replace_by_constant(means[columns]))
    cost = announce_cost(
        "attention_heads",
        model,
        batches,
        block_runs=sum(model.n_blocks - block + 1 for block, _, _ in changes),
        unembeddings=len(changes) + 1,
    )
    variants = Variants(model)
    for rerun in variants.reruns(batches, setup.progress):
        for (block, head, replacement), change in changes.items():
            pair = Site(block, "attn.in"), Site(block, "heads")
            states = rerun.from_level(block - 1, changes={pair: change})
            variants.add((block, head, replacement), rerun.pick(states))
    rows: list[HeadRow] = []
    for replacement in REPLACEMENTS:
        group = [name for name in changes if name[2] == replacement]
        group.sort(key=lambda name: -variants.mean_kl(name))
        rows += [
            HeadRow(*name, p1=variants.precision(name, 1), kl=variants.mean_kl(name), rank=rank)
            for rank, name in enumerate(group, start=1)
        ]
    by_replacement = {name: [row for row in rows if row.replacement == name] for name in REPLACEMENTS}
    worst = {name: group[0] for name, group in by_replacement.items()}
    kl_of_mean = {(row.block, row.head): row.kl for row in by_replacement["mean"]}
    linear = by_replacement["linear"]
    headline = Headline(
        mean_kl={name: mean(row.kl for row in group) for name, group in by_replacement.items()},
        most_harmful={name: f"block {row.block}, head {row.head}" for name, row in worst.items()},
        heads=len(linear),
        heads_where_linear_halves_kl_of_mean=sum(row.kl < kl_of_mean[row.block, row.head] / 2 for row in linear),
    )
    facts = to_json(cost) | {"budget_share": TOKEN_SHARE, "estimator": "affine", "n_fit": jumps.provenance.n_fit}
    return Result("attention_heads", Tables(rows), headline, settings=facts)


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return a heat map of the KL by block and head for each replacement, with one scale."""
    rows, head = result.tables.heads, result.headline
    highest = max(row.kl for row in rows)
    charts = []
    for replacement in REPLACEMENTS:
        cells = {(row.block, row.head): row.kl for row in rows if row.replacement == replacement}
        charts.append(
            draw_heat_map(cells, title=NAMES[replacement], x="block", y="head", span=(0.0, highest), unit=" nats")
        )
    worst = next(row for row in rows if row.replacement == "linear" and row.rank == 1)
    reading = (
        f"Replacing one head costs a KL of {number(head.mean_kl['linear'])} nats on average by its linear prediction, "
        f"{number(head.mean_kl['mean'])} by its mean and {number(head.mean_kl['zero'])} by zero. The prediction halves "
        f"the KL of the mean for {head.heads_where_linear_halves_kl_of_mean} of {head.heads} heads; it fails most for "
        f"head {worst.head} of block {worst.block} ({number(worst.kl)} nats)."
    )
    return [Panel("KL of replacing one attention head", reading, ("heads",), charts)]


STUDY = Study(
    "attention_heads", "which attention heads can be replaced by a linear map?", run, figures, cannot_run=cannot_run
)

"""What a prediction costs: floating-point operations for one token, counted from the weights themselves.

A multiply and an add are two operations. Norms, activations and attention's products with earlier tokens, which grow
with the context and not with the weights, are not counted.

`size`: what maps and shortcuts cost, in parameters, bytes and operations, against what they give.

Full maps, narrow maps, one map for all levels, and full maps kept in half precision or in int8 (written so, read back,
then scored). Then what stopping at each level costs, and each alternation of blocks and jumps, if `alternation` ran.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from layerjump.errors import BadEstimator
from layerjump.jumps.collect import SplitMoments
from layerjump.jumps.estimators.low_rank import low_rank, njtc_rank, truncate_rank
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import JumpInfo, Jumps
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.pairs import Pair
from layerjump.jumps.quantize import STORAGES, quantize_map
from layerjump.lens.lens import Lens
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.models.unembedding import unembedding_metric
from layerjump.studies import layer_skipping
from layerjump.studies._untyped import Result, Row, mean_r2
from layerjump.studies.setup import Setup, hits_below_last, maps_of, r2_of_maps


def block_flops(model: Model) -> list[int]:
    """The operations of each block."""
    return [_products(block) for block in model.structure.blocks]


def head_flops(model: Model) -> int:
    """The operations from level L to logits."""
    steps = [step for step in model.structure.final_steps if isinstance(step, nn.Module)]
    return sum(map(_products, steps)) + _products(model.structure.unembedding)


def jump_flops(jump: nn.Module) -> int:
    """The operations of one jump: its products, not its bias."""
    return 2 * sum(factor.numel() for factor in to_affine(jump).factors)


def jump_bytes(jump: nn.Module) -> int:
    """The bytes of one jump as it is held."""
    return sum(parameter.nbytes for parameter in jump.parameters())


def _products(module: nn.Module) -> int:
    """Two operations for each entry of each matrix: every entry meets every token once."""
    return 2 * sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)


DIVISORS = (2, 4, 8, 16, 32, 100)
"""Low ranks are the width divided by these."""


def run(setup: Setup) -> Result:
    """Score every kind of map on one set of sums and positions, then count what shortcuts cost."""
    result = Result("size")
    sums = setup.moments("to-last", select=True)
    result.tables["maps"] = _scored(setup, sums, _kinds(setup, sums, result.notes))
    result.tables["exits"] = _exits(setup)
    alternation = setup.result_of(layer_skipping.STUDY)
    if alternation is None:
        result.notes.append(
            "Alternation schedules and pruned blocks are listed here when `alternation` runs in the same run."
        )
    else:
        result.tables["schedules"] = _schedules(setup, alternation.tables.schedules)
    result.settings = {
        "n_fit": sums.fit.n,
        "n_test": sums.test.n,
        "n_examples": setup.few_test_batches().n_picks,
        "exits_by": setup.settings.estimators[0],
        "n_examples_exits": setup.lens_scores().n_examples,
    }
    result.headline = _headline(result.tables["maps"])
    result.notes.append(
        "Operations are two for each weight that a token meets (blocks, jump, norm and head); attention's products "
        "with earlier tokens are left out. int8 keeps one float32 scale a row. Where states hardly "
        "vary in some directions, least squares has huge weights that cancel, and rounding ruins them; ridge has none."
    )
    return result


@dataclass(frozen=True)
class _Kind:
    """One way to keep the maps of all levels."""

    name: str
    maps: dict[Pair, Affine]
    n_parameters: int
    n_bytes: int

    @classmethod
    def of(cls, name: str, maps: dict[Pair, Affine]) -> _Kind:
        """Maps in float32, as they are held and saved; one that serves several levels is kept once."""
        kept = {id(jump): jump.n_parameters for jump in maps.values()}
        return cls(name, maps, sum(kept.values()), 4 * sum(kept.values()))

    @property
    def rank(self) -> int | None:
        factors = next(iter(self.maps.values())).factors
        return factors[0].shape[1] if len(factors) == 2 else None


def _kinds(setup: Setup, sums: SplitMoments, notes: list[str]) -> list[_Kind]:
    """Every kind of map that this model and text allow; the notes say what is left out."""
    names = ("mat", "affine", "ridge") if sums.select.n else ("mat", "affine")
    full = {name: maps_of(solve_jumps(sums, name)) for name in names}
    kinds = [_Kind.of(name, maps) for name, maps in full.items()]
    kinds += low_ranks("low-rank", sums, ranks(setup.model.d_model))
    try:
        metric = unembedding_metric(setup.model, Site(setup.model.n_blocks))
        kinds += low_ranks(
            "low-rank in the unembedding's metric", sums, ranks(setup.model.d_model), metric
        )
    except BadEstimator as error:
        notes.append(f"Low rank in the unembedding's metric is left out: {error}.")
    kinds.append(_Kind.of("n-njtc", maps_of(solve_jumps(sums, "n-njtc"))))
    if sums.select.n:
        kinds += [_one_for_all(sums, how) for how in ("pooled", "best-level")]
    else:
        notes.append(
            "ridge and ojfa are left out: they choose on select documents; this split has none."
        )
    del full["affine"]  # in storage it is much like mat
    return kinds + [
        _in_storage(name, maps, storage) for name, maps in full.items() for storage in STORAGES[1:]
    ]


def ranks(width: int) -> list[int]:
    """The low ranks to try, falling."""
    return list(dict.fromkeys(max(1, width // divisor) for divisor in DIVISORS))


def low_ranks(
    name: str, sums: SplitMoments, wanted: list[int], metric: Tensor | None = None
) -> list[_Kind]:
    """Maps of falling ranks, from one solution each: the widest holds the others."""
    maps: dict[int, dict[Pair, Affine]] = {rank: {} for rank in wanted}
    for a, b in sums.fit.pairs:
        source, target = sums.fit.source(a), sums.fit.target(a, b)
        (widest,) = low_rank(source, [target], rank=wanted[0], metric=metric)
        for rank in wanted:
            maps[rank][a, b] = truncate_rank(widest, rank, source, target)
    return [_Kind.of(f"{name} {rank}", mine) for rank, mine in maps.items()]


def _one_for_all(sums: SplitMoments, how: str) -> _Kind:
    jumps = maps_of(solve_jumps(sums, "ojfa", how=how, rank=njtc_rank(sums.about["width"])))
    one = next(iter(jumps.values()))
    return _Kind.of(f"ojfa {how}", dict.fromkeys(jumps, one))


def _in_storage(name: str, maps: dict[Pair, Affine], storage: str) -> _Kind:
    kept = {pair: quantize_map(jump, storage) for pair, jump in maps.items()}
    return _Kind(
        f"{name} in {storage}",
        {pair: one.affine for pair, one in kept.items()},
        sum(jump.n_parameters for jump in maps.values()),
        sum(one.n_bytes for one in kept.values()),
    )


def _scored(setup: Setup, sums: SplitMoments, kinds: list[_Kind]) -> list[Row]:
    """One row for each kind; all are read at the same few positions."""
    known = solve_jumps(sums, "identity").provenance
    lenses = {}
    for kind in kinds:
        infos = {pair: JumpInfo(*pair, kind.name) for pair in kind.maps}
        lenses[kind.name] = Lens(setup.model, Jumps.of(kind.maps, infos, known))
    hits = hits_below_last(setup.score_lenses(lenses, setup.few_test_batches())).mean(-1).tolist()
    return [
        {
            "map": kind.name,
            "rank": kind.rank,
            "parameters": kind.n_parameters,
            "bytes": kind.n_bytes,
            **mean_r2(r2_of_maps(kind.maps, sums.test)),
            "p@1": hit,
        }
        for kind, hit in zip(kinds, hits, strict=True)
    ]


def _exits(setup: Setup) -> list[Row]:
    """What stopping at each level costs: the blocks so far, the jump and the head."""
    name, last = setup.settings.estimators[0], setup.model.n_blocks
    readings, jumps = setup.lens_scores(), setup.jumps(name)
    hits = readings.hits(1)[readings.lenses.index(name)].double().mean(-1).tolist()
    blocks, head = block_flops(setup.model), head_flops(setup.model)
    rows: list[Row] = []
    for level in range(last + 1):
        flops = sum(blocks[:level]) + head + jump_flops(jumps[level, last])
        rows.append(
            {
                "level": level,
                "blocks": level,
                "flops per token": flops,
                "share of flops": flops / (sum(blocks) + head),
                "map bytes": jump_bytes(jumps[level, last]),
                "p@1": hits[level],
            }
        )
    return rows


def _schedules(setup: Setup, rows: list[layer_skipping.ScheduleRow]) -> list[Row]:
    """What each alternation of blocks and jumps costs; `single jump` with few blocks left out is a pruned model."""
    jump = setup.jumps(setup.settings.estimators[0])[0, setup.model.n_blocks]
    blocks, head = block_flops(setup.model), head_flops(setup.model)
    found: list[Row] = []
    for row in rows:
        legs = row.schedule.legs
        ran = sum(sum(blocks[start:end]) for start, end in legs)
        flops = ran + (len(legs) - 1) * jump_flops(jump) + head
        found.append(
            {
                "rule": row.rule,
                "schedule": row.schedule.to_json(),
                "blocks": row.blocks_run,
                "flops per token": flops,
                "share of flops": flops / (sum(blocks) + head),
                "map bytes": (len(legs) - 1) * jump_bytes(jump),
                "p@1": row.scores.p1.mean,
            }
        )
    return found


def _headline(maps: list[Row]) -> Row:
    """How small the maps get before they lose more than a point of P@1."""
    full = maps[0]
    good = [row for row in maps if row["p@1"] >= full["p@1"] - 0.01]
    least = min(good, key=lambda row: row["bytes"])
    return {
        "full_bytes": full["bytes"],
        "full_p@1": full["p@1"],
        "smallest_within_a_point": least["map"],
        "smallest_bytes": least["bytes"],
        "smallest_p@1": least["p@1"],
    }

"""`failures`: where the maps are wrong.

Agreement with the model by position, by how common the token is, and by how unsure the model itself is; the first
token, whose state is unlike any other; the tail of the error; and the worst examples in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.data.positions import Positions
from layerjump.data.tokenization import token_text
from layerjump.jumps.jumps import Jumps
from layerjump.lens.evaluate import LensScores
from layerjump.models.activations import capture_states
from layerjump.studies._untyped import Result, Row
from layerjump.studies.examples import context
from layerjump.studies.setup import Setup

WORST = 20
PERCENTILES = (50, 90, 95, 99)


def run(setup: Setup) -> Result:
    """Sort the readings into bins, and measure the errors themselves in a pass of their own."""
    readings, estimator = setup.lens_scores(), setup.settings.estimators[0]
    jumps = setup.jumps(estimator)
    levels = quarters(setup.model.n_blocks)
    first = Positions("all", skip_first=0, special=True)
    everywhere = setup.batches(positions=first, tokens=setup.settings.score_tokens)
    result = Result("failures")
    result.tables = {
        "by position": _binned(readings, levels, *by_position(readings.position)),
        "by frequency": _binned(
            readings, levels, *by_count(_counts(setup)[readings.token.numpy()])
        ),
        "by entropy": _binned(readings, levels, *by_quarter(readings.model_entropy)),
        "first token": _first_token(_errors(setup, jumps, everywhere)),
        "errors": _tails(_errors(setup, jumps, setup.test_batches())),
        "worst": _worst(setup, readings, setup.model.n_blocks // 2),
    }
    result.settings = {
        "n_examples": readings.n_examples,
        "levels": levels,
        "map": estimator,
        "worst_at_level": setup.model.n_blocks // 2,
    }
    result.headline = _headline(result)
    result.notes.append(
        "Frequency is how often the token at the position stands in the fit documents; entropy is of the model's own "
        "distribution. First token: position 0 of every sequence, special tokens included, nothing masked."
    )
    if setup.model.masked:
        result.notes.append(
            "This model's maps are fitted at masked positions, and the first token's pass masks none: there they are "
            "off at all positions."
        )
    return result


def quarters(blocks: int) -> list[int]:
    """The levels a quarter, half and three quarters up."""
    return list(dict.fromkeys(blocks * part // 4 for part in (1, 2, 3)))


# -- bins: every example's bin, and the bins' names in order

Bins = tuple[np.ndarray, list[str]]


def by_position(position: Tensor) -> Bins:
    """Doubling spans of positions: 0, 1, 2–3, 4–7, …"""
    place = np.ceil(np.log2(position.numpy() + 1)).astype(int)
    names = ["0", "1"] + [f"{2 ** (k - 1)}–{2**k - 1}" for k in range(2, place.max() + 1)]
    return place, names


def by_count(counts: np.ndarray) -> Bins:
    """Powers of ten: never, 1–9, 10–99, …"""
    place = np.where(counts > 0, np.floor(np.log10(np.maximum(counts, 1))) + 1, 0).astype(int)
    names = ["never"] + [f"{10 ** (k - 1):,}–{10**k - 1:,}" for k in range(1, place.max() + 1)]
    return place, names


def by_quarter(values: Tensor) -> Bins:
    """Quarters of the examples, by value."""
    ends = np.quantile(values.numpy(), [0.25, 0.5, 0.75])
    low, middle, high = (f"{end:.2f}" for end in ends)
    names = [f"up to {low}", f"{low} to {middle}", f"{middle} to {high}", f"above {high}"]
    return np.searchsorted(ends, values.numpy()), names


def _binned(
    readings: LensScores, levels: Sequence[int], place: np.ndarray, names: Sequence[str]
) -> list[Row]:
    hits, kl = readings.hits(1).double().numpy(), readings.kl.double().numpy()
    return [
        {
            "level": level,
            "lens": lens,
            "bin": name,
            "n": int((place == bin_).sum()),
            "p@1": float(hits[index, level, place == bin_].mean()),
            "kl": float(kl[index, level, place == bin_].mean()),
        }
        for level in levels
        for index, lens in enumerate(readings.lenses)
        for bin_, name in enumerate(names)
        if (place == bin_).any()
    ]


def _counts(setup: Setup) -> np.ndarray:
    """How often each token of the vocabulary stands in the fit documents."""
    fit = setup.batches(part="fit", positions=Positions("all"), tokens=setup.settings.tokens)
    ids = np.asarray(fit.sequences.ids)
    return np.bincount(ids, minlength=setup.model.structure.vocab_size)


# -- errors of the states themselves


@dataclass(frozen=True)
class _Errors:
    """Lengths, in float64: of states and of errors, (levels, positions); of level L, (positions,)."""

    position: Tensor
    state: Tensor
    target: Tensor
    error: dict[str, Tensor]
    """‖jump(h) − h_L‖ and ‖h − h_L‖, by the map's name."""


@torch.no_grad()
def _errors(setup: Setup, jumps: Jumps, batches: Batches) -> _Errors:
    last, name = setup.model.n_blocks, jumps.provenance.estimator
    position: list[Tensor] = []
    lengths: dict[str, list[Tensor]] = {key: [] for key in ("state", "target", name, "identity")}
    for found in capture_states(setup.model, batches, range(last + 1)):
        h = torch.stack([found[level].float() for level in range(last + 1)])
        jumped = torch.stack([jumps[level, last](h[level]) for level in range(last)])
        position.append(found.batch.position)
        lengths["state"].append(_length(h[:-1]))
        lengths["target"].append(_length(h[-1:]))
        lengths[name].append(_length(jumped - h[-1]))
        lengths["identity"].append(_length(h[:-1] - h[-1]))
    joined = {key: torch.cat(parts, dim=1) for key, parts in lengths.items()}
    error = {key: joined[key] for key in (name, "identity")}
    return _Errors(torch.cat(position), joined["state"], joined["target"][0], error)


def _length(vectors: Tensor) -> Tensor:
    return vectors.double().norm(dim=-1).cpu()


def _first_token(errors: _Errors) -> list[Row]:
    """The sink at position 0 beside all other positions."""
    first = errors.position == 0
    return [
        {
            "level": level,
            "map": name,
            "at": where,
            "n": int(rows.sum()),
            "state norm": float(errors.state[level, rows].mean()),
            "target norm": float(errors.target[rows].mean()),
            "error": float(error[level, rows].mean()),
            "relative error": float((error[level, rows] / errors.target[rows]).mean()),
        }
        for name, error in errors.error.items()
        for level in range(len(error))
        for where, rows in (("position 0", first), ("other positions", ~first))
        if rows.any()
    ]


def _tails(errors: _Errors) -> list[Row]:
    """Percentiles of the error at the test positions, in its own unit and over the length of level L."""
    rows: list[Row] = []
    for name, error in errors.error.items():
        for level, mine in enumerate(error.numpy()):
            row: Row = {"level": level, "map": name}
            for kind, values in (("", mine), (" relative", mine / errors.target.numpy())):
                row |= {f"{p} %{kind}": float(np.percentile(values, p)) for p in PERCENTILES}
                row[f"max{kind}"] = float(values.max())
            rows.append(row)
    return rows


# -- examples


def _worst(setup: Setup, readings: LensScores, level: int) -> list[Row]:
    """The examples of largest KL, with the text before them (and after, for a masked model)."""
    place = readings.lenses.index(setup.settings.estimators[0])
    order = readings.kl[place, level].argsort(descending=True)[:WORST].tolist()
    where = _contexts(setup, set(order))
    tokenizer = setup.model.tokenization.tokenizer
    return [
        {
            "kl": float(readings.kl[place, level, example]),
            "context": where[example],
            "model's best": token_text(tokenizer, int(readings.model_top[example])),
            "lens' best": token_text(tokenizer, int(readings.top[place, level, example])),
            "level": level,
            "position": int(readings.position[example]),
            "document": int(readings.document[example]),
        }
        for example in order
    ]


def _contexts(setup: Setup, wanted: set[int]) -> dict[int, str]:
    """The text around some of the readings' examples, which are the scored picks in order."""
    found: dict[int, str] = {}
    start = 0
    for batch in setup.test_batches():
        for pick in range(batch.n_picks):
            if start + pick in wanted:
                found[start + pick] = context(setup.model, batch, pick)
        start += batch.n_picks
    return found


def _headline(result: Result) -> Row:
    half, name = result.settings["worst_at_level"], result.settings["map"]

    def ends(table: str) -> tuple[Row, Row]:
        rows = [r for r in result.tables[table] if (r["level"], r["lens"]) == (half, name)]
        return rows[0], rows[-1]

    sure, unsure = ends("by entropy")
    found: Row = {"p@1_where_model_is_sure": sure["p@1"], "p@1_where_unsure": unsure["p@1"]}
    sink = {
        row["at"]: row["relative error"]
        for row in result.tables["first token"]
        if (row["level"], row["map"]) == (half, name)
    }
    found["relative_error_at_position_0"] = sink.get("position 0")
    found["relative_error_elsewhere"] = sink.get("other positions")
    (tail,) = [r for r in result.tables["errors"] if (r["level"], r["map"]) == (half, name)]
    found["median_relative_error"] = tail["50 % relative"]
    found["99_percent_relative_error"] = tail["99 % relative"]
    return found

"""Typed rows, tables and headlines: their JSON form, and what reading refuses."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
import torch

from layerjump.errors import BadArtifact
from layerjump.studies.results import Column, Interval, from_json, to_json


@dataclass(frozen=True)
class Part:
    size: float


@dataclass(frozen=True)
class Row:
    level: Annotated[int, Column("at level")]
    p1: Annotated[Interval, Column("p@1{}")]
    p10: Annotated[Interval, Column("p@10{}")]
    by_rule: Annotated[dict[str, int], Column("rule {}")]
    tokens: Annotated[dict[str, list[str]], Column("{}")]
    note: Annotated[str | None, Column(optional=True)] = None
    encoder: Annotated[Part | None, Column("encoder {}")] = None


ROW = Row(1, Interval(0.5, 0.4, 0.6), Interval(0.9, 0.8, 1.0), {"kl": 3}, {"mat": ["a", "b"]})
SAVED = {
    "at level": 1,
    "p@1": 0.5,
    "p@1 low": 0.4,
    "p@1 high": 0.6,
    "p@10": 0.9,
    "p@10 low": 0.8,
    "p@10 high": 1.0,
    "rule kl": 3,
    "mat": ["a", "b"],
}


def test_a_row_is_one_object_and_comes_back():
    assert to_json(ROW) == SAVED
    assert from_json(Row, SAVED) == ROW
    more = SAVED | {"note": "x", "encoder size": 2}
    assert from_json(Row, more).encoder == Part(2.0)
    assert to_json(from_json(Row, more)) == more


def test_numbers_that_are_not_finite_are_null():
    value = {1: (np.float64("nan"), torch.tensor(2), np.arange(2)), "x": float("inf")}
    assert to_json(value) == {"1": [None, 2, [0, 1]], "x": None}
    assert math.isnan(from_json(Part, {"size": None}).size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at level": "1"}, "rows, at level: expected int, got '1'"),
        ({"at level": True}, "expected int, got 'True'"),
        ({"p@1 low": "x"}, "p@1 low: expected float, got 'x'"),
        ({"p@10": 10**400}, "p@10: expected float"),
        ({"mat": ["a", 3]}, "mat, item 2: expected str, got '3'"),
        ({"encoder size": []}, "encoder size: expected float"),
        ({"note": 1}, "note: expected str"),
    ],
)
def test_a_value_of_another_type_is_refused(change, message):
    with pytest.raises(BadArtifact, match=message):
        from_json(Row, SAVED | change, "rows")


def test_a_missing_key_is_refused():
    with pytest.raises(BadArtifact, match="rows: expected the key 'p@1 high'; results.json was edited"):
        from_json(Row, {key: value for key, value in SAVED.items() if key != "p@1 high"}, "rows")

"""The smallest run of pretraining, and its texts."""

from __future__ import annotations

from stories import stories

from layerjump.train.architectures import Shape
from layerjump.train.recipe import Recipe

TEXT, HELD_OUT = stories(300), stories(60, seed=1, name="others")
SMALL = Recipe(
    shape=Shape(layers=2, hidden=16, heads=2, positions=16),
    vocabulary=300,
    length=16,
    steps=8,
    batch=8,
    every=4,
    learning_rate=3e-3,
)

"""The smallest run of pretraining, and its texts."""

from __future__ import annotations

from helpers.story_text import stories
from layerjump.training.pretrain import Recipe

TEXT, HELD_OUT = stories(300), stories(60, seed=1, name="others")
SMALL = Recipe(
    layers=2,
    hidden_size=16,
    heads=2,
    max_positions=16,
    vocab_size=300,
    length=16,
    steps=8,
    batch_size=8,
    eval_every=4,
    learning_rate=3e-3,
)

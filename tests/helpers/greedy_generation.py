"""Greedy text as Hugging Face itself writes it, which early exit is compared with, and jumps between all levels."""

from __future__ import annotations

import pytest

import layerjump as lj

GREEDY = {"do_sample": False, "max_new_tokens": 24}
PROMPT = "Once upon a time, there was a little girl named Lily."


@pytest.fixture(scope="module")
def jumps(model, study_text):
    return lj.fit(model, study_text, tokens=4_000, pairs="all")


def theirs(model, prompts, **settings):
    inputs = model.tokenization.generation_inputs(prompts)
    found = model.hf.generate(**inputs, pad_token_id=model.tokenization.pad, **(GREEDY | settings))
    return found[:, inputs["input_ids"].shape[1] :]


def unpadded(ids, end):
    rows = ids.tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]

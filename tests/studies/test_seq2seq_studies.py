"""Fits and studies of encoder–decoders: cross-attention is a part, and both stacks are measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import seq2seq_models
from helpers.seq2seq_models import made
from helpers.study_results import tables_of

import layerjump as lj
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.cost_estimate import estimate_cost
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.lens.lens import Lens
from layerjump.studies import early_exit, examples, linearity, predictions, r2, submodules
from layerjump.studies.setup import Setup, make_settings

model, corpus = seq2seq_models.model, seq2seq_models.corpus  # fixtures


@pytest.fixture(scope="module")
def setup(model, corpus) -> Setup:
    return Setup(model, corpus, make_settings("ours", split="60/20/20", n_test_positions=60))


def test_submodules_take_in_cross_attention(model, corpus):
    jumps = lj.fit(model, corpus, pairs="submodules", estimator="ridge", split="60/20/20")
    for block in range(1, 4):
        for part in ("ln1", "attn", "lnx", "xattn", "ln2", "ffn"):
            assert (f"{block}.{part}.in", f"{block}.{part}.out") in jumps
    assert len(jumps) == 18


def test_the_bill_counts_each_token_through_its_own_stack(model, corpus):
    planned = plan_run(model, corpus, split="60/20/20", use_validation=False)
    tokens = sum(found.n_tokens for found in planned.batches.values())
    sources = sum(found.n_source_tokens for found in planned.batches.values())
    encoder, decoder = (
        sum(p.numel() for block in side.structure.blocks for p in block.parameters())
        for side in (model.encoder_side(), model)
    )
    wanted = 2.0 * (encoder * sources + decoder * (tokens - sources))
    assert estimate_cost(model, planned.moments["fit"], planned.batches).model_flops == wanted


def test_every_lens_is_the_model_at_the_last_level(model, setup):
    jumps = setup.jumps("mat")
    found = lj.make_batches(setup.corpus, model.tokenization, lj.Positions("one"))
    readings = evaluate_lenses(model, {"identity": Lens(model), "mat": Lens(model, jumps)}, found)
    assert readings.hits(1)[:, -1].all()
    assert readings.kl[:, -1].abs().max() < 1e-9
    for batch in found:
        with torch.no_grad():
            logits = model.hf(
                input_ids=batch.source_ids,
                attention_mask=batch.source_mask,
                decoder_input_ids=batch.input_ids,
                decoder_attention_mask=batch.attention_mask,
            ).logits[batch.row, batch.position]
        best = dict(zip(readings.document.tolist(), readings.model_top.tolist(), strict=True))
        assert [best[int(d)] for d in batch.document] == logits.argmax(-1).tolist()


def test_r2_and_predictions_and_exits_run(setup):
    found = r2.run(setup)
    assert len(tables_of(found)["pairs mat"]) == 6
    scored = predictions.run(setup)
    last = [row for row in tables_of(scored)["levels"] if row["level"] == 3]
    assert [(row["p@1"], row["kl"]) for row in last] == [(1.0, pytest.approx(0, abs=1e-9))] * 2
    assert tables_of(early_exit.run(setup))["saved"]


def test_linearity_measures_both_stacks(setup):
    result = linearity.run(setup)
    for name in ("blocks", "levels", "angles"):
        decoder, encoder = tables_of(result)[name], tables_of(result)[f"encoder {name}"]
        assert len(decoder) == len(encoder)
        assert list(decoder[0]) == list(encoder[0])
        assert decoder != encoder
    assert result.headline.encoder.mean_with_residual != result.headline.mean_with_residual
    numbers = [value for row in tables_of(result)["encoder blocks"] for value in row.values()]
    assert np.isfinite(numbers).all()


def test_examples_show_what_both_have_read(setup):
    rows = tables_of(examples.run(setup))["examples"]
    source, arrow, target = rows[0]["context"].partition(" → ")
    assert arrow
    documents = [document.split() for document in setup.corpus.documents]
    ends = [document[: (len(document) + 1) // 2][-1] for document in documents]
    assert source.split()[-1] in ends
    assert target.split()


def test_a_short_encoder_and_a_long_decoder_are_told_apart(corpus):
    model = made("t5", "short-encoder")
    assert (model.n_blocks, model.encoder_side().n_blocks) == (3, 2)
    result = linearity.run(Setup(model, corpus, make_settings("ours", split="60/20/20")))
    assert len(tables_of(result)["blocks"]) == 3
    assert len(tables_of(result)["encoder blocks"]) == 2


def test_cross_attention_is_replaced_beside_self_attention(model, corpus):
    settings = make_settings("ours", split="60/20/20", rerun_tokens=200, estimators=("ridge",), n_test_positions=40)
    tables = submodules.run(Setup(model, corpus, settings)).to_json()["tables"]
    suffix, why = tables["suffix"], tables["why"]
    assert {"attn", "xattn", "ffn", "norms"} <= {row["part"] for row in suffix}
    assert {"lnx", "xattn"} <= {row["part"] for row in why}
    assert all(row["p@1"] == 1 for row in suffix if row["level"] == model.n_blocks)

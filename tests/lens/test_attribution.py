"""Attribution of a reading: rows add up, and heads and sources are what ablation of them changes."""

import json
import math

import pytest
from helpers.cli import refused, run

import layerjump as lj
from layerjump.errors import BadModel, BadText
from layerjump.interventions.change_states import change_states, restrict_to
from layerjump.models.sites import Site

TEXT = "Once upon a time, there was a little girl named"
TOKEN, OTHER = " the", " dog"


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2", dtype="float64")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=150)


@pytest.fixture(scope="module", params=["identity", "mat", "affine", "calibrated"])
def trajectory(request, model, text):
    jumps = None if request.param == "identity" else lj.fit(model, text, estimator=request.param)
    return lj.Lens(model, jumps)(TEXT)


def reading(trajectory, level, position, token, against=None):
    """The logit that the lens itself reads."""
    index = trajectory.levels.index(str(level))
    logits = trajectory.readouts[index].logits(trajectory.states.states[index][position])
    ids = [trajectory.model.prediction_id(name) for name in (token, against) if name is not None]
    return float((logits[ids[0]] - (logits[ids[1]] if against else 0)).detach())


@pytest.mark.parametrize("against", [None, OTHER])
@pytest.mark.parametrize("level", [0, 2, 4])
def test_parts_add_up_to_what_the_lens_reads(trajectory, level, against):
    attribution = trajectory.attribution(-1, level, TOKEN, against)
    expected = reading(trajectory, level, len(trajectory.prompt.ids) - 1, TOKEN, against)
    assert attribution.reading == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert sum(part.value for part in attribution.parts) == pytest.approx(attribution.reading, rel=1e-6, abs=1e-6)
    assert [part.name for part in attribution.parts if part.part != "bias"] == [
        "embedding",
        *(f"{block}.{part}" for block in range(1, level + 1) for part in ("attn", "ffn")),
    ]


def test_heads_add_up_to_attention_and_sources_to_heads(trajectory):
    attribution = trajectory.attribution(5, 3, TOKEN)
    for block in (1, 2, 3):
        (attention,) = [row.value for row in attribution.parts if row.name == f"{block}.attn"]
        heads = [row for row in attribution.heads if row.block == block]
        assert sum(row.value for row in heads) == pytest.approx(attention, abs=1e-9)
        for head in (row for row in heads if row.head):
            sources = [row for row in attribution.sources if (row.block, row.head) == (block, head.head)]
            assert sum(row.value for row in sources) == pytest.approx(head.value, abs=1e-9)
            # A causal model reads from no later position.
            assert [row.source for row in sources if row.value] == list(range(6))
    assert attribution.notes == ()


def frozen_weights(model, text):
    """Weights of logit(TOKEN) − logit(OTHER) on level L at the last position, by hand: a layer norm, frozen."""
    trajectory = lj.Lens(model)(text, levels=[model.n_blocks])
    state = trajectory.states.last_level[-1]
    norm, unembedding = model.hf.transformer.ln_f, model.hf.lm_head.weight
    difference = unembedding[model.prediction_id(TOKEN)] - unembedding[model.prediction_id(OTHER)]
    weights = norm.weight * difference / math.sqrt(state.var(unbiased=False) + norm.eps)
    return (weights - weights.mean()).detach()


def last_attention(model, ids, changes):
    """What attention of the last block adds at the last position, with changes in place."""
    site = Site(model.n_blocks, "attn.out")
    with change_states(model, changes):
        (states,) = lj.capture_states(model, [lj.batch_from_ids(ids)], [site])
    return states[site][-1]


def test_a_head_is_what_its_ablation_takes_away(model):
    trajectory = lj.Lens(model)(TEXT)
    attribution, weights = trajectory.attribution(-1, 4, TOKEN, OTHER), frozen_weights(model, TEXT)
    ids, n_heads = list(trajectory.prompt.ids), model.hf.config.n_head
    width, heads = model.d_model // n_heads, (Site(4, "attn.in"), Site(4, "heads"))
    whole = last_attention(model, ids, {})
    for head in range(n_heads):
        columns = slice(head * width, (head + 1) * width)
        ablated = last_attention(model, ids, {heads: restrict_to(columns, lambda source, exact: 0 * exact)})
        (row,) = [row for row in attribution.heads if (row.block, row.head) == (4, head + 1)]
        assert row.value == pytest.approx(float(weights @ (whole - ablated)), abs=1e-9)


def test_a_source_is_what_its_value_carries(model):
    """Without the value vector of one head at one position, attention loses what that source contributed."""
    trajectory = lj.Lens(model)(TEXT)
    attribution, weights = trajectory.attribution(-1, 4, TOKEN, OTHER), frozen_weights(model, TEXT)
    ids, width = list(trajectory.prompt.ids), model.d_model // model.hf.config.n_head
    whole = last_attention(model, ids, {})
    for head, source in ((1, 0), (2, 3), (1, len(ids) - 1)):

        def drop_value(module, args, output, head=head, source=source):
            output = output.clone()
            start = 2 * model.d_model + (head - 1) * width
            output[:, source, start : start + width] = 0
            return output

        hook = model.hf.transformer.h[3].attn.c_attn.register_forward_hook(drop_value)
        try:
            ablated = last_attention(model, ids, {})
        finally:
            hook.remove()
        (row,) = [row for row in attribution.sources if (row.block, row.head, row.source) == (4, head, source)]
        assert row.value == pytest.approx(float(weights @ (whole - ablated)), abs=1e-9)


def test_rows_as_a_table_a_figure_and_json(model):
    attribution = lj.Lens(model)(TEXT).attribution(-1, 4, TOKEN)
    frame = attribution.to_pandas()
    assert frame["value"].sum() == pytest.approx(attribution.reading)
    assert frame["share"].sum() == pytest.approx(1)
    sources = attribution.to_pandas("sources")
    assert len(sources) == len(attribution.sources)
    assert set(sources["token"]) <= set(attribution.tokens)
    assert len(attribution.plot().data) == len({row.part for row in attribution.parts})
    assert json.loads(json.dumps(attribution.to_dict()))["parts"][0]["part"] == "embedding"
    largest = attribution.top(3, "heads")
    assert abs(largest[0].value) >= abs(largest[1].value) >= abs(largest[2].value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((99, 4, TOKEN), "position 99 was not read"),
        ((-1, 9, TOKEN), "level 9 was not read"),
        ((-1, 4, "two words of text"), "token"),
        ((-1, 4, 10**9), "expected a token id"),
    ],
)
def test_bad_arguments_are_refused(model, arguments, message):
    trajectory = lj.Lens(model)(TEXT)
    with pytest.raises(BadText, match=message):
        trajectory.attribution(*arguments)


def test_a_site_inside_a_block_is_refused(model):
    trajectory = lj.Lens(model)(TEXT, levels=["2.mid"])
    with pytest.raises(BadModel, match="expected a level to attribute"):
        trajectory.attribution(-1, "2.mid", TOKEN)


def test_the_command_explains_the_top_token(data_folder):
    output = run("explain", str(data_folder / "tiny-gpt2"), TEXT, "--json").stdout
    attribution = json.loads(output)
    assert attribution["level"] == 4
    assert sum(row["value"] for row in attribution["parts"]) == pytest.approx(attribution["reading"], abs=1e-4)


def test_a_position_that_the_text_does_not_have_is_refused(monkeypatch, capsys, data_folder):
    folder = str(data_folder / "tiny-gpt2")
    assert "position 99 was not read" in refused(monkeypatch, capsys, "explain", folder, TEXT, "--position", "99")

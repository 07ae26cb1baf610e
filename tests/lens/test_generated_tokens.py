"""A lens reads what a model generates after a text, a chat, or in the decoder of an encoder–decoder."""

import json

import pytest
import torch
from helpers.cli import run
from helpers.seq2seq_models import made

import layerjump as lj
from layerjump.errors import BadModel, BadText

TEXT, NEW = "Once upon a time, there was a little", 6
NUMBERS = "12 13 14 15 16"


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module", params=["t5", "bart"])
def encoder_decoder(request):
    return made(request.param)


def test_the_models_own_continuation_is_read_too(model):
    lens = lj.Lens(model)
    plain, longer = lens(TEXT), lens(TEXT, new_tokens=NEW)
    n = len(plain.prompt.ids)
    expected = model.hf.generate(torch.tensor([plain.prompt.ids]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    assert list(longer.prompt.ids) == expected
    assert longer.roles == ("prompt",) * n + ("generated",) * NEW
    assert longer.positions == tuple(range(n + NEW))
    torch.testing.assert_close(longer.probability[:, :n], plain.probability, rtol=1e-4, atol=1e-5)
    # Greedy: every generated token is the top token at the position before it.
    assert longer.model_top[n - 1 : -1].tolist() == expected[n:]
    assert plain.roles == ()
    both = lens([TEXT, "One day"], new_tokens=2)
    assert [one.roles.count("generated") for one in both] == [2, 2]


def test_what_is_generated_under_an_intervention_is_read(model):
    lens = lj.Lens(model)
    with lj.steer(lens, " dog", levels=[3], strength=2.0):
        steered = lens(TEXT, new_tokens=NEW)
        expected = model.hf.generate(torch.tensor([lens(TEXT).prompt.ids]), max_new_tokens=NEW, do_sample=False)
    assert list(steered.prompt.ids) == expected[0].tolist() != list(lens(TEXT, new_tokens=NEW).prompt.ids)


def test_roles_are_in_every_rendering(model):
    trajectory = lj.Lens(model)(TEXT, new_tokens=2)
    assert "generated" in trajectory._repr_html_()
    figure = trajectory.plot()
    assert figure.layout.xaxis.ticktext[-1].endswith("<br>generated")
    assert ", generated" in figure.data[0].hovertext[0][-1]
    assert set(trajectory.to_pandas()["role"]) == {"prompt", "generated"}
    sources = trajectory.attribution(-1, 2).to_pandas("sources")
    assert set(sources["role"]) == {"prompt", "generated"}


@pytest.mark.parametrize(("new_tokens", "message"), [(-1, "0 or more"), (10**6, "ask for fewer")])
def test_numbers_of_new_tokens_that_cannot_be(model, new_tokens, message):
    with pytest.raises(BadText, match=message):
        lj.Lens(model)(TEXT, new_tokens=new_tokens)


def test_a_masked_model_generates_nothing(data_folder):
    with pytest.raises(BadModel, match="expected a model that generates text"):
        lj.Lens(lj.load(data_folder / "tiny-bert"))("Lily saw a [MASK] dog.", new_tokens=1)


def test_an_encoder_reads_the_text_and_the_lens_its_decoder(encoder_decoder):
    model, lens = encoder_decoder, lj.Lens(encoder_decoder)
    trajectory = lens(NUMBERS, new_tokens=4)
    tokenization = model.tokenization
    source = torch.tensor([tokenization.wrap(tokenization.encode([NUMBERS])[0])])
    start = torch.tensor([[tokenization.start, *tokenization.prefix]])
    expected = model.hf.generate(input_ids=source, decoder_input_ids=start, max_new_tokens=4, do_sample=False)
    assert list(trajectory.prompt.ids) == expected[0].tolist()
    with torch.no_grad():
        logits = model.hf(input_ids=source, decoder_input_ids=expected).logits[0]
    assert trajectory.model_top.tolist() == logits.argmax(-1).tolist()
    attribution = trajectory.attribution(-1, model.n_blocks, 40, 41)
    assert attribution.reading == pytest.approx(float(logits[-1, 40] - logits[-1, 41]), abs=1e-5)
    assert abs(attribution.error) < 1e-6
    assert {row.part for row in attribution.parts} >= {"embedding", "attn", "xattn", "ffn"}
    with lj.steer(lens, 40, levels=[model.n_blocks], strength=5.0):
        assert lens(NUMBERS).model_top[-1] == 40


def test_a_decoder_starts_as_it_was_trained(encoder_decoder):
    tokenization = encoder_decoder.tokenization
    assert lj.Lens(encoder_decoder)(NUMBERS).prompt.ids == (tokenization.start, *tokenization.prefix)


def test_the_command_line_compares_continuations_side_by_side(data_folder, model):
    folder, edit = str(data_folder / "tiny-gpt2"), ("--steer", " dog", "--strength", "2", "--levels", "2-3")
    options = ("--lenses", "identity", "--new-tokens", "4", "--concept", "pets=dog,cat", *edit)
    shown = run("lens", folder, TEXT, *options).stdout
    lens = lj.Lens(model)
    before = lens(TEXT, new_tokens=4)
    with lj.steer(lens, " dog", levels=[2, 3], strength=2.0):
        after = lens(TEXT, new_tokens=4)
    for when, trajectory in (("before", before), ("after", after)):
        new = "".join(model.token_texts(trajectory.prompt.ids[-4:]))
        assert f"{when}: {new.replace(' ', '␣')}" in shown
    assert "after: +2 towards ' dog' at levels 2-3" in shown
    record = json.loads(run("lens", folder, TEXT, *options, "--json").stdout)
    assert [one["concepts"]["pets"] for one in record] == [
        pytest.approx(one.concept(["dog", "cat"]).probability[:, -1].tolist()) for one in (before, after)
    ]
    assert record[0]["roles"][-1] == "generated"

"""Pruning: exact where algebra says so, in every family; on trained models the better stand-in has the lower loss."""

from __future__ import annotations

import pytest
import torch
from tiny import CASES, silent_gpt2, tiny_model
from words import llama as llama_words

import layerjump as lj
from layerjump.compress import choose as choosing
from layerjump.compress.blocks import cannot_drop, without_blocks
from layerjump.compress.cuts import blocks_in, how_many, sink_blocks, spans
from layerjump.compress.fold import ADDED, PAIRS, STREAM, TARGET, rows, solve_fold
from layerjump.compress.loss import losses
from layerjump.compress.projections import cannot_fold, cannot_turn, last_of, map_output
from layerjump.compress.prune import calibrate, cut_out
from layerjump.compress.turn import can_stretch, turn
from layerjump.errors import BadModel, BadPruning, LayerjumpError, TextTooShort
from layerjump.fit.moments import Moments
from layerjump.inputs.anatomy import Anatomy
from layerjump.inputs.batches import batches, one_batch
from layerjump.inputs.check import sample, self_check
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model
from layerjump.inputs.positions import Positions
from layerjump.inputs.states import states

EVERY = Positions("all", skip_first=0, special=True)


def wrapped(hf, words: bool = False) -> Model:
    return Model(hf, Anatomy(hf), "tiny", llama_words() if words else None)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def model(request: pytest.FixtureRequest) -> Model:
    return wrapped(tiny_model(*request.param))


def prunable(model: Model) -> Model:
    if cannot_drop(model):
        with pytest.raises(BadModel, match="give"):
            without_blocks(model, [2])
        pytest.skip("no block can be taken out")
    return model


def logits(model: Model, batch) -> torch.Tensor:
    with torch.no_grad():
        found = model.hf(batch.input_ids, attention_mask=batch.attention_mask).logits
    return found[batch.row, batch.position]


def test_a_shorter_model_passes_the_self_check(model):
    shorter = without_blocks(prunable(model), [2])
    assert shorter.n_blocks == model.n_blocks - 1
    assert [check.name for check in self_check(shorter) if not check.passed] == []
    assert model.n_blocks == len(model.anatomy.blocks)  # the model itself is as it was


def test_a_stretched_stream_gives_the_same_logits(model):
    """Levels 1 on are twice as long: block 1 writes twice as much on a stream that enters twice as long."""
    prunable(model)
    if cannot_fold(model) or not can_stretch(model):
        pytest.skip("nothing to stretch")
    copy = without_blocks(model, [])
    for module in copy.hf.modules():  # what a norm adds to the variance is not stretched
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 0.0)
    before = logits(copy, sample(copy))
    handle = copy.anatomy.blocks[0].register_forward_pre_hook(
        lambda module, args: (2 * args[0], *args[1:])
    )
    turn(copy, 0, None, 2.0)
    assert torch.allclose(logits(copy, sample(copy)), before, rtol=0, atol=1e-4)
    handle.remove()


def test_a_turned_stream_gives_the_same_logits(model):
    """To rounding, which is float32: these norms compute in it whatever the model does."""
    prunable(model)
    if cannot_turn(model):
        pytest.skip(cannot_turn(model))
    copy = without_blocks(model, [])
    before = logits(copy, sample(copy))
    rotation, _ = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))
    turn(copy, 1, rotation)
    plain = copy.anatomy.blocks[0].register_forward_hook(lambda module, args, out: out @ rotation.T)
    assert torch.allclose(logits(copy, sample(copy)), before, rtol=0, atol=1e-4)
    plain.remove()
    assert not torch.allclose(logits(copy, sample(copy)), before, atol=1e-2)
    assert torch.equal(logits(model, sample(model)), before)


def test_a_map_merged_into_feed_forward_is_the_map_of_its_output(model):
    prunable(model)
    if cannot_fold(model):
        pytest.skip(cannot_fold(model))
    copy, batch = without_blocks(model, []), sample(model)
    weight, shift = torch.randn(32, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    layer = last_of(copy, 2)
    biased = getattr(layer, "bias", None) is not None
    map_output(layer, weight, shift if biased else None)
    if not biased:
        with pytest.raises(BadModel, match="no bias"):
            map_output(layer, torch.eye(32, dtype=torch.float64), shift)
    (before,) = states(model, [batch], ["2.ffn.out", 2])
    (after,) = states(copy, [batch], ["2.ffn.out", 2])
    expected = before["2.ffn.out"] @ weight.T + (shift if biased else 0)
    assert torch.allclose(after["2.ffn.out"], expected, rtol=0, atol=1e-10)
    assert torch.allclose(after[2] - before[2], expected - before["2.ffn.out"], atol=1e-10)


def toy_text(count: int = 60) -> Corpus:
    draw = torch.Generator().manual_seed(3)
    lines = torch.randint(0, 54, (count, 12), generator=draw).tolist()
    return Corpus("toy", tuple(" ".join(map(str, line)) for line in lines), "made for a test")


@pytest.mark.parametrize("block", [1, 2, 3])
def test_an_exactly_affine_block_is_replaced_exactly(block):
    """Also the first and the last, where that is asked for."""
    model = wrapped(silent_gpt2(), words=True)
    others = [b for b in (1, 2, 3) if b != block]
    pruned = lj.prune(
        model, toy_text(), drop=1, method="linear", choice="linearity", protect=others
    )
    assert pruned.dropped == (block,)
    batch = sample(model)
    assert torch.allclose(logits(pruned.model, batch), logits(model, batch), rtol=0, atol=1e-8)
    assert pruned.loss["ratio"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("method", ["replaceme", "fold"])
def test_a_fold_is_exact_where_a_block_adds_a_constant(method):
    model = wrapped(silent_gpt2(), words=True)
    pruned = lj.prune(model, toy_text(), drop=1, method=method, choice="deepest")
    assert pruned.dropped == (2,)
    batch = sample(model)
    assert torch.allclose(logits(pruned.model, batch), logits(model, batch), rtol=0, atol=1e-7)


def folded(target, added, stream, **settings):
    sums = Moments(PAIRS, reservoir=0)
    for part in range(0, len(target), 50):
        some = (state[part : part + 50] for state in (added, stream, target))
        sums.add(rows(*some, intercept=settings["intercept"], weighted=True))
    return solve_fold(sums, **settings)


def test_fold_and_turn_find_what_was_put_in():
    """h such that a y + A m is a rotated h exactly: the closed form must come back with a zero error."""
    torch.manual_seed(2)
    m, y = torch.randn(400, 6, dtype=torch.float64), torch.randn(400, 6, dtype=torch.float64)
    weight, shift = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    h = 1.7 * (y + m @ weight.T + shift)
    found = folded(h, m, y, intercept=True, stretch=True, turned=False)
    assert found.scale == pytest.approx(1 / 1.7)
    assert torch.allclose(found.weight, weight)
    assert torch.allclose(found.bias, shift)
    small, _ = torch.linalg.qr(torch.eye(6).double() + 0.2 * torch.randn(6, 6, dtype=torch.float64))
    small = small * small.diagonal().sign()
    turned = folded(h @ small, m, y, intercept=True, stretch=True, turned=True)
    made = y + m @ turned.weight.T + turned.bias
    wanted = turned.scale * (h @ small) @ turned.rotation.T
    assert (made - wanted).norm() < 0.05 * wanted.norm()
    plain = folded(h @ small, m, y, intercept=True, stretch=True, turned=False)
    off = y + m @ plain.weight.T + plain.bias - plain.scale * (h @ small)
    assert (made - wanted).norm() < 0.5 * off.norm()


def test_the_products_named_are_the_feed_forwards_last():
    sums = [str(site) for pair in PAIRS for site in pair]
    assert set(sums) == {str(ADDED), str(STREAM), str(TARGET)}


@pytest.fixture(scope="module")
def trained(real_folder) -> tuple[Model, Corpus]:
    stories = real_folder("stories15M").parents[1] / "text/tinystories/tinystories_train_sample.txt"
    return lj.load(real_folder("stories15M")), lj.read(stories, limit=60)


def test_on_a_trained_model_each_method_beats_the_one_before(trained):
    """On one cut; the order of the papers, and ours behind them."""
    model, text = trained
    calibration = calibrate(model, text, tokens=4_000, sizes="80/5/15", seed=0)
    before = losses(model, calibration.test).mean
    found = {
        method: losses(cut_out(model, [(2, 3)], method, calibration).model, calibration.test).mean
        for method in ("remove", "replaceme", "fold", "turn", "linear")
    }
    assert before < found["turn"] < found["fold"] < found["replaceme"] < found["remove"]
    assert found["linear"] < found["replaceme"]


@pytest.fixture(scope="module")
def gpt2(data_folder) -> Model:
    return lj.load(data_folder / "tiny-gpt2")


def test_a_later_cut_is_fitted_on_the_pruned_models_states(trained):
    """Two cuts: the second one's source is what the first one leaves."""
    model, text = trained
    calibration = calibrate(model, text, tokens=4_000, sizes="80/5/15", seed=0)
    made = cut_out(model, [(1, 2), (3, 4)], "turn", calibration)
    assert [frame.level for frame in made.frames] == [1, 2]
    (batch,) = [calibration.test[0]]
    (ours,) = states(made.model, [batch], [2])
    (theirs,) = states(model, [batch], [4])
    frame = made.frames[-1]
    wanted = frame.scale * theirs[4] @ frame.rotation.float().T
    error = (ours[2] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.median()) < 0.6


@pytest.mark.parametrize("choice", choosing.CHOICES)
def test_every_choice_keeps_the_ends(gpt2, study_text, choice):
    pruned = lj.prune(gpt2, study_text, drop=2, choice=choice, method="remove", tokens=3_000)
    assert len(pruned.dropped) == 2
    assert not {1, gpt2.n_blocks} & set(pruned.dropped)
    assert pruned.model.n_blocks == 2
    assert pruned.loss["after"] > 0


def test_by_loss_the_first_choice_is_the_least_loss(gpt2, study_text):
    calibration = calibrate(gpt2, study_text, tokens=4_000, sizes="80/10/10", seed=0)
    given = choosing.Choosing(gpt2, calibration.fit, calibration.select, [1, 4], mapped=False)
    (best,) = choosing.choose("loss", 1, given)
    found = {b: losses(without_blocks(gpt2, [b]), calibration.select).mean for b in (2, 3)}
    assert best == min(found, key=found.get)
    trial = choosing.Trial(given, 1)
    for block, loss in found.items():
        assert trial.loss(spans([block])) == pytest.approx(loss, abs=1e-4)


def test_losses_are_hugging_faces_own(gpt2, study_text):
    text = Corpus("one", study_text.documents[:1], "")
    batch = batches(text, gpt2.tokens, EVERY, max_length=40)[0]
    found = losses(gpt2, [batch])
    row = batch.input_ids[:1, : int(batch.attention_mask[0].sum())]
    alone = losses(gpt2, [one_batch(row[0].tolist())])
    with torch.no_grad():
        theirs = gpt2.hf(row, labels=row).loss
    assert alone.mean == pytest.approx(float(theirs), abs=1e-5)
    assert found.over(found)[0] == 1


def test_max_loss_is_kept(gpt2, study_text):
    pruned = lj.prune(gpt2, study_text, max_loss=1.2, choice="deepest", tokens=4_000)
    calibration = calibrate(gpt2, study_text, tokens=4_000, sizes="80/10/10", seed=0)
    limit = 1.2 * losses(gpt2, calibration.select).mean
    assert losses(pruned.model, calibration.select).mean <= limit


def test_a_block_that_forms_a_sink_is_found():
    """Block 2 of this model writes a huge state at the first position alone."""
    model = wrapped(tiny_model("gpt2"), words=True)
    text = batches(toy_text(), model.tokens, EVERY)

    def swell(module, args, output):
        output = output.clone()
        output[:, 0] *= 20
        return output

    assert sink_blocks(model, text) == []
    handle = model.anatomy.blocks[1].register_forward_hook(swell)
    try:
        assert sink_blocks(model, text) == [2]
    finally:
        handle.remove()


def test_runs_and_blocks():
    assert spans([5, 3, 4, 9]) == [(2, 5), (8, 9)]
    assert blocks_in([(2, 5), (8, 9)]) == (3, 4, 5, 9)
    assert [how_many(given, 30) for given in (8, "8", "25%", "10%")] == [8, 8, 8, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop": 4}, "leaves none"),
        ({"drop": "100%"}, "leaves none"),
        ({"drop": "150%"}, "leaves none"),
        ({"drop": -1}, "less than one"),
        ({"drop": "-25%"}, "less than one"),
        ({"drop": "some"}, "a number of blocks"),
        ({"drop": 3}, "only 2 may go"),
        ({"drop": 1, "method": "magic"}, "give one of"),
        ({"drop": 1, "choice": "taste"}, "give one of"),
        ({"drop": 1, "method": "turn"}, "give fold"),
        ({"drop": 1, "protect": [7]}, "blocks 1 to 4"),
        ({"drop": 1, "max_loss": 1.1}, "either"),
        ({}, "either"),
        ({"max_loss": 0.9}, "more than 1"),
        ({"drop": 1, "choice": "deepest", "protect": [2, 3, 4], "method": "fold"}, "first block"),
    ],
)
def test_senseless_requests_are_refused(gpt2, study_text, settings, message):
    with pytest.raises(BadPruning, match=message):
        lj.prune(gpt2, study_text, tokens=3_000, **settings)


def test_a_text_too_short_for_the_width_is_refused(gpt2):
    few = Corpus("few", ("one two three",) * 4, "")
    with pytest.raises(TextTooShort, match="positions to fit maps of width"):
        lj.prune(gpt2, few, drop=1, method="fold", choice="deepest", sizes="2/1/1")


def test_families_that_cannot_fold_say_why(data_folder, study_text):
    bert = lj.load(data_folder / "tiny-bert")
    with pytest.raises(BadPruning, match="give linear or remove"):
        lj.prune(bert, study_text, drop=1, method="fold", tokens=2_000)
    pruned = lj.prune(bert, study_text, drop=1, choice="influence", tokens=2_000)
    assert pruned.method == "remove"
    gemma = wrapped(tiny_model("gemma2"), words=True)
    with pytest.raises(LayerjumpError, match="norm stands behind"):
        lj.prune(gemma, toy_text(), drop=1, method="fold")

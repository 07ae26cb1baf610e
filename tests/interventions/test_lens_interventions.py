"""Interventions equal hand-written hooks, act wherever the model runs, and leave nothing behind."""

import json

import pytest
import torch
from helpers.cli import refused, run

import layerjump as lj
from layerjump.errors import BadIntervention, BadJumps, BadModel, BadText
from layerjump.models.frozen_scales import linearize_at

TEXT, OTHER = "Once upon a time, there was a little girl named", "One day, Tom went to the park with his big red"


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def lens(model):
    return lj.Lens(model, lj.fit(model, lj.load_text("pydoc", limit=150)))


def ids_of(model, text):
    return torch.tensor([model.tokenization.wrap_prompt(model.tokenization.encode([text])[0])])


def logits(model, text=TEXT):
    with torch.no_grad():
        return model.hf(ids_of(model, text)).logits[0]


def logits_with(model, block, change, text=TEXT):
    """Logits with a hand-written hook on the output of a block, counted from 1."""

    def hook(module, args, output):
        states = output[0] if isinstance(output, tuple) else output
        changed = change(states.clone())
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = model.hf.transformer.h[block - 1].register_forward_hook(hook)
    try:
        return logits(model, text)
    finally:
        handle.remove()


def test_steering_adds_a_share_of_each_states_norm(model, lens):
    unit = lens.direction(" dog", 2).float()

    def change(states):
        states[:, [3, 5]] += 0.7 * states[:, [3, 5]].norm(dim=-1, keepdim=True) * unit
        return states

    expected = logits_with(model, 2, change)
    with lj.steer(lens, " dog", levels=[2], strength=0.7, positions=[3, 5]):
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, logits(model), atol=1e-3)


def test_a_vector_steers_whatever_its_length(model, lens):
    vector = torch.randn(model.d_model, generator=torch.Generator().manual_seed(0))
    results = []
    for scale in (1.0, 50.0):
        with lj.steer(lens, scale * vector, levels=[1, 3], strength=-0.2):
            results.append(logits(model))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_swap_exchanges_what_the_lens_reads_and_nothing_else(model, lens):
    level = 3
    first, second = (lens.direction(token, level) for token in (" dog", " girl"))
    plain = lens(TEXT, levels=[level])
    with lj.swap(lens, " dog", " girl", levels=[level]):
        swapped = lens(TEXT, levels=[level])
    before, after = (t.states.states[0].double() for t in (plain, swapped))
    torch.testing.assert_close(after @ first, before @ second, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after @ second, before @ first, rtol=1e-4, atol=1e-4)
    plane = torch.linalg.qr(torch.stack([first, second], 1)).Q
    rest_before, rest_after = (states - (states @ plane) @ plane.mT for states in (before, after))
    torch.testing.assert_close(rest_after, rest_before, rtol=1e-4, atol=1e-4)
    with lj.swap(lens, " dog", " girl", levels=[level]), lj.swap(lens, " girl", " dog", levels=[level]):
        twice = lens(TEXT, levels=[level]).states.states[0]
    torch.testing.assert_close(twice, plain.states.states[0], rtol=1e-4, atol=1e-4)


def test_ablation_leaves_no_component(model, lens):
    vector = torch.randn(model.d_model, generator=torch.Generator().manual_seed(1))
    with lj.ablate(lens, [" dog", vector], levels=[2]):
        states = lens(TEXT, levels=[2]).states.states[0].double()
    assert (states @ lens.direction(" dog", 2)).abs().max() < 1e-4
    assert (states @ vector.double()).abs().max() < 1e-4


def test_directions_of_a_lens_that_reads_the_rms_too(model):
    """A `calibrated` lens has a direction for each state: the gradient of the logit with the rms frozen."""
    both = lj.Lens(model, lj.fit(model, lj.load_text("pydoc", limit=150), estimator="calibrated", features="both"))
    state = both(TEXT, levels=[2]).states.states[0][4]
    unembedding = model.hf.lm_head.weight.double()
    weights = unembedding[model.prediction_id(" dog")] - unembedding.mean(0)
    gradient, _ = linearize_at(both.readout(2).to_final, state, weights)
    direction = both.direction(" dog", 2, state)
    torch.testing.assert_close(direction, gradient.double() / gradient.double().norm(), rtol=1e-4, atol=1e-5)
    with lj.ablate(both, [" dog"], levels=[2]):
        ablated = logits(model)

    def change(states):
        units = torch.stack([both.direction(" dog", 2, row) for row in states[0]]).float()
        return states - (states[0] * units).sum(-1, keepdim=True) * units

    torch.testing.assert_close(ablated, logits_with(model, 2, change), rtol=1e-4, atol=1e-4)
    with lj.swap(both, " dog", " girl", levels=[1, 2]), lj.steer(both, " dog", levels=[3]):
        assert not torch.allclose(logits(model), ablated, atol=1e-3)
    with pytest.raises(BadJumps, match="depends on the state"):
        both.direction(" dog", 2)


def test_a_patched_state_is_the_other_texts(model, lens):
    source = lens(OTHER, levels=[1, 2])
    state = source.state(2, 5)

    def change(states):
        states[:, 7] = state
        return states

    expected = logits_with(model, 2, change)
    with lj.patch(lens, source, levels=[2], positions=[7], source_positions=[5]):
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_all_levels_and_positions_patched_with_the_own_text_change_nothing(model, lens):
    source = lens(TEXT)
    levels, positions = range(model.n_blocks), source.positions
    with lj.patch(lens, source, levels=levels, positions=positions):
        torch.testing.assert_close(logits(model), logits(model), rtol=1e-5, atol=1e-5)
        inside = logits(model)
    torch.testing.assert_close(inside, logits(model), rtol=1e-5, atol=1e-5)


def test_interventions_end_with_their_block_also_after_an_error(model, lens):
    before = logits(model)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.hf.modules()]
    with pytest.raises(RuntimeError, match="inside"), lj.steer(lens, " dog", levels=[1]):
        raise RuntimeError("inside")
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.hf.modules()] == hooks
    assert torch.equal(before, logits(model))


@pytest.mark.parametrize("positions", [None, [2, 12, 14]])
def test_both_generations_and_a_full_pass_agree(model, lens, positions):
    """With and without a KV cache, in Hugging Face's loop and in ours, at prompt and generated positions."""
    ids = ids_of(model, TEXT)
    with lj.steer(lens, " dog", levels=[2, 3], strength=0.8, positions=positions):
        cached = model.hf.generate(ids, max_new_tokens=8, do_sample=False)
        uncached = model.hf.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)
        ours = lj.generate(model, None, TEXT, max_new_tokens=8, do_sample=False)
        verified = lj.generate(model, lens.jumps, TEXT, exit="gap:0.3", verify=True, max_new_tokens=8, do_sample=False)
    plain = model.hf.generate(ids, max_new_tokens=8, do_sample=False)
    assert cached.tolist() == uncached.tolist()
    new = cached[0, ids.shape[1] :].tolist()
    assert ours.ids == [new]
    assert verified.ids == [new]
    assert cached.tolist() != plain.tolist()


def test_positions_are_those_of_each_text_in_a_padded_batch(model, lens):
    """Generation pads prompts on the left, so a position of the text is another column in each row."""
    prompts = [TEXT, OTHER, "One day"]
    edits = {
        "steer": lambda: lj.steer(lens, " dog", levels=[2, 3], strength=2.0, positions=[1]),
        "patch": lambda: lj.patch(lens, lens(OTHER), levels=[1, 3], positions=[1], source_positions=[6]),
    }
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = lj.generate(model, None, prompts, **options).ids
    for edit in edits.values():
        with edit():
            together = lj.generate(model, None, prompts, **options).ids
            inputs = model.tokenization.generation_inputs(prompts)
            theirs = model.hf.generate(**inputs, pad_token_id=model.tokenization.pad, **options)
            alone = [lj.generate(model, None, prompt, **options).ids[0] for prompt in prompts]
        assert together == alone == theirs[:, inputs["input_ids"].shape[1] :].tolist()
        assert together != plain


def test_hooks_of_other_tools_see_the_changed_states(model, lens):
    seen = []
    with lj.ablate(lens, [" dog"], levels=[2]):
        handle = model.hf.transformer.h[1].register_forward_hook(lambda m, a, out: seen.append(out))
        logits(model)
        handle.remove()
    states = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert (states.double() @ lens.direction(" dog", 2)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda lens: lj.steer(lens, " dog", levels=[]), BadIntervention),
        (lambda lens: lj.steer(lens, " dog", levels=3), BadIntervention),
        (lambda lens: lj.steer(lens, " dog", levels=[99]), BadModel),
        (lambda lens: lj.steer(lens, "two words of it", levels=[1]), BadText),
        (lambda lens: lj.steer(lens, torch.zeros(80), levels=[1]), BadIntervention),
        (lambda lens: lj.steer(lens, torch.ones(7), levels=[1]), BadIntervention),
        (lambda lens: lj.steer(lens, " dog", levels=[1], positions=[-1]), BadIntervention),
        (lambda lens: lj.ablate(lens, [], levels=[1]), BadIntervention),
        (lambda lens: lj.ablate(lens, " dog", levels=[1]), BadIntervention),
        (lambda lens: lj.patch(lens, lens(TEXT, levels=[1]), levels=[2], positions=[0]), BadText),
        (lambda lens: lj.patch(lens, lens(TEXT), levels=[2], positions=[0], source_positions=[1, 2]), BadIntervention),
    ],
)
def test_bad_arguments_are_refused_before_the_model_runs(lens, call, error):
    with pytest.raises(error), call(lens):
        pytest.fail("the block runs")


def test_the_commands_show_before_and_after(data_folder, model):
    folder, edit = str(data_folder / "tiny-gpt2"), ("--swap", " dog", " girl", "--levels", "2-3")
    read = run("lens", folder, TEXT, "--lenses", "identity", *edit, "--json")
    before, after = json.loads(read.stdout)
    with lj.swap(lj.Lens(model), " dog", " girl", levels=[2, 3]):
        expected = lj.Lens(model)(TEXT, k=5).to_dict()
    assert after["top"] == expected["top"] != before["top"]
    assert after["intervention"] == "' dog' and ' girl' exchanged at levels 2-3"
    written = json.loads(
        run("generate", folder, TEXT, "--steer", " dog", "--levels", "3", "--strength", "2", "--json").stdout
    )
    assert written["changed"][0]["ids"] != written["texts"][0]["ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--swap", " dog", " girl"], "expected --levels"),
        (["--ablate", " dog", "--levels", "99"], "levels 0 to 4"),
        (["--steer", " dog", "--levels", "1", "--edit-positions", "x"], "expected numbers"),
    ],
)
def test_bad_options_are_one_line(monkeypatch, capsys, data_folder, options, message):
    folder = str(data_folder / "tiny-gpt2")
    assert message in refused(monkeypatch, capsys, "lens", folder, TEXT, "--lenses", "identity", *options)

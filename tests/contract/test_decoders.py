"""Early-exit generation on every decoder family: the full model's text and KV cache, wherever tokens exit."""

from __future__ import annotations

import pytest
import torch
from helpers.family_table import FAMILIES
from helpers.tiny_models import CASES, tiny_model
from transformers import DynamicCache, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import layerjump as lj
from layerjump.generation.block_runner import BlockRunner, HuggingFaceBlocks
from layerjump.generation.combine_drafters import FREE, DraftConfig, DrafterName, Drafting
from layerjump.generation.decoding_loop import Decoder, ExitDrafter, Sequences
from layerjump.generation.drafters import HeadJump
from layerjump.generation.exit_rules import ExitConfig, Fixed, Never
from layerjump.generation.generate import generate
from layerjump.jumps.maps import Affine, to_module
from layerjump.lens.lens import Lens
from layerjump.models.discovery import discover
from layerjump.models.model import Model
from layerjump.models.sites import FINAL

DECODERS = [case for case in CASES if FAMILIES[case[0]].task == "causal"]
END, NEW = 2, 14


class Hashed:
    """Exits pseudo-randomly, as the digits of the state decide: the same state always exits."""

    levels = None

    def __init__(self, share: float) -> None:
        self.share = share

    def should_exit(self, reading):
        return (reading.states.abs().sum(-1) * 1e4 % 1) < self.share


@pytest.fixture(scope="module", params=DECODERS, ids=lambda case: "-".join(filter(None, case)))
def model(request) -> Model:
    # Eager attention in float64 makes NaN of a row with padding: Hugging Face's, so ours too.
    eager = request.param[0] in ("bloom", "gemma2", "gpt_neo", "gptj")
    hf = tiny_model(*request.param, dtype=torch.float32 if eager else torch.float64)
    return Model(hf, discover(hf), "-".join(request.param))


def prompts(rows: int = 3) -> dict[str, torch.Tensor]:
    """Prompts of unequal length, padded on the left."""
    ids = torch.randint(3, 61, (rows, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row - 1] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def theirs(model: Model, inputs, **settings) -> list[list[int]]:
    """Hugging Face's own new tokens, without padding."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | settings
    found = model.hf.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in found]


def ours(model: Model, inputs, rule, **settings):
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | settings
    return generate(model, None, inputs, exit=rule, **settings)


def test_without_exits_the_text_is_the_models(model):
    for inputs in (prompts(1), prompts(3)):
        assert ours(model, inputs, Never()).ids == theirs(model, inputs)


def test_verified_text_is_the_models_whatever_the_rule(model):
    cases = (prompts(1), 3, Hashed(0.8)), (prompts(3), 6, Hashed(0.5)), (prompts(1), 2, Fixed(0))
    for inputs, most, rule in cases:
        made = ours(model, inputs, rule, verify=True, max_draft_tokens=most)
        assert made.ids == theirs(model, inputs)
        assert made.counts.drafts > 0


def decode(model: Model, rule, inputs, steps: int):
    """Decode random tokens one after another with a rule; the runner, all tokens and the levels reached."""
    mask = inputs["attention_mask"]
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    padding = None if bool(mask.all()) else mask
    runner = BlockRunner(model, HuggingFaceBlocks(model), padding, position)
    ids, rows = inputs["input_ids"], [True] * len(mask)
    sequences = Sequences(ids, None, pad=0, eos_tokens=frozenset(), streamer=None)
    decoder = Decoder(model, None, ExitConfig(rule), runner, sequences, None, do_sample=False)
    generator = torch.Generator().manual_seed(2)
    levels = []
    with torch.no_grad():
        levels.append(decoder.decode_step(ids, rows).level)
        for _ in range(steps):
            new = torch.randint(3, 61, (len(ids), 1), generator=generator)
            ids = torch.cat([ids, new], 1)
            levels.append(decoder.decode_step(ids, rows).level)
    return runner, ids, levels


def test_keys_and_values_are_those_of_a_full_pass(model):
    """After early exits, every block holds of each row what it holds when the full model reads that row alone."""
    for inputs in (prompts(1), prompts(3)):
        runner, ids, levels = decode(model, Hashed(0.5), inputs, 12)
        assert len(set(levels)) > 1
        assert_cache_equals_full_passes(model, runner, ids, inputs["attention_mask"])


def test_a_fixed_exit_gives_the_top_token_of_the_lens(model):
    for level in range(model.n_blocks):
        inputs = prompts(1)
        batch = lj.batch_from_ids(inputs["input_ids"][0].tolist())
        (states,) = lj.capture_states(model, [batch], [level])
        wanted = int(Lens(model).logits(level, states[level][-1:]).argmax())
        made = ours(model, inputs, Fixed(level), max_new_tokens=1)
        assert made.ids == [[wanted]]
        assert made.exit_levels == [[level]]
        assert made.counts.block_runs == level


def test_stored_keys_and_values_equal_those_of_a_full_run(model):
    """`store` leaves what running the block leaves, for the same states."""
    inputs, hashes = prompts(3), {}
    for how in ("run", "store"):
        runner, ids, _ = decode(model, Never(), inputs, 1)
        with torch.no_grad():
            states = runner.extend(torch.cat([ids, ids[:, -1:]], 1))
            getattr(runner._blocks, how)(1, states)
        hashes[how] = [held.clone() for held in runner.cache.get(1)]
        assert runner.cache.lengths == [8, 9, 8]
    for one, other in zip(hashes["run"], hashes["store"], strict=True):
        assert torch.equal(one, other)


def drafting(*names: DrafterName, **settings) -> DraftConfig:
    """Drafters whose every proposal is verified, whatever it costs."""
    return DraftConfig(names, costs=FREE, **settings)


def random_head(model: Model) -> tuple[HeadJump, ...]:
    width = model.structure.unembedding.get_parameter("weight").shape[1]
    embedding = model.hf.get_input_embeddings().weight.shape[1]
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(width, width + embedding, generator=generator)
    return (HeadJump(to_module(Affine.of(weight)).to(model.dtype), (FINAL,), 1),)


def all_drafters(model: Model) -> dict[str, DraftConfig]:
    head, candidates = random_head(model), torch.arange(61).roll(1)
    return {
        "lookup": drafting("lookup"),
        "recycled": drafting("recycled", candidates=candidates),
        "head": drafting("head", head=head, max_tokens=3),
        "together": drafting("lookup", "recycled", "head", "exit", head=head, max_tokens=5),
    }


def test_drafted_text_is_the_models_with_every_drafter(model):
    n_drafts = 0
    for name, config in all_drafters(model).items():
        for inputs in (prompts(1), prompts(3)):
            made = ours(model, inputs, Hashed(0.5), verify=True, drafts=config)
            assert made.ids == theirs(model, inputs), name
            n_drafts += made.counts.drafts
    assert n_drafts > 0


def test_the_cache_after_rejected_drafts_is_that_of_a_full_pass(model):
    total = 0
    for config in all_drafters(model).values():
        for inputs in (prompts(1), prompts(3)):
            runner, ids, rejected = decode_with_drafts(model, config, inputs)
            assert_cache_equals_full_passes(model, runner, ids, inputs["attention_mask"])
            total += rejected
    assert total > 0


def decode_with_drafts(model: Model, config: DraftConfig, inputs) -> tuple[BlockRunner, torch.Tensor, int]:
    """Decode greedily with drafts; the runner, all tokens and the number of rejected drafts."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    padding = None if bool(mask.all()) else mask
    runner = BlockRunner(model, HuggingFaceBlocks(model), padding, (mask.cumsum(-1) - 1).clamp_min(0))
    length = ids.shape[1] + NEW
    stop = StoppingCriteriaList([MaxLengthCriteria(length)])
    sequences = Sequences(ids, stop, pad=0, eos_tokens=frozenset(), streamer=None)
    processors = LogitsProcessorList()
    decoder = Decoder(model, None, ExitConfig(Hashed(0.5)), runner, sequences, processors, do_sample=False)
    drafters = config.make_drafters(model, None, runner)
    if "exit" in config.drafters:
        drafters.append(ExitDrafter(decoder))
    with torch.no_grad():
        decoder.decode_verified(Drafting(drafters, FREE, max_tokens=config.max_tokens), length)
    return runner, sequences.ids[:, :length], decoder.counts.drafts - decoder.counts.accepted


def assert_cache_equals_full_passes(model: Model, runner: BlockRunner, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Every block holds of each row what it holds when the full model reads that row alone."""
    for row, padding in enumerate((mask == 0).sum(1).tolist()):
        full = DynamicCache()  # without a configuration no layer forgets what its window has passed
        with torch.no_grad():
            model.hf(input_ids=ids[row : row + 1, padding:], past_key_values=full)
        for block, seen in enumerate(runner.cache.lengths):
            if seen:
                layer, held = full.layers[block], runner.cache.get(block)
                for kept, wanted in zip(held, (layer.keys, layer.values), strict=True):
                    n = min(kept.shape[2] - padding, ids.shape[1] - padding)
                    assert torch.allclose(kept[row, :, padding : padding + n], wanted[0, :, :n], rtol=1e-5, atol=1e-5)

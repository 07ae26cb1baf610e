"""Every check on every family and variant. Adding a family is adding a row; it is picked up here by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.family_table import family_of
from helpers.tiny_models import CASES, tiny_model

from layerjump.data.batches import Batch
from layerjump.lens.attribution import attribute
from layerjump.lens.lens import Lens
from layerjump.lens.prepare_prompt import Prompt
from layerjump.models.discovery import discover
from layerjump.models.hooks import Capture
from layerjump.models.hugging_face_config import example_tokens
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import readings, reassembly, sample, self_check
from layerjump.models.sites import FINAL, Site
from layerjump.models.structure import Structure

EXACT = 1e-12


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def model(request: pytest.FixtureRequest) -> Model:
    hf = tiny_model(*request.param)
    return Model(hf, discover(hf), "-".join(request.param))


@pytest.fixture
def batch(model: Model) -> Batch:
    return sample(model, rows=3, length=14)


def at(tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    return tensor[batch.row, batch.position]


def hf_output(model: Model, batch: Batch):
    """Hugging Face's own forward pass; of an encoder–decoder the decoder's hidden states."""
    given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if model.task == "seq2seq":
        given = {f"decoder_{name}": value for name, value in given.items()}
        given |= {"input_ids": batch.source_ids, "attention_mask": batch.source_mask}
    with torch.no_grad():
        output = model.hf(**given, output_hidden_states=True)
    if model.task == "seq2seq":
        output.hidden_states = output.decoder_hidden_states
    return output


def run_body(model: Model, batch: Batch, ids: torch.Tensor) -> None:
    """The body on these ids, nothing masked; an encoder–decoder's encoder reads the batch's source."""
    source = batch.source_ids
    model.run_body(ids, torch.ones_like(ids), source, None if source is None else torch.ones_like(source))


def test_the_self_check_passes(model):
    checks = self_check(model)
    assert [check.name for check in checks if not check.passed] == []
    assert max(check.difference or 0 for check in checks) < EXACT


def test_discovery_finds_what_the_row_read_by_hand_says(model):
    """Blocks, sites, and the modules at which states are captured."""
    row, structure = family_of(model.hf.config), model.structure
    assert structure.degree == "full"
    assert structure.task == row.task
    assert structure.anatomy.notes == ()
    assert model.hf.get_submodule(row.unembedding) is structure.unembedding
    has = {site.part for site in structure.sites()}
    expected = {
        *({"ln1.in", "ln1.out"} if row.ln1 else ()),
        *({"ln2.in", "ln2.out"} if row.ln2 else ()),
        *({"lnx.in", "lnx.out"} if row.lnx else ()),
        *({"xattn.in", "xattn.out", "mid2"} if row.xattn else ()),
        *({"attn_raw", "ffn_raw"} if row.kind == "sandwich" else ()),
        *({"mid"} if row.kind != "parallel" else ()),
    }
    assert has == expected | {"level", "final", "attn.in", "attn.out", "heads", "ffn.in", "ffn.out"}
    for index, block in enumerate(structure.blocks, start=1):
        writers = {write.name: write.output_layer for write in structure.writes(index)}
        assert structure.module(writers["attn"]) is block.get_submodule(row.attn_out_proj)
        assert structure.tap(Site(index, "attn.out")).module is block.get_submodule(row.attn_adds)
        assert structure.tap(Site(index, "ffn.out")).module is block.get_submodule(row.ffn_adds)
        for norm in ("ln1", "lnx", "ln2"):
            if path := getattr(row, norm):
                assert structure.tap(Site(index, f"{norm}.out")).module is block.get_submodule(path)


def test_norm_and_head_of_level_L_are_the_models_logits(model, batch):
    (ours,) = capture_states(model, [batch], [model.n_blocks], logits=True)
    theirs = at(hf_output(model, batch).logits, batch)
    assert torch.allclose(ours.logits, theirs, rtol=0, atol=EXACT)
    assert torch.allclose(model.logits(ours[model.n_blocks]), theirs, rtol=0, atol=EXACT)


def test_levels_below_L_are_hugging_faces_hidden_states(model, batch):
    (ours,) = capture_states(model, [batch], range(model.n_blocks))
    theirs = hf_output(model, batch).hidden_states
    assert len(theirs) == model.n_blocks + 1
    for level in range(model.n_blocks):
        assert torch.allclose(ours[level], at(theirs[level], batch), rtol=0, atol=EXACT)


def test_a_run_that_ends_at_its_last_site_is_as_good_as_a_whole_one(model, batch):
    """It leaves the forward pass in the middle, in every family's own code."""
    (whole,) = capture_states(model, [batch], range(model.n_blocks + 1), logits=True)
    for level in range(model.n_blocks):
        (short,) = capture_states(model, [batch], [level])
        assert torch.equal(short[level], whole[level])
    (again,) = capture_states(model, [batch], [model.n_blocks], logits=True)
    assert torch.equal(again.logits, whole.logits)


def test_level_L_is_before_the_final_norm(model, batch):
    last = model.n_blocks
    (ours,) = capture_states(model, [batch], [last, "final"])
    theirs = at(hf_output(model, batch).hidden_states[-1], batch)
    if model.masked:
        assert torch.allclose(ours[last], theirs, rtol=0, atol=EXACT)
    elif family_of(model.hf.config).to_final:
        # Hugging Face's last entry is after the norm: what we call `final`.
        # T5 scales it once more.
        scaled = family_of(model.hf.config).final_scale * theirs
        assert torch.allclose(ours["final"], scaled, rtol=0, atol=EXACT)
        assert ours[last].shape != theirs.shape or not torch.allclose(ours[last], theirs, atol=1e-3)


def test_final_is_what_enters_the_vocabulary_product(model, batch):
    seen = []
    handle = model.structure.unembedding.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    hf_output(model, batch)
    handle.remove()
    (ours,) = capture_states(model, [batch], [FINAL])
    assert torch.allclose(ours[FINAL], at(seen[0], batch), rtol=0, atol=EXACT)


def test_the_parts_of_each_block_add_up_to_the_next_level(model, batch):
    sites = [site for site in model.structure.sites() if site != FINAL]
    (ours,) = capture_states(model, [batch], sites)
    assert len(reassembly(model, ours.at)) >= model.n_blocks
    for rebuilt, captured in reassembly(model, ours.at) + readings(model, ours.at):
        assert torch.allclose(rebuilt, captured, rtol=0, atol=EXACT)


def test_attention_mixes_tokens_and_feed_forward_does_not(model):
    """Guards the table against attention and feed-forward swapped: only one of them sees another token."""
    one = sample(model, rows=1, length=10)
    other_ids = one.input_ids.clone()
    other_ids[0, 0] = (other_ids[0, 0] + 7) % 60 + 1
    sites = [Site(1, "attn.in"), Site(1, "attn.out"), Site(1, "ffn.in"), Site(1, "ffn.out")]
    pick = torch.tensor([1])
    found = []
    with torch.no_grad(), Capture(model.structure, sites) as capture:
        for ids in (one.input_ids, other_ids):
            capture.start(pick)
            run_body(model, one, ids)
            found.append(capture.take())
    before, after = found
    assert torch.equal(before[sites[0]], after[sites[0]])
    assert not torch.allclose(before[sites[1]], after[sites[1]], atol=1e-6)


def test_cross_attention_reads_the_source_and_self_attention_does_not(model):
    """Guards the table against the two swapped."""
    if model.task != "seq2seq":
        pytest.skip("no encoder beside the decoder")
    batch = sample(model, rows=1, length=10)
    other = replace(batch, source_ids=(batch.source_ids + 7) % 60 + 1)
    same, other_sites = ["1.attn.out", "1.mid", "1.xattn.in"], ["1.xattn.out", "1.mid2"]
    before, after = capture_states(model, [batch, other], same + other_sites)
    for site in same:
        assert torch.equal(before[site], after[site]), site
    for site in other_sites:
        assert not torch.allclose(before[site], after[site], atol=1e-6), site


def test_a_wrong_cross_attention_is_caught(model):
    if model.task != "seq2seq":
        pytest.skip("no encoder beside the decoder")
    failed = [check.name for check in self_check(misread(model, "xattn.out", "attn.out")) if not check.passed]
    assert "blocks" in failed
    failed = [check.name for check in self_check(misread(model, "xattn.in", "ffn.in")) if not check.passed]
    assert "inputs" in failed


def test_a_later_token_changes_no_earlier_state(model):
    if model.masked:
        pytest.skip("an encoder reads both ways")
    batch = sample(model, rows=1, length=14)
    levels = [Site(level) for level in range(model.n_blocks + 1)]
    found = []
    with torch.no_grad(), Capture(model.structure, levels) as capture:
        for token in (5, 50):
            ids = batch.input_ids.clone()
            ids[0, 9:] = token
            capture.start(torch.arange(14))
            run_body(model, batch, ids)
            found.append(capture.take())
    for level in levels:
        assert torch.allclose(found[0][level][:9], found[1][level][:9], rtol=0, atol=EXACT)
        assert not torch.allclose(found[0][level][9:], found[1][level][9:], atol=1e-6)


def test_padding_changes_no_state(model):
    """A row's states are the same alone and beside a longer row."""
    batch = sample(model, rows=2, length=14)
    short = batch.row == 1
    length = int(short.sum())
    sites = [site for site in model.structure.sites() if site != FINAL]
    (together,) = capture_states(model, [batch], sites)
    ids = batch.input_ids[1:, :length]
    position = torch.arange(length)
    row = torch.zeros_like(position)
    alone_batch = Batch(ids, torch.ones_like(ids), row, position, row, ids[0])
    if batch.source_ids is not None:
        source = batch.source_ids[1:, : int(batch.source_mask[1].sum())]
        assert source.shape != batch.source_ids[1:].shape
        alone_batch = replace(alone_batch, source_ids=source, source_mask=torch.ones_like(source))
    (alone,) = capture_states(model, [alone_batch], sites)
    # GPT-Neo and GPT-J compute attention weights in float32 whatever the model's dtype.
    float32_products = ("gpt_neo", "gptj", "t5")  # T5: the norms
    tolerance = 1e-5 if model.hf.config.model_type in float32_products else 1e-10
    for site in sites:
        assert torch.allclose(together[site][short], alone[site], rtol=0, atol=tolerance), site


def test_a_window_shorter_than_the_text_is_honoured(model):
    window = getattr(model.hf.config, "sliding_window", None)
    kinds = getattr(model.hf.config, "layer_types", None) or ["sliding_attention"] * model.n_blocks
    if not window or "full_attention" in kinds:
        pytest.skip("every layer, or some, see the whole text")
    # What a state can depend on reaches back (window − 1) tokens a block, and not one further.
    reach = (window - 1) * model.n_blocks
    batch = sample(model, rows=1, length=14)
    last, found = 13, []
    with torch.no_grad(), Capture(model.structure, [Site(model.n_blocks)]) as capture:
        for first in (5, 50):
            ids = batch.input_ids.clone()
            ids[0, : last - reach] = first
            capture.start(torch.tensor([last, last - 1]))
            run_body(model, batch, ids)
            found.append(capture.take()[Site(model.n_blocks)])
    assert torch.allclose(found[0][0], found[1][0], rtol=0, atol=EXACT)
    assert not torch.allclose(found[0][1], found[1][1], rtol=0, atol=1e-9)


def test_a_wrong_tail_is_caught(model):
    broken = Model(model.hf, discover(model.hf), "broken")
    broken.structure.final_steps.append(lambda states: 1.01 * states)
    assert [check.name for check in self_check(broken) if not check.passed] == ["logits"]


def test_a_wrong_part_is_caught(model):
    """Taking feed-forward's output for attention's own must not go unnoticed."""
    failed = [check.name for check in self_check(misread(model, "attn.out", "ffn.out")) if not check.passed]
    assert "blocks" in failed or "inputs" in failed


def misread(model: Model, part: str, instead: str) -> Model:
    """The model with one part of every block taken for another."""
    blocks = []
    for block in model.structure.anatomy.blocks:
        points = dict(block.points)
        blocks.append(replace(block, points=tuple((points | {part: points[instead]}).items())))
    return Model(model.hf, Structure(model.hf, replace(model.structure.anatomy, blocks=tuple(blocks))), "misread")


def test_the_self_check_leaves_no_hook_behind(model):
    def hooks():
        return {module: list(module._forward_hooks) for module in model.hf.modules()}

    before = hooks()
    self_check(model)
    assert hooks() == before


def test_an_attribution_adds_up_to_the_logit(model):
    """At the last level: embedding, parts and constants; heads to attention; sources to heads."""
    if model.task not in ("causal", "masked", "seq2seq"):
        pytest.skip("it predicts labels")
    ids, source = example_tokens(model.hf, 1, 9), example_tokens(model.hf, 1, 8, seed=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.task == "seq2seq":
        inputs = {"input_ids": source, "attention_mask": torch.ones_like(source), "decoder_input_ids": ids}
    extra = {name: inputs[name] for name in ("input_ids", "attention_mask")} if model.task == "seq2seq" else None
    prompt = Prompt(tuple(ids[0].tolist()), tuple(range(9)), inputs=extra)
    attribution = attribute(model, Lens(model).readout(model.n_blocks), prompt, 7, 3, against=6)
    with torch.no_grad():
        logits = model.hf(**inputs).logits[0, 7].double()
    assert attribution.reading == pytest.approx(float(logits[3] - logits[6]), rel=1e-9, abs=1e-9)
    assert sum(part.value for part in attribution.parts) == pytest.approx(attribution.reading, rel=1e-6, abs=1e-6)
    assert model.task != "seq2seq" or "xattn" in {part.part for part in attribution.parts}
    attention = {part.block: part.value for part in attribution.parts if part.part == "attn"}
    for block in {row.block for row in attribution.heads}:
        heads = [row for row in attribution.heads if row.block == block]
        assert sum(row.value for row in heads) == pytest.approx(attention[block], abs=1e-8)
        for head in (row for row in heads if row.head and attribution.sources):
            sources = [row.value for row in attribution.sources if (row.block, row.head) == (block, head.head)]
            assert sum(sources) == pytest.approx(head.value, abs=1e-8)

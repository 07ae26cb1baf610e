"""Image–text models and speech decoders: images through a processor, arguments of forward, text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tokenizers
from helpers.cli import run
from helpers.images import IMAGE, image_tokenizer, make_processor, random_image
from torch import Tensor
from transformers import PreTrainedModel, WhisperConfig, WhisperForConditionalGeneration

import layerjump as lj
from layerjump.errors import BadModel, BadText, UnsupportedModel
from layerjump.lens.trajectory import Trajectory
from layerjump.models.small_models import build, list_architectures, small_config

TYPES = ("gemma3", "qwen2_vl", "llava", "paligemma", "idefics3", "internvl")
PLACEHOLDER = int(image_tokenizer().convert_tokens_to_ids(IMAGE))
VOCABULARY = 1100
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_token_id": PLACEHOLDER, "mm_tokens_per_image": 4},
    "qwen2_vl": {"image_token_id": PLACEHOLDER},
    "llava": {"image_token_index": PLACEHOLDER},
    "paligemma": {"image_token_index": PLACEHOLDER},
    "idefics3": {"image_token_id": PLACEHOLDER},
    "internvl": {"image_token_id": PLACEHOLDER, "vision_config": {"image_size": [56, 56]}},
}
N_PLACEHOLDERS = {"gemma3": 4, "qwen2_vl": 4, "llava": 16, "paligemma": 16, "idefics3": 4, "internvl": 4}


def build_image_text(model_type: str) -> PreTrainedModel:
    (architecture,) = [a for a in list_architectures() if str(a) == f"image-text:{model_type}"]
    return build(architecture, small_config(model_type, vocab_size=VOCABULARY, **SETTINGS[model_type]))


def forward_inputs(hf: PreTrainedModel, seed: int) -> dict[str, Any]:
    """Three tokens, an image, three tokens."""
    name, vision = hf.config.model_type, hf.config.vision_config
    ids = torch.tensor([[5, 20, 21, *[PLACEHOLDER] * N_PLACEHOLDERS[name], 22, 23, 24]])
    is_image = (ids == PLACEHOLDER).long()
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    side = {"idefics3": 128, "internvl": 56}.get(name) or getattr(vision, "image_size", None)
    shape = (16, 3 * 2 * 14 * 14) if name == "qwen2_vl" else (1, 3, side, side)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    inputs["pixel_values"] = pixels[None] if name == "idefics3" else pixels
    match name:
        case "gemma3":
            inputs["token_type_ids"] = is_image
        case "paligemma":
            inputs["token_type_ids"] = torch.zeros_like(ids)
        case "qwen2_vl":
            inputs |= {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": is_image}
    return inputs


def require_the_models_own(trajectory: Trajectory, hidden_states: tuple[Tensor, ...], logits: Tensor) -> None:
    """Levels are Hugging Face's hidden states, and the last level predicts what the model does."""
    n_blocks = trajectory.model.n_blocks
    for level in range(n_blocks):
        assert torch.allclose(trajectory.states.states[level], hidden_states[level][0], rtol=1e-4, atol=1e-4)
    assert trajectory.positions == tuple(range(logits.shape[1]))
    assert torch.equal(trajectory.top[-1, :, 0], logits[0].argmax(-1))
    for position in trajectory.positions:
        ours = trajectory.distribution(n_blocks, position)
        assert torch.allclose(ours, logits[0, position].softmax(-1), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_saved_folder_is_read_with_text_alone(model_type: str, tmp_path: Any) -> None:
    hf = build_image_text(model_type)
    hf.save_pretrained(tmp_path)
    tokenizers.characters(pad_token="[PAD]").save_pretrained(tmp_path)
    model = lj.load(tmp_path)
    assert (model.structure.degree, model.processor, model.no_processor) == ("full", None, None)
    jumps = lj.fit(model, lj.load_text("pydoc"), tokens=1_500, max_length=64)
    trajectory = lj.Lens(model, jumps)("The capital")
    assert trajectory.image_positions == ()
    with torch.no_grad():
        logits = hf(torch.tensor([trajectory.prompt.ids])).logits[0]
    assert torch.equal(trajectory.top[-1, :, 0], logits.argmax(-1))
    # A fitted map of level L−1 is nearer to the last state than the state itself.
    states, last = trajectory.states.states[model.n_blocks - 1], trajectory.states.last_level
    mapped = jumps[model.n_blocks - 1, model.n_blocks](states)
    assert (mapped - last)[1:].norm() < (states - last)[1:].norm()


@pytest.mark.parametrize("model_type", TYPES)
def test_levels_with_an_image_are_the_models_own(model_type: str) -> None:
    hf = build_image_text(model_type)
    model = lj.Model.wrap(hf, image_tokenizer())
    inputs = forward_inputs(hf, seed=0)
    trajectory = lj.Lens(model)(inputs=inputs)
    with torch.no_grad():
        output = hf(**inputs, output_hidden_states=True)
    require_the_models_own(trajectory, output.hidden_states, output.logits)
    first, n_images = 3, N_PLACEHOLDERS[model_type]
    assert trajectory.image_positions == tuple(range(first, first + n_images))
    assert {trajectory.tokens[position].strip() for position in trajectory.image_positions} == {IMAGE}
    # Another image changes every reading after it.
    other = lj.Lens(model)(inputs=inputs | {"pixel_values": forward_inputs(hf, seed=1)["pixel_values"]})
    changes = (other.states.last_level - trajectory.states.last_level).abs().amax(-1)
    assert (changes[first:] > 1e-2).all()
    if model.causal:
        assert not changes[:first].any()
        assert trajectory.cross_entropy.isnan()[0].nonzero().flatten().tolist() == [
            *range(first - 1, first + n_images - 1),  # the next token is a placeholder
            first + n_images + 2,  # there is no next token
        ]


@pytest.fixture(scope="module")
def gemma() -> lj.Model:
    hf = build_image_text("gemma3")
    processor = make_processor("Gemma3Processor", hf.config.vision_config.image_size, image_seq_length=4)
    return lj.Model.wrap(hf, processor=processor)


TEXT = "11 12 <start_of_image> 13 14 15"


def test_a_processor_makes_the_inputs_of_a_text_with_an_image(gemma: lj.Model) -> None:
    assert gemma.processor is not None
    image = random_image(0)
    trajectory = lj.Lens(gemma)(TEXT, images=[image])
    inputs = gemma.processor(text=TEXT, images=[image], return_tensors="pt")
    with torch.no_grad():
        output = gemma.hf(**inputs, output_hidden_states=True)
    require_the_models_own(trajectory, output.hidden_states, output.logits)
    words = "<s> 11 12 <start_of_image> <image> <image> <image> <image> <end_of_image> 13 14 15"
    assert [token.strip() for token in trajectory.tokens] == words.split()
    assert trajectory.image_positions == (4, 5, 6, 7)
    same = lj.Lens(gemma)(images=image, text=TEXT)
    assert torch.equal(same.states.last_level, trajectory.states.last_level)
    other = lj.Lens(gemma)(TEXT, images=[random_image(1)])
    changes = (other.states.last_level - trajectory.states.last_level).abs().amax(-1)
    assert not changes[:4].any()
    assert (changes[4:] > 1e-2).all()
    assert not torch.equal(other.distribution(gemma.n_blocks), trajectory.distribution(gemma.n_blocks))


def test_several_texts_have_images_of_their_own(gemma: lj.Model) -> None:
    lens, images = lj.Lens(gemma), [random_image(seed) for seed in range(3)]
    two = "<start_of_image> 1 <start_of_image> 2 3"
    both = lens([TEXT, two], images=[images[0], images[1:]])
    alone = [lens(TEXT, images=images[0]), lens(two, images=images[1:])]
    for together, single in zip(both, alone, strict=True):
        assert together.image_positions == single.image_positions
        assert torch.equal(together.states.last_level, single.states.last_level)
    assert len(both[1].image_positions) == 8
    swapped = lens(two, images=[images[2], images[1]])
    assert not torch.equal(swapped.states.last_level, both[1].states.last_level)


def test_jumps_and_renderings_of_a_text_with_an_image(gemma: lj.Model) -> None:
    numbers = " ".join(str(i % 997) for i in range(4_000))
    corpus = lj.Corpus("numbers", tuple(numbers[i : i + 400] for i in range(0, len(numbers), 400)), "")
    jumps = lj.fit(gemma, corpus, tokens=2_000, max_length=64)
    trajectory = lj.Lens(gemma, jumps)(TEXT, images=[random_image(0)], tokens=["13"])
    assert trajectory.kl[-1].abs().max() < 1e-5 < trajectory.kl[0].min()
    assert (trajectory.to_pandas()["token"].str.strip() == IMAGE).sum() == 4 * len(trajectory.levels)
    assert len(json.loads(json.dumps(trajectory.to_dict()))["tokens"]) == 12
    assert trajectory.track("14").rank.shape == (gemma.n_blocks + 1, 12)
    assert "&lt;image&gt;" in trajectory.to_html()


def test_arguments_of_forward_may_be_arrays_with_padding_and_without_a_tokenizer() -> None:
    hf = build_image_text("llava")
    model, inputs = lj.Model.wrap(hf), forward_inputs(hf, seed=0)
    whole = lj.Lens(model)(inputs={name: value.numpy() for name, value in inputs.items()})
    assert whole.tokens[:4] == ["5", "20", "21", str(PLACEHOLDER)]
    pad = torch.zeros(1, 3, dtype=torch.long)
    padded = inputs | {
        "input_ids": torch.cat([inputs["input_ids"], pad], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], pad], 1),
    }
    trajectory = lj.Lens(model)(inputs=padded)
    assert trajectory.positions == whole.positions
    assert torch.allclose(trajectory.states.last_level, whole.states.last_level, rtol=1e-4, atol=1e-4)


def test_a_text_model_reads_arguments_of_forward_too(data_folder: Any) -> None:
    model = lj.load(data_folder / "tiny-gpt2")
    lens = lj.Lens(model)
    by_text = lens("Once upon a time")
    by_ids = lens(inputs={"input_ids": list(by_text.prompt.ids)})
    assert torch.equal(by_ids.top, by_text.top)
    assert torch.allclose(by_ids.states.last_level, by_text.states.last_level, rtol=1e-4, atol=1e-4)


def whisper(n_mels: int = 8) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "num_mel_bins": n_mels}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    widths = {f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")}
    tokens = {"pad_token_id": 1, "bos_token_id": 5, "eos_token_id": 6, "decoder_start_token_id": 5}
    lengths = {"max_source_positions": 20, "max_target_positions": 64}
    config = WhisperConfig(vocab_size=VOCABULARY, **sizes, **heads, **widths, **tokens, **lengths)
    hf = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in hf.parameters():  # the initialisation hardly hears the sound
            parameter.add_(0.1 * torch.randn_like(parameter))
    return hf


def test_a_speech_decoder_reads_sound_through_extra_inputs() -> None:
    hf = whisper()
    sounds = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    model = lj.Model.wrap(
        hf, tokenizers.llama(), extra_inputs=lambda ids: {"input_features": sounds[:1].expand(len(ids), -1, -1)}
    )
    assert (model.task, model.structure.degree) == ("seq2seq", "full")
    assert [write.name for write in model.structure.writes(1)] == ["attn", "xattn", "ffn"]
    trajectories = []
    for sound in sounds:
        inputs = {"input_features": sound[None], "decoder_input_ids": torch.tensor([[5, 20, 21, 22]])}
        trajectory = lj.Lens(model)(inputs=inputs)
        with torch.no_grad():
            output = hf(**inputs, output_hidden_states=True)
        require_the_models_own(trajectory, output.decoder_hidden_states, output.logits)
        trajectories.append(trajectory)
    heard = [trajectory.states.last_level for trajectory in trajectories]
    assert ((heard[0] - heard[1]).abs().amax(-1) > 1e-3).all()
    with pytest.raises(UnsupportedModel, match="encoder that reads tokens"):
        model.encoder_side()


def test_a_speech_checkpoint_is_refused_by_load(tmp_path: Any) -> None:
    whisper().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"got the speech model Whisper.*extra_inputs"):
        lj.load(tmp_path)


def test_a_processor_is_loaded_with_the_folder(gemma: lj.Model, tmp_path: Any) -> None:
    assert gemma.processor is not None
    gemma.hf.save_pretrained(tmp_path)
    gemma.processor.save_pretrained(tmp_path)
    model = lj.load(tmp_path)
    assert type(model.processor).__name__ == "Gemma3Processor"
    image = random_image(0)
    ours, theirs = lj.Lens(model)(TEXT, images=image), lj.Lens(gemma)(TEXT, images=image)
    assert ours.image_positions == theirs.image_positions
    assert torch.equal(ours.states.last_level, theirs.states.last_level)


def test_a_processor_that_cannot_be_loaded_leaves_text_and_is_explained(gemma: lj.Model, tmp_path: Any) -> None:
    gemma.hf.save_pretrained(tmp_path)
    image_tokenizer().save_pretrained(tmp_path)
    settings = {"processor_class": "Gemma3Processor", "image_processor": {"image_processor_type": "NoSuchProcessor"}}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    model = lj.load(tmp_path)
    assert model.processor is None
    assert model.no_processor
    assert lj.Lens(model)("11 12").positions == (0, 1, 2)
    with pytest.raises(BadModel, match="whose processor cannot be loaded"):
        lj.Lens(model)(TEXT, images=[random_image(0)])


REFUSED: dict[str, tuple[Callable[[lj.Model], Any], str]] = {
    "no placeholder": (lambda m: lj.Lens(m)("11 12", images=[random_image(0)]), "write <start_of_image> in the text"),
    "not an image": (lambda m: lj.Lens(m)(TEXT, images=[3]), "cannot read .* pass PIL images or arrays"),
    "too few images": (lambda m: lj.Lens(m)(f"{TEXT} {TEXT}", images=[random_image(0)]), "received 1 images"),
    "one entry for two texts": (lambda m: lj.Lens(m)([TEXT, TEXT], images=[random_image(0)]), "for each of 2 texts"),
    "text and inputs": (lambda m: lj.Lens(m)("11", inputs={"input_ids": [1]}), "expected inputs alone"),
    "neither": (lambda m: lj.Lens(m)(), "text or inputs, got neither"),
    "no ids": (lambda m: lj.Lens(m)(inputs={"pixel_values": np.zeros((1, 3, 64, 64))}), "token ids as 'input_ids'"),
    "two rows": (lambda m: lj.Lens(m)(inputs={"input_ids": [[1, 2], [3, 4]]}), r"\(1, positions\), got \(2, 2\)"),
    "too long": (lambda m: lj.Lens(m)(inputs={"input_ids": [7] * 500}), "at most"),
    "short mask": (lambda m: lj.Lens(m)(inputs={"input_ids": [7, 8], "attention_mask": [1]}), "mask of 2 positions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_advice(name: str, gemma: lj.Model) -> None:
    call, message = REFUSED[name]
    with pytest.raises(BadText, match=message):
        call(gemma)


def test_inputs_that_the_model_does_not_take_are_named(gemma: lj.Model) -> None:
    pixels = torch.zeros(1, 3, 64, 64)
    with pytest.raises(BadModel, match="does not run with the inputs pixel_values"):
        lj.Lens(gemma)(inputs={"input_ids": [7, 8, 9], "pixel_values": pixels})


def test_a_model_that_puts_images_before_the_tokens_is_refused() -> None:
    (architecture,) = [a for a in list_architectures() if str(a) == "image-text:git"]
    model = lj.Model.wrap(build(architecture, small_config("git")))
    side = model.hf.config.vision_config.image_size
    assert lj.Lens(model)(inputs={"input_ids": [7, 8, 9]}).positions == (0, 1, 2)
    with pytest.raises(BadModel, match="a hidden state for each of the 3 tokens, got 20"):
        lj.Lens(model)(inputs={"input_ids": [7, 8, 9], "pixel_values": torch.zeros(1, 3, side, side)})


def test_images_without_a_processor_are_refused() -> None:
    model = lj.Model.wrap(build_image_text("llava"), image_tokenizer(), name="small")
    with pytest.raises(BadModel, match="expected a model with a processor for images, got small, without one; pass"):
        lj.Lens(model)("<image> 1", images=[random_image(0)])


def test_the_command_line_reads_text_of_an_image_text_folder(tmp_path: Any) -> None:
    build_image_text("qwen2_vl").save_pretrained(tmp_path)
    tokenizers.characters(pad_token="[PAD]").save_pretrained(tmp_path)
    done = run("lens", str(tmp_path), "The capital", "--lenses", "identity", "--top-k", "3", "--json")
    assert done.returncode == 0, done.stderr
    (document,) = json.loads(done.stdout)
    assert document.pop("findings")
    assert document == lj.Lens(lj.load(tmp_path))("The capital", k=3).to_dict() | {"model": str(tmp_path)}

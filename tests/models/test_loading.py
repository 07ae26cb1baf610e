"""Loading: every source, every way to fail, each with one line that says what to do."""

import json
import shutil
import sys

import pytest
import torch
from faults.checkpoints import make_gguf
from helpers.tiny_models import tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from transformers import BertModel, ViTConfig

import layerjump as lj
from layerjump.cli import main
from layerjump.errors import BadModel, LayerjumpError, ModelNotFound, NoPredictions, UnsupportedModel, WrongModel
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "model"
    tiny_model("gpt2", dtype=torch.float32).save_pretrained(folder)
    return folder


def one_line(error: LayerjumpError) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 700
    return text


def test_every_command_takes_a_model_with_attached_maps(data_folder, tmp_path, monkeypatch, capsys):
    """A folder of `prune --method linear` is a checkpoint and maps, and not to be mistaken for the checkpoint alone."""
    monkeypatch.setenv("LAYERJUMP_HOME", str(tmp_path / "home"))
    folder, jumps = str(tmp_path / "linear"), str(tmp_path / "jumps")

    def run(command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["layerjump", *command.split()])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    small, gpt2 = "--text pydoc --tokens 3000", data_folder / "tiny-gpt2"
    run(f"prune {gpt2} --drop 1 --criterion deepest --method linear {small} -o {folder}")
    assert all(check["passed"] for check in json.loads(run(f"check {folder} --json"))["checks"])
    run(f"fit {folder} {small} -o {jumps}")
    (trajectory,) = json.loads(run(f"lens {folder} def --jumps {jumps} --json"))
    model, base = lj.load(folder), lj.load(f"{folder}/base")
    lens = lj.Lens(model, lj.Jumps.from_pretrained(jumps, model=model))
    trajectory.pop("findings")
    assert trajectory == lens("def", k=5).to_dict()
    few = "--text pydoc --target 0.5 --confidence 0.5 --documents 40"
    run(f"calibrate {folder} --jumps {jumps} {few}")
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.allclose(model.hf(ids).logits, base.hf(ids).logits, atol=1e-2)
    with pytest.raises(WrongModel):
        lj.Jumps.from_pretrained(jumps, model=base)


def test_a_folder_loads_in_float32_and_is_checked(saved):
    model = lj.load(saved)
    assert (model.n_blocks, model.d_model, model.masked) == (3, 32, False)
    assert model.hf.dtype == torch.float32
    assert not model.hf.training
    assert all(check.passed for check in lj.self_check(model))


def test_dtype_is_honoured_and_a_wrong_one_named(saved):
    assert lj.load(saved, dtype="float64").hf.dtype == torch.float64
    with pytest.raises(BadModel, match="expected dtype of float32, .* got 'float31'"):
        lj.load(saved, dtype="float31")


def test_a_model_without_tokenizer_says_so_when_text_comes(saved):
    with pytest.raises(BadModel, match="has no tokenizer"):
        _ = lj.load(saved).tokenization


def test_an_unknown_hub_id_without_network():
    with pytest.raises(ModelNotFound) as caught:
        lj.load("nobody/no-such-model")
    assert "nobody/no-such-model" in one_line(caught.value)


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "a/b/c"])
def test_a_path_that_does_not_exist(name):
    with pytest.raises(ModelNotFound, match="does not exist"):
        lj.load(name)


def test_a_folder_without_config_or_weights(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="cannot be loaded") as caught:
        lj.load(saved)
    assert str(saved) in one_line(caught.value)
    (saved / "config.json").unlink()
    with pytest.raises(ModelNotFound, match="no config.json"):
        lj.load(saved)


def test_truncated_weights(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    with pytest.raises(BadModel, match="cannot be loaded") as caught:
        lj.load(saved)
    one_line(caught.value)


def test_a_config_that_is_not_json(saved):
    (saved / "config.json").write_text("{")
    with pytest.raises(BadModel) as caught:
        lj.load(saved)
    one_line(caught.value)


def test_a_body_with_missing_weights_is_refused(saved):
    tensors = load_file(saved / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModel, match=r"lacks 1 weights of its body, such as transformer.h.1.mlp.c_fc.weight"):
        lj.load(saved)


def test_a_vision_model_is_refused(tmp_path):
    ViTConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="got 'vit'") as caught:
        lj.load(tmp_path)
    one_line(caught.value)


def test_an_encoder_without_head_loads_but_predicts_nothing(tmp_path):
    torch.manual_seed(0)
    BertModel(tiny_config("bert")).save_pretrained(tmp_path)
    model = lj.load(tmp_path)
    batch = sample(model)
    assert len(list(capture_states(model, [batch], [0, 3]))) == 1
    with pytest.raises(NoPredictions, match="without its prediction head"):
        list(capture_states(model, [batch], [0], logits=True))


def test_a_tied_decoder_saved_without_head_still_predicts(tmp_path):
    tiny_model("gpt2", dtype=torch.float32).transformer.save_pretrained(tmp_path)
    assert lj.load(tmp_path).no_predictions is None


def test_an_untied_decoder_saved_without_head_predicts_nothing(tmp_path):
    tiny_model("llama", dtype=torch.float32).model.save_pretrained(tmp_path)
    assert "lm_head" in lj.load(tmp_path).no_predictions


def test_a_gguf_of_an_unsupported_architecture(tmp_path):
    import gguf

    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadModel) as caught:
        lj.load(path)
    assert "strange.gguf" in one_line(caught.value)


@pytest.mark.parametrize("size", ["block_count", "embedding_length", "feed_forward_length"])
def test_a_gguf_that_does_not_state_a_size(tmp_path, size):
    """transformers would put in a large model's: 32 blocks, which takes it seconds to build and to miss."""
    make_gguf(tmp_path)
    path = tmp_path / "tiny.gguf"
    assert lj.load(path).n_blocks == 1
    path.write_bytes(path.read_bytes().replace(size.encode(), size.upper().encode()))
    with pytest.raises(BadModel, match=f"does not state llama.{size}") as caught:
        lj.load(path)
    one_line(caught.value)


def test_a_gguf_whose_angles_are_more_than_its_width(tmp_path):
    make_gguf(tmp_path)
    path = tmp_path / "tiny.gguf"
    key = b"llama.rope.dimension_count" + (4).to_bytes(4, "little")
    before, after = (key + count.to_bytes(4, "little") for count in (4, 1 << 24))
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(BadModel, match="rope.dimension_count 16777216, but the model is 8 wide"):
        lj.load(path)


@pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_gguf_whose_list_goes_on_behind_its_end(tmp_path, count):
    """Its reader would go through all those entries that are not there."""
    make_gguf(tmp_path)
    path = tmp_path / "tiny.gguf"
    kinds = (9).to_bytes(4, "little") + (8).to_bytes(4, "little")  # a list, of strings
    key = b"tokenizer.ggml.tokens" + kinds
    before, after = (key + n.to_bytes(8, "little") for n in (32, count))
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(BadModel, match="damaged") as caught:
        lj.load(path)
    one_line(caught.value)


def test_a_gguf_with_fewer_blocks_than_it_states(tmp_path):
    make_gguf(tmp_path)
    path = tmp_path / "tiny.gguf"
    key = b"llama.block_count" + (4).to_bytes(4, "little")
    before, after = (key + count.to_bytes(4, "little") for count in (1, 1000))
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(BadModel, match="block_count 1000, but its tensors have 1"):
        lj.load(path)


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(BadModel, match="expected a model folder, a .gguf file"):
        lj.load(path)
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(range(200)))
    with pytest.raises(BadModel) as caught:
        lj.load(garbage)
    one_line(caught.value)


def test_remote_code_is_not_run_unless_allowed(saved, tmp_path):
    """A checkpoint that brings its own code is refused, and the code leaves no trace."""
    trace = tmp_path / "it-ran"
    (saved / "evil.py").write_text(f"open({str(trace)!r}, 'w').write('x')\nclass C: pass\n")
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel):
        lj.load(saved)
    assert not trace.exists()


def test_a_model_that_fails_the_check_is_refused_with_the_check_named(monkeypatch):
    """A structure that is wrong about the final norm must not pass silently."""
    from dataclasses import replace

    from layerjump.errors import SelfCheckFailed
    from layerjump.models import model as model_module
    from layerjump.models.discovery import discover
    from layerjump.models.structure import Structure

    def misread(hf, **options):
        return Structure(hf, replace(discover(hf, **options).anatomy, to_final=()))

    monkeypatch.setattr(model_module, "discover", misread)
    with pytest.raises(SelfCheckFailed, match="'logits' failed.*difference is"):
        lj.Model.wrap(tiny_model("llama"), name="tiny")


@pytest.mark.parametrize("name", ["stories15M", "stories260K", "rxn-bert"])
def test_real_checkpoints_pass_the_self_check(name, real_folder):
    checks = lj.self_check(lj.load(real_folder(name)))
    assert [check.name for check in checks if not check.passed] == []
    assert max(check.difference or 0 for check in checks) < 1e-5


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-bert"])
def test_our_own_trained_checkpoints_pass_the_self_check(name, data_folder):
    checks = lj.self_check(lj.load(data_folder / name))
    assert [check.name for check in checks if not check.passed] == []


UNIGRAM = 300
"""About the perplexity of the text that they learnt, to one who knows how often each token occurs."""


@pytest.mark.parametrize(("name", "share"), [("tiny-gpt2", 0.1), ("tiny-bert", 0.3)])
def test_our_own_checkpoints_learnt_english(name, share, data_folder):
    recorded = json.loads((data_folder / name / "training.json").read_text())
    assert recorded["tables"]["steps"][-1]["perplexity"] < share * UNIGRAM
    model = lj.load(data_folder / name)
    text = "Once upon a time, there was a little girl named Lily. She liked to play with her toys."
    (ids,) = model.tokenization.encode([text])
    positions = lj.Positions("all") if name == "tiny-gpt2" else lj.Positions("one")
    seeds = range(1) if name == "tiny-gpt2" else range(20)
    surprise = []
    for seed in seeds:
        batches = lj.make_batches(lj.load_text([text]), model.tokenization, positions, seed=seed)
        (found,) = capture_states(model, batches, [0], logits=True)
        target = found.batch.token if model.masked else torch.tensor(ids[2:])
        logits = found.logits if model.masked else found.logits[:-1]
        surprise.append(torch.nn.functional.cross_entropy(logits, target))
    assert torch.stack(surprise).mean().exp() < UNIGRAM / 2


def test_a_copy_of_the_folder_is_the_same_model(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    a, b = lj.load(saved), lj.load(copy)
    assert all(torch.equal(x, y) for x, y in zip(a.hf.parameters(), b.hf.parameters(), strict=True))


def test_a_padding_token_that_is_none_is_no_obstacle():
    assert lj.Model.wrap(tiny_model("llama", pad_token_id=-1)).n_blocks == 3


def test_an_error_in_the_first_run_is_one_line():
    broken = tiny_model("gpt2", dtype=torch.float32)
    broken.lm_head = torch.nn.Linear(5, 5)  # of another width
    with pytest.raises(BadModel, match="loads, but does not run: RuntimeError") as caught:
        Model.wrap(broken, name="broken")
    one_line(caught.value)


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", torch.int8), ("nf4", torch.uint8), ("fp4", torch.uint8)])
def test_weights_are_quantised_as_they_are_read(tmp_path, quantization, dtype):
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    tiny_model("llama", dtype=torch.float32, **sizes).save_pretrained(tmp_path)
    model = lj.load(tmp_path, quantization=quantization, dtype="bfloat16")
    assert model.structure.blocks[0].mlp.down_proj.weight.dtype == dtype
    assert model.hf.get_input_embeddings().weight.dtype == torch.bfloat16


def test_torchao_quantises_linear_layers(tmp_path):
    pytest.importorskip("torchao")
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    model = lj.load(tmp_path, quantization="torchao-int8")
    assert type(model.structure.blocks[0].mlp.down_proj.weight.data) is not torch.Tensor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization": "int3"}, "expected quantization of none, int8, nf4, fp4, torchao-int8, got 'int3'"),
        ({"device": "cpu", "device_map": "auto"}, "expected device or device_map, got both"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_read(saved, arguments, message):
    with pytest.raises(BadModel, match=message):
        lj.load(saved, **arguments)


def test_a_missing_quantisation_package_is_named(saved, monkeypatch):
    monkeypatch.setattr("layerjump.models.quantize_at_load.find_spec", lambda name: None)
    with pytest.raises(BadModel, match="quantization='nf4' needs bitsandbytes.*pip install bitsandbytes"):
        lj.load(saved, quantization="nf4")

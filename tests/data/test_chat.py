"""Chats are read as the template renders them; a chat model that reads plain text says so, once."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from helpers import tokenizers
from helpers.cli import run

import layerjump as lj
from layerjump.data import chat
from layerjump.data.chat import plain_text_note, template_markers
from layerjump.errors import BadText

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt and messages[0]['role'] < 'z' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}{{ eos_token }}"
TURNS = "{% for m in messages %}{{ '<start_of_turn>' + m['role'] + m['content'] + '<end_of_turn>' }}{% endfor %}"
PLAIN, CHAT = "Lily saw a dog.", "<|im_start|>user\nLily saw a dog.<|im_end|>\n"


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch):
    monkeypatch.setattr(chat, "_noted", set())


@pytest.fixture(scope="module")
def chat_folder(data_folder, tmp_path_factory):
    """A checkpoint whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(data_folder / "tiny-gpt2", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHATML}))
    return folder


@pytest.fixture(scope="module")
def chat_model(chat_folder):
    return lj.load(chat_folder)


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        (None, []),
        ("{{ messages[0]['content'] }}", []),
        (CHATML, ["<|im_start|>", "<|im_end|>"]),
        (INST, ["[INST]", "[/INST]"]),
        (TURNS, ["<start_of_turn>", "<end_of_turn>"]),
        ("{{ '</s>User: ' + messages[0]['content'] }}", ["</s>"]),
    ],
)
def test_markers_are_those_of_the_template(template, markers):
    tokenizer = tokenizers.llama()
    tokenizer.chat_template = template
    assert template_markers(tokenizer) == markers
    if template is not None:
        tokenizer.chat_template = {"default": template}
        assert template_markers(tokenizer) == markers


def test_a_note_needs_a_template_and_a_text_without_its_markers():
    tokenizer = tokenizers.llama()
    assert plain_text_note("base", None, [PLAIN]) is None
    assert plain_text_note("base", tokenizer, [PLAIN]) is None
    tokenizer.chat_template = CHATML
    assert plain_text_note("chat", tokenizer, [CHAT, "Hello<|im_end|>"]) is None
    assert plain_text_note("chat", tokenizer, [CHAT, PLAIN]).startswith("chat is a chat model; ")
    assert plain_text_note("chat", tokenizer, [PLAIN]) is None
    assert plain_text_note("other", tokenizer, [PLAIN]) is not None


def test_the_lens_warns_once_at_the_line_of_the_caller(chat_model):
    lens = lj.Lens(chat_model)
    with pytest.warns(UserWarning, match="chatty is a chat model; .*pass its messages.*filterwarnings") as caught:
        lens(PLAIN)
    (warning,) = caught
    assert warning.filename == __file__
    assert "\n" not in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lens([PLAIN, CHAT])
        lj.generate(chat_model, None, PLAIN, max_new_tokens=1)


def test_generate_warns_once_at_the_line_of_the_caller(chat_model):
    with pytest.warns(UserWarning, match="is a chat model") as caught:
        lj.generate(chat_model, None, PLAIN, max_new_tokens=1)
    (warning,) = caught
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lj.generate(chat_model, None, [PLAIN], max_new_tokens=1)


def test_the_filter_of_the_message_silences_it(chat_model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* is a chat model")
        lj.Lens(chat_model)(PLAIN)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_templated_text_and_a_corpus_cause_no_warning(chat_model, study_text):
    chat = chat_model.tokenizer.apply_chat_template([{"role": "user", "content": PLAIN}], tokenize=False)
    lj.Lens(chat_model)(chat)
    lj.generate(chat_model, None, chat, max_new_tokens=1)
    inputs = chat_model.tokenization.generation_inputs([PLAIN])
    lj.generate(chat_model, None, inputs, max_new_tokens=1, pad_token_id=0)
    lj.fit(chat_model, study_text, tokens=2_000)


@pytest.mark.parametrize("command", [["lens", "--lenses", "identity"], ["generate", "--max-new-tokens", "2"]])
def test_the_command_line_prints_one_note(chat_folder, command):
    name, *options = command
    plain = run(name, str(chat_folder), PLAIN, *options, "--json")
    notes = [line for line in plain.stderr.splitlines() if "chat" in line]
    assert notes == [
        f"note: {chat_folder} is a chat model; the text is read as plain text, without its chat template; for a chat, "
        f"pass --chat"
    ]
    assert "UserWarning" not in plain.stderr
    json.loads(plain.stdout)
    chat = run(name, str(chat_folder), CHAT, *options, "--json")
    assert chat.returncode == 0
    assert "chat model" not in chat.stderr


MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "  Lily saw a dog. "},
    {"role": "assistant", "content": "A dog."},
    {"role": "user", "content": "A dog."},
]


def test_a_chat_is_what_the_template_renders(chat_model):
    tokenizer = chat_model.tokenizer
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    trajectory = lj.Lens(chat_model)(MESSAGES, k=3)
    assert list(trajectory.prompt.ids) == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    torch.testing.assert_close(trajectory.kl, lj.Lens(chat_model)(rendered, k=3).kl)
    assert trajectory.to_dict()["roles"] == list(trajectory.roles)
    assert set(trajectory.to_pandas()["role"]) == {"system", "user", "assistant", "template"}


def test_every_token_has_the_role_of_its_message(chat_model):
    trajectory = lj.Lens(chat_model)(MESSAGES)
    texts = dict.fromkeys(trajectory.roles, "")
    for role, text in zip(trajectory.roles, trajectory.tokens, strict=True):
        texts[role] += text
    assert texts["system"].strip() == "Be kind."
    assert texts["assistant"].strip() == "A dog."
    assert "Lily saw a dog." in texts["user"]
    assert "im_start" in texts["template"]
    assert "dog" not in texts["template"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], "expected messages such as"),
        ([{"role": "user", "content": 3}], "expected messages such as"),
        ([{"role": "user", "content": "long " * 2000}], "shorten it"),
    ],
)
def test_bad_chats_are_refused(chat_model, messages, message):
    with pytest.raises(BadText, match=message):
        lj.Lens(chat_model)(messages)


def test_a_template_without_the_models_bos_is_a_warning(chat_folder):
    model = lj.load(chat_folder)
    model.__dict__["tokenization"] = replace(model.tokenization, prefix=(3,))
    with pytest.warns(UserWarning, match="does not begin with"):
        lj.Lens(model)(MESSAGES)


def test_a_model_without_a_template_reads_no_chat(data_folder):
    with pytest.raises(BadText, match="expected a model with a chat template"):
        lj.Lens(lj.load(data_folder / "tiny-gpt2"))(MESSAGES)


def test_the_command_line_reads_a_users_message(chat_folder, chat_model):
    read = run("lens", str(chat_folder), PLAIN, "--lenses", "identity", "--chat", "--json")
    assert "chat model" not in read.stderr
    (trajectory,) = json.loads(read.stdout)
    assert trajectory["top"] == lj.Lens(chat_model)([{"role": "user", "content": PLAIN}], k=5).to_dict()["top"]
    assert trajectory["roles"].count("user") > 3
    assert json.loads(run("explain", str(chat_folder), PLAIN, "--chat", "--json").stdout)["tokens"]
    written = json.loads(run("generate", str(chat_folder), PLAIN, "--chat", "--max-new-tokens", "2", "--json").stdout)
    assert written["texts"][0]["prompt"].startswith("<|im_start|>user")

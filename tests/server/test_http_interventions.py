"""Interventions, chats and concepts over HTTP: answers equal the library's, and nothing is left behind."""

from __future__ import annotations

import itertools
import threading

import pytest
from helpers import fitted_gpt2
from helpers.http_generation import talking_model
from helpers.server_process import serving

import layerjump as lj

model = fitted_gpt2.model  # a fixture

TEXT = "Once upon a time, there was a little girl named Lily."
OTHER = "Tom saw a big dog in the park."
CHAT = [{"role": "user", "content": "Tell me of Lily."}]
SWAP = {"kind": "swap", "first": " the", "second": " a", "levels": [2, 3]}
STEER = {"kind": "steer", "token": " a", "levels": [3], "strength": 0.5, "positions": [4, 5]}
ABLATE = {"kind": "ablate", "tokens": [" the"], "levels": [1, 2]}
PATCH = {"kind": "patch", "source": OTHER, "source_position": 3, "position": 5, "levels": [2]}


@pytest.fixture(scope="module")
def server(data_folder, tmp_path_factory):
    talking = talking_model(data_folder / "tiny-gpt2", tmp_path_factory.mktemp("models") / "talking")
    with serving(data_folder / "tiny-gpt2", talking, home=tmp_path_factory.mktemp("home")) as running:
        yield running


_runs = itertools.count(1)


def read(server, **changes):
    """A reading that is not cached: nobody else tracks this token."""
    body = {"model": "tiny-gpt2", "text": TEXT, "tokens": [next(_runs)]} | changes
    status, answer = server.patiently("/api/lens", body)
    assert status == 200, answer
    return answer["lenses"]["identity"]


def generate(server, **changes):
    body = {"model": "tiny-gpt2", "prompt": TEXT, "max_new_tokens": 12} | changes
    with server.stream("/api/generate", body) as (status, lines):
        assert status == 200
        return list(lines)[-1]["done"]


def enter(lens, change):
    """The same change in the library."""
    options = {name: change[name] for name in ("levels", "positions", "strength") if name in change}
    if change["kind"] == "swap":
        return lj.swap(lens, change["first"], change["second"], **options)
    if change["kind"] == "steer":
        return lj.steer(lens, change["token"], **options)
    if change["kind"] == "ablate":
        return lj.ablate(lens, change["tokens"], **options)
    places = {"positions": [change["position"]], "source_positions": [change["source_position"]]}
    return lj.patch(lens, lens(change["source"]), levels=change["levels"], **places)


@pytest.mark.parametrize("change", [SWAP, STEER, ABLATE, PATCH], ids=lambda change: change["kind"])
def test_changed_readings_and_texts_equal_the_librarys_and_end_with_the_request(server, model, change):
    lens = lj.Lens(model)
    before, plain = read(server)["entropy"], generate(server)
    changed, text = read(server, interventions=[change]), generate(server, interventions=[change])
    with enter(lens, change):
        expected = lens(TEXT)
        continued = lj.generate(model, None, TEXT, max_new_tokens=12, do_sample=False)
    assert changed["top"][4] != read(server)["top"][4]
    assert [cell[0] for cell in changed["top"][4]] == expected.top[4, :, 0].tolist()
    assert changed["entropy"][3] == pytest.approx(expected.entropy[3].tolist(), rel=1e-3)
    assert text["ids"] == continued.ids[0]
    assert read(server)["entropy"] == before
    assert generate(server)["ids"] == plain["ids"]


def test_other_requests_run_on_the_plain_model_while_a_changed_one_generates(server):
    """Lens requests are answered between the tokens of a generation; its interventions must not act on them."""
    plain = read(server)["entropy"]
    options = {"interventions": [SWAP, STEER], "max_new_tokens": 90}
    alone, seen = generate(server, **options), []
    texts = []
    thread = threading.Thread(target=lambda: texts.append(generate(server, **options)))
    thread.start()
    while thread.is_alive():
        seen.append(read(server)["entropy"])
    thread.join()
    assert len(seen) > 1
    assert all(entropy == plain for entropy in seen)
    assert texts[0]["ids"] == alone["ids"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (SWAP | {"levels": [9]}, "expected one of levels 0 to 4, got 9"),
        (SWAP | {"levels": []}, "levels: "),
        (SWAP | {"levels": [-1]}, "levels → 0: "),
        (SWAP | {"first": "no single token at all"}, "expected the text of one token"),
        (SWAP | {"first": 10**8}, "expected a token id"),
        (STEER | {"positions": [99]}, "expected positions from 0 to"),
        (STEER | {"strength": 1e9}, "strength: "),
        (ABLATE | {"tokens": []}, "tokens: "),
        (PATCH | {"source_position": 99}, "position 99 was not read"),
        (PATCH | {"position": 99}, "expected positions from 0 to"),
        (PATCH | {"source": ""}, "source: "),
        ({"kind": "explode", "levels": [1]}, "explode"),
    ],
)
def test_invalid_interventions_get_one_sentence(server, change, words):
    body = {"model": "tiny-gpt2", "text": TEXT, "interventions": [change]}
    status, answer = server.patiently("/api/lens", body)
    assert status == 422
    assert words in answer["error"]
    assert "\n" not in answer["error"]


def test_chats_are_rendered_by_the_template_and_roles_are_marked(server, data_folder):
    expected = [("<", "template"), (" Lily", "user")]
    reading = read(server, model="talking", text=CHAT)
    pairs = list(zip((token["text"] for token in reading["tokens"]), reading["roles"], strict=True))
    assert [pair in pairs for pair in expected] == [True, True]
    assert "".join(text for text, role in pairs if role == "user") == CHAT[0]["content"]
    done = generate(server, model="talking", prompt=CHAT)
    ids = [token["id"] for token in reading["tokens"]]
    plain = lj.load(data_folder / "tiny-gpt2")
    inputs = plain.tokenization.left_padded([ids])
    assert done["ids"] == lj.generate(plain, None, inputs, max_new_tokens=12, do_sample=False).ids[0]
    cell = {"level": 3, "position": len(ids) - 1}
    status, answer = server.patiently("/api/explain", {"model": "talking", "text": CHAT, **cell})
    assert status == 200, answer


@pytest.mark.parametrize(
    ("model_name", "messages", "words"),
    [
        ("tiny-gpt2", CHAT, "expected a model with a chat template"),
        ("talking", [], "text: "),
        ("talking", [{"role": "user"}], "text → 0 → content: "),
        ("talking", [{"role": "user", "content": "word " * 3_000}], "at most 128"),
    ],
)
def test_invalid_chats_get_one_sentence(server, model_name, messages, words):
    status, answer = server.patiently("/api/lens", {"model": model_name, "text": messages})
    assert status == 422
    assert words in answer["error"]


def test_the_models_say_whether_they_chat(server):
    for name in ("tiny-gpt2", "talking"):
        server.patiently("/api/load", {"model": name})
    models = server.ask("/api/models")[1]["models"]
    assert [status["chat"] for status in models] == [False, True]


def test_a_race_equals_the_librarys_at_every_position(server, model):
    concepts = {"girl": ["girl", "Lily"], "boy": ["boy", "Tom"]}
    body = {"model": "tiny-gpt2", "text": TEXT}
    listed = [{"name": name, "words": words} for name, words in concepts.items()]
    status, answer = server.patiently("/api/race", body | {"concepts": listed})
    assert status == 200, answer
    trajectory = lj.Lens(model)(TEXT)
    for row, position in enumerate(answer["positions"]):
        race = trajectory.race(concepts, position)
        by_concept = zip(answer["concepts"], race.probability.T.tolist(), strict=True)
        for track, expected in by_concept:
            assert [level[row] for level in track["probability"]] == pytest.approx(expected, rel=1e-4)
        assert (answer["leader"][row], answer["crossing"][row]) == (race.leaders[-1], race.crossing_level)


@pytest.mark.parametrize(
    ("concepts", "words"),
    [
        ([("girl", []), ("boy", ["boy"])], "expected a concept as a list of words"),
        ([("girl", [" "]), ("boy", ["boy"])], "expected words that are one token"),
        ([("girl", ["girl"]), ("boy", ["girl", "boy"])], "without a common token"),
        ([("girl", ["girl"]), ("girl", ["boy"])], "of different names"),
        ([("girl", ["antidisestablishmentarianism"]), ("boy", ["boy"])], "expected words that are one token"),
    ],
)
def test_invalid_races_get_one_sentence(server, concepts, words):
    listed = [{"name": name, "words": list(entries)} for name, entries in concepts]
    status, answer = server.patiently("/api/race", {"model": "tiny-gpt2", "text": TEXT, "concepts": listed})
    assert status == 422
    assert words in answer["error"]

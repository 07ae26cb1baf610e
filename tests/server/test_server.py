"""The server as a process: answers equal the library's, errors are one sentence, shutdown is clean."""

from __future__ import annotations

import json
import threading
import time

import pytest
from helpers import fitted_gpt2
from helpers.server_process import serving

import layerjump as lj
from layerjump.errors import LayerjumpError
from layerjump.lens.lens import Lens, read_trajectories
from layerjump.server.served_models import ModelRegistry, load_jump_sets

model = fitted_gpt2.model  # a fixture

TEXT = "Once upon a time, there was a little girl named Lily."


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def jumps(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jumps")
    lj.fit(model, "pydoc", tokens=6_000).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(data_folder, home, jumps, tmp_path_factory):
    broken = tmp_path_factory.mktemp("models") / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    models = [data_folder / "tiny-gpt2", data_folder / "tiny-bert", broken]
    with serving(*models, "--jumps", f"own={jumps}", home=home) as running:
        yield running


def lens(server, **changes):
    return server.patiently("/api/lens", {"model": "tiny-gpt2", "text": TEXT} | changes)


def test_answers_equal_the_librarys(server, model, jumps):
    status, answer = lens(server, lenses=["identity", "own"], k=7, tokens=[5, 9], js=True)
    assert status == 200
    lenses = {"identity": Lens(model), "own": Lens(model, lj.Jumps.from_pretrained(jumps))}
    (wanted,) = read_trajectories(lenses, [TEXT], k=7, tokens=[5, 9], jensen_shannon=True)
    assert list(answer["lenses"]) == ["identity", "own"]
    for name, trajectory in wanted.items():
        ours, theirs = answer["lenses"][name], json.loads(json.dumps(trajectory.to_dict()))
        assert ours["top"] == theirs["top"]
        assert ours["words"] == theirs["words"]
        assert ours["followed"][1]["rank"] == theirs["followed"][1]["rank"]
        for key in ("entropy", "kl", "confidence", "js"):
            for row, other in zip(ours[key], theirs[key], strict=True):
                assert row == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_a_masked_model_is_read_at_its_mask(server):
    status, answer = lens(server, model="tiny-bert", text="Lily saw a [MASK] dog.")
    assert status == 200
    reading = answer["lenses"]["identity"]
    assert reading["task"] == "masked"
    assert [reading["tokens"][place]["text"] for place in reading["positions"]] == ["[MASK]"]


def test_a_repeated_request_is_answered_from_the_cache(server):
    body = {"model": "tiny-gpt2", "text": "A question asked twice", "lenses": ["identity"]}
    assert server.patiently("/api/lens", body)[0] == 200
    first, second = server.raw("/api/lens", body), server.raw("/api/lens", body)
    assert first[1]["x-layerjump-cache"] == second[1]["x-layerjump-cache"] == "hit"
    assert first[2] == second[2]
    other = server.raw("/api/lens", body | {"k": 3})
    assert other[1]["x-layerjump-cache"] == "miss"


def test_a_fit_reports_progress_and_is_cached(server, data_folder, home):
    status, answer = lens(server, lenses=["mat"])
    assert (status, answer["unfitted"]) == (409, ["mat"])
    seen = server.fit("tiny-gpt2", ["mat", "affine"])
    done = [job["done"] for job in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1]["total"] > 0
    status, answer = lens(server, lenses=["mat", "identity"])
    assert status == 200
    assert answer["lenses"]["mat"]["kl"] != answer["lenses"]["identity"]["kl"]
    with serving(data_folder / "tiny-gpt2", home=home) as again:
        assert lens(again, lenses=["mat"])[1]["lenses"]["mat"]["top"] == answer["lenses"]["mat"]["top"]
        states = {each["name"]: each["state"] for each in _model(again)["lenses"]}
        assert states == {"identity": "ready", "mat": "ready", "affine": "ready", "ridge": "not fitted"}
        _stop_while_it_fits(again)


def _stop_while_it_fits(server):
    assert server.ask("/api/fit", {"model": "tiny-gpt2", "estimators": ["ridge"]})[0] == 202
    assert server.ask("/api/healthz")[0] == 200
    assert _model(server)["doing"] == "fitting ridge"
    code, said = server.stop()
    assert code == 0
    assert said == "starting …\n"  # no traceback, no abort of a thread that was in torch's code


def _model(server, name="tiny-gpt2"):
    _, answer = server.ask("/api/models")
    return next(model for model in answer["models"] if model["name"] == name)


def test_models_state_their_names_and_lenses(server):
    assert server.patiently("/api/load", {"model": "tiny-bert"})[0] == 200
    assert lens(server)[0] == 200
    gpt2, bert = _model(server), _model(server, "tiny-bert")
    assert (gpt2["state"], gpt2["n_blocks"], gpt2["task"], gpt2["mask"]) == ("ready", 4, "causal", False)
    assert (bert["task"], bert["mask"]) == ("masked", "[MASK]")
    assert {"name": "own", "state": "ready"} in gpt2["lenses"]
    assert {"name": "own", "state": "other weights"} in bert["lenses"]
    status, answer = lens(server, model="tiny-bert", lenses=["own"])
    assert status == 422
    assert "fitted on another model" in answer["error"]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"text": ""}, 422, "text: "),
        ({"text": 5}, 422, "text: "),
        ({"text": None}, 422, "text: "),
        ({"text": "a" * 20_001}, 422, "20000"),
        ({"text": "word " * 2_000}, 422, "tokens, and at most 128 are read; shorten it"),
        ({"text": "\ud800"}, 422, "text: "),
        ({"model": "gpt3"}, 404, "choose from tiny-gpt2, tiny-bert, broken"),
        ({"model": "../../etc/passwd"}, 404, "unknown model"),
        ({"model": "/etc"}, 404, "unknown model"),
        ({"model": ["tiny-gpt2"]}, 422, "model: "),
        ({"lenses": []}, 422, "lenses: "),
        ({"lenses": ["identity"] * 5}, 422, "lenses: "),
        ({"lenses": ["../jumps"]}, 404, "unknown lens"),
        ({"lenses": "identity"}, 422, "lenses: "),
        ({"k": 0}, 422, "k: "),
        ({"k": 10**9}, 422, "k: "),
        ({"k": "10"}, 422, "k: "),
        ({"tokens": [-1]}, 422, "tokens"),
        ({"tokens": [10**8]}, 422, "vocabulary"),
        ({"tokens": list(range(17))}, 422, "tokens"),
        ({"tokens": ["no single token at all"]}, 422, "token"),
        ({"surprise": 1}, 422, "surprise"),
    ],
)
def test_invalid_requests_get_one_sentence(server, changes, status, words):
    found, answer = lens(server, **changes)
    assert found == status
    assert words in answer["error"]
    assert "\n" not in answer["error"]


def test_an_explanation_equals_the_librarys(server, model):
    body = {"model": "tiny-gpt2", "text": TEXT, "level": 3, "position": 4, "token": " the", "rows": 5}
    status, answer = server.patiently("/api/explain", body)
    assert status == 200, answer
    expected = lj.Lens(model)(TEXT).attribution(4, 3, " the")
    assert answer["reading"] == pytest.approx(expected.reading, rel=1e-4)
    assert [row["name"] for row in answer["parts"]] == [row.name for row in expected.parts]
    assert [row["name"] for row in answer["heads"]] == [row.name for row in expected.top(5, "heads")]
    assert [row["source"] for row in answer["sources"]] == [row.source for row in expected.top(5, "sources")]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"level": 9}, 422, "levels 0 to 4"),
        ({"level": -1}, 422, "level: "),
        ({"position": 99}, 422, "position 99 was not read"),
        ({"token": "no single token at all"}, 422, "token"),
        ({"lens": "../jumps"}, 404, "unknown lens"),
    ],
)
def test_invalid_explanations_get_one_sentence(server, changes, status, words):
    body = {"model": "tiny-gpt2", "text": TEXT, "level": 3, "position": 4} | changes
    found, answer = server.patiently("/api/explain", body)
    assert found == status
    assert words in answer["error"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"\xff\xfe", b'{"text": NaN}', b"[" * 100_000])
def test_bodies_that_are_not_json_objects_are_refused(server, body):
    status, answer = server.ask("/api/lens", body)
    assert status == 422 or status == 400
    assert answer["error"]


def test_a_missing_content_type_is_explained(server):
    plain = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer = server.ask("/api/lens", {"model": "tiny-gpt2"}, headers=plain)
    assert status == 422
    assert "Content-Type: application/json" in answer["error"]


def test_concurrent_clients_get_their_own_answers(server):
    texts = [f"{TEXT} {word} was happy." for word in ("Tom", "Ben", "Mia", "Sam", "Anna", "Tim")]
    wanted = {text: _facts(lens(server, text=text, k=3)[1]) for text in texts}
    wrong, ends = [], time.monotonic() + 4

    def client(number):
        turn = number
        while time.monotonic() < ends:
            text, turn = texts[turn % len(texts)], turn + 1
            # A k nobody asked for before misses the cache, and changes nothing else.
            status, answer = lens(server, text=text, k=4 + turn % 40)
            if status != 200 or _facts(answer) != wanted[text]:
                wrong.append((status, answer if status != 200 else text))
            if server.ask("/api/healthz")[0] != 200:
                wrong.append("health")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _facts(answer):
    """The part of an answer that identifies it. (The order of equally probable tokens may depend on k.)"""
    reading = answer["lenses"]["identity"]
    best = [[cell[:3] for cell in row] for row in reading["probability"]]
    return reading["tokens"], reading["entropy"], best


def test_a_failed_load_is_an_answer(server):
    status, answer = server.patiently("/api/load", {"model": "broken"})
    assert status == 422
    assert "broken" in answer["error"]
    assert _model(server, "broken")["state"] == "failed"
    assert lens(server)[0] == 200


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["./no-such-folder"], "no-such-folder"),
        (["a name=folder"], "NAME=FOLDER"),
        (["own="], "NAME=FOLDER"),
        (["mat=folder"], "another name"),
        (["own=./no-such-folder"], "no-such-folder"),
    ],
)
def test_bad_jumps_are_one_line(given, words):
    with pytest.raises(LayerjumpError, match=words) as caught:
        load_jump_sets(given)
    assert "\n" not in str(caught.value)


def test_jumps_without_a_name_have_that_of_their_folder(jumps):
    assert list(load_jump_sets([str(jumps), f"own={jumps}"])) == [jumps.name, "own"]


def test_duplicate_model_names_get_numbers(data_folder):
    folder = str(data_folder / "tiny-gpt2")
    registry = ModelRegistry([folder, "someone/tiny-gpt2", folder], {})
    assert list(registry.models) == ["tiny-gpt2", "someone/tiny-gpt2", "tiny-gpt2 (2)"]

"""Generation over HTTP, on a real server: the library's own tokens and levels, as they come, and an end on request."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

import pytest
from helpers.http_generation import calibrated_jumps, slow_model
from helpers.server_process import serving

import layerjump as lj
from layerjump.generation.calibration import calibration_file
from layerjump.server.generation import IncrementalDecoder
from layerjump.server.schemas import MAX_NEW_TOKENS

PROMPT = "Once upon a time, there was a little girl named Lily."


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return calibrated_jumps(model, tmp_path_factory.mktemp("jumps"))


@pytest.fixture(scope="module")
def jumps(folder):
    return lj.Jumps.from_pretrained(folder)


@pytest.fixture(scope="module")
def slow(data_folder, tmp_path_factory):
    return slow_model(data_folder / "tiny-gpt2", tmp_path_factory.mktemp("models") / "slow")


@pytest.fixture(scope="module")
def server(data_folder, folder, slow, tmp_path_factory):
    models = [data_folder / "tiny-gpt2", data_folder / "tiny-bert", slow]
    home = tmp_path_factory.mktemp("home")
    with serving(*models, "--jumps", f"own={folder}", home=home) as running:
        yield running


def wish(**changes):
    return {"model": "tiny-gpt2", "prompt": PROMPT, "max_new_tokens": 24, "lens": "own"} | changes


def written(server, **changes):
    """The tokens' lines and what was said at the end."""
    with server.stream("/api/generate", wish(**changes)) as (status, lines):
        assert status == 200
        said = [line for line in lines if not line.get("busy")]
    return said[:-1], said[-1]["done"]


def refused(server, **changes):
    status, answer = server.ask("/api/generate", wish(**changes))
    assert "\n" not in answer["error"]
    return status, answer["error"]


@pytest.mark.parametrize(
    "how",
    [
        {"exit": "never"},
        {"exit": "gap:0.3"},
        {"exit": "fixed:2", "cache": "jump"},
        {"exit": "gap:0.3@1,3", "cache": "copy"},
        {"exit": "fixed:1", "verify": True},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_streamed_tokens_equal_the_librarys(server, model, jumps, how):
    tokens, done = written(server, **how)
    made = lj.generate(model, jumps, PROMPT, max_new_tokens=24, do_sample=False, **how)
    assert [each["token"] for each in tokens] == done["ids"] == made.ids[0]
    assert [each["level"] for each in tokens] == done["levels"] == made.exit_levels[0]
    assert {each["verified"] for each in tokens} == {how.get("verify", False)}
    assert done["text"].strip() == made.text[0].strip()
    assert done["text"] == "".join(each["text"] for each in tokens)
    assert done["blocks_saved"] == pytest.approx(made.blocks_saved)
    assert done["agreement"] == made.agreement
    assert (done["agreement"] is not None) == how.get("verify", False)
    assert done["counts"]["unembeddings"] == made.counts.unembeddings
    assert done["n_blocks"] == 4
    assert 0 < done["seconds"] < 60


def test_identity_reads_levels_with_the_logit_lens(server, model):
    tokens, _ = written(server, lens="identity", exit="gap:0.3")
    made = lj.generate(model, None, PROMPT, exit="gap:0.3", max_new_tokens=24, do_sample=False)
    assert [(each["token"], each["level"]) for each in tokens] == list(
        zip(made.ids[0], made.exit_levels[0], strict=True)
    )


@pytest.mark.parametrize("verify", [False, True])
def test_the_calibrated_rule_is_that_of_the_jumps_folder(server, model, jumps, folder, verify):
    found = calibration_file.load_calibration(folder)
    tokens, _ = written(server, exit="calibrated", verify=verify)
    made = lj.generate(
        model,
        jumps,
        PROMPT,
        exit=found.verified_exit if verify else found.exit,
        verify=verify,
        max_draft_tokens=found.max_draft_tokens,
        max_new_tokens=24,
        do_sample=False,
    )
    assert [each["token"] for each in tokens] == made.ids[0]
    assert [each["level"] for each in tokens] == made.exit_levels[0]
    status, said = refused(server, exit="calibrated", lens="identity")
    assert (status, "identity has no calibrated exit rule" in said) == (422, True)


def test_models_state_what_they_support(server):
    for name in ("tiny-gpt2", "tiny-bert"):
        server.patiently("/api/load", {"model": name})
    _, answer = server.ask("/api/models")
    gpt2, bert, _ = answer["models"]
    assert gpt2["cannot_generate"] is None
    assert gpt2["calibrated"] == gpt2["predicting"] == ["own"]
    assert "masked model" in bert["cannot_generate"]
    assert answer["limits"]["new_tokens"] == MAX_NEW_TOKENS
    assert refused(server, model="tiny-bert", lens="identity") == (422, bert["cannot_generate"])


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"prompt": ""}, 422, "prompt: "),
        ({"prompt": "a" * 20_001}, 422, "20000"),
        ({"prompt": "word " * 200}, 422, "tokens, and at most 128 are read"),
        ({"prompt": "word " * 60, "max_new_tokens": 128}, 422, "ask for fewer"),
        ({"max_new_tokens": 0}, 422, "max_new_tokens: "),
        ({"max_new_tokens": MAX_NEW_TOKENS + 1}, 422, "max_new_tokens: "),
        ({"max_new_tokens": "5"}, 422, "max_new_tokens: "),
        ({"exit": "sometimes"}, 422, "expects never, fixed:20, gap:0.9"),
        ({"exit": "gap:nine"}, 422, "got 'gap:nine'"),
        ({"exit": "fixed:4"}, 422, "checks level 4, but this model can exit at levels 0 to 3"),
        ({"exit": "gap:0.9@1,9"}, 422, "checks level 9"),
        ({"cache": "none"}, 422, "cache: "),
        ({"cache": "copy", "verify": True}, 422, "needs the full model's keys"),
        ({"cache": "jump", "lens": "identity", "exit": "fixed:1"}, 422, "jump needs jumps from every level"),
        ({"lens": "../jumps"}, 404, "unknown lens"),
        ({"lens": "mat"}, 409, "must be fitted"),
        ({"model": "gpt3"}, 404, "unknown model"),
        ({"temperature": 2}, 422, "temperature"),
    ],
)
def test_invalid_requests_get_one_sentence(server, changes, status, words):
    found, said = refused(server, **changes)
    assert found == status
    assert words in said


def test_cross_site_requests_are_refused(server):
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        assert server.ask("/api/generate", wish(), headers=headers)[0] in (400, 403)


@pytest.fixture
def long_text(server):
    """A function: opens the stream of a text that takes seconds."""
    server.patiently("/api/load", {"model": "slow"})
    body = {"model": "slow", "prompt": "a", "max_new_tokens": MAX_NEW_TOKENS}
    return lambda: server.stream("/api/generate", body)


def test_closing_the_connection_stops_the_generation(server, long_text):
    with long_text() as (status, lines):
        assert status == 200
        start = time.monotonic()
        for _ in range(20):
            assert "token" in next(lines)
        each = (time.monotonic() - start) / 20
        assert server.doing("slow") == "writing"
    assert server.seconds_until_free("slow") < each * (MAX_NEW_TOKENS - 20) / 3
    status, answer = server.patiently("/api/lens", {"model": "slow", "text": "a b"})
    assert status == 200
    with long_text() as (_, lines):
        assert next(lines)["level"] == 64


def test_a_client_that_leaves_before_the_first_token_stops_the_generation(server, long_text):
    with long_text() as (_, lines):
        start = time.monotonic()
        for _ in range(20):
            next(lines)
        each = (time.monotonic() - start) / 20
    server.seconds_until_free("slow")
    body = f'{{"model": "slow", "prompt": "a", "max_new_tokens": {MAX_NEW_TOKENS}}}'.encode()
    head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    time.sleep(0.05)
    assert server.seconds_until_free("slow") < each * MAX_NEW_TOKENS / 3


def test_a_lens_request_is_answered_between_two_tokens(server, long_text):
    with long_text() as (_, lines):
        next(lines)
        question = {"model": "slow", "text": "A question in between"}
        assert server.ask("/api/lens", question)[0] == 200
        assert server.doing("slow") == "writing"
        assert "token" in next(lines)


def test_a_second_generation_gets_its_position_and_then_runs(server, long_text):
    with ExitStack() as before:
        _, first = before.enter_context(long_text())
        next(first)
        with long_text() as (status, second):
            waiting = next(second)
            assert status == 200
            assert (waiting["busy"], waiting["position"]) == (True, 1)
            assert waiting["doing"] == "writing"
            before.close()
            while (line := next(second)).get("busy"):
                pass
            assert "token" in line


def test_concurrent_generations_and_readings_do_not_mix(server, model, jumps):
    prompts, results = [PROMPT, "Tom had a big", "One day, a cat"], {}

    def writer(prompt):
        results[prompt] = written(server, prompt=prompt, max_new_tokens=80, exit="gap:0.3")

    threads = [threading.Thread(target=writer, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    k = 1
    while any(thread.is_alive() for thread in threads):
        k = k % 50 + 1  # a k nobody asked for before misses the cache
        body = {"model": "tiny-gpt2", "text": PROMPT, "lenses": ["own"], "k": k}
        assert server.patiently("/api/lens", body)[0] == 200
    for prompt in prompts:
        made = lj.generate(model, jumps, prompt, exit="gap:0.3", max_new_tokens=80, do_sample=False)
        tokens, done = results[prompt]
        assert [each["token"] for each in tokens] == done["ids"] == made.ids[0]
        assert [each["level"] for each in tokens] == done["levels"] == made.exit_levels[0]


def test_the_server_shuts_down_during_a_generation(slow, tmp_path):
    with serving(slow, home=tmp_path) as running:
        body = {"model": "slow", "prompt": "a", "max_new_tokens": MAX_NEW_TOKENS}
        with running.stream("/api/generate", body) as (_, lines):
            while "token" not in next(lines):
                pass
            code, said = running.stop()
            assert list(lines)[-1] == {"error": "the generation was stopped"}
    assert (code, said) == (0, "starting …\n")


def test_decoded_pieces_join_to_the_text(model):
    tokenizer = model.tokenization.tokenizer
    text = " naïve ☃ 👩‍👧 done"
    prompt, ids = tokenizer.encode("It was"), tokenizer.encode(text)
    pieces = IncrementalDecoder(tokenizer, prompt)
    found = [pieces.add(token) for token in ids]
    assert "".join(found) == text
    assert "" in found  # a snowman's first bytes are no character


def test_leading_blanks_that_a_tokenizer_drops_are_kept(real_folder):
    model = lj.load(real_folder("stories15M"))
    prompt = model.tokenization.generation_inputs(["Once upon a time,"])["input_ids"][0].tolist()
    ids = model.tokenization.encode(["there was a café"])[0]
    pieces = IncrementalDecoder(model.tokenization.tokenizer, prompt)
    assert "".join(pieces.add(token) for token in ids) == " there was a café"


def test_openapi_describes_the_answer_as_json_lines(server):
    _, described = server.ask("/api/openapi.json")
    route = described["paths"]["/api/generate"]["post"]
    assert list(route["responses"]["200"]["content"]) == ["application/x-ndjson"]
    assert "closing" in route["responses"]["200"]["description"].lower()
    fields = described["components"]["schemas"]["GenerateRequest"]["properties"]
    assert set(fields) == {*wish(), "exit", "cache", "verify", "interventions"}

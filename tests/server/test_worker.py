"""The line before a model: one thing at a time, in order, nothing twice, nothing for nobody."""

from __future__ import annotations

import threading
import time

import pytest

from layerjump.errors import BadText
from layerjump.server import worker
from layerjump.server.worker import Answer, Answers, Worker, encode, refusal


@pytest.fixture
def held():
    """A desk whose first piece of work lasts until the event is set."""
    desk, release = Worker(Answers()), threading.Event()
    first = desk.ask(
        "first", lambda: release.wait(10) and Answer(200, b"first"), doing="a long one"
    )
    yield desk, release, first
    release.set()


def test_work_is_done_one_at_a_time_in_the_order_asked():
    desk, running, seen = Worker(Answers()), [], []

    def work(name):
        running.append(name)
        assert running == [name]
        time.sleep(0.01)
        running.remove(name)
        seen.append(name)
        return Answer(200, str(name).encode())

    asked = [desk.ask(name, lambda name=name: work(name)) for name in range(20)]
    assert [future.result(10).body for future in asked] == [str(i).encode() for i in range(20)]
    assert seen == list(range(20))


def test_the_place_in_line_counts_what_is_before(held):
    desk, release, first = held
    for name in "abc":
        desk.ask(name, lambda: Answer(200, b""))
    assert [desk.place(name) for name in ("first", "a", "b", "c", "unknown")] == [0, 1, 2, 3, 4]
    assert desk.doing == "a long one"
    release.set()
    assert first.result(10).body == b"first"


def test_the_same_question_keeps_its_place_and_is_answered_once(held):
    desk, release, _ = held
    calls = []
    one = desk.ask("a", lambda: calls.append(1) or Answer(200, b"a"))
    desk.ask("b", lambda: Answer(200, b"b"))
    assert desk.ask("a", lambda: calls.append(2) or Answer(200, b"other")) is one
    assert desk.place("a") == 1
    release.set()
    assert one.result(10).body == b"a"
    assert calls == [1]
    assert desk.answers.get("a").body == b"a"


def test_what_nobody_asks_for_again_is_not_done(held, monkeypatch):
    desk, release, _ = held
    monkeypatch.setattr(worker, "FORGOTTEN", 0.05)
    calls = []
    desk.ask("left", lambda: calls.append("left") or Answer(200, b""))
    desk.ask("job", lambda: calls.append("job") or Answer(200, b""), lasting=True)
    time.sleep(0.1)
    last = desk.ask("last", lambda: calls.append("last") or Answer(200, b""))
    release.set()
    last.result(10)
    assert calls == ["job", "last"]


def test_long_work_lets_one_question_in_between_two_steps():
    desk, done, ready = Worker(Answers()), [], threading.Event()

    def write():
        ready.wait(10)
        for step in range(3):
            done.append(step)
            desk.let_in()
        return Answer(200, b"written")

    def short(name):
        return Answer(200, done.append(name) or b"")

    first = desk.ask("write", write, long=True)
    second = desk.ask("write too", lambda: short("another long one"), long=True)
    for name in ("a", "b"):
        desk.ask(name, lambda name=name: short(name))
    ready.set()
    assert second.result(10).good
    assert done == [0, "a", 1, "b", 2, "another long one"]
    assert first.result(10).body == b"written"
    assert desk.answers.get("a").good
    assert desk.answers.get("write") is None  # only the one who asked wants it


def test_work_that_is_begun_is_never_forgotten(monkeypatch):
    monkeypatch.setattr(worker, "FORGOTTEN", 0.05)
    desk = Worker(Answers())

    def write():
        time.sleep(0.1)
        desk.let_in()
        return Answer(200, b"written")

    assert desk.ask("write", write, long=True).result(10).body == b"written"
    assert desk.place("write") == 0


def test_what_is_still_wanted_keeps_its_place(held, monkeypatch):
    desk, release, _ = held
    monkeypatch.setattr(worker, "FORGOTTEN", 0.2)
    wanted = desk.ask("wanted", lambda: Answer(200, b"wanted"))
    for _ in range(5):
        time.sleep(0.06)
        desk.still_wanted("wanted")
        desk.still_wanted("unknown")
    release.set()
    assert wanted.result(10).body == b"wanted"


def test_a_line_that_is_too_long_turns_away(held, monkeypatch):
    desk, _, _ = held
    monkeypatch.setattr(worker, "LONGEST", 3)
    assert all(desk.ask(name, lambda: Answer(200, b"")) for name in "ab")
    assert desk.ask("c", lambda: Answer(200, b"")) is None
    assert desk.ask("a", lambda: Answer(200, b"")) is not None


def test_errors_become_answers_and_the_desk_goes_on():
    desk = Worker(Answers())

    def wrong():
        raise BadText("too\nlong")

    assert desk.ask("wrong", wrong).result(10) == refusal(422, "too long")
    broken = desk.ask("broken", lambda: 1 / 0).result(10)
    assert broken.status == 500
    assert b"division" not in broken.body
    assert desk.ask("good", lambda: Answer(200, b"")).result(10).good


def test_the_cache_lets_go_of_the_least_used():
    answers = Answers(100)
    for name in "abc":
        answers.keep(name, Answer(200, name.encode() * 30))
    assert answers.get("a").body == b"a" * 30
    answers.keep("d", Answer(200, b"d" * 30))
    assert answers.get("b") is None
    assert all(answers.get(name) for name in "acd")
    answers.keep("huge", Answer(200, b"h" * 101))
    assert answers.get("huge") is None


def test_errors_are_kept_for_a_moment_and_what_a_fit_changes_never(monkeypatch):
    answers = Answers()
    answers.keep("later", refusal(409, "not fitted"))
    assert answers.get("later") is None
    answers.keep("wrong", refusal(422, "wrong"))
    assert answers.get("wrong").status == 422
    later = time.monotonic() + 60
    monkeypatch.setattr("time.monotonic", lambda: later)
    assert answers.get("wrong") is None


def test_json_has_no_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"x": float("nan")})

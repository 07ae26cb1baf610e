"""The worker runs one task at a time, in order; repeated requests run once, abandoned ones not at all."""

from __future__ import annotations

import threading
import time

import pytest

from layerjump.errors import BadText
from layerjump.server import worker
from layerjump.server.worker import Answer, AnswerCache, Worker, encode, error_answer


@pytest.fixture
def held():
    """A worker whose first task runs until the event is set."""
    queue, release = Worker(AnswerCache()), threading.Event()
    first = queue.submit("first", lambda: release.wait(10) and Answer(200, b"first"), label="a long one")
    yield queue, release, first
    release.set()


def test_tasks_run_one_at_a_time_in_order():
    queue, running, seen = Worker(AnswerCache()), [], []

    def work(name):
        running.append(name)
        assert running == [name]
        time.sleep(0.01)
        running.remove(name)
        seen.append(name)
        return Answer(200, str(name).encode())

    asked = [queue.submit(name, lambda name=name: work(name)) for name in range(20)]
    assert [future.result(10).body for future in asked] == [str(i).encode() for i in range(20)]
    assert seen == list(range(20))


def test_position_counts_the_tasks_before(held):
    queue, release, first = held
    for name in "abc":
        queue.submit(name, lambda: Answer(200, b""))
    assert [queue.position(name) for name in ("first", "a", "b", "c", "unknown")] == [0, 1, 2, 3, 4]
    assert queue.current_label == "a long one"
    release.set()
    assert first.result(10).body == b"first"


def test_a_repeated_request_keeps_its_place_and_runs_once(held):
    queue, release, _ = held
    calls = []
    one = queue.submit("a", lambda: calls.append(1) or Answer(200, b"a"))
    queue.submit("b", lambda: Answer(200, b"b"))
    assert queue.submit("a", lambda: calls.append(2) or Answer(200, b"other")) is one
    assert queue.position("a") == 1
    release.set()
    assert one.result(10).body == b"a"
    assert calls == [1]
    assert queue.cache.get("a").body == b"a"


def test_an_abandoned_request_is_dropped(held, monkeypatch):
    queue, release, _ = held
    monkeypatch.setattr(worker, "ABANDONED_SECONDS", 0.05)
    calls = []
    queue.submit("left", lambda: calls.append("left") or Answer(200, b""))
    queue.submit("job", lambda: calls.append("job") or Answer(200, b""), is_persistent=True)
    time.sleep(0.1)
    last = queue.submit("last", lambda: calls.append("last") or Answer(200, b""))
    release.set()
    last.result(10)
    assert calls == ["job", "last"]


def test_long_work_runs_one_short_task_between_two_steps():
    queue, done, ready = Worker(AnswerCache()), [], threading.Event()

    def write():
        ready.wait(10)
        for step in range(3):
            done.append(step)
            queue.run_one_short_task()
        return Answer(200, b"written")

    def short(name):
        return Answer(200, done.append(name) or b"")

    first = queue.submit("write", write, is_long=True)
    second = queue.submit("write too", lambda: short("another long one"), is_long=True)
    for name in ("a", "b"):
        queue.submit(name, lambda name=name: short(name))
    ready.set()
    assert second.result(10).is_ok
    assert done == [0, "a", 1, "b", 2, "another long one"]
    assert first.result(10).body == b"written"
    assert queue.cache.get("a").is_ok
    assert queue.cache.get("write") is None  # only its own client wants it


def test_a_started_task_is_never_dropped(monkeypatch):
    monkeypatch.setattr(worker, "ABANDONED_SECONDS", 0.05)
    queue = Worker(AnswerCache())

    def write():
        time.sleep(0.1)
        queue.run_one_short_task()
        return Answer(200, b"written")

    assert queue.submit("write", write, is_long=True).result(10).body == b"written"
    assert queue.position("write") == 0


def test_keep_alive_keeps_a_place(held, monkeypatch):
    queue, release, _ = held
    monkeypatch.setattr(worker, "ABANDONED_SECONDS", 0.2)
    wanted = queue.submit("wanted", lambda: Answer(200, b"wanted"))
    for _ in range(5):
        time.sleep(0.06)
        queue.keep_alive("wanted")
        queue.keep_alive("unknown")
    release.set()
    assert wanted.result(10).body == b"wanted"


def test_a_full_queue_refuses_new_requests(held, monkeypatch):
    queue, _, _ = held
    monkeypatch.setattr(worker, "MAX_QUEUE", 3)
    assert all(queue.submit(name, lambda: Answer(200, b"")) for name in "ab")
    assert queue.submit("c", lambda: Answer(200, b"")) is None
    assert queue.submit("a", lambda: Answer(200, b"")) is not None


def test_errors_become_answers_and_the_desk_goes_on():
    queue = Worker(AnswerCache())

    def wrong():
        raise BadText("too\nlong")

    assert queue.submit("wrong", wrong).result(10) == error_answer(422, "too long")
    broken = queue.submit("broken", lambda: 1 / 0).result(10)
    assert broken.status == 500
    assert b"division" not in broken.body
    assert queue.submit("good", lambda: Answer(200, b"")).result(10).is_ok


def test_the_cache_drops_the_least_recently_used():
    cache = AnswerCache(100)
    for name in "abc":
        cache.put(name, Answer(200, name.encode() * 30))
    assert cache.get("a").body == b"a" * 30
    cache.put("d", Answer(200, b"d" * 30))
    assert cache.get("b") is None
    assert all(cache.get(name) for name in "acd")
    cache.put("huge", Answer(200, b"h" * 101))
    assert cache.get("huge") is None


def test_errors_expire_and_answers_that_a_fit_changes_are_not_cached(monkeypatch):
    cache = AnswerCache()
    cache.put("later", error_answer(409, "not fitted"))
    assert cache.get("later") is None
    cache.put("wrong", error_answer(422, "wrong"))
    assert cache.get("wrong").status == 422
    later = time.monotonic() + 60
    monkeypatch.setattr("time.monotonic", lambda: later)
    assert cache.get("wrong") is None


def test_json_has_no_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"x": float("nan")})

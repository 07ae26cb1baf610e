"""Cost of a response of the page's server relative to its lower bound, and a load test with many clients.

    python benchmarks/page.py [--model smollm2 …] [--repeats 20]   cost of a 32-token prompt, HTTP included, cache off
    python benchmarks/page.py --load [--quick]                     32 clients for 60 seconds (--quick: 20)

The lower bound is the bare forward pass over the prompt and L + 1 unembeddings of its 32 positions. Every prompt is
new, so no response comes from the cache (the script checks the header that says so). The server is a separate process,
started as a user starts it; the rivals alternate. `explained` is the same call followed by that of the panel "Why?":
the attribution of a token at the last position, at three quarters of the depth.

The clients of the load test read, explain, race, and change: every third request has an intervention (in a reading or a
generation), and every plain reading must equal, to the last digit, that of a server on which nothing was ever changed.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import layerjump as lj
from layerjump.jumps.default_jumps import cached_jumps
from layerjump.metrics.timing import describe_machine, ratio, time_alternately

STORIES = Path(__file__).parents[2] / "shared/models/stories15M"
TOKENS, CLIENTS = 32, 32
MAX_GROWTH = 1.05
"""Largest growth of the server's memory in the second half of a load test."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=[str(STORIES), "smollm2"])
    parser.add_argument("--lens", default="mat")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--load", action="store_true", help="run the load test instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the load test")
    parser.add_argument("--quick", action="store_true", help="within two minutes")
    options = parser.parse_args()
    print(describe_machine())
    if options.load:
        figures = load(options.model[0], 20.0 if options.quick else options.seconds)
        grown = figures["memory_last_over_middle"] > MAX_GROWTH
        failed = bool(figures["errors"] or figures["wrong_answers"] or grown or not figures["changed"])
    else:
        repeats = 3 if options.quick else options.repeats
        figures, failed = costs(options.model, options.lens, repeats), False
    print(json.dumps(figures))
    sys.exit(failed)


def costs(names: list[str], lens: str, repeats: int) -> dict[str, float]:
    """Return the ratio of each model, and the largest."""
    print(f"{TOKENS} tokens, lens {lens}, HTTP included, cache off, median of {repeats}\n")
    print(
        f"{'model':12} {'call ms':>8} {'bound ms':>9} {'ratio':>6} {'explained ms':>13} {'ratio':>6} {'cached ms':>10}"
    )
    figures: dict[str, float] = {}
    for name in names:
        model = lj.load(name)
        if lens != "identity":
            cached_jumps(model, (lens,))
        texts = prompts(model, 2 * (repeats + 1))
        short, level = Path(name).name, 3 * model.n_blocks // 4
        with serving(name) as port:
            client = Client(port)
            client.ask_until_done({"model": short, "text": "Hello", "lenses": [lens]})
            client.ask_explanation(short, "Hello", lens, 0, 0, 0)
            ours, theirs, explained_texts = iter(texts), iter(texts), iter(reversed(texts))

            def call(client: Client = client, short: str = short, texts: Iterator[str] = ours) -> None:
                client.ask_uncached(short, next(texts), lens)

            def explained(
                client: Client = client, short: str = short, texts: Iterator[str] = explained_texts, level: int = level
            ) -> None:
                text = next(texts)
                client.ask_uncached(short, text, lens)
                client.ask_explanation(
                    short, text, lens, level, TOKENS - 1, token=len(text)
                )  # all tokens cost the same

            def bound(model: lj.Model = model, texts: Iterator[str] = theirs) -> None:
                lower_bound(model, next(texts))

            seconds = time_alternately({"call": call, "bound": bound, "explained": explained}, repeats=repeats)
            start = time.perf_counter()
            client.ask({"model": short, "text": texts[0], "lenses": [lens]})
            cached = time.perf_counter() - start
        over = ratio(seconds["call"], seconds["bound"])
        middle = {rival: 1e3 * statistics.median(times) for rival, times in seconds.items()}
        more = ratio(seconds["explained"], seconds["call"])
        print(
            f"{short:12} {middle['call']:8.1f} {middle['bound']:9.1f} {over:6.2f} {middle['explained']:13.1f} "
            f"{more:6.2f} {1e3 * cached:10.1f}"
        )
        figures[f"api_over_minimum_{short}"], figures[f"explained_over_call_{short}"] = over, more
    largest = {
        kind: max(value for name, value in figures.items() if name.startswith(kind))
        for kind in ("api_over_minimum", "explained_over_call")
    }
    return largest | figures


@torch.no_grad()
def lower_bound(model: lj.Model, text: str) -> None:
    """Run the bare forward pass, and one unembedding for every level."""
    ids = torch.tensor([model.tokenization.wrap(model.tokenization.encode([text])[0])])
    final = []
    hook = model.stack.register_forward_hook(lambda _, __, out: final.append(out[0][0]))
    try:
        model.run_body(ids, torch.ones_like(ids))
    finally:
        hook.remove()
    for _ in range(model.n_blocks + 1):
        model.structure.decode(final[0])


def prompts(model: lj.Model, count: int) -> list[str]:
    """Return different texts of exactly 32 tokens, including special ones."""
    selected: list[str] = []
    for document in lj.load_text("pydoc").documents:
        words = document.split()
        for size in range(5, min(TOKENS, len(words)) + 1):
            text = " ".join(words[:size])
            length = len(model.tokenization.wrap(model.tokenization.encode([text])[0]))
            if length == TOKENS and text not in selected:
                selected.append(text)
            if length >= TOKENS:
                break
        if len(selected) == count:
            return selected
    raise SystemExit(f"only {len(selected)} texts of {TOKENS} tokens in the built-in text")


class Client:
    """A client with a new connection for each request: the server would close an idle one."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def ask(self, question: dict[str, Any], path: str = "/api/lens") -> tuple[int, str, bytes]:
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", path, json.dumps(question), headers)
        response = self.connection.getresponse()
        status, cache, body = response.status, response.getheader("X-Layerjump-Cache", ""), response.read()
        self.connection.close()
        return status, cache, body

    def send_bad_request(self, draw: random.Random) -> int:
        """Send a request that must be refused; return the status of the response."""
        unknown = json.dumps(_question("no such model", "x", 3))
        bad_requests = [
            ("POST", "/api/lens", unknown, {}),
            ("POST", "/api/lens", "{" + unknown, {}),
            ("POST", "/api/lens", json.dumps({"model": 3}), {}),
            ("POST", "/api/race", json.dumps({"model": "no such model", "text": "x", "concepts": []}), {}),
            ("POST", "/api/lens", "x" * 3_000_000, {}),
            ("POST", "/api/lens", unknown, {"Host": "elsewhere.example"}),
            ("POST", "/api/lens", unknown, {"Origin": "https://elsewhere.example"}),
            ("GET", "/static/..%2f..%2fpyproject.toml", None, {}),
            ("DELETE", "/api/lens", None, {}),
        ]
        method, path, body, headers = draw.choice(bad_requests)
        headers = {"Content-Type": "application/json"} | headers
        try:
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
            response.read()
            return response.status
        except (BrokenPipeError, ConnectionResetError):
            return 413  # the server does not read the rest of a body that is too long
        finally:
            self.connection.close()

    def ask_until_done(
        self, question: dict[str, Any], busy: Counter[str] | None = None, path: str = "/api/lens"
    ) -> tuple[int, Any]:
        """Repeat a request for as long as the server is busy."""
        while True:
            status, _, body = self.ask(question, path)
            answer = json.loads(body)
            if not answer.get("busy"):
                return status, answer
            if busy is not None:
                busy["busy"] += 1

    def ask_explanation(self, model: str, text: str, lens: str, level: int, position: int, token: int) -> None:
        """Ask for the attribution of one cell, as the page does."""
        question = {"model": model, "text": text, "lens": lens, "level": level, "position": position, "token": token}
        status, answer = self.ask_until_done(question, path="/api/explain")
        if status != 200:
            raise SystemExit(f"the server answered {status}: {answer}")

    def generate(self, question: dict[str, Any]) -> list[int]:
        """Generate, and return the ids of the new tokens."""
        _, _, body = self.ask(question, "/api/generate")
        done: dict[str, Any] = json.loads(body.splitlines()[-1])
        return list(done["done"]["ids"])

    def ask_uncached(self, model: str, text: str, lens: str) -> None:
        """Send a request whose response must not be cached; repeat it while the server is busy (a slow model)."""
        question = {"model": model, "text": text, "lenses": [lens]}
        status, cache, body = self.ask(question)
        if status == 202:
            status, _ = self.ask_until_done(question)
        elif cache != "miss":
            raise SystemExit("a response came from the cache")
        if status != 200:
            raise SystemExit(f"the server answered {status}: {body[:200]!r}")


@contextmanager
def serving(model: str) -> Iterator[int]:
    """Run `layerjump serve` on a free port; yield the port."""
    command = [sys.executable, "-m", "layerjump", "serve", model, "--port=0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = re.search(r":(\d+)/", process.stdout.readline())
        if port is None:
            raise SystemExit("the server did not start")
        yield int(port[1])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def load(name: str, seconds: float) -> dict[str, float]:
    """Run many clients at once; compare each response with that of a single client."""
    model = lj.load(name)
    texts, short = prompts(model, 24), Path(name).name
    changes = _changes(model, texts)
    count: Counter[str] = Counter()
    with serving(name) as port:
        alone = Client(port)
        expected = {text: _facts(alone.ask_until_done(_question(short, text, 12))[1], 12) for text in texts}
        changed = [alone.generate(_prompt(short, texts[0], change)) for change in changes]
        process = next(p for p in psutil.Process().children() if "serve" in p.cmdline())
        memory = [process.memory_info().rss]
        end = time.monotonic() + seconds
        rounds = [
            _Round(port, short, expected, changes, changed, texts[0], end, count, random.Random(seed))
            for seed in range(CLIENTS)
        ]
        threads = [threading.Thread(target=round.run) for round in rounds]
        for thread in threads:
            thread.start()
        for _ in range(4):
            time.sleep(seconds / 4)
            memory.append(process.memory_info().rss)
        for thread in threads:
            thread.join()
        for text in texts:  # and when all is quiet; a k that nobody asked for is not cached
            left = _facts(alone.ask_until_done(_question(short, text, 13))[1], 13)
            count["right" if _first(left, 12) == expected[text] else "wrong"] += 1
    print(f"{short}: {CLIENTS} clients for {seconds:.0f} s: {dict(count)}")
    print("memory of the server, MB, at the start and each quarter: ", end="")
    print(", ".join(f"{size / 1e6:.0f}" for size in memory))
    return {
        "errors": count["error"],
        "wrong_answers": count["wrong"],
        "answers": count["right"],
        "changed": count["changed"],
        "busy_answers": count["busy"],
        "memory_last_over_middle": memory[-1] / memory[2],
    }


def _changes(model: lj.Model, texts: list[str]) -> list[dict[str, Any]]:
    """One intervention of each kind, in the upper half of the model."""
    levels = list(range(model.n_blocks // 2, model.n_blocks))
    first, second = model.tokenization.encode([texts[0]])[0][:2]
    return [
        {"kind": "swap", "first": first, "second": second, "levels": levels},
        {"kind": "steer", "token": first, "levels": levels, "strength": 0.5},
        {"kind": "ablate", "tokens": [first, second], "levels": levels, "positions": [3, 4]},
        {"kind": "patch", "source": texts[1], "source_position": 5, "position": 6, "levels": levels[:1]},
    ]


@dataclass
class _Round:
    """The requests of one client until the end of the load test."""

    port: int
    model: str
    expected: dict[str, Any]
    """What plain readings must be."""
    changes: list[dict[str, Any]]
    changed: list[list[int]]
    """The tokens that must follow the prompt under each change."""
    prompt: str
    end: float
    count: Counter[str]
    draw: random.Random

    def run(self) -> None:
        client = Client(self.port)
        for turn in itertools.count():
            if time.monotonic() > self.end:
                return
            try:
                if turn % 10 == 9:
                    self.count["refused" if 400 <= client.send_bad_request(self.draw) < 500 else "error"] += 1
                elif turn % 3 == 1:
                    self._change(client)
                elif turn % 10 == 5:
                    self._explain_or_race(client)
                else:
                    self._read(client)
            except (OSError, http.client.HTTPException) as error:
                print(f"client: {error!r}", file=sys.stderr)
                self.count["error"] += 1
                client = Client(self.port)

    def _read(self, client: Client) -> None:
        text, k = self.draw.choice(list(self.expected)), self.draw.randint(2, 12)
        status, answer = client.ask_until_done(_question(self.model, text, k), self.count)
        if status != 200:
            self.count["error"] += 1
        else:
            self.count["right" if _facts(answer, k) == _first(self.expected[text], k) else "wrong"] += 1

    def _change(self, client: Client) -> None:
        index = self.draw.randrange(len(self.changes))
        if self.draw.random() < 0.3:
            ids = client.generate(_prompt(self.model, self.prompt, self.changes[index]))
            self.count["changed" if ids == self.changed[index] else "wrong"] += 1
            return
        question = _question(self.model, self.prompt, self.draw.randint(2, 12))
        status, _ = client.ask_until_done(question | {"interventions": [self.changes[index]]}, self.count)
        self.count["changed" if status == 200 else "error"] += 1

    def _explain_or_race(self, client: Client) -> None:
        body: dict[str, Any] = {"model": self.model, "text": self.draw.choice(list(self.expected))}
        if self.draw.random() < 0.5:
            path, body = "/api/explain", body | {"level": 2, "position": self.draw.randrange(TOKENS)}
        else:
            concepts = [{"name": "one", "words": ["the"]}, {"name": "other", "words": ["a"]}]
            path, body = "/api/race", body | {"concepts": concepts}
        status, _ = client.ask_until_done(body, self.count, path)
        self.count["explained" if status == 200 else "error"] += 1


def _prompt(model: str, text: str, change: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "prompt": text, "max_new_tokens": 8, "interventions": [change]}


def _first(facts: tuple[Any, Any, Any], k: int) -> tuple[Any, Any, Any]:
    """The facts of a response with fewer top tokens."""
    tokens, entropy, best = facts
    return tokens, entropy, [[cell[:k] for cell in row] for row in best]


def _question(model: str, text: str, k: int) -> dict[str, Any]:
    return {"model": model, "text": text, "lenses": ["identity"], "k": k}


def _facts(answer: Any, k: int) -> tuple[Any, Any, Any]:
    """Return what must be equal in two responses: the text, and the numbers to the last digit.

    The ids of the top tokens are left out: stories15M has tokens with identical embeddings, and the order of tokens
    of equal probability depends on k.
    """
    trajectory = answer["lenses"]["identity"]
    assert trajectory["k"] == k
    return trajectory["tokens"], trajectory["entropy"], trajectory["probability"]


if __name__ == "__main__":
    main()

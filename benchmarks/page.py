"""Cost of a response of the page's server relative to its lower bound, and a load test with many clients.

    python benchmarks/page.py [--model smollm2 …] [--repeats 20]   cost of a 32-token prompt, HTTP included, cache off
    python benchmarks/page.py --load [--quick]                     32 clients for 60 seconds (--quick: 20)

The lower bound is the bare forward pass over the prompt and L + 1 unembeddings of its 32 positions. Every prompt is
new, so no response comes from the cache (the script checks the header that says so). The server is a separate process,
started as a user starts it; the two alternate.
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
        failed = bool(figures["errors"] or figures["wrong_answers"] or grown)
    else:
        repeats = 3 if options.quick else options.repeats
        figures, failed = costs(options.model, options.lens, repeats), False
    print(json.dumps(figures))
    sys.exit(failed)


def costs(names: list[str], lens: str, repeats: int) -> dict[str, float]:
    """Return the ratio of each model, and the largest."""
    print(f"{TOKENS} tokens, lens {lens}, HTTP included, cache off, median of {repeats}\n")
    print(f"{'model':12} {'call ms':>8} {'bound ms':>9} {'ratio':>6} {'cached ms':>10}")
    figures: dict[str, float] = {}
    for name in names:
        model = lj.load(name)
        if lens != "identity":
            cached_jumps(model, (lens,))
        texts = prompts(model, repeats + 1)
        short = Path(name).name
        with serving(name) as port:
            client = Client(port)
            client.ask_until_done({"model": short, "text": "Hello", "lenses": [lens]})
            ours, theirs = iter(texts), iter(texts)

            def call(client: Client = client, short: str = short, texts: Iterator[str] = ours) -> None:
                client.ask_uncached(short, next(texts), lens)

            def bound(model: lj.Model = model, texts: Iterator[str] = theirs) -> None:
                lower_bound(model, next(texts))

            seconds = time_alternately({"call": call, "bound": bound}, repeats=repeats)
            start = time.perf_counter()
            client.ask({"model": short, "text": texts[0], "lenses": [lens]})
            cached = time.perf_counter() - start
        over = ratio(seconds["call"], seconds["bound"])
        middle = {rival: 1e3 * statistics.median(times) for rival, times in seconds.items()}
        print(f"{short:12} {middle['call']:8.1f} {middle['bound']:9.1f} {over:6.2f} {1e3 * cached:10.1f}")
        figures[f"api_over_minimum_{short}"] = over
    return {"api_over_minimum": max(figures.values()), **figures}


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

    def ask(self, question: dict[str, Any]) -> tuple[int, str, bytes]:
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", "/api/lens", json.dumps(question), headers)
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

    def ask_until_done(self, question: dict[str, Any], busy: Counter[str] | None = None) -> tuple[int, Any]:
        """Repeat a request for as long as the server is busy."""
        while True:
            status, _, body = self.ask(question)
            answer = json.loads(body)
            if not answer.get("busy"):
                return status, answer
            if busy is not None:
                busy["busy"] += 1

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
    count: Counter[str] = Counter()
    with serving(name) as port:
        alone = Client(port)
        expected = {text: _facts(alone.ask_until_done(_question(short, text, 12))[1], 12) for text in texts}
        process = next(p for p in psutil.Process().children() if "serve" in p.cmdline())
        memory = [process.memory_info().rss]
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=_client, args=(port, short, expected, end, seed, count)) for seed in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for _ in range(4):
            time.sleep(seconds / 4)
            memory.append(process.memory_info().rss)
        for thread in threads:
            thread.join()
    print(f"{short}: {CLIENTS} clients for {seconds:.0f} s: {dict(count)}")
    print("memory of the server, MB, at the start and each quarter: ", end="")
    print(", ".join(f"{size / 1e6:.0f}" for size in memory))
    return {
        "errors": count["error"],
        "wrong_answers": count["wrong"],
        "answers": count["right"],
        "busy_answers": count["busy"],
        "memory_last_over_middle": memory[-1] / memory[2],
    }


def _client(port: int, model: str, expected: dict[str, Any], end: float, seed: int, count: Counter[str]) -> None:
    draw, client = random.Random(seed), Client(port)
    for turn in itertools.count():
        if time.monotonic() > end:
            return
        try:
            if turn % 10 == 9:
                count["refused" if 400 <= client.send_bad_request(draw) < 500 else "error"] += 1
                continue
            text, k = draw.choice(list(expected)), draw.randint(2, 12)
            status, answer = client.ask_until_done(_question(model, text, k), count)
            if status != 200:
                count["error"] += 1
            else:
                tokens, entropy, best = expected[text]
                facts = tokens, entropy, [[cell[:k] for cell in row] for row in best]
                same = _facts(answer, k) == facts
                count["right" if same else "wrong"] += 1
        except (OSError, http.client.HTTPException) as error:
            print(f"client {seed}: {error!r}", file=sys.stderr)
            count["error"] += 1
            client = Client(port)


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

"""A real `layerjump serve` process, and a plain client for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path


class Server:
    """A running server. `ask` gives status and parsed JSON; `raw` also headers and bytes."""

    def __init__(self, process, port):
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}/"

    def raw(self, path, body=None, *, headers=None, method=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = ({"Content-Type": "application/json"} if data else {}) | (headers or {})
        connection.request(method or ("POST" if data else "GET"), path, data, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, content

    def ask(self, path, body=None, **options):
        status, _, content = self.raw(path, body, **options)
        return status, json.loads(content)

    @contextmanager
    def stream(self, path, body):
        """Status and an iterator over lines, as they come; leaving closes the connection, whatever is still to come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        try:
            yield response.status, map(json.loads, iter(response.readline, b""))
        finally:
            response.close()
            connection.close()

    def patiently(self, path, body):
        """Ask again for as long as the server is busy."""
        for _ in range(500):
            status, answer = self.ask(path, body)
            if status != 202 or not answer.get("busy"):
                return status, answer
        raise AssertionError(f"still busy: {answer}")

    def doing(self, name):
        """What a model is busy with; None if nothing."""
        models = self.ask("/api/models")[1]["models"]
        return next(model["doing"] for model in models if model["name"] == name)

    def seconds_until_free(self, name):
        start = time.monotonic()
        while self.doing(name) is not None:
            assert time.monotonic() - start < 60
            time.sleep(0.01)
        return time.monotonic() - start

    def fit(self, model, estimators):
        status, job = self.ask("/api/fit", {"model": model, "estimators": estimators})
        assert status == 202, job
        seen = [job]
        while seen[-1]["state"] in ("waiting", "fitting"):
            time.sleep(0.1)
            seen.append(self.ask(f"/api/jobs/{job['id']}")[1])
        assert seen[-1]["state"] == "done", seen[-1]
        return seen

    def stop(self):
        """Ctrl-C; returns the exit code and what was said on standard error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said


@contextmanager
def serving(*arguments, home: Path):
    """Start a server on any free port; stopped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "layerjump", "serve", *map(str, arguments), "--port=0", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"LAYERJUMP_HOME": str(home)},
    )
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
    if not found:
        raise AssertionError(f"no address in {line!r}: {process.communicate()[1]}")
    server = Server(process, int(found[1]))
    try:
        yield server
    finally:
        if process.poll() is None:
            server.stop()

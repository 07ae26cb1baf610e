"""The server refuses other hosts, other sites, other files, and unbounded or unfinished requests."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.server_process import serving

import layerjump as lj
from layerjump.server.security import REQUEST_SECONDS

PAGE = Path(lj.__file__).parent / "server" / "static"


@pytest.fixture(scope="module")
def server(data_folder, tmp_path_factory):
    with serving(data_folder / "tiny-gpt2", home=tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "192.168.0.7:80", "localhost@e"])
def test_a_foreign_host_is_refused(server, host):
    status, answer = server.ask("/api/models", headers={"Host": host})
    assert status == 400
    assert "Host" in answer["error"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8417", "[::1]:99"])
def test_local_host_names_are_accepted(server, host):
    assert server.ask("/api/healthz", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
    ],
)
def test_cross_site_requests_are_refused(server, headers):
    status, found, _ = server.raw("/api/models", headers=headers)
    assert status == 403
    assert not [name for name in found if name.startswith("access-control")]


def test_a_link_from_another_site_opens_the_page(server):
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert server.raw("/", headers=followed | {"Sec-Fetch-Dest": "document"})[0] == 200
    assert server.raw("/", headers=followed | {"Sec-Fetch-Dest": "iframe"})[0] == 403


def test_every_answer_has_security_headers(server):
    for path in ("/", "/page/main.js", "/api/models", "/nothing"):
        _, headers, _ = server.raw(path)
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    status, headers, _ = server.raw("/api/lens", method="OPTIONS", headers={"Origin": server.url[:-1]})
    assert status == 405
    assert "access-control-allow-methods" not in headers


def test_a_body_that_is_too_large_is_refused(server):
    status, answer = server.ask("/api/lens", b'{"text": "' + b"a" * (300 << 10) + b'"}')
    assert status == 413
    assert "bytes" in answer["error"]
    with socket.create_connection(("127.0.0.1", server.port)) as raw:  # one that does not say its length
        raw.sendall(b"POST /api/lens HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            raw.sendall(b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
        raw.sendall(b"0\r\n\r\n")
        assert b" 413 " in raw.recv(100)


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/etc/passwd",
        "/page/",
        "/page/nothing.js",
        "/docs",
        "/api/jobs/../models",
        "/api/jobs/x",
    ],
)
def test_no_other_file_is_served(server, path):
    status, answer = server.ask(path)
    assert status == 404
    assert answer["error"]


def test_page_files_are_served_with_their_types(server):
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    for file in PAGE.iterdir():
        status, headers, content = server.raw(f"/page/{file.name}")
        assert (status, content) == (200, file.read_bytes())
        assert headers["content-type"].split(";")[0] == kinds[file.suffix]
    assert server.raw("/")[2] == (PAGE / "index.html").read_bytes()


def test_every_route_is_documented_with_its_command(server):
    _, described = server.ask("/api/openapi.json")
    twins = (lj_docs() / "page.md").read_text(encoding="utf-8")
    for path in described["paths"]:
        assert f"`{path}`" in twins


def lj_docs():
    return Path(__file__).resolve().parents[2] / "docs"


SLOW = {
    "nothing at all": b"",
    "half a header": b"GET /api/healthz HTTP/1.1\r\nHost: 127",
    "a body to come": b"POST /api/lens HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    "half a second question": b"GET /api/healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /api",
}


def test_connections_without_a_complete_request_are_closed(server):
    """Other requests are answered meanwhile."""
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    for place, connection in enumerate(slow):
        connection.sendall(list(SLOW.values())[place % len(SLOW)])
    assert server.ask("/api/healthz")[0] == 200
    time.sleep(REQUEST_SECONDS / 2)
    for connection in slow:
        connection.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            said = connection.recv(4096)
            assert said.startswith(b"HTTP/1.1 200"), "closed too early"
    assert server.ask("/api/healthz")[0] == 200
    for connection in slow:
        connection.settimeout(3 * REQUEST_SECONDS)
        while connection.recv(4096):
            pass
        connection.close()


def test_the_timeout_restarts_with_every_request(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.connect()
    first = connection.sock
    for _ in range(4):
        connection.request("GET", "/api/healthz")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        assert connection.sock is first, "closed in between"
        time.sleep(REQUEST_SECONDS / 3)
    connection.close()


def test_a_port_in_use_is_a_one_line_error(server, data_folder):
    command = [sys.executable, "-m", "layerjump", "serve", str(data_folder / "tiny-gpt2")]
    done = subprocess.run(
        [*command, "--no-browser", "--port", str(server.port)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    assert f"port {server.port} of 127.0.0.1 cannot be used" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr

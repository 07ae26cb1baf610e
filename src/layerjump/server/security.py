"""Reject cross-site, oversized and unfinished requests.

What stands before every route: only this machine's own pages may ask, and not with too much at once.

A page of another site, open in the same browser, can send requests to 127.0.0.1 too. It cannot read the answers
(there are no CORS headers), but its requests are refused all the same; and a foreign name that was made to point to
this machine (DNS rebinding) is seen in the Host header.

Connections that never finish their question are closed: many of them would hold all that a process may open.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from layerjump.server.worker import Answer, refusal

MOST_BYTES = 256 << 10
"""The largest body of a request."""
_OURS = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
SECURITY = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]


class LocalOnlyMiddleware:
    """An ASGI middleware that checks where a request comes from and how large it is."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *SECURITY]
            await send(message)

        refused = _refused(scope)
        if refused is None:
            body = await _whole_body(receive)
            if body is not None:
                await self.app(scope, _once(body, receive), guarded)
                return
            refused = refusal(413, f"the request is larger than the {MOST_BYTES:,} bytes allowed")
        await _send(refused, guarded)


def _refused(scope: Scope) -> Answer | None:
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    if not _OURS.fullmatch(host):
        return refusal(
            400,
            f"the Host header is {host[:80]!r}; this server only answers to localhost and 127.0.0.1",
        )
    origin = headers.get("origin")
    foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    if foreign or _from_elsewhere(scope, headers):
        return refusal(403, "requests from pages of other sites are not answered")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BYTES:
        return refusal(
            413, f"the request is {length[:20]} bytes long; at most {MOST_BYTES:,} are allowed"
        )
    return None


def _from_elsewhere(scope: Scope, headers: Headers) -> bool:
    if headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
        return False
    # Following a link to the page from somewhere else is fine: a state is shared as a link.
    followed = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
    return not (followed and headers.get("sec-fetch-dest") == "document" and scope["path"] == "/")


async def _whole_body(receive: Receive) -> bytes | None:
    """The request's body, or None if it is too large (a chunked one does not say its length)."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST_BYTES:
            return None
    return body


def _once(body: bytes, receive: Receive) -> Receive:
    """Give the body again, then whatever else comes (the end of the connection)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _send(answer: Answer, send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(answer.body)).encode()),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


SECONDS = 10.0
"""From the first byte of a question, or from the beginning of a connection, to the question's last byte."""


class RequestTimeoutProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which by itself waits for ever for the rest of a request."""

    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Let the clock run while a question is incomplete; an answer may take as long as it needs."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._clock is None:
            self._clock = self.loop.call_later(SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

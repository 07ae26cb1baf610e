"""Reject cross-site, oversized and unfinished requests.

A page of another site, open in the same browser, can send requests to 127.0.0.1. It cannot read the answers (there
are no CORS headers), but its requests are refused all the same. The Host header reveals a foreign domain that resolves
to this machine (DNS rebinding).

Starlette's `TrustedHostMiddleware` does not do: it does not parse IPv6 hosts and its answers are not JSON.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BODY_BYTES = 256 << 10
REQUEST_SECONDS = 10.0
"""Time from the first byte of a request, or from the start of a connection, to the last byte of the request."""
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class LocalOnlyMiddleware:
    """Refuse requests of other hosts and sites, limit the size of bodies, and add security headers to all answers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:  # a chunked body does not state its length
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        try:
            _check(scope)
        except HTTPException as error:
            refusal = JSONResponse({"error": error.detail}, error.status_code)
            await refusal(scope, receive, send_with_headers)
            return
        await self.app(scope, receive_limited, send_with_headers)


def _check(scope: Scope) -> None:
    """Raise `HTTPException` for a request that is not from this machine's own page, or too large."""
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    if not _LOCAL_HOST.fullmatch(host):
        raise HTTPException(
            400, f"the Host header is {host[:80]!r}; this server answers only to localhost and 127.0.0.1"
        )
    origin = headers.get("origin")
    is_foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    is_own_site = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
    # A link on another site may open the page: links share the page's state.
    is_navigation = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
    is_link = is_navigation and headers.get("sec-fetch-dest") == "document" and scope["path"] == "/"
    if is_foreign or not (is_own_site or is_link):
        raise HTTPException(403, "requests from pages of other sites are refused")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body has {length[:20]} bytes; at most {MAX_BODY_BYTES:,} are allowed")


class RequestTimeoutProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 that closes connections without a complete request (slowloris protection)."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        """Run the timer while a request is incomplete; an answer may take as long as it needs."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

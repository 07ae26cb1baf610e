"""Connections that never finish their question are closed: many of them would hold all that a process may open."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0
"""From the first byte of a question, or from the beginning of a connection, to the question's last byte."""


class Impatient(H11Protocol):
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

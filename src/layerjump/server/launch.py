"""Start the server on the local address and stop it cleanly."""

from __future__ import annotations

import contextlib
import socket
import threading
import webbrowser
from collections.abc import Callable

import uvicorn

from layerjump.errors import CannotServe, argument
from layerjump.server.app import make_app
from layerjump.server.model_registry import ModelRegistry
from layerjump.server.security import RequestTimeoutProtocol

HOST = "127.0.0.1"


def serve(
    library: ModelRegistry, *, port: int, browser: bool, say: Callable[[str], None] = print
) -> None:
    """Serve the page until Ctrl-C. Port 0 takes any free one."""
    with _listen(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/"

        def started() -> None:
            say(f"layerjump is at {address} (Ctrl-C stops it)")
            _load_first(library)
            if browser:
                # A browser for terminals would not come back before it is closed.
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

        config = uvicorn.Config(
            make_app(library),
            http=RequestTimeoutProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        with contextlib.suppress(KeyboardInterrupt):  # the ordinary way to stop it
            _Server(config, started, library.closing.set).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and when it is about to end."""

    def __init__(
        self, config: uvicorn.Config, started: Callable[[], None], ending: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._say_started, self._say_ending = started, ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._say_ending()  # or it would wait for whoever still writes
        await super().shutdown(sockets)


def _listen(port: int) -> socket.socket:
    # Named as TCP, or asyncio does not switch off Nagle's delay, which costs 40 ms an answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)  # so that a second server on the port is refused here, in words
    except OSError as error:
        listener.close()
        raise CannotServe(
            f"port {port} of {HOST} cannot be used ({error.strerror}); stop what runs there, or give another "
            f"{argument('port')} (0 takes any free one)"
        ) from error
    return listener


def _load_first(library: ModelRegistry) -> None:
    """Load the first model while the browser opens."""
    shelf = next(iter(library.shelves.values()))
    shelf.desk.ask(("load", shelf.name), shelf.loaded, doing="loading", lasting=True)

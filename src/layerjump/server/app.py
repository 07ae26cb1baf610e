"""The FastAPI application, and `serve()`, which runs it on this machine's loopback address."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import socket
import threading
import webbrowser
from collections.abc import Callable, Hashable, Mapping
from importlib import resources
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from layerjump import __version__
from layerjump.errors import CannotServe, argument
from layerjump.jumps.estimators.registry import SERVED
from layerjump.server import schemas
from layerjump.server.generation import EventQueue, EventStreamResponse, stream_generation
from layerjump.server.security import LocalOnlyMiddleware, RequestTimeoutProtocol
from layerjump.server.served_models import ModelRegistry, ServedModel
from layerjump.server.worker import INTERNAL_ERROR, Answer, encode, error_answer

HOST = "127.0.0.1"
POLL_SECONDS = 2.0
"""How long a request waits for its answer before it gets its position in the queue."""
MAX_FINISHED_JOBS = 50
QUEUED: dict[int | str, dict[str, Any]] = {
    202: {"description": "busy: the request is queued; repeat it to keep its place", "model": schemas.Busy},
    503: {"description": "the queue is full", "model": schemas.Problem},
}
NOT_FITTED = {"description": "a lens is not fitted yet: see /api/fit", "model": schemas.UnfittedProblem}
ERRORS = {
    400: "the body is not text, or the Host header is not this machine's",
    403: "the request comes from a page of another site",
    404: "unknown model, lens or job",
    413: "the body is too large",
    422: "refused; `error` says why",
}
QUEUE_FULL = error_answer(503, "too many requests are waiting; try again later")
EVENTS = (
    "JSON lines: {busy, position} while the request is queued, {token, text, level, verified} for every token, "
    "with verify also {drafter, rejected, speedup}, and {done: …} or {error} at the end. Closing the connection stops "
    "the generation"
)


def make_app(registry: ModelRegistry) -> FastAPI:
    """The application that serves the models of a registry."""
    app = FastAPI(
        title="layerjump",
        version=__version__,
        description="What hidden levels predict. Loopback only; errors are {error: one sentence}.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # FastAPI's pages load scripts from the network; /api/docs is our own
        redoc_url=None,
        responses={status: {"description": text, "model": schemas.Problem} for status, text in ERRORS.items()},
    )
    app.add_middleware(LocalOnlyMiddleware)
    _add_error_handlers(app)
    _add_page(app)
    _add_model_routes(app, registry)
    _add_generate(app, registry)
    _add_fit(app, registry)
    return app


def _add_model_routes(app: FastAPI, registry: ModelRegistry) -> None:
    @app.get("/api/healthz", summary="Whether the server answers", response_model=schemas.Health)
    async def healthz() -> Response:
        return _json(schemas.Health(version=__version__))

    @app.get("/api/models", summary="Models, their lenses and states", response_model=schemas.Models)
    async def models() -> Response:
        return _json(schemas.Models(models=[served.status() for served in registry.models.values()]))

    @app.post(
        "/api/lens",
        summary="What every level predicts at every position of a text",
        response_model=schemas.LensAnswer,
        responses={409: NOT_FITTED, **QUEUED},
    )
    async def lens(body: schemas.LensRequest) -> Response:
        served = _find_model(registry, body.model)
        _check_lenses(registry, *body.lenses)
        return await _answer_or_position(served, body, lambda: served.read(body))

    @app.post(
        "/api/explain",
        summary="The logit of a token in one cell, as a sum over the parts of the model",
        response_model=schemas.ExplainAnswer,
        responses={409: NOT_FITTED, **QUEUED},
    )
    async def explain(body: schemas.ExplainRequest) -> Response:
        served = _find_model(registry, body.model)
        _check_lenses(registry, body.lens)
        return await _answer_or_position(served, body, lambda: served.explain(body))

    @app.post(
        "/api/race",
        summary="The probabilities of concepts, sets of words, level by level",
        response_model=schemas.RaceAnswer,
        responses={409: NOT_FITTED, **QUEUED},
    )
    async def race(body: schemas.RaceRequest) -> Response:
        served = _find_model(registry, body.model)
        _check_lenses(registry, body.lens)
        return await _answer_or_position(served, body, lambda: served.race(body))

    @app.post("/api/load", summary="Load a model", response_model=schemas.ModelStatus, responses=QUEUED)
    async def load(body: schemas.LoadRequest) -> Response:
        served = _find_model(registry, body.model)
        if served.state == "ready":
            return _json(served.status())
        return await _answer_or_position(served, body, served.load_and_describe)


async def _answer_or_position(served: ServedModel, key: Hashable, work: Callable[[], Answer]) -> Response:
    """The answer if it is cached or ready within `POLL_SECONDS`, otherwise the position in the queue."""
    cached = served.worker.cache.get(key)
    if cached is not None:
        return _response(cached, {"X-Layerjump-Cache": "hit"})
    future = served.worker.submit(key, work)
    if future is None:
        return _response(QUEUE_FULL)
    waiting = asyncio.wrap_future(future)
    await asyncio.wait([waiting], timeout=POLL_SECONDS)
    if waiting.done():
        return _response(waiting.result(), {"X-Layerjump-Cache": "miss"})
    return _response(_busy(served, key), {"X-Layerjump-Cache": "miss", "Retry-After": "1"})


def _busy(served: ServedModel, key: Hashable) -> Answer:
    position = served.worker.position(key)
    label = "loading the model" if served.state == "loading" else served.worker.current_label
    return Answer(202, encode(schemas.Busy(position=position, doing=label, said=f"busy, position {position}")))


def _add_generate(app: FastAPI, registry: ModelRegistry) -> None:
    @app.post(
        "/api/generate",
        summary="Generate with early exit: each token exits at the first level where the rule is satisfied",
        response_class=StreamingResponse,  # without a media type: `responses` states it
        responses={
            200: {"description": EVENTS, "content": {EventStreamResponse.media_type: {}}},
            409: NOT_FITTED,
            503: QUEUED[503],
        },
    )
    async def generate(body: schemas.GenerateRequest) -> Response:
        served = _find_model(registry, body.model)
        _check_lenses(registry, body.lens)
        events = EventQueue(registry.closing)

        def describe_position() -> Answer:
            served.worker.keep_alive(events)
            return _busy(served, events)

        future = served.worker.submit(
            events, lambda: stream_generation(served, body, events), label="writing", is_long=True
        )
        if future is None:
            return _response(QUEUE_FULL)
        asyncio.wrap_future(future).add_done_callback(lambda done: events.put_last(done.result()))
        first = await events.next(POLL_SECONDS)
        if first is not None and not first.is_ok:
            return _response(first)
        return EventStreamResponse(events, events.lines(first, describe_position, POLL_SECONDS))


def _add_fit(app: FastAPI, registry: ModelRegistry) -> None:
    jobs: dict[str, schemas.JobStatus] = {}

    @app.post("/api/fit", status_code=202, summary="Fit jumps on the built-in text", response_model=schemas.JobStatus)
    async def fit(body: schemas.FitRequest) -> Response:
        served = _find_model(registry, body.model)
        for name in body.estimators:
            if name not in SERVED:
                raise HTTPException(422, f"unknown estimator {name!r}; choose from {', '.join(SERVED)}")
        estimators = tuple(name for name in SERVED if name in body.estimators)
        for job in jobs.values():
            if (job.model, job.estimators) == (served.name, estimators) and not job.is_finished:
                return _json(job, 202)
        finished = [id for id, job in jobs.items() if job.is_finished]
        for id in finished[:-MAX_FINISHED_JOBS]:
            del jobs[id]
        new = schemas.JobStatus(model=served.name, estimators=estimators)
        jobs[new.id] = new
        label = f"fitting {', '.join(estimators)}"
        served.worker.submit(("fit", new.id), lambda: served.fit(new), label=label, is_persistent=True, is_long=True)
        return _json(new, 202)

    @app.get("/api/jobs/{id}", summary="The progress of a fit", response_model=schemas.JobStatus)
    async def job_status(id: str) -> Response:
        if id not in jobs:
            raise HTTPException(404, "unknown job; the server may have been restarted")
        return _json(jobs[id])


def _add_page(app: FastAPI) -> None:
    # All files are read at the start: no request is ever turned into a path.
    folder = resources.files("layerjump.server") / "static"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    colours = resources.files("layerjump.report") / "templates" / "colours.css"
    files[colours.name] = colours.read_bytes()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(files["index.html"], media_type="text/html; charset=utf-8")

    @app.get("/api/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(files["docs.html"], media_type="text/html; charset=utf-8")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file {name[:80]!r}")
        guessed = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(files[name], media_type="text/javascript" if name.endswith(".js") else guessed)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if message in ("Not Found", "Method Not Allowed"):  # raised by the router itself
            message = f"unknown request {request.method} {request.url.path[:80]}; see /api/docs"
        return _response(error_answer(error.status_code, message), error.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        # The name of a union's member says nothing after its field's.
        path = [str(part) for part in first["loc"] if part != "body"]
        named = [part for index, part in enumerate(path) if index == 0 or part not in schemas.TEXT_KINDS]
        field = " → ".join(named)
        message = f"{field or 'the request'}: {first['msg']}"
        if not field and "json" not in request.headers.get("content-type", ""):
            message += "; send JSON, with the header Content-Type: application/json"
        return _response(error_answer(422, message))

    @app.exception_handler(Exception)
    async def report_internal_error(request: Request, error: Exception) -> Response:
        return _response(error_answer(500, INTERNAL_ERROR))  # uvicorn logs the error


def _find_model(registry: ModelRegistry, name: str) -> ServedModel:
    if name not in registry.models:
        raise HTTPException(404, f"unknown model {name[:80]!r}; choose from {', '.join(registry.models)}")
    return registry.models[name]


def _check_lenses(registry: ModelRegistry, *names: str) -> None:
    for name in names:
        if name not in registry.lens_names:
            raise HTTPException(404, f"unknown lens {name[:80]!r}; choose from {', '.join(registry.lens_names)}")


def _json(content: BaseModel, status: int = 200) -> Response:
    return _response(Answer(status, encode(content)))


def _response(answer: Answer, headers: Mapping[str, str] | None = None) -> Response:
    return Response(answer.body, answer.status, dict(headers or {}), "application/json")


def serve(registry: ModelRegistry, *, port: int, browser: bool, log: Callable[[str], None] = print) -> None:
    """Serve the page until Ctrl-C; port 0 takes any free one."""
    with _listen(port) as listener, contextlib.suppress(KeyboardInterrupt):
        config = uvicorn.Config(
            make_app(registry),
            http=RequestTimeoutProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        address = f"http://{HOST}:{listener.getsockname()[1]}/"  # requests wait there until the server runs
        log(f"layerjump is at {address} (Ctrl-C stops it)")
        first = next(iter(registry.models.values()))  # loads while the browser opens
        request = schemas.LoadRequest(model=first.name)
        first.worker.submit(request, first.load_and_describe, label="loading", is_persistent=True)
        if browser:
            # In a thread: a browser in a terminal returns when it is closed.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        _Server(config, registry).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's server, which stops generations before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, registry: ModelRegistry) -> None:
        super().__init__(config)
        self._registry = registry

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._registry.closing.set()
        await super().shutdown(sockets)


def _listen(port: int) -> socket.socket:
    # With IPPROTO_TCP stated, asyncio switches off Nagle's algorithm, which costs 40 ms an answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)  # so that a second server on this port fails here
    except OSError as error:
        listener.close()
        raise CannotServe(
            f"port {port} of {HOST} cannot be used ({error.strerror}); stop the program that uses it, or give another "
            f"{argument('port')} (0 takes any free one)"
        ) from error
    return listener

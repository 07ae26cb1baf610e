"""The FastAPI application."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Callable, Hashable, Mapping
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from layerjump import __version__
from layerjump.server.generation import MOST_NEW, GenerateParams, write
from layerjump.server.model_registry import (
    FITTED,
    Job,
    Jobs,
    LensQuestion,
    ModelRegistry,
    ServedModel,
)
from layerjump.server.schemas import (
    MOST_CHARACTERS,
    MOST_FOLLOWED,
    MOST_K,
    FitRequest,
    GenerateRequest,
    LensRequest,
    LoadRequest,
    Problem,
)
from layerjump.server.security import LocalOnlyMiddleware
from layerjump.server.worker import UNFORESEEN, Answer, EventQueue, Stream, encode, refusal

PATIENCE = 2.0
"""Seconds that a request waits for its turn before it is told its place in line."""
BUSY: dict[int | str, dict[str, Any]] = {
    202: {
        "description": "busy: the question waits in line, at the position said; ask the same again"
    },
    503: {"description": "too many questions wait"},
}
UNFITTED = {"description": "a lens is not fitted yet: see /api/fit"}
REFUSED = {
    400: "the body is no text, or the Host header is not this machine's",
    403: "asked from a page of another site",
    404: "there is no such model, lens or job",
    413: "the body is too large",
    422: "refused; `error` says why",
}
FULL = refusal(503, "too many questions are waiting; ask again in a while")
STREAMED = (
    "JSON lines, as they come: {busy, position} while in line, {token, text, level, verified} for every token, and at "
    "the end {done: …} or {error}. Closing the connection stops the writing"
)


def make_app(library: ModelRegistry) -> FastAPI:
    """The application that answers for a library of models."""
    app = FastAPI(
        title="layerjump",
        version=__version__,
        description="What hidden levels predict. Loopback only; errors are {error: one sentence}.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # they would load their scripts from the network; /api/docs is our own
        redoc_url=None,
        responses={
            status: {"description": why, "model": Problem} for status, why in REFUSED.items()
        },
    )
    app.add_middleware(LocalOnlyMiddleware)
    _add_errors(app)
    _add_page(app)
    _add_lens(app, library)
    _add_generate(app, library)
    _add_fit(app, library)
    return app


def _add_lens(app: FastAPI, library: ModelRegistry) -> None:
    @app.get("/api/healthz", summary="Whether the server answers")
    async def healthz() -> Response:
        return _json({"ok": True, "version": __version__})

    @app.get("/api/models", summary="Models, their lenses, and how far they are loaded")
    async def models() -> Response:
        limits = {
            "characters": MOST_CHARACTERS,
            "k": MOST_K,
            "followed": MOST_FOLLOWED,
            "new_tokens": MOST_NEW,
        }
        shelves = [shelf.about() for shelf in library.shelves.values()]
        return _json({"models": shelves, "fitted_here": FITTED, "limits": limits})

    @app.post(
        "/api/lens",
        summary="What every level predicts at every position of a text",
        responses={409: UNFITTED, **BUSY},
    )
    async def lens(asked: LensRequest) -> Response:
        shelf = _shelf(library, asked.model)
        for name in asked.lenses:
            _require_lens(library, name)
        question = LensQuestion(
            asked.text, tuple(dict.fromkeys(asked.lenses)), asked.k, tuple(asked.tokens), asked.js
        )
        return await _in_turn(shelf, (shelf.name, question), lambda: shelf.answer(question))

    @app.post("/api/load", summary="Load a model, and say which lenses it has", responses=BUSY)
    async def load(asked: LoadRequest) -> Response:
        shelf = _shelf(library, asked.model)
        if shelf.state == "ready":
            return _json(shelf.about())
        return await _in_turn(shelf, ("load", shelf.name), shelf.loaded)


async def _in_turn(shelf: ServedModel, key: Hashable, work: Callable[[], Answer]) -> Response:
    """The answer if it is known or comes soon, and else the place in line."""
    known = shelf.desk.answers.get(key)
    if known is not None:
        return _response(known, cached=True)
    future = shelf.desk.ask(key, work)
    if future is None:
        return _response(FULL)
    waiting = asyncio.wrap_future(future)
    await asyncio.wait([waiting], timeout=PATIENCE)
    if waiting.done():
        return _response(waiting.result(), cached=False)
    return _response(_busy(shelf, key), cached=False, headers={"Retry-After": "1"})


def _busy(shelf: ServedModel, key: Hashable) -> Answer:
    place = shelf.desk.place(key)
    doing = "loading the model" if shelf.state == "loading" else shelf.desk.doing
    said = {"busy": True, "position": place, "doing": doing, "said": f"busy, position {place}"}
    return Answer(202, encode(said))


def _add_generate(app: FastAPI, library: ModelRegistry) -> None:
    @app.post(
        "/api/generate",
        summary="Go on with a prompt, each token leaving at the first level that is sure",
        response_class=StreamingResponse,  # of unknown kind: what it is stands below
        responses={
            200: {"description": STREAMED, "content": {Stream.media_type: {}}},
            409: UNFITTED,
            503: BUSY[503],
        },
    )
    async def generate(asked: GenerateRequest) -> Response:
        shelf = _shelf(library, asked.model)
        _require_lens(library, asked.lens)
        wish = GenerateParams(**asked.model_dump(exclude={"model"}))
        told = EventQueue(library.closing)
        future = shelf.desk.ask(told, lambda: write(shelf, wish, told), doing="writing", long=True)
        if future is None:
            return _response(FULL)
        asyncio.wrap_future(future).add_done_callback(lambda done: told.end(done.result()))
        first = await told.next(PATIENCE)
        if first is not None and not first.good:
            return _response(first)
        return Stream(first, told, lambda: _still_busy(shelf, told), patience=PATIENCE)


def _still_busy(shelf: ServedModel, key: Hashable) -> Answer:
    shelf.desk.still_wanted(key)
    return _busy(shelf, key)


def _add_fit(app: FastAPI, library: ModelRegistry) -> None:
    jobs = Jobs()

    @app.post("/api/fit", status_code=202, summary="Fit jumps on the built-in text, once")
    async def fit(asked: FitRequest) -> Response:
        shelf = _shelf(library, asked.model)
        for name in asked.estimators:
            if name not in FITTED:
                raise HTTPException(
                    422, f"no estimator {name!r} is fitted here; known are {', '.join(FITTED)}"
                )
        estimators = tuple(name for name in FITTED if name in asked.estimators)
        job = jobs.same(shelf.name, estimators)
        if job is None:
            job = jobs.add(Job(shelf.name, estimators))
            made: Job = job
            doing = f"fitting {', '.join(estimators)}"
            shelf.desk.ask(
                ("fit", job.id), lambda: shelf.fit(made), doing=doing, lasting=True, long=True
            )
        return _json(job.about(), 202)

    @app.get("/api/jobs/{id}", summary="How far a fit is")
    async def job(id: str) -> Response:
        found = jobs.get(id)
        if found is None:
            raise HTTPException(404, "there is no such job; the server may have been started anew")
        return _json(found.about())


def _add_page(app: FastAPI) -> None:
    # Read once, by name: no request ever becomes a path.
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
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(files[name], media_type="text/javascript" if name.endswith(".js") else kind)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path[:80]} is not known here; see /api/docs"
        generic = error.detail in ("Not Found", "Method Not Allowed")
        told = refusal(error.status_code, said if generic else str(error.detail))
        return _response(told, headers=error.headers)  # "Allow", where a method is refused

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = " → ".join(str(part) for part in first["loc"] if part != "body")
        said = f"{where or 'the request'}: {first['msg']}"
        if not where and "json" not in request.headers.get("content-type", ""):
            said += "; send JSON, with the header Content-Type: application/json"
        return _response(refusal(422, said))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _response(refusal(500, UNFORESEEN))  # the server logs the error itself


def _shelf(library: ModelRegistry, name: str) -> ServedModel:
    if name not in library.shelves:
        known = ", ".join(library.shelves)
        raise HTTPException(404, f"there is no model {name[:80]!r} here; known are {known}")
    return library.shelves[name]


def _require_lens(library: ModelRegistry, name: str) -> None:
    if name not in library.lens_names:
        known = ", ".join(library.lens_names)
        raise HTTPException(404, f"there is no lens {name[:80]!r} here; known are {known}")


def _json(content: Any, status: int = 200) -> Response:
    return _response(Answer(status, encode(content)))


def _response(
    answer: Answer, *, cached: bool | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    told = dict(headers or {})
    if cached is not None:
        told["X-Layerjump-Cache"] = "hit" if cached else "miss"
    return Response(answer.body, answer.status, told, "application/json")

"""Stream generated tokens to the page, as events.

Between two tokens the worker runs one short task that waits; if the client disconnects, generation stops there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from torch import Tensor

from layerjump.errors import BadExit, BadText
from layerjump.generation.calibration import calibration_file
from layerjump.generation.combine_drafters import step_costs
from layerjump.generation.decoding_loop import RejectedDraft
from layerjump.generation.exit_rules import ExitConfig
from layerjump.generation.generate import generate
from layerjump.lens.prepare_prompt import chat_prompt
from layerjump.server.interventions import RequestInterventions
from layerjump.server.request_text import as_prompt, count_tokens
from layerjump.server.schemas import GenerateRequest
from layerjump.server.served_models import ServedModel
from layerjump.server.worker import Answer, Refused, Worker, encode, error_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALIBRATED = "calibrated"
"""The exit rule that `layerjump calibrate` saved with the jumps."""
MAX_BYTES_PER_CHARACTER = 4


def stream_generation(served: ServedModel, request: GenerateRequest, events: EventQueue) -> Answer:
    """Generate, and put every token into `events`; return the last event."""
    model = served.load()
    if served.cannot_generate:
        raise BadExit(served.cannot_generate)
    lens = served.get_lenses([request.lens])[request.lens]
    if request.exit != CALIBRATED:
        exit_config, max_draft_tokens = ExitConfig.of(request.exit), None
    elif request.lens in served.calibrated:
        calibration = calibration_file.load_calibration(served.folders[request.lens], model=model)
        exit_config = calibration.verified_exit if request.verify else calibration.exit
        max_draft_tokens = calibration.max_draft_tokens if request.verify else None
    else:
        raise BadExit(
            f"{request.lens} has no calibrated exit rule; run `layerjump calibrate`, or give never, gap:0.9, fixed:3 …"
        )
    longest = model.tokenization.max_length
    prompt = as_prompt(request.prompt)
    length = count_tokens(model, "prompt", prompt)
    if request.max_new_tokens > longest - length:
        raise BadText(
            f"{request.max_new_tokens} new tokens do not fit: the model takes {longest:,} tokens, and the prompt has "
            f"{length:,}; ask for fewer, or shorten the prompt"
        )
    n_positions = length + request.max_new_tokens
    interventions = RequestInterventions(lens, request.interventions, n_positions=n_positions)
    tokenization = model.tokenization
    if isinstance(prompt, str):
        inputs = tokenization.generation_inputs([prompt])
    else:
        inputs = tokenization.left_padded([chat_prompt(model, prompt).ids])
    # What a token would take without drafts, for the running speed-up.
    token_seconds = step_costs(model, 1).of(1) if request.verify else None
    streamer = _Streamer(
        tokenization.tokenizer, served.worker, events, token_seconds=token_seconds, suspended=interventions.suspended
    )
    start = time.perf_counter()
    with interventions:
        generated = generate(
            model,
            lens.jumps,
            inputs,
            exit=exit_config,
            verify=request.verify,
            cache=request.cache,
            max_draft_tokens=max_draft_tokens,
            streamer=streamer,
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenization.pad,
            use_cache=True,  # checkpoints saved during training may switch it off
        )
    counts = asdict(generated.counts)
    del counts["seconds"]  # they include time spent on other requests
    done = {
        "text": streamer.text,
        "ids": generated.ids[0],
        "levels": generated.exit_levels[0],
        "n_blocks": generated.n_blocks,
        "blocks_saved": generated.blocks_saved,
        "agreement": generated.agreement,
        "drafters": generated.drafters[0],
        "speedup": streamer.speedup,
        "seconds": round(time.perf_counter() - start - streamer.seconds_for_others, 4),
        "counts": counts,
    }
    return Answer(200, encode({"done": done}))


class _Streamer:
    """The streamer of one generation: sends every token, then runs one short task that waits."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        worker: Worker,
        events: EventQueue,
        *,
        token_seconds: float | None,
        suspended: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`token_seconds`: what a token takes without drafts; None: tokens are not verified."""
        self._tokenizer, self._worker, self._events = tokenizer, worker, events
        self._suspended = suspended
        self._token_seconds = token_seconds
        self._drafter: str | None = None
        self._rejected: RejectedDraft | None = None
        self._first_time = 0.0
        self._n_tokens = 0
        self.speedup: float | None = None
        """How many times as fast tokens came as they would without drafts, after the first; None: not verified."""
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._decoder: IncrementalDecoder | None = None
        self._level: int | None = None
        self.text = ""
        """The generated text, without special tokens."""
        self.seconds_for_others = 0.0
        """Time spent on the tasks of other requests."""

    def put_exit_levels(self, levels: Sequence[int | None]) -> None:
        """Take the exit level of the next token."""
        self._level = levels[0]

    def put_drafters(self, drafters: Sequence[str | None]) -> None:
        """Take the drafter of the next token."""
        self._drafter = drafters[0]

    def put_rejected(self, rejected: Sequence[RejectedDraft | None]) -> None:
        """Take the draft that the next token took the place of."""
        self._rejected = rejected[0]

    def put(self, ids: Tensor) -> None:
        """Take the prompt, then one token a call."""
        self._events.refuse_if_disconnected()
        if self._decoder is None:
            self._decoder = IncrementalDecoder(self._tokenizer, ids[0].tolist())
            return
        token = int(ids)
        text = self._decoder.add(token)
        if token not in self._special_ids:
            self.text += text
        event: dict[str, Any] = {"token": token, "text": text, "level": self._level}
        event["verified"] = self._token_seconds is not None
        if self._token_seconds is not None:
            self._measure_speedup(self._token_seconds)
            event |= {"drafter": self._drafter, "rejected": self._describe_rejected(), "speedup": self.speedup}
        self._events.put(Answer(200, encode(event)))
        start = time.perf_counter()
        self._worker.run_one_short_task(self._suspended)
        self.seconds_for_others += time.perf_counter() - start

    def _measure_speedup(self, token_seconds: float) -> None:
        """Compare the time since the first token, whose step read the prompt, with that of as many single steps."""
        now = time.perf_counter() - self.seconds_for_others
        if self._n_tokens == 0:
            self._first_time = now
        elif now > self._first_time:
            self.speedup = round(self._n_tokens * token_seconds / (now - self._first_time), 3)
        self._n_tokens += 1

    def _describe_rejected(self) -> dict[str, str] | None:
        if self._rejected is None:
            return None
        return {"text": str(self._tokenizer.decode([self._rejected.token])), "drafter": self._rejected.drafter}

    def end(self) -> None:
        """Do nothing: the worker sends the last event."""


class IncrementalDecoder:
    """Decode a text token by token: blanks depend on neighbours, and a character may span tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._context_start, self._decoded = 0, len(self._ids)
        """Tokens from `_context_start` are context; those from `_decoded` are not decoded yet."""

    def add(self, token: int) -> str:
        """The text that the token adds; empty while a character lacks bytes."""
        self._ids.append(token)
        before = self._decode(self._decoded)
        after = self._decode(len(self._ids))
        pending = len(self._ids) - self._decoded
        if after.endswith("\ufffd") and pending < MAX_BYTES_PER_CHARACTER:
            return ""
        self._context_start, self._decoded = self._decoded, len(self._ids)
        return after[len(before) :]

    def _decode(self, end: int) -> str:
        ids = self._ids[self._context_start : end]
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class EventQueue:
    """Events of one generation, from the worker's thread to the event loop that made this queue."""

    def __init__(self, closing: threading.Event) -> None:
        self.client_gone = threading.Event()
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Answer] = asyncio.Queue()
        self._has_last = False

    def refuse_if_disconnected(self) -> None:
        """End the task if the client closed its connection, or the server ends."""
        if self.client_gone.is_set() or self._closing.is_set():
            raise Refused(error_answer(503, "the generation was stopped"))

    def put(self, event: Answer) -> None:
        """Add an event; called in the worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has just ended
            self.client_gone.set()
            self.refuse_if_disconnected()

    def put_last(self, event: Answer) -> None:
        """Add the last event; called in the event loop."""
        self._events.put_nowait(event)
        self._has_last = True

    async def next(self, timeout: float) -> Answer | None:
        """The next event, or None if there is none within `timeout` seconds."""
        try:
            return await asyncio.wait_for(self._events.get(), timeout)
        except TimeoutError:
            return None

    async def lines(
        self, first: Answer | None, describe_position: Callable[[], Answer], interval: float
    ) -> AsyncIterator[bytes]:
        """JSON lines: the events, and before the first one the position in the queue every `interval` seconds."""
        event, has_started = first, first is not None
        while True:
            if event is not None:
                has_started = True
                yield event.body + b"\n"
            elif not has_started:
                yield describe_position().body + b"\n"
            if self._has_last and self._events.empty():
                return
            event = await self.next(interval)


class EventStreamResponse(StreamingResponse):
    """The events of a generation, until the last one or until the client leaves."""

    media_type = "application/x-ndjson"

    def __init__(self, events: EventQueue, lines: AsyncIterator[bytes]) -> None:
        self._events = events
        super().__init__(lines)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Here and not in the generator, which does not run at all if the client leaves early.
            self._events.client_gone.set()

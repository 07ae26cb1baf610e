"""Stream generated tokens to the page.

Between two tokens the worker runs one short task that waits; if the client disconnects, generation stops there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from torch import Tensor

from layerjump.errors import BadExit, BadText
from layerjump.generation.calibration import serialization
from layerjump.generation.generate import MAX_DRAFT_TOKENS, Generated, generate
from layerjump.generation.rules import ExitConfig
from layerjump.models.model import Model
from layerjump.server.model_registry import ServedModel
from layerjump.server.schemas import MAX_PROMPT_TOKENS, DoneEvent, GenerateRequest, GenerationSummary, TokenEvent
from layerjump.server.worker import Answer, ClientDisconnected, EventQueue, Worker, encode, error_answer

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
    problem = served.find_problem([request.lens])
    if problem is not None:
        return problem
    lens = served.get_lenses([request.lens])[request.lens]
    exit_config, max_draft_tokens = _choose_exit(served, model, request)
    _check_length(model, request)
    streamer = _Streamer(model.tokenization.tokenizer, served.worker, events, is_verified=request.verify)
    start = time.perf_counter()
    try:
        generated = generate(
            model,
            lens.jumps,
            model.tokenization.generation_inputs([request.prompt]),
            exit=exit_config,
            verify=request.verify,
            cache=request.cache,
            max_draft_tokens=max_draft_tokens,
            streamer=streamer,
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            pad_token_id=model.tokenization.pad,
            use_cache=True,  # checkpoints saved during training may switch it off
        )
    except ClientDisconnected:
        return error_answer(503, "the generation was stopped")
    seconds = time.perf_counter() - start - streamer.seconds_for_others
    return Answer(200, encode(DoneEvent(done=_summarise(generated, streamer.text, seconds))))


def _choose_exit(served: ServedModel, model: Model, request: GenerateRequest) -> tuple[ExitConfig, int]:
    """The exit rule of the request, and the largest number of draft tokens before verification."""
    if request.exit != CALIBRATED:
        return ExitConfig.of(request.exit), MAX_DRAFT_TOKENS
    if request.lens not in served.calibrated:
        raise BadExit(
            f"{request.lens} has no calibrated exit rule; run `layerjump calibrate`, or give never, gap:0.9, fixed:3 …"
        )
    calibration = serialization.load_calibration(served.folders[request.lens], model=model)
    exit_config = calibration.verified_exit if request.verify else calibration.exit
    return exit_config, calibration.max_draft_tokens


def _check_length(model: Model, request: GenerateRequest) -> None:
    tokenization = model.tokenization
    length = len(tokenization.wrap(tokenization.encode([request.prompt])[0]))
    longest = min(MAX_PROMPT_TOKENS, tokenization.max_length)
    if length > longest:
        raise BadText(f"the prompt has {length:,} tokens, and at most {longest:,} are read; shorten it")
    if request.max_new_tokens > tokenization.max_length - length:
        raise BadText(
            f"{request.max_new_tokens} new tokens do not fit: the model takes {tokenization.max_length:,} tokens, and "
            f"the prompt has {length:,}; ask for fewer, or shorten the prompt"
        )


class _Streamer:
    """The streamer of one generation: sends every token, then runs one short task that waits."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, worker: Worker, events: EventQueue, *, is_verified: bool
    ) -> None:
        self._tokenizer, self._worker, self._events = tokenizer, worker, events
        self._is_verified = is_verified
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

    def put(self, ids: Tensor) -> None:
        """Take the prompt, then one token a call."""
        self._events.raise_if_disconnected()
        if self._decoder is None:
            self._decoder = IncrementalDecoder(self._tokenizer, ids[0].tolist())
            return
        token = int(ids)
        text = self._decoder.add(token)
        if token not in self._special_ids:
            self.text += text
        event = TokenEvent(token=token, text=text, level=self._level, verified=self._is_verified)
        self._events.put(Answer(200, encode(event)))
        start = time.perf_counter()
        self._worker.run_one_short_task()
        self.seconds_for_others += time.perf_counter() - start

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


def _summarise(generated: Generated, text: str, seconds: float) -> GenerationSummary:
    counts = asdict(generated.counts)
    del counts["seconds"]  # they include time spent on other requests
    return GenerationSummary(
        text=text,
        ids=generated.ids[0],
        levels=generated.exit_levels[0],
        n_blocks=generated.n_blocks,
        blocks_saved=generated.blocks_saved,
        agreement=generated.agreement,
        seconds=round(seconds, 4),
        counts=counts,
    )

"""Stream generated tokens to the page.

Between two tokens a question that waits at the desk is answered; when nobody listens any more, the writing stops there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerjump.errors import BadExit, BadText
from layerjump.generation.calibration import serialization
from layerjump.generation.generate import MAX_DRAFT_TOKENS, Generated, generate
from layerjump.generation.kv_cache import CacheKind
from layerjump.generation.rules import ExitConfig
from layerjump.models.model import Model
from layerjump.server.model_registry import MOST_READ, ServedModel
from layerjump.server.worker import Answer, ClientDisconnected, EventQueue, Worker, encode, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_NEW = 256
"""New tokens of one generation."""
CALIBRATED = "calibrated"
"""The rule that `layerjump calibrate` left beside the jumps."""
_BYTES = 4
"""A character may be spread over so many tokens, a byte each."""


@dataclass(frozen=True)
class GenerateParams:
    """What `/api/generate` was asked."""

    prompt: str
    lens: str
    exit: str
    cache: CacheKind
    verify: bool
    max_new_tokens: int


def write(shelf: ServedModel, wish: GenerateParams, told: EventQueue) -> Answer:
    """Generate for one who listens; the answer is what is said at the end."""
    model = shelf.load()
    if shelf.cannot_generate:
        raise BadExit(shelf.cannot_generate)
    refused = shelf.refused([wish.lens])
    if refused is not None:
        return refused
    shelf.fetch([wish.lens])
    rule, most = _rule(shelf, model, wish)
    _check_room(model, wish)
    scribe = _Scribe(model.tokenization.tokenizer, shelf.desk, told, verified=wish.verify)
    start = time.perf_counter()
    try:
        made = generate(
            model,
            shelf.lenses[wish.lens].jumps,
            wish.prompt,
            exit=rule,
            verify=wish.verify,
            cache=wish.cache,
            max_draft_tokens=most,
            streamer=scribe,
            max_new_tokens=wish.max_new_tokens,
            do_sample=False,
            use_cache=True,  # training switches it off, and checkpoints are saved so
        )
    except ClientDisconnected:
        return refusal(503, "the generation was stopped")
    seconds = time.perf_counter() - start - scribe.lent
    return Answer(200, encode({"done": _summary(made, scribe.text, seconds)}))


def _rule(shelf: ServedModel, model: Model, wish: GenerateParams) -> tuple[ExitConfig, int]:
    """The rule asked for, and how many of its tokens may wait for verification."""
    if wish.exit != CALIBRATED:
        return ExitConfig.of(wish.exit), MAX_DRAFT_TOKENS
    if wish.lens not in shelf.calibrated:
        raise BadExit(
            f"there is no calibrated rule for {wish.lens} here; make one with `layerjump calibrate`, or give never, "
            f"gap:0.9, fixed:3 …"
        )
    found = serialization.load_calibration(shelf.folders[wish.lens], model=model)
    return found.verified_exit if wish.verify else found.exit, found.max_draft_tokens


def _check_room(model: Model, wish: GenerateParams) -> None:
    tokens = model.tokenization
    length, most = len(tokens.wrap(tokens.encode([wish.prompt])[0])), tokens.max_length
    if length > min(MOST_READ, most):
        raise BadText(
            f"the prompt has {length:,} tokens, and up to {min(MOST_READ, most):,} are read; shorten it"
        )
    if wish.max_new_tokens > most - length:
        raise BadText(
            f"{wish.max_new_tokens} more tokens were asked for, but the model takes {most:,}, and the prompt has "
            f"{length:,} of them; ask for fewer, or shorten the prompt"
        )


class _Scribe:
    """The streamer of one text: tells every token, then lets a question in."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, desk: Worker, told: EventQueue, *, verified: bool
    ) -> None:
        self._tokenizer, self._desk, self._told = tokenizer, desk, told
        self._verified = verified
        self._special = frozenset(tokenizer.all_special_ids)
        self._pieces: Pieces | None = None
        self._level: int | None = None
        self.text = ""
        """What was added to the prompt, without special tokens."""
        self.lent = 0.0
        """Seconds that went to others' questions."""

    def put_exit_levels(self, levels: Sequence[int | None]) -> None:
        """The level of the token that comes next."""
        self._level = levels[0]

    def put(self, ids: Tensor) -> None:
        """The prompt, and then token by token."""
        self._told.check()
        if self._pieces is None:
            self._pieces = Pieces(self._tokenizer, ids[0].tolist())
            return
        token = int(ids)
        piece = self._pieces.add(token)
        if token not in self._special:
            self.text += piece
        said = {
            "token": token,
            "text": piece,
            "level": self._level,
            "verified": self._verified,
        }
        self._told.tell(Answer(200, encode(said)))
        start = time.perf_counter()
        self._desk.let_in()
        self.lent += time.perf_counter() - start

    def end(self) -> None:
        """Nothing is left to say."""


class Pieces:
    """What each token adds to a text. Alone it does not say: blanks depend on neighbours, characters may be shared."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._start, self._told = 0, len(self._ids)
        """Tokens from the first on are context; those from the second on are still to be told."""

    def add(self, token: int) -> str:
        """The text that is certain now: none while a character lacks bytes."""
        self._ids.append(token)
        before = self._decoded(self._told)
        whole = self._decoded(len(self._ids))
        if whole.endswith("\ufffd") and len(self._ids) - self._told < _BYTES:
            return ""
        self._start, self._told = self._told, len(self._ids)
        return whole[len(before) :]

    def _decoded(self, end: int) -> str:
        return str(
            self._tokenizer.decode(self._ids[self._start : end], clean_up_tokenization_spaces=False)
        )


def _summary(made: Generated, text: str, seconds: float) -> dict[str, Any]:
    counts = asdict(made.counts)
    del counts["seconds"]  # they include what was lent
    return {
        "text": text,
        "ids": made.ids[0],
        "levels": made.exit_levels[0],
        "n_blocks": made.n_blocks,
        "blocks_saved": made.blocks_saved,
        "agreement": made.agreement,
        "seconds": round(seconds, 4),
        "counts": counts,
    }

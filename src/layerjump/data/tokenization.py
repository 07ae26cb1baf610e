"""A tokenizer with the special tokens that the model was trained to see."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from layerjump.errors import BadText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_ONCE = 1_000  # texts a call: enough to keep the tokenizer's threads busy
_UNLIMITED = 10**9  # tokenizers write "no limit" as a number of about 1e30
_known: "WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, str]]" = WeakKeyDictionary()
"""Texts of tokens looked up before: a trajectory names thousands of them, and decoding is slow."""

_WHITESPACE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
"""Unicode categories of invisible characters: controls, direction marks, joiners, unusual spaces."""


@dataclass(frozen=True)
class Tokenization:
    """A tokenizer, left as it is, with the ids that go around every text and the ids that fill."""

    tokenizer: "PreTrainedTokenizerBase"
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int
    mask: int | None
    max_length: int
    both_ways: bool = False
    """Read by an encoder without masks: it wants the whole text, its end-of-text token included."""
    start: int | None = None
    """What an encoder–decoder's decoder reads first; None for a single stack."""

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_positions: int,
        needs_bos: bool = False,
        masked: bool | None = None,
        both_ways: bool = False,
        start: int | None = None,
    ) -> "Tokenization":
        """Find out what this tokenizer puts around a text.

        `needs_bos` adds a BOS that the tokenizer has but does not add. `masked` says whether the
        model is a masked one; unless told, it is if the tokenizer has a mask token.
        An encoder–decoder is `both_ways`, and gives its decoder's `start` token.
        """
        mask = tokenizer.mask_token_id if masked is not False else None
        if masked and mask is None:
            raise BadText("the model fills in masks, but its tokenizer has no mask token; add one")
        limit = tokenizer.model_max_length
        if not isinstance(limit, int | float) or not limit >= 1:
            raise BadText(
                f"the tokenizer's model_max_length is {str(limit)[:50]!r}, but a number of 1 or more was wanted; mend "
                f"it in tokenizer_config.json"
            )
        _require_unknown(tokenizer)
        prefix, suffix = _around(tokenizer)
        bos = tokenizer.bos_token_id
        if needs_bos and bos is not None and bos not in prefix:
            prefix = (bos, *prefix)
        if mask is None and not both_ways:
            suffix = ()  # after an end of text, a causal model does not go on with the text
        max_length = min(max_positions, int(limit)) if limit < _UNLIMITED else max_positions
        pad = _padding(tokenizer)
        found = cls(tokenizer, prefix, suffix, pad, mask, max_length, both_ways, start)
        if found.room < 1:
            raise BadText(
                f"sequences of {max_length} tokens leave no room for text beside the "
                f"{found.n_added} the tokenizer adds; allow more positions"
            )
        return found

    @property
    def room(self) -> int:
        """How many tokens of text fit in one sequence."""
        return self.room_in(self.max_length)

    @property
    def n_added(self) -> int:
        """How many tokens stand beside the text in one row, at most."""
        return max(len(self.wrap([])), sum(self.around))

    @property
    def around(self) -> tuple[int, int]:
        """How many tokens stand before and after the text in `input_ids`."""
        if self.start is not None:
            return 1 + len(self.prefix), 0
        return len(self.prefix), len(self.suffix)

    def room_in(self, length: int) -> int:
        """How many tokens of text fit where a row has at most this length; encoder–decoders have two rows."""
        room = min(length, self.max_length) - self.n_added
        return room if self.start is None else 2 * room

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the texts in full, with nothing around them."""
        starts = range(0, len(texts), _AT_ONCE)
        chunks = (_encode(self.tokenizer, texts[i : i + _AT_ONCE]) for i in starts)
        return [ids for chunk in chunks for ids in chunk]

    def wrap(self, ids: Sequence[int]) -> list[int]:
        """The ids with prefix and suffix around them."""
        return [*self.prefix, *ids, *self.suffix]

    def halves(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """What an encoder–decoder reads of a text: the encoder its first half, the decoder its second.

        The decoder's half stands behind the start token, as it does in training: these are the labels (prefix, text,
        end of text) moved one place to the right.
        """
        assert self.start is not None
        middle = (len(ids) + 1) // 2
        return self.wrap(ids[:middle]), [self.start, *self.prefix, *ids[middle:]]

    def one(self, text: str) -> int:
        """The token that is this text; " Paris" is the token after a blank, however the tokenizer writes it."""
        ids = self.encode([text])[0]
        if len(ids) != 1 and text.startswith(" "):
            # SentencePiece puts a blank before every text by itself.
            bare = self.encode([text[1:]])[0]
            ids = bare if token_texts(self.tokenizer, bare) == [text] else ids
        if len(ids) != 1:
            pieces = ", ".join(repr(piece) for piece in token_texts(self.tokenizer, ids)) or "none"
            raise BadText(
                f"{text!r} was given as one token, but this tokenizer makes {len(ids)} of it ({pieces}); give one of "
                f"these"
            )
        return ids[0]

    def generation_inputs(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, padded on the left: the next token follows the last."""
        rows = [self.wrap(ids) for ids in self.encode(texts)]
        for text, row in zip(texts, rows, strict=True):
            self._check_prompt(text, len(row))
        return self.left_padded(rows)

    def left_padded(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Rows of ids as `input_ids` and `attention_mask` that end together."""
        longest = max(map(len, rows), default=0)
        ids = torch.full((len(rows), longest), self.pad)
        attention = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = torch.tensor(row)
            attention[i, longest - len(row) :] = 1
        return {"input_ids": ids, "attention_mask": attention}

    def _check_prompt(self, text: str, length: int) -> None:
        if length > self.max_length:
            raise BadText(
                f"the prompt {text[:20]!r}... has {length:,} tokens, but the model takes "
                f"{self.max_length:,}; shorten it"
            )
        if length == 0:
            raise BadText(f"the prompt {text!r} has no tokens; give at least one word")


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: Iterable[int]) -> list[str]:
    """Tokens as they stand within a text: alone, SentencePiece drops the blank that tells a token from others."""
    ids = list(ids)
    known = _known.setdefault(tokenizer, {})
    new = [token for token in dict.fromkeys(ids) if token not in known]
    for token in new:
        alone, twice = (str(tokenizer.decode([token] * times)) for times in (1, 2))
        known[token] = twice[len(alone) :] if twice.startswith(alone) else alone
        if not alone and token >= len(tokenizer):
            known[token] = f"<row {token}>"  # heads are filled up to a round number of rows
    return [known[token] for token in ids]


def token_text(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """One token as it stands within a text."""
    return token_texts(tokenizer, [token])[0]


def escape_token(text: str) -> str:
    """A token's text with visible whitespace and escaped control characters; ∅ for an empty one."""
    escaped = "".join(map(_escape_character, text)) or "∅"
    # A combining mark would join the character before it, such as a table's border.
    return f"◌{escaped}" if unicodedata.combining(escaped[0]) else escaped


def _escape_character(character: str) -> str:
    if character in _WHITESPACE:
        return _WHITESPACE[character]
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _encode(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], *, special: bool = False
) -> list[list[int]]:
    # verbose=False: texts longer than the model takes are cut later, a warning would be wrong.
    encoded = tokenizer(
        list(texts),
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return encoded["input_ids"]


def _around(tokenizer: "PreTrainedTokenizerBase") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prefix and suffix, by encoding a text with special tokens and without."""
    for probe in _probes(tokenizer):
        bare = _encode(tokenizer, [probe])[0]
        full = _encode(tokenizer, [probe], special=True)[0]
        starts = range(len(full) - len(bare) + 1) if bare else ()
        for start in starts:
            end = start + len(bare)
            if full[start:end] == bare:
                return tuple(full[:start]), tuple(full[end:])
    raise BadText(
        f"the tokenizer {type(tokenizer).__name__} gives no tokens for any word tried, not even "
        "its own; check its vocabulary"
    )


def _probes(tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Texts of which one should have tokens. A tokenizer for molecules, say, drops all words."""
    yield "a"
    vocabulary = tokenizer.get_vocab()
    for token in sorted(vocabulary, key=lambda token: vocabulary[token])[:1_000]:
        if token not in tokenizer.all_special_tokens:
            yield tokenizer.convert_tokens_to_string([token])


def _require_unknown(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Where the unknown token is itself unknown, transformers looks it up for ever."""
    try:
        _ = tokenizer.unk_token_id
    except RecursionError:
        raise BadText(
            f"the tokenizer's unknown token is {str(tokenizer.unk_token)[:50]!r}, which is not in its vocabulary; mend "
            f"it in tokenizer.json"
        ) from None


def _padding(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Padding is always masked out, so any id will do where the tokenizer names none."""
    fillers = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, 0)
    return next(filler for filler in fillers if filler is not None)

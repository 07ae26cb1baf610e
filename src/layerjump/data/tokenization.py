"""A tokenizer with the special tokens that the model was trained to see."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerjump.data.token_text import token_texts
from layerjump.errors import BadText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_ONCE = 1_000  # texts a call: enough to keep the tokenizer's threads busy
_UNLIMITED = 10**9  # tokenizers write "no limit" as a number of about 1e30


@dataclass(frozen=True)
class Tokenization:
    """A tokenizer, which is never changed, with the ids around every text, the padding id and the mask id."""

    tokenizer: "PreTrainedTokenizerBase"
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int
    mask: int | None
    max_length: int
    both_ways: bool = False
    """Whether an encoder without masks reads the text: the whole text, including its end-of-text token."""
    start: int | None = None
    """The first token of an encoder–decoder's decoder; None for other models."""

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_positions: int,
        masked: bool | None = None,
        both_ways: bool = False,
        start: int | None = None,
    ) -> "Tokenization":
        """Find out which ids this tokenizer puts around a text.

        `masked` says whether the model is a masked one; by default, it is if the tokenizer has a mask token. An
        encoder–decoder is `both_ways`, and has its decoder's `start` token.
        """
        mask = tokenizer.mask_token_id if masked is not False else None
        if masked and mask is None:
            raise BadText("the model fills in masks, but its tokenizer has no mask token; add one")
        limit = tokenizer.model_max_length
        if not isinstance(limit, int | float) or not limit >= 1:
            raise BadText(
                f"expected a number of 1 or more as model_max_length in tokenizer_config.json, got "
                f"{str(limit)[:50]!r}; correct it"
            )
        try:
            # Padding is always masked out, so any id will do if the tokenizer has none.
            ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, 0)
        except RecursionError:  # transformers looks an unknown token that is not in the vocabulary up forever
            raise BadText(
                f"expected the tokenizer's unknown token in its vocabulary, got {str(tokenizer.unk_token)[:50]!r}; "
                f"correct it in tokenizer.json"
            ) from None
        pad = next(token for token in ids if token is not None)
        prefix, suffix = _around(tokenizer)
        if mask is None and not both_ways:
            suffix = ()  # after an end-of-text token, a causal model does not continue the text
        max_length = min(max_positions, int(limit)) if limit < _UNLIMITED else max_positions
        tokenization = cls(tokenizer, prefix, suffix, pad, mask, max_length, both_ways, start)
        if tokenization.text_length(max_length) < 1:
            raise BadText(
                f"expected sequences longer than the {tokenization.n_added} tokens that the tokenizer adds, got "
                f"{max_length}; allow more positions"
            )
        return tokenization

    def with_bos(self) -> "Tokenization":
        """The same with BOS before every text, once; unchanged if the tokenizer has none."""
        bos = self.tokenizer.bos_token_id
        return self if bos is None or bos in self.prefix else replace(self, prefix=(bos, *self.prefix))

    @property
    def n_added(self) -> int:
        """The largest number of tokens that are added to the text in one row."""
        return max(len(self.wrap([])), sum(self.around))

    @property
    def around(self) -> tuple[int, int]:
        """How many tokens are before and after the text in `input_ids`."""
        if self.start is not None:
            return 1 + len(self.prefix), 0
        return len(self.prefix), len(self.suffix)

    def text_length(self, max_length: int) -> int:
        """How many tokens of text fit into a sequence of rows of at most `max_length`; encoder–decoders have two."""
        length = min(max_length, self.max_length) - self.n_added
        return length if self.start is None else 2 * length

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of the complete texts, without special tokens."""
        starts = range(0, len(texts), _AT_ONCE)
        chunks = (_encode(self.tokenizer, texts[i : i + _AT_ONCE]) for i in starts)
        return [ids for chunk in chunks for ids in chunk]

    def wrap(self, ids: Sequence[int]) -> list[int]:
        """The ids with prefix and suffix around them."""
        return [*self.prefix, *ids, *self.suffix]

    def wrap_prompt(self, ids: Sequence[int]) -> list[int]:
        """The ids of a prompt with prefix and suffix around them; chat templates write the prefix themselves."""
        has_prefix = tuple(ids[: len(self.prefix)]) == self.prefix
        return [*ids, *self.suffix] if has_prefix else self.wrap(ids)

    def halves(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The inputs of an encoder–decoder: the first half of a text for the encoder, the second for the decoder.

        The decoder's half follows the start token, as in training: these are the labels (prefix, text, end of text)
        shifted to the right by one.
        """
        assert self.start is not None
        middle = (len(ids) + 1) // 2
        return self.wrap(ids[:middle]), [self.start, *self.prefix, *ids[middle:]]

    def token_id(self, text: str) -> int:
        """The token with this text; " Paris" is the token after a space, however the tokenizer writes it."""
        ids = self.encode([text])[0]
        if len(ids) != 1 and text.startswith(" "):
            # SentencePiece puts a space before every text by itself.
            bare = self.encode([text[1:]])[0]
            ids = bare if token_texts(self.tokenizer, bare) == [text] else ids
        if len(ids) != 1:
            pieces = ", ".join(repr(piece) for piece in token_texts(self.tokenizer, ids)) or "none"
            raise BadText(
                f"expected the text of one token, got {text!r}, which is {len(ids)} tokens ({pieces}); pass one of "
                f"these"
            )
        return ids[0]

    def generation_inputs(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` of prompts, padded on the left so that all end together."""
        rows = [self.wrap_prompt(ids) for ids in self.encode(texts)]
        for text, row in zip(texts, rows, strict=True):
            if len(row) > self.max_length:
                raise BadText(
                    f"expected a prompt of at most {self.max_length:,} tokens, got {len(row):,} in {text[:20]!r}...; "
                    f"shorten it"
                )
            if not row:
                raise BadText(f"expected a prompt of at least one token, got none in {text!r}")
        return self.left_padded(rows)

    def left_padded(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` of rows of ids, padded on the left."""
        longest = max(map(len, rows), default=0)
        ids = torch.full((len(rows), longest), self.pad)
        attention = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = torch.tensor(row)
            attention[i, longest - len(row) :] = 1
        return {"input_ids": ids, "attention_mask": attention}


def _encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    # verbose=False: texts that are too long for the model are cut later, so a warning would be wrong.
    encoded = tokenizer(
        list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
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
        f"the tokenizer {type(tokenizer).__name__} returns no tokens for any word tried, not even for words of its "
        "own vocabulary; check it"
    )


def _probes(tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Texts of which at least one should have tokens. A tokenizer for molecules, for example, drops all words."""
    yield "a"
    vocabulary = tokenizer.get_vocab()
    for token in sorted(vocabulary, key=lambda token: vocabulary[token])[:1_000]:
        if token not in tokenizer.all_special_tokens:
            yield tokenizer.convert_tokens_to_string([token])

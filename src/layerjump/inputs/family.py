"""What is said of a model family: where it keeps its parts, and in what order a block adds them up.

Paths of `ln1 … ffn_adds` start at a block, the others at the model. What a block of each kind computes:

    pre        y = h + attn;       out = y + ffn         (each reads a norm of the stream)
    parallel   out = h + attn + ffn
    sandwich   as pre; attn and ffn are taken after a norm of their own outputs
    post       y = ln1(h + attn);  out = ln2(y + ffn)

A decoder beside an encoder adds cross-attention between the two in the same manner: y + xattn, or lnx(y + xattn).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from layerjump.errors import UnsupportedModel

Kind = Literal["pre", "parallel", "sandwich", "post"]
Task = Literal["causal", "masked", "seq2seq", "encoder"]
"""`encoder` is the encoder of a seq2seq model looked at alone; no row has it."""


@dataclass(frozen=True)
class Family:
    """Where a family keeps its parts."""

    blocks: str
    """The block list; `*` steps into each entry's own list (ALBERT's groups)."""
    kind: Kind
    ln1: str | None
    ln2: str | None
    """None: there is none, or it is the same module as ln1."""
    attn: str
    """The module that attention's input enters."""
    attn_adds: str
    """The module whose output is what attention adds to the stream."""
    heads: str
    """The attention output projection: its input holds one slice a head."""
    ffn: str
    ffn_adds: str
    to_final: tuple[str, ...]
    """Modules between level L and the vocabulary product; `@gelu` is the bare activation."""
    head: str
    """The vocabulary product."""
    task: Task = "causal"
    lnx: str | None = None
    xattn: str | None = None
    xattn_adds: str | None = None
    """Cross-attention and its norm, as ln1, attn and attn_adds are self-attention's."""
    encoder: Mapping[str, Any] | None = None
    """Encoder–decoders: where the encoder keeps its parts, as far as they differ from the decoder's."""
    final_scale: float = 1.0
    """What the state is multiplied by just before the vocabulary product."""
    logits_bias: str | None = None
    """A buffer added to the logits."""
    softcap: str | None = None
    """The config field of a tanh soft-cap on the logits."""
    needs_bos: bool = False
    """Trained with BOS always: it is added even if the tokenizer forgets to."""
    reserved_positions: int = 0
    """Rows of the position table that no token can use."""
    before: str = "token embedding"
    """What stands before level 0 (said in `layerjump families`)."""
    variant: Callable[[Any], dict[str, Any]] | None = None
    """What differs by configuration: config → fields to replace."""

    def of(self, config: Any) -> Family:
        """This row with the configuration's variant applied."""
        return replace(self, **self.variant(config)) if self.variant else self

    def additions(self) -> list[tuple[str, str | None, str]]:
        """What a block adds to the stream, one after another: (part, its norm, the stream's name afterwards)."""
        cross = [("xattn", self.lnx, "mid2")] if self.xattn else []
        return [("attn", self.ln1, "mid"), *cross, ("ffn", self.ln2, "level")]

    def of_encoder(self) -> Family:
        """The row of the encoder that an encoder–decoder has beside its decoder."""
        if self.encoder is None:
            raise UnsupportedModel("this family has one stack of blocks, so no encoder beside it")
        bare = replace(self, lnx=None, xattn=None, xattn_adds=None, encoder=None, logits_bias=None)
        return replace(bare, task="encoder", to_final=(), final_scale=1.0, **self.encoder)

"""Sites of a model, and the family row bound to one model.

Names of places in a network.

5             level 5: what leaves block 5 (0: what enters block 1; L: what leaves the last block)
5.attn.in     the input of attention in block 5       5.attn.out   what attention adds to the stream
5.ln1.in …    likewise ln1, ln2 and ffn               5.mid        the stream after attention is added
5.heads       the output projection's input           5.attn_raw   attention's own output, before a post-norm
5.xattn.in …  cross-attention and its norm lnx        5.mid2       the stream after cross-attention is added
final         just before the vocabulary product

A family's row bound to one model: its blocks, where each site is tapped, and the way from level L to logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from layerjump.errors import BadModel
from layerjump.models.families import Family, family_of

BLOCK_PARTS = (
    "ln1.in",
    "ln1.out",
    "attn.in",
    "heads",
    "attn_raw",
    "attn.out",
    "mid",
    "lnx.in",
    "lnx.out",
    "xattn.in",
    "xattn.out",
    "mid2",
    "ln2.in",
    "ln2.out",
    "ffn.in",
    "ffn_raw",
    "ffn.out",
)


@dataclass(frozen=True, order=True)
class Site:
    """A place: a level, a part of block `index` (blocks count from 1), or `final`."""

    index: int
    part: str = "level"

    def __str__(self) -> str:
        if self.part == "final":
            return "final"
        return str(self.index) if self.part == "level" else f"{self.index}.{self.part}"

    @property
    def between_blocks(self) -> bool:
        """Whether it is a level or `final`, not a part of a block."""
        return self.part in ("level", "final")

    @classmethod
    def parse(cls, text: str | int | Site) -> Site:
        """Read a site's name, such as `5`, `5.attn.in` or `final`."""
        if isinstance(text, Site):
            return text
        name = str(text).strip()
        if name == "final":
            return FINAL
        index, _, part = name.partition(".")
        if index.isdecimal() and (not part or part in BLOCK_PARTS):
            return cls(int(index), part or "level")
        raise BadModel(
            f"{name[:50]!r} names no site; give a level (5), a part of a block "
            f"(5.attn.in; parts: {', '.join(BLOCK_PARTS)}) or final"
        )


FINAL = Site(-1, "final")


@dataclass(frozen=True)
class Tap:
    """Where a site is read: a module's input or output, at its `call`-th call in a forward pass.

    A module is called once, except where blocks share weights (ALBERT): there the call tells the block.
    """

    module: nn.Module
    side: Literal["in", "out"]
    call: int = 0


class Structure:
    """The parts of one Hugging Face model, found by its family's row."""

    def __init__(self, hf: PreTrainedModel, *, encoder: bool = False) -> None:
        row = family_of(hf.config)
        self.family: Family = row.of_encoder() if encoder else row
        self._hf = hf
        self.blocks: list[nn.Module] = _blocks(hf, self.family)
        self.n_blocks = len(self.blocks)
        self.d_model: int = hf.config.hidden_size
        self.unembedding: nn.Module = hf.get_submodule(self.family.head)
        self.final_steps = [_step(hf, path) for path in self.family.to_final]
        self._softcap: float | None = (
            getattr(hf.config, self.family.softcap, None) if self.family.softcap else None
        )

    @property
    def vocab_size(self) -> int:
        """How many tokens the vocabulary product scores."""
        weight = self.unembedding.get_parameter("weight")
        return int(weight.shape[0])

    def to_final(self, states: Tensor) -> Tensor:
        """From level L to just before the vocabulary product."""
        for step in self.final_steps:
            states = step(states)
        return states if self.family.final_scale == 1 else states * self.family.final_scale

    def decode(self, final: Tensor) -> Tensor:
        """From just before the vocabulary product to logits: the product with its bias, and the soft-cap."""
        return self.from_product(self.unembedding(final))

    def from_product(self, logits: Tensor) -> Tensor:
        """What is done to the vocabulary product: a bias of the model's own, the soft-cap."""
        if self.family.logits_bias:
            # Looked up each time: a model that moves to another device gets a new buffer.
            logits = logits + self._hf.get_buffer(self.family.logits_bias)[0]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def sites(self) -> list[Site]:
        """Every site this model has."""
        found = [Site(index) for index in range(self.n_blocks + 1)]
        parts = [part for part in BLOCK_PARTS if self._part(part) is not None]
        found += [Site(block, part) for block in range(1, self.n_blocks + 1) for part in parts]
        return found if self.family.task == "encoder" else [*found, FINAL]

    def tap(self, site: Site) -> Tap:
        """Where to read a site; an error if this model does not have it."""
        if site == FINAL:
            if self.family.task == "encoder":
                raise BadModel(
                    "an encoder beside a decoder has no vocabulary product, so no site final"
                )
            return Tap(self.unembedding, "in")
        if site.part == "level":
            return self._level(site.index)
        found = self._part(site.part)
        if found is None or not 1 <= site.index <= self.n_blocks:
            raise BadModel(
                f"this model has no site {site}: its blocks are 1 to {self.n_blocks}, with "
                f"{', '.join(part for part in BLOCK_PARTS if self._part(part) is not None)}"
            )
        path, side = found
        block = self.blocks[site.index - 1]
        return Tap(block.get_submodule(path), side, self._calls_before(site.index))

    def _level(self, index: int) -> Tap:
        if index == 0:
            return Tap(self.blocks[0], "in")
        if index > self.n_blocks:
            raise BadModel(f"this model has levels 0 to {self.n_blocks}; level {index} was given")
        return Tap(self.blocks[index - 1], "out", self._calls_before(index))

    def _calls_before(self, block: int) -> int:
        module = self.blocks[block - 1]
        return sum(earlier is module for earlier in self.blocks[: block - 1])

    def _part(self, part: str) -> tuple[str, Literal["in", "out"]] | None:
        """The module path (inside a block) and side where a part is read; None if absent."""
        row = self.family
        found: dict[str, tuple[str | None, Literal["in", "out"]]] = {
            "ln1.in": (row.ln1, "in"),
            "ln1.out": (row.ln1, "out"),
            "attn.in": (row.attn, "in"),
            "heads": (row.heads, "in"),
            "attn_raw": (row.attn if row.kind == "sandwich" else None, "out"),
            "attn.out": (row.attn_adds, "out"),
            "mid": self._stream_after("attn"),
            "lnx.in": (row.lnx, "in"),
            "lnx.out": (row.lnx, "out"),
            "xattn.in": (row.xattn, "in"),
            "xattn.out": (row.xattn_adds, "out"),
            "mid2": self._stream_after("xattn"),
            "ln2.in": (row.ln2, "in"),
            "ln2.out": (row.ln2, "out"),
            "ffn.in": (row.ffn, "in"),
            "ffn_raw": (row.ffn if row.kind == "sandwich" else None, "out"),
            "ffn.out": (row.ffn_adds, "out"),
        }
        path, side = found[part]
        return None if path is None else (path, side)

    def _stream_after(self, part: str) -> tuple[str | None, Literal["in", "out"]]:
        """The stream inside a block: the norm's output (post), or what the next part or its norm reads."""
        row = self.family
        norms = {name: norm for name, norm, _ in row.additions()}
        if row.kind == "parallel" or part not in norms:
            return None, "in"
        if row.kind == "post":
            return norms[part], "out"
        if part == "attn" and row.xattn:
            return row.lnx or row.xattn, "in"
        return row.ln2 or row.ffn, "in"


def _blocks(hf: PreTrainedModel, family: Family) -> list[nn.Module]:
    outer, star, inner = family.blocks.partition(".*.")
    listed = list(hf.get_submodule(outer).children())
    if not star:
        return listed
    # Shared weights: as many turns as the config says, each through its group's own list.
    turns = hf.config.num_hidden_layers
    groups = [listed[int(turn / (turns / len(listed)))] for turn in range(turns)]
    return [block for group in groups for block in group.get_submodule(inner).children()]


def _step(hf: PreTrainedModel, path: str) -> Callable[[Tensor], Tensor]:
    return ACT2FN[path[1:]] if path.startswith("@") else hf.get_submodule(path)

"""Structure of a model: its sites, pairs of sites, blocks, and the path from the last level to the logits.

A site names a point in the network where hidden states can be captured or patched:

    5             level 5: the output of block 5 (0: the input of block 1; L: the output of the last block)
    5.attn.in     the input of attention in block 5       5.attn.out   what attention adds to the residual stream
    5.ln1.in …    likewise ln1, ln2 and ffn               5.mid        the stream after attention is added
    5.heads       the attention heads' outputs, side by   5.attn_raw   attention's output before its post-norm
                  side: the output projection's input     5.ffn_raw    likewise of the feed-forward
    5.xattn.in …  cross-attention and its norm lnx        5.mid2       the stream after cross-attention is added
    final         the input of the unembedding

Level l is `blocks.{l-1}.hook_resid_post` in TransformerLens and `hidden_states[l]` in Hugging Face (but level L is
before the final norm); `5.mid` is `hook_resid_mid`, `5.attn.out` `hook_attn_out`, `5.ffn.out` `hook_mlp_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from layerjump.errors import BadEstimator, BadModel, NoSuchJump, argument
from layerjump.models.families import Family, family_of

if TYPE_CHECKING:
    from layerjump.models.model import Model

Side = Literal["in", "out"]
_PARTS = "ln1.in ln1.out attn.in heads attn_raw attn.out mid lnx.in lnx.out xattn.in xattn.out mid2 ln2.in ln2.out"
BLOCK_PARTS = (*_PARTS.split(), "ffn.in", "ffn_raw", "ffn.out")
"""The parts of a block, in the order of computation."""


@dataclass(frozen=True, order=True)
class Site:
    """A level, a part of block `index` (blocks count from 1), or `final`."""

    index: int
    part: str = "level"

    def __str__(self) -> str:
        if self.part == "final":
            return "final"
        return str(self.index) if self.part == "level" else f"{self.index}.{self.part}"

    @property
    def between_blocks(self) -> bool:
        """Whether this is a level or `final`, not a part of a block."""
        return self.part in ("level", "final")

    @classmethod
    def parse(cls, text: str | int | Site) -> Site:
        """Parse a site's name, such as `5`, `5.attn.in` or `final`."""
        if isinstance(text, Site):
            return text
        name = str(text).strip()
        if name == "final":
            return FINAL
        index, _, part = name.partition(".")
        if index.isdecimal() and (not part or part in BLOCK_PARTS):
            return cls(int(index), part or "level")
        raise BadModel(
            f"expected a site, which is a level (5), a part of a block (5.attn.in; parts: {', '.join(BLOCK_PARTS)}) "
            f"or final, got {name[:50]!r}"
        )


FINAL = Site(-1, "final")


@dataclass(frozen=True)
class Tap:
    """A module's input or output at its `call`-th call in a forward pass.

    A module is called once, except where blocks share weights (ALBERT): there the call identifies the block.
    """

    module: nn.Module
    side: Side
    call: int = 0


class Structure:
    """The modules of one Hugging Face model: its blocks, the tap of each site, the steps from level L to logits."""

    def __init__(self, hf: PreTrainedModel, *, encoder: bool = False) -> None:
        family = family_of(hf.config)
        self.family: Family = family.of_encoder() if encoder else family
        self._hf = hf
        self.blocks: list[nn.Module] = _blocks(hf, self.family)
        self.n_blocks = len(self.blocks)
        self.d_model: int = hf.config.hidden_size
        self.unembedding: nn.Module = hf.get_submodule(self.family.unembedding)
        self.final_steps = [_final_step(hf, path) for path in self.family.to_final]
        self._softcap: float | None = getattr(hf.config, self.family.softcap, None) if self.family.softcap else None

    @property
    def vocab_size(self) -> int:
        """The number of tokens that have a logit."""
        return int(self.unembedding.get_parameter("weight").shape[0])

    def to_final(self, states: Tensor) -> Tensor:
        """From level L to the input of the unembedding."""
        for step in self.final_steps:
            states = step(states)
        return states if self.family.final_scale == 1 else states * self.family.final_scale

    def decode(self, final: Tensor) -> Tensor:
        """From the input of the unembedding to logits."""
        return self.adjust_logits(self.unembedding(final))

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """The model's logits from the unembedding's output: plus a bias buffer, through the soft-cap."""
        if self.family.logits_bias:
            # Looked up each time: a model that moves to another device gets a new buffer.
            logits = logits + self._hf.get_buffer(self.family.logits_bias)[0]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def sites(self) -> list[Site]:
        """Every site of this model."""
        sites = [Site(level) for level in range(self.n_blocks + 1)]
        blocks = range(1, self.n_blocks + 1)
        sites += [Site(block, part) for block in blocks for part in self._part_taps()]
        return sites if self.family.task == "encoder" else [*sites, FINAL]

    def tap(self, site: Site) -> Tap:
        """The tap of a site; `BadModel` if this model does not have the site."""
        if site == FINAL:
            if self.family.task == "encoder":
                raise BadModel("the encoder of an encoder–decoder has no unembedding, so no site final")
            return Tap(self.unembedding, "in")
        if site.part == "level":
            if site.index > self.n_blocks:
                raise BadModel(f"expected one of levels 0 to {self.n_blocks}, got {site.index}")
            if site.index == 0:
                return Tap(self.blocks[0], "in")
            return Tap(self.blocks[site.index - 1], "out", self._calls_before(site.index))
        taps = self._part_taps()
        if site.part not in taps or not 1 <= site.index <= self.n_blocks:
            raise BadModel(
                f"this model has no site {site}: its blocks are 1 to {self.n_blocks}, with {', '.join(taps)}"
            )
        path, side = taps[site.part]
        module = self.blocks[site.index - 1].get_submodule(path)
        return Tap(module, side, self._calls_before(site.index))

    def _calls_before(self, block: int) -> int:
        module = self.blocks[block - 1]
        return sum(earlier is module for earlier in self.blocks[: block - 1])

    def _part_taps(self) -> dict[str, tuple[str, Side]]:
        """Part of a block → module path inside the block, and side, of the parts that this family has."""
        row = self.family
        is_sandwich = row.kind == "sandwich"
        paths: dict[str, tuple[str | None, Side]] = {
            "ln1.in": (row.ln1, "in"),
            "ln1.out": (row.ln1, "out"),
            "attn.in": (row.attn, "in"),
            "heads": (row.attn_out_proj, "in"),
            "attn_raw": (row.attn if is_sandwich else None, "out"),
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
            "ffn_raw": (row.ffn if is_sandwich else None, "out"),
            "ffn.out": (row.ffn_adds, "out"),
        }
        return {part: (path, side) for part, (path, side) in paths.items() if path is not None}

    def _stream_after(self, part: str) -> tuple[str | None, Side]:
        """The stream inside a block: the norm's output (post), or the input of the next part or its norm."""
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
    # Shared weights: `num_hidden_layers` passes, each through the list of its group.
    n_layers = hf.config.num_hidden_layers
    groups = [listed[int(layer / (n_layers / len(listed)))] for layer in range(n_layers)]
    return [block for group in groups for block in group.get_submodule(inner).children()]


def _final_step(hf: PreTrainedModel, path: str) -> Callable[[Tensor], Tensor]:
    return ACT2FN[path[1:]] if path.startswith("@") else hf.get_submodule(path)


def can_restrict(structure: Structure) -> bool:
    """Whether `unembedding_rows` of this model's unembedding give the logits of some tokens."""
    return type(structure.unembedding) is nn.Linear and structure.family.logits_bias is None


def with_unembedding(structure: Structure, unembedding: nn.Linear) -> Structure:
    """The same structure with another unembedding."""
    changed = copy(structure)
    changed.unembedding = unembedding
    return changed


def unembedding_rows(unembedding: nn.Linear, tokens: Tensor) -> nn.Linear:
    """An unembedding of these tokens only, in their order: fewer rows are a cheaper product."""
    rows = tokens.to(unembedding.weight.device)
    has_bias = unembedding.bias is not None
    short = nn.Linear(unembedding.in_features, len(rows), bias=has_bias, device="meta")
    short.weight = nn.Parameter(unembedding.weight.detach()[rows], requires_grad=False)
    if has_bias:
        short.bias = nn.Parameter(unembedding.bias.detach()[rows], requires_grad=False)
    return short


@torch.no_grad()
def unembedding_metric(model: Model, target: Site) -> Tensor:
    """EᵀE of the vocabulary-centred unembedding E; at level L, through the final norm's weight: diag(w) EᵀE diag(w).

    It measures the errors of a state that change logits. A shift of all logits changes no probability, hence the
    centring. The norm's division by the length is left out: it is the same for every coordinate.
    """
    embedding = model.structure.unembedding.get_parameter("weight").double()
    embedding = embedding - embedding.mean(0)
    metric = embedding.mT @ embedding
    if target == FINAL:
        return metric
    weight = norm_weight(model)
    if target != Site(model.n_blocks) or weight is None:
        raise BadEstimator(
            f"expected final, or the last level of a model with one final norm, as the target of the unembedding's "
            f"metric, got {target}"
        )
    return weight[:, None] * metric * weight


def norm_weight(model: Model) -> Tensor | None:
    """The final norm's scale of each coordinate; None unless a single norm precedes the unembedding."""
    steps = model.structure.final_steps
    if len(steps) != 1 or not isinstance(steps[0], nn.Module) or not hasattr(steps[0], "weight"):
        return None
    weight = steps[0].get_parameter("weight").double()
    return weight + model.structure.family.norm_offset if weight.dim() == 1 else None


Pair = tuple[Site, Site]
"""Source and target of a jump."""

PREDICTIONS = "predictions"
"""Every level to `final`, and the last levels to level L as well: the candidates of `calibrated`."""
SUBMODULES = ("ln1", "attn", "lnx", "xattn", "ln2", "ffn")


def parse_pairs(text: str, structure: Structure) -> list[Pair]:
    """Parse to-last, to-final, predictions, adjacent, all, submodules, or a list: `0:6,2.attn.in:2.attn.out`."""
    levels = [Site(index) for index in range(structure.n_blocks + 1)]
    if text == "to-last":
        return [(source, levels[-1]) for source in levels[:-1]]
    if text == "to-final":
        return [(source, FINAL) for source in levels[:-1]]
    if text == PREDICTIONS:
        late = levels[-1 - max(2, structure.n_blocks // 6) : -1]
        both = [(source, target) for source in late for target in (levels[-1], FINAL)]
        return [(source, FINAL) for source in levels[:-1] if source not in late] + both
    if text == "adjacent":
        return list(zip(levels, levels[1:], strict=False))
    if text == "all":
        return [(a, b) for i, a in enumerate(levels) for b in levels[i + 1 :]]
    present = set(structure.sites())
    if text == "submodules":  # input → output of every norm, attention and feed-forward module
        pairs = [
            (Site(block, f"{part}.in"), Site(block, f"{part}.out"))
            for block in range(1, structure.n_blocks + 1)
            for part in SUBMODULES
        ]
        return [pair for pair in pairs if pair[0] in present]
    pairs = []
    for item in text.split(","):
        source, colon, target = item.partition(":")
        if not colon:
            raise BadModel(
                f"expected {argument('pairs')} to-last, to-final, predictions, adjacent, all, submodules, or a list "
                f"such as 0:6,3:6, got {text!r}"
            )
        pair = Site.parse(source), Site.parse(target)
        for site in pair:
            if site not in present:
                structure.tap(site)  # raises, and names the sites of the model
        if pair[0] == pair[1]:
            raise BadModel(f"the pair {item} maps a site to itself, which is the identity; leave it out")
        pairs.append(pair)
    return list(dict.fromkeys(pairs))


def sites_of(pairs: Sequence[Pair]) -> list[Site]:
    """Return every site of the pairs once, in order."""
    return sorted({site for pair in pairs for site in pair})


def parse_pair(pair: Any) -> Pair:
    """Parse a source and a target, each a level's number, a site's name or a `Site`."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise NoSuchJump(f"expected a source and a target, such as jumps[3, 6], got {pair!r}")
    return Site.parse(pair[0]), Site.parse(pair[1])

"""Attribution: which parts of the model wrote a prediction that a lens reads at a level.

A hidden state is a sum: the embedding plus what every attention and feed-forward module added. A lens reads a logit off
it through an affine map, so the logit is a sum over the same parts, and an attention head's share is a sum over the
positions that it reads from. Norms are frozen at this state (`models/frozen_scales.py`): the attribution says what each
part contributed to this reading, not what the reading would be without it; `interventions` answer that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.errors import BadModel, BadText, argument
from layerjump.jumps.maps import apply_map
from layerjump.lens.prepare_prompt import Prompt
from layerjump.lens.readout import Readout
from layerjump.models.anatomy import Write
from layerjump.models.capture_attention import AttentionPatterns
from layerjump.models.frozen_scales import linearize_at
from layerjump.models.hooks import apply_attached
from layerjump.models.model import Model, capture_states
from layerjump.models.sites import Site
from layerjump.models.structure import rebuild_streams

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go
    from rich.console import Console, ConsoleOptions, RenderResult

Detail = Literal["parts", "heads", "sources"]


@dataclass(frozen=True)
class Contribution:
    """The share of one part in a reading."""

    part: str
    """`embedding`, a part of a block (`attn`, `ffn`, `xattn`, …), or a constant (`bias`)."""
    value: float
    block: int | None = None
    """The block, counted from 1; None for the embedding and for constants after the blocks."""
    head: int | None = None
    """The attention head, counted from 1."""
    source: int | None = None
    """The position that the attention head reads from."""
    note: str = ""
    """What a constant comes from."""

    @property
    def name(self) -> str:
        """The part in a few characters: `5.attn.h3`, `final norm and unembedding bias`."""
        if self.note:
            return self.note if self.block is None else f"{self.block}.{self.note}"
        name = self.part if self.block is None else f"{self.block}.{self.part}"
        return name if self.head is None else f"{name}.h{self.head}"


@dataclass(frozen=True, eq=False)
class Attribution:
    """The logit that a lens gives a token at one level and position, as a sum over the parts of the model.

    `parts` add up to `reading`. The rows of `heads` add up to their block's attention, and those of `sources` to their
    head. Norms, and activations between the last level and the logits, are frozen at this state.
    """

    model: str
    lens: str
    level: int
    position: int
    token: str
    against: str | None
    reading: float
    """The token's logit, or its difference from the logit of `against`."""
    parts: tuple[Contribution, ...]
    heads: tuple[Contribution, ...]
    sources: tuple[Contribution, ...]
    tokens: tuple[str, ...]
    """The text of every input token, to name the sources."""
    roles: tuple[str, ...] = ()
    """The role of every token of a chat; empty for a plain text."""
    notes: tuple[str, ...] = ()
    """Which rows the model's structure does not allow, and why."""

    @property
    def error(self) -> float:
        """The reading less the sum of its parts: rounding."""
        return self.reading - sum(part.value for part in self.parts)

    def top(self, n: int = 10, detail: Detail = "parts") -> list[Contribution]:
        """The n contributions of largest absolute value."""
        rows = self._rows(detail)
        return sorted(rows, key=lambda row: -abs(row.value))[:n]

    def _rows(self, detail: Detail) -> tuple[Contribution, ...]:
        rows = {"parts": self.parts, "heads": self.heads, "sources": self.sources}
        if detail not in rows:
            raise BadText(f"expected {argument('detail')} parts, heads or sources, got {detail!r}")
        return rows[detail]

    def to_dict(self) -> dict[str, Any]:
        """The attribution as JSON values."""
        return asdict(self) | {"error": self.error}

    def to_pandas(self, detail: Detail = "parts") -> pandas.DataFrame:
        """A data frame with one row for each contribution; `share` is its part of the reading."""
        import pandas

        rows = [{"name": row.name, **asdict(row)} for row in self._rows(detail)]
        frame = pandas.DataFrame(rows, columns=["name", *Contribution.__dataclass_fields__])
        frame["share"] = frame["value"] / self.reading if self.reading else float("nan")
        if detail == "sources":
            frame["token"] = [self.tokens[row.source] if row.source is not None else "" for row in self.sources]
            if self.roles:
                frame["role"] = [self.roles[row.source] if row.source is not None else "" for row in self.sources]
        return frame

    def plot(self) -> go.Figure:
        """A bar for each part, block by block, coloured by the kind of part."""
        from layerjump.lens.render.html import plot_attribution

        return plot_attribution(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from layerjump.lens.render.terminal import render_attribution

        yield render_attribution(self)

    @property
    def what(self) -> str:
        """The reading in words: the logit of ' Paris', or a difference of two."""
        return f"logit of {self.token!r}" if self.against is None else f"logit of {self.token!r} − {self.against!r}"


def attribute(
    model: Model,
    readout: Readout,
    prompt: Prompt,
    position: int,
    token: str | int,
    *,
    against: str | int | None = None,
    lens: str = "",
) -> Attribution:
    """Attribute a readout's logit of a token, at one level and position of a prompt, to the parts of the model."""
    structure, site = model.structure, readout.site
    if site.part != "level":
        raise BadModel(f"expected a level to attribute, got the site {site}; pass a level from 0 to {model.n_blocks}")
    blocks = range(1, site.index + 1)
    for block in blocks:
        if problem := structure.anatomy.blocks[block - 1].problem:
            raise BadModel(f"the parts of block {block} of {model.name} are not known: {problem}; read level 0")
    ids = [model.prediction_id(name) for name in ([token] if against is None else [token, against])]
    weights = torch.zeros(structure.vocab_size)
    for token_id, sign in zip(ids, (1.0, -1.0), strict=False):
        weights[token_id] += sign
    with AttentionPatterns(position) as patterns:
        states = _capture_parts(model, prompt, position, site.index)
    walk = _Walk(model, states, patterns)
    walk.read(readout, weights)
    for block in reversed(blocks):
        walk.through_block(block)
    walk.add("embedding", walk.weights, states[Site(0)][0])
    walk.require_sum()
    texts = model.prediction_texts(ids)
    return Attribution(
        model=model.name,
        lens=lens,
        level=site.index,
        position=position,
        token=texts[0],
        against=None if against is None else texts[1],
        reading=walk.reading,
        parts=tuple(reversed(walk.parts)),
        heads=tuple(reversed(walk.heads)),
        sources=tuple(reversed(walk.sources)),
        tokens=tuple(model.token_texts(prompt.ids)),
        roles=prompt.roles,
        notes=tuple(dict.fromkeys(walk.notes)),
    )


def _capture_parts(model: Model, prompt: Prompt, position: int, level: int) -> dict[Site, Tensor]:
    """States (1, width) of one position: all levels, and what every part of the blocks below `level` computes."""
    structure, present = model.structure, set(model.structure.sites())
    sites = [Site(index) for index in range(level + 1)]
    for block in range(1, level + 1):
        for write in structure.writes(block):
            names = (f"{write.name}.out", f"{write.name}_raw", _heads_site(write))
            sites += [site for site in (Site(block, name) for name in names if name) if site in present]
    ids = torch.tensor([prompt.ids])
    row, at = torch.tensor([0]), torch.tensor([position])
    batch = Batch(ids, torch.ones_like(ids), row, at, row, ids[:, position], extra_inputs=prompt.inputs)
    (captured,) = capture_states(model, [batch], sites)
    return captured.at


def _heads_site(write: Write) -> str | None:
    return write.name.replace("attn", "heads", 1) if write.role == "attn" else None


class _Walk:
    """The way back from a reading to the embedding; `weights` are those of the reading on the stream."""

    def __init__(self, model: Model, states: dict[Site, Tensor], patterns: AttentionPatterns) -> None:
        self.model, self.states, self.patterns = model, states, patterns
        self.weights = torch.empty(0)
        self.reading = 0.0
        self.parts: list[Contribution] = []
        self.heads: list[Contribution] = []
        self.sources: list[Contribution] = []
        self.notes: list[str] = []

    def add(self, part: str, weights: Tensor, output: Tensor, block: int | None = None) -> None:
        self.parts.append(Contribution(part, float(weights.double() @ output.to(weights.device).double()), block))

    def add_constant(self, value: float, note: str, block: int | None = None) -> None:
        """A row for a constant; a norm without a bias leaves only rounding, which is not worth a row."""
        if abs(value) > 100 * torch.finfo(self.model.dtype).eps * max(1.0, abs(self.reading)):
            self.parts.append(Contribution("bias", value, block, note=note))

    def read(self, readout: Readout, logit_weights: Tensor) -> None:
        """From logits to the state that the readout reads."""
        structure, state = self.model.structure, self.states[readout.site][0]
        mapped = state
        for jump in readout.maps:
            mapped = apply_map(jump, mapped)
        decode = self.model.logits if readout.needs_final_norm else structure.decode
        self.weights, constant = linearize_at(decode, mapped, logit_weights)
        self.reading = constant + float(self.weights.double() @ mapped.double())
        self.add_constant(constant, "final norm and unembedding bias")
        for index in reversed(range(len(readout.maps))):
            before = state
            for jump in readout.maps[:index]:
                before = apply_map(jump, before)
            jump_at = partial(apply_map, readout.maps[index])
            self.weights, constant = linearize_at(jump_at, before, self.weights)
            self.add_constant(constant, "jump bias")

    def require_sum(self) -> None:
        """Raise `BadModel` if the parts do not add up to the reading."""
        values = [part.value for part in self.parts]
        tolerance = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 5e-2
        if not abs(self.reading - sum(values)) <= tolerance * max(1.0, *map(abs, values)):
            raise BadModel(
                f"the parts of {self.model.name} add up to {sum(values):.4g}, not to the reading {self.reading:.4g}: "
                f"its blocks do more than their structure says at this position; attribute another model"
            )

    def through_block(self, block: int) -> None:
        """From the output of a block to its input."""
        structure, states = self.model.structure, self.states
        module, anatomy = structure.blocks[block - 1], structure.anatomy.blocks[block - 1]
        streams = rebuild_streams(structure, block, states)
        writes = {write.name: write for write in anatomy.writes}
        self._linearize(lambda x: apply_attached(module, x), streams[-1][0], "attached map bias", block)
        for step, stream in zip(reversed(anatomy.steps), reversed(streams[:-1]), strict=True):
            factor = structure.constant(step.factor)
            if step.kind == "norm":
                self._linearize(structure.module(step.name), stream[0], "norm bias", block)
            elif step.kind == "mul":
                self.weights = self.weights * factor
            elif step.kind == "shift":
                constant = factor * torch.ones_like(self.weights)
                self.add_constant(float((self.weights * constant).sum()), "shift", block)
            else:
                output = states[Site(block, f"{step.name}.out")].reshape(-1)
                self.add(step.name, self.weights * factor, output, block)
                if writes[step.name].role == "attn":
                    self._split_attention(block, writes[step.name], self.weights * factor)

    def _linearize(self, function: Callable[[Tensor], Tensor], state: Tensor, note: str, block: int) -> None:
        self.weights, constant = linearize_at(function, state, self.weights.to(state.device))
        self.add_constant(constant, note, block)

    def _split_attention(self, block: int, write: Write, weights: Tensor) -> None:
        """Attention's share as a sum over heads, and each head's as a sum over the positions that it reads from."""
        model, structure = self.model, self.model.structure
        heads, raw = (
            self.states.get(Site(block, str(_heads_site(write)))),
            self.states.get(Site(block, f"{write.name}_raw")),
        )
        n_heads = int(getattr(model.text_config, "num_attention_heads", 0) or 0)
        if heads is None or write.output_layer is None or not n_heads or heads.shape[-1] % n_heads:
            self.notes.append(f"the attention heads of {model.model_type} are not known")
            return
        if raw is not None:  # a norm follows the output projection
            post_norm = structure.tap(Site(block, f"{write.name}.out")).module
            weights, constant = linearize_at(post_norm, raw.reshape(-1), weights)
            self._add_head_constant(constant, "norm bias", write, block)
        at_heads = heads.reshape(-1)
        weights, constant = linearize_at(structure.module(write.output_layer), at_heads, weights)
        self._add_head_constant(constant, "output bias", write, block)
        by_head = (weights.double() * at_heads.double()).reshape(n_heads, -1).sum(-1)
        pattern = self.patterns.find(at_heads, n_heads)
        if pattern is None:
            self.notes.append(f"the attention weights of {model.model_type} are not seen, so heads have no sources")
        else:
            reads = (pattern.values.double() * weights.double().reshape(n_heads, 1, -1)).sum(-1)
            by_source = (pattern.weights.double() * reads).tolist()
        for head in reversed(range(n_heads)):
            self.heads.append(Contribution(write.name, float(by_head[head]), block, head + 1))
            if pattern is not None:
                for source in reversed(range(len(by_source[head]))):
                    value = by_source[head][source]
                    self.sources.append(Contribution(write.name, value, block, head + 1, source))

    def _add_head_constant(self, value: float, note: str, write: Write, block: int) -> None:
        if value:
            self.heads.append(Contribution(write.name, value, block, note=f"{write.name} {note}"))

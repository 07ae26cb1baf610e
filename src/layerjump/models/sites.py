"""Sites, the points of the network where hidden states are captured or patched, and pairs of them.

    5             level 5: the output of block 5 (0: the input of block 1; L: the output of the last block)
    5.attn.in     the input of attention in block 5       5.attn.out   what attention adds to the residual stream
    5.ln1.in …    likewise ln1, ln2 and ffn               5.mid        the stream after attention is added
    5.heads       the attention heads' outputs, side by   5.attn_raw   attention's output before its post-norm
                  side: the output projection's input     5.ffn_raw    likewise of the feed-forward
    5.xattn.in …  cross-attention and its norm lnx        5.mid2       the stream after cross-attention is added
    5.mixer.in …  a mixer of positions without softmax:   5.moe.router the scores of the experts
                  state space, linear attention, …        5.moe.out    the output of the experts
    final         the input of the unembedding            embedding    the token's row of the embedding table

A jump can read several sites, and earlier positions: a `JointSource` puts their states side by side.

    final@-1+10          `final` one position earlier, then level 10 at the position itself
    final@-1+embedding   with target `final`, a draft head: the last final state and the token that follows it

Level l is `blocks.{l-1}.hook_resid_post` in TransformerLens and `hidden_states[l]` in Hugging Face (but level L is
before the final norm); `5.mid` is `hook_resid_mid`, `5.attn.out` `hook_attn_out`, `5.ffn.out` `hook_mlp_out`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerjump.errors import BadModel, NoSuchJump, argument

if TYPE_CHECKING:
    from layerjump.models.structure import Structure

BLOCK_PARTS = (
    *("ln1.in", "ln1.out", "attn.in", "heads", "attn_raw", "attn.out", "mixer.in", "mixer_raw", "mixer.out", "mid"),
    *("lnx.in", "lnx.out", "xattn.in", "xattn_raw", "xattn.out", "mid2"),
    *("ln2.in", "ln2.out", "ffn.in", "moe.router", "moe.out", "ffn_raw", "ffn.out"),
)
"""The parts that blocks commonly have, in the order of computation."""
_PART = re.compile(
    r"(ln1|ln2|lnx|ln_\w+|(attn|mixer|xattn|ffn|aside)\d*)\.(in|out)|(attn|mixer|xattn|ffn|aside)\d*_raw|mid\d*|"
    r"heads\d*|moe\.(router|out)"
)


@dataclass(frozen=True)
class Site:
    """A level, a part of block `index` (blocks count from 1), `final` or `embedding`."""

    index: int
    part: str = "level"

    def __str__(self) -> str:
        if self.part in ("final", "embedding"):
            return self.part
        return str(self.index) if self.part == "level" else f"{self.index}.{self.part}"

    def __lt__(self, other: Site) -> bool:
        return self._sort_key < other._sort_key

    @property
    def _sort_key(self) -> tuple[Any, ...]:
        return self.index, self.part

    @property
    def between_blocks(self) -> bool:
        """Whether this is a level, `final` or `embedding`, not a part of a block."""
        return self.part in ("level", "final", "embedding")

    @property
    def terms(self) -> tuple[Term, ...]:
        """The sites and offsets whose states are read: this site at the position itself."""
        return (Term(self, 0),)

    @classmethod
    def parse(cls, text: str | int | Site) -> Site:
        """Parse a site's name, such as `5`, `5.attn.in` or `final`."""
        if isinstance(text, Site):
            return text
        name = str(text).strip()
        if name in ("final", "embedding"):
            return FINAL if name == "final" else EMBEDDING
        index, _, part = name.partition(".")
        if index.isdecimal() and (not part or _PART.fullmatch(part)):
            return cls(int(index), part or "level")
        raise BadModel(
            f"expected a site, which is a level (5), a part of a block (5.attn.in; parts: {', '.join(BLOCK_PARTS)}), "
            f"final or embedding, got {name[:50]!r}"
        )


FINAL = Site(-1, "final")
EMBEDDING = Site(-1, "embedding")


@dataclass(frozen=True)
class Term:
    """A site, read `offset` positions after the target's position: 0, or a negative number for an earlier one."""

    site: Site
    offset: int

    def __str__(self) -> str:
        return f"{self.site}@{self.offset}" if self.offset else str(self.site)

    @classmethod
    def parse(cls, term: str | int | Site | Term | tuple[str | int | Site, int]) -> Term:
        """Parse `10`, `final@-1` or `("final", -1)`."""
        if isinstance(term, Term):
            return term
        if isinstance(term, tuple):
            if len(term) != 2 or not isinstance(term[1], int):
                raise BadModel(f"expected a site and an offset, such as ('final', -1), got {str(term)[:50]}")
            site, offset = str(term[0]), str(term[1])
        else:
            site, at, offset = str(term).partition("@")
            offset = offset.strip() if at else "0"
        if not re.fullmatch(r"-?[0-9]{1,4}", offset) or not -MAX_LAG <= int(offset) <= 0:
            raise BadModel(
                f"expected an offset of 0 or an earlier position down to -{MAX_LAG}, as in final@-1, got "
                f"{str(term)[:50]!r}"
            )
        return cls(Site.parse(site), int(offset))


MAX_LAG = 512
"""The earliest position that a source can read."""
MAX_TERMS = 8


@dataclass(frozen=True)
class JointSource(Site):
    """The states of several sites, or of earlier positions, side by side in the order of the terms.

    It is a source of jumps, with rows of states like any site, but not a point where a model can be patched.
    """

    index: int = field(init=False)
    part: str = field(default="joint", init=False)
    joined: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        # Sorted among the levels by the level that it reads at the position itself.
        current = [term.site.index for term in self.joined if not term.offset and term.site.part == "level"]
        object.__setattr__(self, "index", current[0] if current else -1)

    def __str__(self) -> str:
        return "+".join(map(str, self.joined))

    @property
    def _sort_key(self) -> tuple[Any, ...]:
        return self.index, self.part, [(term.site._sort_key, term.offset) for term in self.joined]

    @property
    def between_blocks(self) -> bool:
        return all(term.site.between_blocks for term in self.joined)

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.joined


SourceName = str | int | Site | Sequence[str | int | Site | Term | tuple[str | int | Site, int]]
"""One site, or several: `"final@-1+10"`, `["final@-1", 10]` or `[("final", -1), 10]`."""


def parse_source(source: SourceName) -> Site:
    """Parse the source of a jump: a site such as `5`, or a `JointSource` such as `final@-1+5`."""
    if isinstance(source, Site):
        return source
    parts = [source] if isinstance(source, int) else source.split("+") if isinstance(source, str) else list(source)
    terms = tuple(map(Term.parse, parts))
    if not 1 <= len(terms) <= MAX_TERMS:
        raise BadModel(f"expected 1 to {MAX_TERMS} sites joined by +, as in final@-1+5, got {len(terms)}")
    if len(set(terms)) < len(terms):
        raise BadModel(f"expected different sites joined by +, got one of them twice in {str(source)[:50]!r}")
    is_plain = len(terms) == 1 and not terms[0].offset
    return terms[0].site if is_plain else JointSource(joined=terms)


def lag_of(sources: Iterable[Site]) -> int:
    """Return how many positions back the sources read: 0 for sites at the position itself."""
    return max((-term.offset for source in sources for term in source.terms), default=0)


Pair = tuple[Site, Site]
"""Source and target of a jump."""

PREDICTIONS = "predictions"
"""Every level to `final`, and the last levels to level L as well: the candidates of `calibrated`."""
SUBMODULES = ("ln1", "attn", "mixer", "lnx", "xattn", "ln2", "ffn")


def parse_pairs(text: str, structure: Structure) -> list[Pair]:
    """Parse to-last, to-final, predictions, adjacent, all, submodules, or a list: `0:6,2.attn.in:2.attn.out`.

    Sources of a list may be joint (`final@-1+1:26`). A name may be followed by terms that all its sources get:
    `to-final+final@-1`.
    """
    name, plus, added = text.partition("+")
    if plus and ":" not in text:
        more = parse_source(added).terms
        _check_terms(more, structure)
        return [
            (parse_source([*source.terms, *more]), target) for source, target in parse_pairs(name.strip(), structure)
        ]
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
        pair = parse_source(source), Site.parse(target)
        _check_terms((*pair[0].terms, Term(pair[1], 0)), structure)
        if Term(pair[1], 0) in pair[0].terms and pair[0] != pair[1]:
            raise BadModel(f"the source of the pair {item.strip()} holds its target; leave {pair[1]} out of the source")
        if pair[0] == pair[1]:
            raise BadModel(f"the pair {item} maps a site to itself, which is the identity; leave it out")
        pairs.append(pair)
    return list(dict.fromkeys(pairs))


def _check_terms(terms: Iterable[Term], structure: Structure) -> None:
    """Raise an error that names the sites of the model, if it lacks one of these."""
    for term in terms:
        structure.check_site(term.site)


def join_pairs(pairs: str | None, sources: SourceName | None, target: SourceName | None) -> str | None:
    """Return the pairs of a fit as text: as they were passed, or the one jump from `sources` to `target`."""
    if sources is None and target is None:
        return pairs
    if sources is None or target is None or pairs is not None:
        raise BadModel(
            f"expected {argument('sources')} and {argument('target')} together, or {argument('pairs')} alone; a list "
            f"of pairs has joint sources too: final@-1+1:26"
        )
    return f"{parse_source(sources)}:{parse_source(target)}"


def sites_of(pairs: Sequence[Pair]) -> list[Site]:
    """Return every site of the pairs once, in order."""
    return sorted({site for pair in pairs for site in pair})


def parse_pair(pair: Any) -> Pair:
    """Parse a source and a target, each a level's number, a site's name or a `Site`; a source may be joint."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise NoSuchJump(f"expected a source and a target, such as jumps[3, 6], got {pair!r}")
    return parse_source(pair[0]), Site.parse(pair[1])

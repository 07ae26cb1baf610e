"""Pairs of sites, and the names under which a user asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerjump.errors import BadModel, NoSuchJump, argument
from layerjump.models.structure import FINAL, Site, Structure

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
            raise BadModel(
                f"the pair {item} maps a site to itself, which is the identity; leave it out"
            )
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

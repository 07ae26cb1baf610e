"""Parse which pairs of sites to fit."""

from __future__ import annotations

from collections.abc import Sequence

from layerjump.errors import BadModel
from layerjump.models.structure import FINAL, Site, Structure

Pair = tuple[Site, Site]

PREDICTIONS = "predictions"
"""To `final`, and from the last levels to level L as well: what `calibrated` chooses from."""
SUBMODULES = ("ln1", "attn", "lnx", "xattn", "ln2", "ffn")


def parse_pairs(text: str, structure: Structure) -> list[Pair]:
    """Read to-last, to-final, predictions, adjacent, all, submodules, or a list: `0:6,3:final,2.attn.in:2.attn.out`."""
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
    if text == "submodules":
        return _submodules(structure)
    return _listed(text, structure)


def _submodules(structure: Structure) -> list[Pair]:
    """Input → output of every norm, attention and feed-forward the model has."""
    present = set(structure.sites())
    pairs = [
        (Site(block, f"{part}.in"), Site(block, f"{part}.out"))
        for block in range(1, structure.n_blocks + 1)
        for part in SUBMODULES
    ]
    return [pair for pair in pairs if pair[0] in present]


def _listed(text: str, structure: Structure) -> list[Pair]:
    present, pairs = set(structure.sites()), []
    for item in text.split(","):
        source, colon, target = item.partition(":")
        if not colon:
            raise BadModel(
                f"pairs given are {text!r}; give to-last, to-final, predictions, adjacent, all, submodules, or a list "
                f"such as 0:6,3:6"
            )
        pair = Site.parse(source), Site.parse(target)
        for site in pair:
            if site not in present:
                structure.tap(site)  # raises, saying which sites there are
        if pair[0] == pair[1]:
            raise BadModel(
                f"the pair {item} leads from a site to itself; that jump is the identity"
            )
        pairs.append(pair)
    return list(dict.fromkeys(pairs))


def sites_of(pairs: Sequence[Pair]) -> list[Site]:
    """Every site the pairs touch, once, in order."""
    return sorted({site for pair in pairs for site in pair})

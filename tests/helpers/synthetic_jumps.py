"""Jumps made on the spot: one of each form, three blocks, d 8, seeded."""

import dataclasses

import torch

from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance
from layerjump.jumps.maps import Affine
from layerjump.models.sites import FINAL, Site

D = 8


def provenance(**changes) -> Provenance:
    known = Provenance(
        model="tiny",
        revision=None,
        fingerprint="0" * 64,
        tokenizer=None,
        family="gpt2",
        n_blocks=3,
        width=D,
        text="pydoc",
        text_sha256="1" * 64,
        tokens=40_000,
        positions="one",
        skip_first=1,
        special=False,
        split="80/10/10",
        n_fit=21_034,
        n_select=2_500,
        n_test=2_400,
        seed=0,
        estimator="mat",
        settings={"strength": 0.5, "names": ["a", "b"], "café": None},
        layerjump="0.1.0",
    )
    return dataclasses.replace(known, **changes)


def affines(seed: int = 0, d: int = D) -> dict[tuple[Site, Site], Affine]:
    """One map of each form."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    last = Site(3)
    return {
        (Site(2), last): Affine.of(normal(d, d), bias=normal(d)),
        (Site(0), last): Affine.of(normal(d, d).mT),
        (Site(1), last): Affine.of(normal(d, 2), normal(2, d), bias=normal(d)),
        (Site(0), Site(1)): Affine((d, d)),
        (Site(0), Site(2)): Affine((d, d), bias=normal(d)),
        (Site(1), FINAL): Affine.of(normal(d, 2 * d), bias=normal(d)),
        (Site(2), FINAL): Affine.of(normal(d, d)),
        (Site(1, "attn.in"), Site(1, "attn.out")): Affine.of(normal(d, d), bias=normal(d)),
        (Site(2, "heads"), Site(2, "ffn.out")): Affine.of(normal(d, d + 3)),
    }


FEATURES = {(Site(1), FINAL): "both", (Site(2), FINAL): "rms"}


def infos(maps: dict[tuple[Site, Site], Affine]) -> dict[tuple[Site, Site], JumpInfo]:
    return {
        pair: JumpInfo(
            *pair,
            "mat",
            features=FEATURES.get(pair, "raw"),
            rank=2 if len(affine.factors) == 2 else None,
            strength=0.5,
            r2=(0.5, 0.75),
            r2_identity=None if affine.shape[0] != affine.shape[1] else (-3.0, 0.1),
            n_test=2_400,
        )
        for pair, affine in maps.items()
    }


def jumps(seed: int = 0, d: int = D, **changes) -> Jumps:
    """A set with one jump of each form."""
    maps = affines(seed, d)
    return Jumps.from_maps(maps, infos(maps), provenance(width=d, **changes))


def same(one: Jumps, other: Jumps) -> bool:
    """Whether two sets are equal to the last bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    return (
        one.provenance == other.provenance
        and dict(one.info) == dict(other.info)
        and repr(one.maps) == repr(other.maps)
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[key], theirs[key]) for key in ours)
    )

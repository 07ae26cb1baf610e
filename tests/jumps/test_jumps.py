"""A jump is an ordinary module that computes its map, and a set of them says what it holds."""

import copy
import dataclasses
import math

import pytest
import torch
from helpers import synthetic_jumps
from torch import nn

from layerjump.errors import BadJumps, BadModel, NoSuchJump
from layerjump.jumps.jumps import JumpInfo, Jumps
from layerjump.jumps.maps import Affine, Features, Shift, compute_features, to_affine, to_module
from layerjump.models.sites import FINAL, Site


@pytest.fixture
def jumps():
    return synthetic_jumps.jumps()


def states(pair, n: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 3 * torch.randn(n, synthetic_jumps.D + 3 if pair[0].part == "heads" else synthetic_jumps.D, dtype=dtype)


# Maps


def test_every_jump_computes_its_map(jumps):
    jumps.to(torch.float64)
    for pair, affine in synthetic_jumps.affines().items():
        x = states(pair, dtype=torch.float64)
        unit = x / x.square().mean(-1, keepdim=True).sqrt()
        kind = synthetic_jumps.FEATURES.get(pair, "raw")
        read = {"raw": x, "rms": unit, "both": torch.cat([x, unit], -1)}[kind]
        # The parameters were rounded to float32 once: 24 bits.
        torch.testing.assert_close(jumps[pair](x), affine(read), rtol=1e-5, atol=1e-5)


def test_the_forms_are_torchs_own(jumps):
    assert type(jumps[2, 3]) is nn.Linear
    assert jumps[0, 3].bias is None
    assert [type(step) for step in jumps[1, 3]] == [nn.Linear, nn.Linear]
    assert isinstance(jumps[0, 1], nn.Identity)
    assert type(jumps[0, 2]) is Shift
    assert [type(step) for step in jumps[1, "final"]] == [Features, nn.Linear]


def test_a_jump_to_itself_is_the_identity(jumps):
    for site in (0, 3, "1.attn.in", "final", Site(2)):
        assert isinstance(jumps[site, site], nn.Identity)
    with pytest.raises(NoSuchJump, match="3 blocks"):
        jumps[4, 4]


def test_low_rank_is_applied_in_its_thin_factors(jumps):
    down, up = jumps[1, 3]
    assert (down.out_features, up.in_features) == (2, 2)
    assert down.bias is None


def test_modules_and_maps_are_the_same_thing():
    for pair, affine in synthetic_jumps.affines().items():
        back = to_affine(to_module(affine, synthetic_jumps.FEATURES.get(pair, "raw")))
        assert back.shape == affine.shape
        assert [f.tolist() for f in back.factors] == [f.float().tolist() for f in affine.factors]
        assert (back.bias is None) == (affine.bias is None)


def test_features_of_nothing_and_of_much():
    assert compute_features(torch.zeros(1, 4), "rms").tolist() == [[0, 0, 0, 0]]
    huge = torch.full((1, 4), 6e4, dtype=torch.float16)  # its square is beyond float16
    assert compute_features(huge, "rms").tolist() == [[1, 1, 1, 1]]
    assert compute_features(huge, "both").dtype == torch.float16


# As a module


def test_parameters_are_float32_without_gradients(jumps):
    assert {(p.dtype, p.requires_grad) for p in jumps.parameters()} == {(torch.float32, False)}
    expected = sum(affine.n_parameters for affine in synthetic_jumps.affines().values())
    assert jumps.n_parameters == expected
    assert jumps.n_bytes == 4 * expected


def test_it_moves_and_copies_like_any_module(jumps):
    half = copy.deepcopy(jumps).to(torch.bfloat16)
    assert half[2, 3](torch.ones(1, synthetic_jumps.D, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert half.n_bytes == jumps.n_bytes / 2
    assert next(half.to("meta").parameters()).is_meta
    fresh = synthetic_jumps.jumps(seed=1)
    fresh.load_state_dict(jumps.state_dict())
    assert synthetic_jumps.same(fresh, jumps)


@pytest.mark.parametrize("pair", list(synthetic_jumps.affines()), ids=lambda pair: "-".join(map(str, pair)))
def test_it_compiles_in_one_graph(jumps, pair):
    x = states(pair)
    compiled = torch.compile(jumps[pair], backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), jumps[pair](x))


# As a collection


def test_sites_may_be_numbers_names_or_sites(jumps):
    assert jumps[0, 3] is jumps["0", "3"] is jumps[Site(0), Site(3)]
    assert jumps["1.attn.in", "1.attn.out"] is jumps[Site(1, "attn.in"), Site(1, "attn.out")]
    assert jumps.info[1, "final"].target == FINAL


def test_it_iterates_in_sorted_order(jumps):
    assert list(jumps) == sorted(synthetic_jumps.affines()) == list(jumps.info)
    assert len(jumps) == 9
    assert (0, 3) in jumps
    assert ("1", FINAL) in jumps
    assert (3, 0) not in jumps


def test_an_absent_jump_says_what_there_is(jumps):
    with pytest.raises(KeyError) as caught:
        jumps[3, 1]
    assert isinstance(caught.value, NoSuchJump)
    assert str(caught.value).startswith("this set has no jump 3 → 1, only 0 → 1, 0 → 2, 0 → 3,")
    assert "and 1 more" in str(caught.value)
    with pytest.raises(NoSuchJump, match="a source and a target"):
        jumps[3]
    with pytest.raises(BadModel, match="expected a site"):
        jumps[3, "nowhere"]
    with pytest.raises(NoSuchJump):
        jumps.info[1, 1]


def test_where_it_lands():
    targets = {"3": "level", "final": "final", "2.attn.out": "site", "2.mid": "site"}
    for target, lands in targets.items():
        assert JumpInfo(Site(0), Site.parse(target), "mat").lands == lands


def test_it_says_in_one_line_what_it_holds():
    def said(*pairs: tuple[Site, Site]) -> str:
        maps = {pair: Affine((synthetic_jumps.D, synthetic_jumps.D)) for pair in pairs}
        return repr(Jumps.from_maps(maps, synthetic_jumps.infos(maps), synthetic_jumps.provenance(n_blocks=30)))

    last = Site(30)
    assert said(*((Site(i), last) for i in range(30))) == (
        "Jumps(mat, 30 jumps: levels 0…29 → 30, d 8, fitted on tiny with 21,034 positions of pydoc)"
    )
    assert "1 jump: 4 → final," in said((Site(4), FINAL))
    assert "levels 1, 5 → 30," in said((Site(1), last), (Site(5), last))
    assert "3 → 30, final," in said((Site(3), last), (Site(3), FINAL))
    parts = [(Site(i, "attn.in"), Site(i, "attn.out")) for i in range(1, 8)]
    assert "1.attn.in, 2.attn.in, 3.attn.in and 4 more → 1.attn.out" in said(*parts)


# Anatomy


def test_the_anatomy_of_the_identity(jumps):
    for pair in ((0, 1), (3, 3)):
        structure = jumps.spectrum(*pair)
        assert structure.singular_values == pytest.approx([1.0] * synthetic_jumps.D)
        assert structure.effective_rank == pytest.approx(synthetic_jumps.D)
        assert structure.stable_rank == pytest.approx(synthetic_jumps.D)
        assert (structure.from_identity, structure.bias_norm) == (0.0, 0.0)


def test_the_anatomy_of_a_known_map():
    """Singular values 2, 1, 1: shares 4/6, 1/6, 1/6."""
    draw, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    weight = draw @ torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))
    maps = {(Site(0), Site(1)): Affine.of(weight, bias=torch.tensor([3.0, 0.0, 4.0]))}
    structure = Jumps.from_maps(maps, synthetic_jumps.infos(maps), synthetic_jumps.provenance(width=3)).spectrum(0, 1)
    entropy = -(4 / 6 * math.log(4 / 6) + 2 / 6 * math.log(1 / 6))
    assert structure.singular_values == pytest.approx((2, 1, 1), rel=1e-6)
    assert structure.effective_rank == pytest.approx(math.exp(entropy), rel=1e-6)
    assert structure.stable_rank == pytest.approx(6 / 4, rel=1e-6)
    expected = float((weight - torch.eye(3)).norm()) / math.sqrt(3)
    assert structure.from_identity == pytest.approx(expected, rel=1e-6)
    assert structure.bias_norm == pytest.approx(5)


def test_the_anatomy_of_narrow_oblong_and_zero_maps(jumps):
    narrow = jumps.spectrum(1, 3)
    assert len(narrow.singular_values) == synthetic_jumps.D
    assert max(narrow.singular_values[2:]) < 1e-6
    assert narrow.effective_rank <= 2
    assert jumps.spectrum(1, "final").from_identity is None
    maps = {(Site(0), Site(1)): Affine.of(torch.zeros(synthetic_jumps.D, synthetic_jumps.D))}
    zero = Jumps.from_maps(maps, synthetic_jumps.infos(maps), synthetic_jumps.provenance()).spectrum(0, 1)
    assert (zero.effective_rank, zero.stable_rank, zero.from_identity) == (0, 0, 1)


# What does not fit together


def refusal(maps, infos=None, **changes) -> str:
    with pytest.raises(BadJumps) as caught:
        Jumps.from_maps(
            maps, synthetic_jumps.infos(maps) if infos is None else infos, synthetic_jumps.provenance(**changes)
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_maps_and_infos_must_pair_up():
    maps = synthetic_jumps.affines()
    infos = synthetic_jumps.infos(maps)
    assert "at least one jump" in refusal({})
    assert "0 → 1 has a map or an info" in refusal(maps, dict(list(infos.items())[:3]))
    one, other = list(maps)[:2]
    swapped = infos | {one: infos[other]}
    assert "has the info of 0 → 3" in refusal(maps, swapped)


def test_sites_must_exist():
    square = Affine((synthetic_jumps.D, synthetic_jumps.D))
    for pair in ((Site(0), Site(9)), (Site(4), FINAL), (Site(0, "mid"), Site(3))):
        assert "has no site" in refusal({pair: square})
    assert "the identity by definition" in refusal({(Site(1), Site(1)): square})


@pytest.mark.parametrize(
    ("affine", "changes", "words"),
    [
        (Affine.of(torch.ones(8, 7)), {}, "reads 7 features, expected 8"),
        (Affine.of(torch.ones(7, 8)), {}, "has 7 outputs, expected 8"),
        (Affine.of(torch.ones(8, 8)), {"features": "both"}, "reads 8 features, expected 16"),
        (Affine((8, 16)), {"features": "both"}, "do not give a map"),
        (Affine.of(torch.ones(8, 8)), {"features": "cube"}, "features are raw, rms, both"),
        (Affine.of(torch.ones(8, 2), torch.ones(3, 8)), {}, "do not give a map"),
        (Affine.of(torch.ones(8, 8), bias=torch.ones(7)), {}, "do not give a map"),
        (Affine.of(torch.ones(8, 2), torch.ones(2, 8)), {"rank": 3}, "has rank 2, but its info"),
    ],
)
def test_shapes_must_fit(affine, changes, words):
    pair = (Site(1), Site(3))
    info = dataclasses.replace(JumpInfo(*pair, "mat"), **changes)
    assert words in refusal({pair: affine}, {pair: info})

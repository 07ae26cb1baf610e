"""The bound behind a calibrated rule's guarantee."""

import math

import pytest

from layerjump.generation.calibration.calibrate import binomial_tail


@pytest.mark.parametrize(("hits", "n"), [(59, 59), (58, 59), (980, 1000), (900, 1000), (0, 7)])
def test_the_tail_is_exact(hits, n):
    ways = (math.comb(n, k) * 0.95**k * 0.05 ** (n - k) for k in range(hits, n + 1))
    assert binomial_tail(hits, n, 0.95) == pytest.approx(math.fsum(ways), rel=1e-9)

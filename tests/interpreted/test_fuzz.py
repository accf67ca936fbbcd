"""A few random problems on our kernels against the dense formula; `make fuzz SECONDS=600` checks more."""

from __future__ import annotations

import pytest

import fuzz
from random_problems import draw


@pytest.mark.parametrize("seed", range(12))
def test_random_problems_agree_with_the_dense_formula(seed: int) -> None:
    fuzz.check(draw(seed), "triton")

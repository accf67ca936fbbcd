"""The kernel of the weight on earlier copies of a token, and on what followed them, against full matrices."""

from __future__ import annotations

import pytest

from repeats import check_repeats


@pytest.mark.parametrize("mask", ["window", "strided"])
def test_the_kernel_agrees(mask: str) -> None:
    check_repeats(mask, "triton", length=36, heads=2, items=1)

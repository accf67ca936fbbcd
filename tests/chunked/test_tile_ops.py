"""The operations on one tile: exponentials, hidden pairs, and keys in any memory layout."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.chunked.tile_ops import _hide, exp_below_max
from regard.lab.online import peak_bytes

BARE: Any = SimpleNamespace(bias=None, spec=SimpleNamespace(hides_by_value=False))
FULL, PARTIAL = (SimpleNamespace(full=full) for full in (True, False))


def taken(X: Tensor, run: Any) -> Tensor:
    return exp_below_max(BARE, X, run, out=torch.empty_like(X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_are_torchs_and_0_below_the_smallest_normal_number(dtype: torch.dtype) -> None:
    least = math.log(torch.finfo(dtype).tiny)
    X = torch.linspace(1.2 * least, 3, 10_001, dtype=dtype)
    found = taken(X, PARTIAL)
    visible = least + 0.02 < X
    assert torch.equal(found[visible], X[visible].exp())
    assert not found[least > X].any()
    assert torch.equal(taken(X, FULL), X.exp())


def test_exponentials_in_place_and_of_nan_and_inf() -> None:
    X = torch.tensor([0.0, -1e4, -torch.inf, torch.nan, torch.inf])
    found = exp_below_max(BARE, X, PARTIAL, out=X)
    assert found.data_ptr() == X.data_ptr()
    assert torch.equal(found[[0, 1, 2, 4]], torch.tensor([1.0, 0.0, 0.0, torch.inf]))
    assert found[3].isnan()


def test_hidden_pairs_take_about_as_long_as_visible_ones() -> None:
    """Intel's exp takes some 90 times as long for them."""
    visible = torch.randn(512, 512)
    hidden, out = torch.full_like(visible, -1e4), torch.empty_like(visible)
    best = [math.inf, math.inf]
    for _ in range(20):
        for at, (X, run) in enumerate(((visible, FULL), (hidden, PARTIAL))):
            start = time.perf_counter()
            exp_below_max(BARE, X, run, out=out)
            best[at] = min(best[at], time.perf_counter() - start)
    assert best[1] < 15 * best[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_hidden_pairs_are_minus_infinity_whatever_they_were_and_others_keep_their_bits(
    dtype: torch.dtype,
) -> None:
    numbers = torch.tensor([1.5, -0.0, torch.nan, torch.inf, -torch.inf, -3.0], dtype=dtype)
    hide = torch.rand(4, 6) > 0.5
    for S in (numbers.repeat(2, 4, 1), numbers.repeat(4, 2, 1).transpose(0, 1)):
        expected = S.clone().masked_fill_(hide, -torch.inf)
        _hide(S, hide)
        kind = torch.int16 if dtype.itemsize == 2 else torch.int32
        assert torch.equal(S.contiguous().view(kind), expected.contiguous().view(kind))


def test_for_few_rows_the_keys_are_not_copied() -> None:
    q, k, v = torch.randn(1, 2, 16, 64), *torch.randn(2, 1, 2, 32768, 64).unbind()
    assert peak_bytes(lambda: regard.attention(q, k, v, backend="chunked")) < k.nbytes


@pytest.mark.parametrize("rows", [3, 16, 64, 200])
def test_keys_in_any_layout_have_the_same_products(rows: int) -> None:
    q = torch.randn(2, 3, rows, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 300, 3, 8, dtype=torch.float64).transpose(2, 3).unbind()  # heads inside positions
    wide = torch.randn(2, 2, 3, 300, 16, dtype=torch.float64)
    for keys, values in ((k, v), wide[..., ::2], wide[..., :8], k[:1].expand(2, 2, -1, -1, -1)):
        expected = regard.attention(q, keys, values, backend="reference")
        torch.testing.assert_close(regard.attention(q, keys, values, backend="chunked"), expected)

"""The engine alone with NaN in its inputs, as operators run it: what eager mode gives with the whole problem."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.chunked import nonfinite
from regard.chunked.engine import ChunkedEngine
from regard.core.folded import fold, unfold
from regard.core.tiling import TileSizes
from regard.core.validation import pose


def inputs(spoilt: int, kv_heads: int = 2) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    found = [torch.randn(2, heads, 9, 4, generator=made) for heads in (4, kv_heads, kv_heads)]
    if spoilt < 3:
        found[spoilt][0, :, 2] = math.nan
    return [x.requires_grad_() for x in found]


@pytest.mark.parametrize("spoilt", range(4))
@pytest.mark.parametrize(
    "options",
    [
        {"mask": regard.window(2)},
        {"mask": regard.window(2), "softcap": 2.0},
        {"mask": regard.window(2, offset=3) & regard.padding([7, 9])},
        {"bias": regard.biases.alibi(torch.tensor([0.1, 0.2, 0.3, 0.4]))},
    ],
)
def test_the_engine_alone_gives_what_the_whole_call_gives(spoilt: int, options: dict[str, object]) -> None:
    tensors = inputs(spoilt)
    expected = regard.attention(*tensors, **options, backend="chunked")  # type: ignore[arg-type]
    upstream = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    upstream = torch.where(expected.isnan(), 0.0, upstream)
    p = pose(*(x.detach() for x in tensors), **options)  # type: ignore[arg-type]
    x = fold(p, finite=True)
    engine, given = ChunkedEngine(x.spec, TileSizes(), False), (x.query, x.key, x.value, x.bias, *x.shared)
    rows = nonfinite.forward(engine, given)
    torch.testing.assert_close(unfold(p, rows).output, expected, equal_nan=True)
    cotangent = upstream.unflatten(1, (2, 2))
    found = nonfinite.vjp(engine, given, rows, (cotangent, None, None), (True,) * 3 + (False,) * (len(given) - 3))
    wanted = torch.autograd.grad(expected, tensors, upstream)
    assert found[0] is not None
    scaled = (found[0].flatten(1, 2) * 0.5, *found[1:3])  # the scale was folded into the queries
    for ours, theirs in zip(scaled, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)

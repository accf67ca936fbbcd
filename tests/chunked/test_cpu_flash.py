"""Torch's CPU kernel for small masked problems: what it takes, and that it gives what the strips give."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.autograd.engine import MaybeTensors
from regard.chunked import cpu_flash
from regard.chunked.engine import ChunkedEngine
from regard.core.folded import fold
from regard.core.tiling import TileSizes
from regard.core.validation import pose


def engine_of(n: int = 9, kv_heads: int = 4, dim: int = 8, **options: object) -> tuple[ChunkedEngine, MaybeTensors]:
    made = torch.Generator().manual_seed(0)
    shapes = (2, 4, n, 8), (2, kv_heads, n, 8), (2, kv_heads, n, dim)
    observed = bool(options.pop("observed", False))
    p = pose(*(torch.randn(s, generator=made) for s in shapes), **options)  # type: ignore[arg-type]
    x = fold(p, finite=True)
    return ChunkedEngine(x.spec, TileSizes(), observed), (x.query, x.key, x.value, x.bias, *x.shared)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "mask", [regard.window(2), regard.window(2, offset=4), regard.padding([3, 0]) & regard.causal()]
)
def test_it_gives_what_the_strips_give(mask: regard.masks.Mask, kv_heads: int) -> None:
    engine, x = engine_of(mask=mask, kv_heads=kv_heads)
    assert cpu_flash.takes(engine, x)
    rows, expected = cpu_flash.forward(engine, x), engine.forward(x)
    torch.testing.assert_close(rows.output, expected.output)
    g = torch.linspace(-1, 1, rows.output.numel()).view(rows.output.shape)
    wanted = engine.vjp(x, expected, (g, None, None), (True, True, True, False))
    for ours, theirs in zip(cpu_flash.vjp(engine, x, rows, (g, None, None))[:3], wanted, strict=False):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 300},
        {"dim": 4},
        {"softcap": 2.0},
        {"dropout": 0.1},
        {"bias": torch.zeros(9, 9)},
        {"score": regard.scores.Additive(8, 8, 4)},
        {"observed": True},
        {"mask": None},
    ],
)
def test_it_leaves_everything_else_to_the_strips(options: dict[str, object]) -> None:
    assert not cpu_flash.takes(*engine_of(**{"mask": regard.window(2), **options}))  # type: ignore[arg-type]

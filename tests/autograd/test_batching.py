"""One more dimension of the inputs becomes a part of the batch, or runs item by item if an input has no batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.autograd.batching import apply_batched


class Sums:
    """Stands for an autograd function: the sum of its inputs, and a result that is not there."""

    shapes: list[tuple[int, ...]]

    @classmethod
    def apply(cls, engine: Any, *x: Tensor | None) -> tuple[Tensor, None]:
        there = [t for t in x if t is not None]
        cls.shapes.append(tuple(there[0].shape))
        return sum(there[1:], there[0]), None


class Batched:
    """Stands for an engine whose new dimension goes before or after the batch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def batched(self, size: int) -> tuple[Batched, int]:
        return self, self.at


def inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in ((3, 2, 4), (2, 4), (2, 3, 4)))


@pytest.mark.parametrize("at", [0, 1])
def test_a_dimension_is_folded_into_the_batch(at: int) -> None:
    x, y, z = inputs()
    Sums.shapes = []
    (found, nothing), dims = apply_batched(Sums, 3, (0, None, 1, None), (Batched(at),), (x, y, z, None))
    assert (nothing, dims) == (None, (at, None))
    torch.testing.assert_close(found.movedim(at, 0), x + y + z.movedim(1, 0))
    assert Sums.shapes == [(6, 4)]


def test_inputs_without_a_batch_run_item_by_item() -> None:
    x, y, z = inputs()
    Sums.shapes = []
    (found, nothing), dims = apply_batched(Sums, 3, (0, None, 1, None), (Batched(0),), (x, y, z, y))
    assert (nothing, dims) == (None, (0, None))
    torch.testing.assert_close(found, x + 2 * y + z.movedim(1, 0))
    assert Sums.shapes == [(2, 4)] * 3

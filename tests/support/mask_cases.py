"""The masks that every mask test runs over, each with numbers of rows and keys; add a new mask here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from regard.masks import (
    Mask,
    blocks,
    causal,
    chosen,
    dense,
    documents,
    everything,
    global_tokens,
    packed,
    padding,
    predicate,
    prefix,
    strided,
    window,
)

__all__ = ["CASES", "Case", "for_each_mask", "written_out"]


class Case(NamedTuple):
    mask: Mask
    n: int
    m: int


def slanted(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + 2 * j + batch + 3 * head) % 3 != 0


def random(*shape: int, seed: int = 0, share: float = 0.5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def listed(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, below, shape, generator=torch.Generator().manual_seed(seed))


SIZES = [(7, 7), (5, 9), (9, 5), (1, 6), (0, 4), (4, 0)]

ANY_SIZE: list[Mask] = [
    everything(),
    causal(),
    causal(offset=2),
    causal(offset=-3),
    causal(offset=[-2, 0, 9]),
    window(2),
    window(0, 0),
    window(1, right=2),
    window(None, right=1),
    window(2, right=None),
    window(None, right=None),
    window(2, right=1, offset=-4),
    window(1, offset=torch.tensor([0, 3, -9])),
    window(None, right=None, offset=torch.tensor([0, 3])),
    padding([3, 0, 12]),
    padding(torch.tensor([4])),
    blocks(1),
    blocks(3),
    blocks(20),
    blocks(3, offset=0),
    blocks(2, offset=[-5, 1, 4]),
    prefix(0),
    prefix(3),
    prefix(torch.tensor([0, 2, 30])),
    strided(1),
    strided(3),
    strided(20),
    strided(3, offset=-7),
    strided(3, offset=torch.tensor([0, 2, -1])),
    global_tokens([]),
    global_tokens([0]),
    global_tokens([2, 3, 2]),
    global_tokens([4, 1, 99]),
    global_tokens([4, 1, 99], offset=-2),
    global_tokens([0, 1, 2, 3], offset=[0, 3, -1]),
    dense(torch.tensor(True)),
    predicate(slanted),
    predicate(slanted).bind(2, 3),
    ~causal(),
    ~window(1, right=1),
    ~padding([3, 0]),
    ~everything(),
    ~~blocks(2),
    causal() & padding([3, 5]),
    causal() | prefix(2),
    causal() | prefix([1, 4]),
    window(1, right=1) | global_tokens([0]),
    window(2) & ~window(0),
    (window(1) | strided(3)) & causal(),
    blocks(2) | ~causal(offset=1),
    prefix(1) | ~prefix(2),
    prefix(1) | window(0, 0, offset=[0, 3]),
    predicate(slanted).bind(2, 3) & padding([2, 4]) | blocks(2),
]

FIXED_SIZE = [
    Case(padding(random(3, 7)), 4, 7),
    Case(padding(random(7, seed=1)), 4, 7),
    Case(padding([[1, 1, 0], [0, 1, 1], [0, 0, 0]]), 2, 3),
    Case(padding(keep=torch.zeros(2, 0, dtype=torch.bool)), 2, 0),
    Case(padding(keep=torch.zeros(0, dtype=torch.bool)), 2, 0),
    Case(documents([5, 5, 3, 3, 3, 9]), 6, 6),
    Case(documents([0, 1, 0, 2, 2, 1]), 6, 6),
    Case(documents([[0, 0, 1, 1], [1, 0, 0, 0]]), 4, 4),
    Case(documents([0, 4, 1, 1], [1, 1, 0, 0, 1, 7]), 4, 6),
    Case(documents([[0, 1], [2, 2]], [0, 0, 2]), 2, 3),
    Case(documents([0, 1], [[0, 0, 2], [1, 1, 1], [5, 6, 7]]), 2, 3),
    Case(documents([0, 1], []), 2, 0),
    Case(documents(torch.zeros(2, 0, dtype=torch.int32)), 0, 0),
    Case(packed([2, 0, 3, 1]), 6, 6),
    Case(packed([]), 0, 0),
    Case(packed(torch.tensor([7])), 7, 7),
    Case(packed(cu_seqlens=[0, 2, 2, 6]), 6, 6),
    Case(packed(cu_seqlens=[0, 2, 2, 5], key_cu_seqlens=[0, 1, 4, 8]), 5, 8),
    Case(packed(cu_seqlens=[0]), 0, 0),
    Case(dense(random(5, 7)), 5, 7),
    Case(dense(random(3, 5, 7).int()), 5, 7),
    Case(dense(random(2, 3, 5, 7)), 5, 7),
    Case(dense(random(2, 1, 5, 7, share=0.9)), 5, 7),
    Case(dense(random(2, 1, 1, 7)), 5, 7),
    Case(dense(random(1, 2, 5, 1)), 5, 7),
    Case(dense(random(6)), 3, 6),
    Case(dense(random(0, 4)), 0, 4),
    Case(dense(torch.ones(5, 7).tril().bool()), 5, 7),
    Case(dense(random(2, 5, 7)).bind(2, 1, headless=True), 5, 7),
    Case(dense(random(3, 5, 7)) & padding([2, 7]), 5, 7),
    Case(causal() & documents([0, 0, 1, 1, 1]) | ~padding(random(2, 5)), 5, 5),
    Case(causal() & random(5, 7), 5, 7),
    Case(random(5, 7) | window(1), 5, 7),
    Case(packed([3, 4]) & window(1, right=1) | global_tokens([6]), 7, 7),
    Case(chosen([[4, 0, -1], [2, 2, 2], [-1, -1, -1], [0, 1, 2], [3, 6, 5]]), 5, 7),
    Case(chosen(torch.full((3, 0), -1)), 3, 4),
    Case(chosen(torch.full((0, 2), -1)), 0, 4),
    Case(chosen(torch.full((2, 2), -1, dtype=torch.int32)), 2, 0),
    Case(chosen([[2, 0], [-1, 1], [2, 2]], size=3, rows=2), 5, 7),
    Case(chosen(listed(2, 3, 5, 4, below=7)), 5, 7),
    Case(chosen(listed(2, 1, 3, 2, below=3, seed=1), size=3, rows=2), 6, 7),
    Case(chosen(listed(2, 2, 5, 3, below=7)).bind(2, 4), 5, 7),
    Case(chosen(listed(2, 5, 3, below=7)).bind(2, 1, headless=True), 5, 7),
    Case(~chosen(listed(5, 4, below=7)), 5, 7),
    Case(chosen(listed(5, 4, below=7)) & causal(), 5, 7),
    Case(padding([3, 7]) & chosen(listed(2, 1, 5, 2, below=4, seed=2), size=2), 5, 7),
    Case(chosen(listed(5, 4, below=7)) & chosen(listed(3, 5, 2, below=7, seed=3)), 5, 7),
    Case(chosen(listed(5, 2, below=7)) | chosen(listed(2, 1, 5, 2, below=7, seed=4)) & causal(), 5, 7),
    Case(chosen(listed(5, 2, below=7)) | window(1), 5, 7),
]

CASES = [Case(mask, n, m) for mask in ANY_SIZE for n, m in SIZES] + FIXED_SIZE


def written_out(case: Case) -> Tensor:
    """The mask pair by pair: `allows` called with two Python ints at a time, as bool (B, H, n, m)."""
    mask, n, m = case
    grid = torch.zeros(*mask.lead, n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            grid[..., i, j] = mask.allows(i, j, n, m)
    return grid


def for_each_mask(cases: list[Case]) -> Callable[[Callable[[Case], None]], Callable[..., None]]:
    """Make one test for each mask from a check of one case: it runs over all sizes, and an error names the size."""
    groups = [[*same] for _, same in groupby(cases, key=lambda case: id(case.mask))]

    def decorate(check: Callable[[Case], None]) -> Callable[..., None]:
        def test(cases: list[Case]) -> None:
            for case in cases:
                try:
                    check(case)
                except Exception as error:
                    error.add_note(f"with {case.n} rows and {case.m} keys")
                    raise

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        names = [repr(group[0].mask) for group in groups]
        return pytest.mark.parametrize("cases", groups, ids=names)(test)

    return decorate

"""The keys that each row sees, as one interval or two."""

from __future__ import annotations

import random

import pytest
import torch

import regard
from regard.chunked.intervals import intervals_of
from regard.core.spec import Spec
from regard.masks import Mask


@pytest.mark.parametrize(
    "mask",
    [
        regard.window(4, 1),
        regard.window(3) | regard.global_tokens([0, 1]),
        ~regard.window(4, 1),
        ~regard.causal(offset=-3),
        regard.causal() & (regard.window(3) | regard.prefix(2)),
        regard.causal(offset=-4) | regard.prefix(2),
    ],
    ids=repr,
)
def test_intervals_are_those_of_the_mask(mask: Mask) -> None:
    n, m = 9, 12
    parts = intervals_of(Spec(n, m, mask))
    assert 1 <= len(parts) <= 2
    visible = [part.between(0, n, 0, m) for part in parts]
    assert torch.equal(torch.stack(visible).sum(0), mask.dense(n, m).long())


def test_rows_of_three_intervals_or_of_unknown_ones_have_none() -> None:
    for mask in (
        regard.window(1) | regard.global_tokens([0]) | regard.global_tokens([5]),
        ~(regard.window(1) | regard.global_tokens([0])),
        regard.strided(3),
    ):
        assert intervals_of(Spec(9, 9, mask)) == ()


def composed(n: int, m: int, depth: int) -> Mask:
    """A random composition of masks with one interval per row."""
    choice = random.randrange(4) if depth else 0
    if choice == 1:
        return ~composed(n, m, depth - 1)
    if choice > 1:
        left, right = composed(n, m, depth - 1), composed(n, m, depth - 1)
        return left & right if choice == 2 else left | right
    return random.choice(
        (
            regard.window(random.randrange(6), random.randrange(6)),
            regard.causal(offset=random.randrange(-n - 2, m + 2)),
            regard.prefix(random.randrange(1, m + 1)),
            regard.padding(torch.tensor([random.randrange(m + 1)])),
            regard.everything(),
        )
    )


def test_intervals_of_compositions_show_each_visible_pair_once_and_the_first_keys_first() -> None:
    random.seed(0)
    counts = [0, 0, 0]
    for _ in range(500):
        n, m = random.randrange(2, 12), random.randrange(2, 12)
        mask = composed(n, m, 3)
        parts = [part.between(0, n, 0, m) for part in intervals_of(Spec(n, m, mask))]
        counts[len(parts)] += 1
        if parts:
            assert torch.equal(sum(part.long() for part in parts), mask.dense(n, m).expand(1, 1, n, m)[0, 0].long())
        if len(parts) == 2:
            keys = torch.arange(m)
            last, first = torch.where(parts[0], keys, -1).amax(1), torch.where(parts[1], keys, m).amin(1)
            assert bool((last < first).all())
    assert min(counts) > 10

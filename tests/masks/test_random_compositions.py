"""Random compositions of masks keep the contract of a mask."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.masks import Mask, blocks, causal, dense, global_tokens, padding, predicate, prefix, strided, window
from regard.masks.base import FULL, HIDDEN

small = st.integers(0, 5)
offsets = st.none() | st.integers(-6, 6) | st.lists(st.integers(-6, 6), min_size=2, max_size=2)
sides = st.none() | small
leaves = st.one_of(
    st.builds(causal, offsets),
    st.builds(window, sides, sides, offsets),
    st.builds(padding, st.lists(st.integers(0, 12), min_size=2, max_size=2)),
    st.builds(blocks, st.integers(1, 5), offsets),
    st.builds(prefix, small),
    st.builds(strided, st.integers(1, 5), offsets),
    st.builds(global_tokens, st.lists(st.integers(0, 12), max_size=3), offsets),
    st.builds(lambda k: predicate(lambda b, h, i, j: (i * j + b) % k == 0), st.integers(1, 3)),
    st.builds(
        lambda row: dense(torch.tensor(row).reshape(2, 1, 1, 1)), st.lists(st.booleans(), min_size=2, max_size=2)
    ),
)
masks = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=5,
)


def edges(length: int) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.integers(0, length), max_size=4).map(lambda inner: torch.tensor([0, *sorted(inner), length]))


@settings(max_examples=150, deadline=None)
@given(mask=masks, n=st.integers(0, 9), m=st.integers(0, 9), data=st.data())
def test_span_and_cover_of_random_compositions_agree_with_allows(
    mask: Mask, n: int, m: int, data: st.DataObject
) -> None:
    truth = mask.dense(n, m)
    lo, hi, exact = mask.span(torch.arange(n), n, m)
    j = torch.arange(m)
    inside = (j >= lo[..., None]) & (j < hi[..., None])
    assert not (truth & ~inside).any()
    assert not exact or torch.equal(truth, inside)
    assert torch.equal(mask.visible(torch.arange(n), n, m), truth.sum(-1))
    assert keeps_boolean_laws(mask, n, m)
    rows, cols = data.draw(edges(n)), data.draw(edges(m))
    for r, line in enumerate(mask.cover(rows, cols, n, m).tolist()):
        for c, state in enumerate(line):
            tile = truth[..., rows[r] : rows[r + 1], cols[c] : cols[c + 1]]
            assert state != HIDDEN or not tile.any()
            assert state != FULL or tile.all()


def keeps_boolean_laws(mask: Mask, n: int, m: int) -> bool:
    """Whether double negation and De Morgan's law hold."""
    return torch.equal((~~mask).dense(n, m), mask.dense(n, m)) and torch.equal(
        (~(mask & causal())).dense(n, m), (~mask | ~causal()).dense(n, m)
    )

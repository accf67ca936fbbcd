"""Statistics of rows with lists of keys are those of the same weights in a matrix."""

from __future__ import annotations

import pytest
import torch

import regard
from gathered_cases import MASKS, B, D, H, K, M, N, drawn


@pytest.mark.parametrize("name", MASKS)
def test_statistics_are_those_of_the_matrix(name: str) -> None:
    mask = MASKS[name]
    x = drawn(B, H, N, D), drawn(B, K, M, D), drawn(B, K, M, D)
    written = regard.dense(mask.bind(B, H).dense(N, M))
    ours = regard.observe(*x, mask=mask, backend=regard.backends.Chunked(chunk_size=8))
    theirs = regard.observe(*x, mask=written, backend="chunked")
    assert torch.equal(ours.visible, theirs.visible)
    assert torch.equal(ours.top(9).indices, theirs.top(9).indices)
    torch.testing.assert_close(ours.top(9).weights, theirs.top(9).weights)
    torch.testing.assert_close(ours.received, theirs.received)
    torch.testing.assert_close(ours.map(4, 5), theirs.map(4, 5))
    for found, expected in zip(ours.survey(3, 6), theirs.survey(3, 6), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_strongest_keys_can_be_chosen_as_they_are() -> None:
    x = torch.randn(3, 2, 3, 12, 8).unbind()
    seen = regard.observe(*x, mask=regard.causal())
    top = seen.top(4)
    again = regard.observe(*x, mask=regard.chosen(top.indices))
    kept = (again.lse - seen.lse).exp()
    torch.testing.assert_close(kept, top.weights.sum(-1))
    assert torch.equal(again.visible, (top.indices >= 0).sum(-1))

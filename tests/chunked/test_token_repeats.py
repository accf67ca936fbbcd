"""The weight on earlier copies of a token, and on what followed them, against full matrices."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.errors import ShapeError
from repeats import MASKS, check_repeats


@pytest.mark.parametrize("name", MASKS)
def test_repeats_and_sums_over_some_rows_equal_the_whole_matrix(name: str) -> None:
    check_repeats(name, "chunked")


def test_tokens_must_be_one_per_row_and_key() -> None:
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8)
    with pytest.raises(ShapeError, match="one id per row, for as many keys as rows"):
        regard.observe(q, k, k).survey_with_repeats(torch.zeros(1, 4, dtype=torch.int64))


def test_lists_of_keys_give_the_repeats_of_the_same_mask_as_a_tensor() -> None:
    q, k, v = torch.randn(3, 2, 2, 12, 8, generator=torch.Generator().manual_seed(0)).unbind()
    tokens = torch.arange(24).reshape(2, 12) % 3
    lists = (torch.arange(12)[:, None] * 5 + torch.arange(5) * 7) % 12
    mask = regard.chosen(lists)
    for found, expected in zip(
        regard.observe(q, k, v, mask=mask).survey_with_repeats(tokens)[1],
        regard.observe(q, k, v, mask=mask.dense(12, 12)).survey_with_repeats(tokens)[1],
        strict=True,
    ):
        assert found.abs().sum() > 0
        torch.testing.assert_close(found, expected)

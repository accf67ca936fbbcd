"""The forward pass over batches of equal tiles."""

from __future__ import annotations

import pytest
import torch

import regard
from batched_cases import MASKS, N, problem
from regard.chunked.engine import ChunkedEngine
from regard.core.tiling import TileSizes


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_batches_give_the_rows_of_the_formula(name: str, groups: int) -> None:
    q = torch.randn(2, 2 * groups, N, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, N, 8, dtype=torch.float64) for _ in range(2))
    found, expected = (
        regard.observe(q, k, v, mask=MASKS[name](), softcap=3.0, backend=backend)
        for backend in (regard.backends.Chunked(chunk_size=64), "reference")
    )
    for member in ("output", "lse", "entropy", "max_logit"):
        torch.testing.assert_close(getattr(found, member), getattr(expected, member))


def test_a_hidden_nan_does_not_reach_the_row_max() -> None:
    x = problem(regard.window(40))
    x.query[:, :, :, 100:] = torch.nan  # seen by rows from 100 on alone
    x.key[:, :, 200:] = torch.nan
    rows = ChunkedEngine(x.spec, TileSizes(), observed=True).forward((x.query, x.key, x.value, None))
    assert rows.lse[..., :100].isfinite().all()
    assert rows.entropy[..., :100].isfinite().all()
    assert rows.lse[..., 100:].isnan().all()

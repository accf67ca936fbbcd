"""The kernels that count rows compile for a chip without a GPU, and keep everything in registers."""

from __future__ import annotations

import pytest
import torch

from hopper_compiled import compiles
from portable_compiled import compiling
from regard.kernels import row_tally
from regard.kernels.portable.configs import CHIPS

L, H, N, BINS = 2, 3, 1100, 256


@compiles
@pytest.mark.parametrize(
    "chip", ["9.0", *(pytest.param(name, marks=pytest.mark.slow) for name in CHIPS if name != "9.0")]
)
def test_the_kernels_that_count_rows_compile(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape or (L, H, N), dtype=dtype)

    whole = {"dtype": torch.int64}
    survey = row_tally.RowSurvey(*(row() for _ in range(7)), *(row(**whole) for _ in range(2)))
    labels = row_tally.RowLabels(row(L, **whole), row(L, N, dtype=torch.uint8), *(row(L, N, **whole) for _ in range(3)))
    tables = row_tally.TokenTables(row(H, 9, **whole), row(H, 9, **whole))
    sizes = (2 * BINS,), (), (), (), *(((40,),) * 4), *(((8,),) * 2)
    kinds = (torch.int64, torch.int64, torch.float64, torch.float64, *(torch.int64,) * 6)
    tally = row_tally.Tally(*(row(12, H, *size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)))
    buckets = row_tally.RowBuckets(*(row(L * N, dtype=torch.int32) for _ in range(3)))
    with compiling(CHIPS[chip], monkeypatch) as made:
        stats, repeats = row_tally.RowStats(row(), row(), row()), row_tally.RowRepeats(row(), row())
        values, scores = row_tally.row_values(stats, survey, repeats, labels, tables, row(H), 2.0**-30)
        row_tally.tally_values(values, row(12, 4, dtype=torch.float64), buckets, tally)
        row_tally.best_rows(scores, row(6, H), 32)
    assert [kernel.name for kernel in made] == ["row_values", "tally_values", "best_rows", "best_rows"]
    for kernel in made:
        assert kernel.spilled == 0, f"{kernel.name} spills {kernel.spilled} bytes"
        assert kernel.shared <= CHIPS[chip].shared

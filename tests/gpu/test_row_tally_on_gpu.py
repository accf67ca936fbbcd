"""A census on a GPU: its kernels count what torch's operations count, again bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from census_by_kernels import Reader, check_census, padded
from regard.models import census
from regard.models.head_census import device_copies
from regard.models.head_census.candidates import best_rows
from regard.models.head_census.kernel_rows import best_by_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_a_census_by_kernels_equals_one_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    check_census(((3, 700), (2, 1500), (3, 700), (5, 33)), "cuda", monkeypatch, moved=0.01)


def test_a_census_repeats_bit_for_bit() -> None:
    model, data = Reader().cuda(), [padded(4, 900, "cuda") for _ in range(3)]
    first, second = (census(model, data).state.arrays() for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name], err_msg=name)


def test_the_best_rows_of_several_blocks_are_those_of_torch() -> None:
    scores = torch.randint(-1, 900, (6, 5, 9000), device="cuda").float()
    assert torch.equal(best_by_kernel(scores, 32, None), best_rows(scores, 32, None))


def test_tables_come_to_the_host_whole_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "_AT_ONCE", 1 << 10)
    tables = [torch.randint(0, 9, (5, 777), device="cuda"), torch.zeros(3, 0, device="cuda"), torch.arange(9)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        tables.append(torch.rand(40, 64, device="cuda").double()[:, ::2])
        found = device_copies.to_host(tables)
    for mine, true in zip(found, tables, strict=True):
        np.testing.assert_array_equal(mine, true.cpu().numpy())

"""What warmup compiles, and in how many processes; nothing is compiled here."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import warmup
from regard.errors import DeviceError
from regard.warmup import VARIANTS, Warmed, plan, warm

CPU = torch.device("cpu")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pools that were made; threads stand for processes, and compile nothing."""
    made: list[int] = []

    def pool(size: int, mp_context: Any) -> ThreadPoolExecutor:
        assert mp_context.get_start_method() == "spawn"
        made.append(size)
        return ThreadPoolExecutor(size)

    monkeypatch.setattr(warmup, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(warmup, "_warm_one", lambda entry, backward, device: Warmed(*entry, 0.0))
    return made


@pytest.mark.parametrize(("jobs", "sizes"), [(1, []), (3, [3]), (100, [8])])
def test_every_entry_is_compiled_once_by_at_most_so_many_processes(
    jobs: int, sizes: list[int], pools: list[int]
) -> None:
    wanted = plan()
    assert len(wanted) == 8
    assert sorted(one[:3] for one in warm(wanted, device="cpu", jobs=jobs)) == sorted(wanted)
    assert pools == sizes


def test_a_process_that_dies_is_reported_with_a_remedy(pools: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> Warmed:
        raise BrokenProcessPool

    monkeypatch.setattr(warmup, "_warm_one", dies)
    with pytest.raises(DeviceError, match=r"one of 2 processes that compile ended .* --jobs 1"):
        list(warm(plan(), device="cpu", jobs=2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_option_is_compiled_without_a_mask_and_with_one(variant: str) -> None:
    calls = warmup._arguments(variant, 8, CPU)
    masked = {"plain": [False], "decode": [False], "bits": [True], "mask": [True, True]}  # also a narrow one
    assert ["mask" in given for given in calls] == masked.get(variant, [False, True])
    assert all(set(given) - {"mask"} == set(calls[0]) - {"mask"} for given in calls)


def test_the_cache_folder_is_that_of_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this system")
    monkeypatch.setenv("TRITON_CACHE_DIR", os.fspath(tmp_path))
    assert warmup.cache_folder() == os.fspath(tmp_path)

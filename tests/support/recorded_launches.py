"""Kernels that are recorded and not run: the code that launches them works without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from triton.runtime import driver

from regard.compat import triton
from regard.kernels import launch_cache
from regard.kernels.hopper import forward_launch

STREAM = 7


class Start(NamedTuple):
    """One start of a kernel."""

    how: str  # "first", "again" or, where a profiler listens, "by grid"
    kernel: str
    programs: int
    arguments: tuple[Any, ...]


STARTS: list[Start] = []


class Compiled:
    """Stands for a compiled kernel, and records what its launcher gets."""

    function, packed_metadata = object(), object()

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: STARTS.append(Start("by grid", self.name, grid[0], arguments))

    def run(self, programs: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        before = (1, 1, STREAM, self.function, self.packed_metadata, None, None, None)
        assert (y, z, stream, *arguments[:5]) == before
        STARTS.append(Start("again", self.name, programs, arguments[5:]))


class Kernel:
    """Stands for a kernel: records its arguments, and returns a compiled one."""

    def __init__(self, name: str, arg_names: list[str]) -> None:
        self.name, self.arg_names = name, arg_names

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Compiled]:
        def run(**given: Any) -> Compiled:
            STARTS.append(Start("first", self.name, grid[0], tuple(given[name] for name in self.arg_names)))
            return Compiled(self.name)

        return run


class Driver:
    """Stands for a GPU's driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM


def record_launches(monkeypatch: pytest.MonkeyPatch, kernels: dict[str, tuple[Any, str]]) -> None:
    """Record the kernels, each given by its module and its name there, in `STARTS`."""
    STARTS.clear()
    for name, (module, attribute) in kernels.items():
        monkeypatch.setattr(module, attribute, Kernel(name, getattr(module, attribute).arg_names))
    monkeypatch.setattr(launch_cache, "_LAUNCHES", {})
    monkeypatch.setattr(launch_cache, "INTERPRETED", False)
    monkeypatch.setattr(forward_launch, "cuda_allocator", lambda size, dtype: lambda: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(triton, "_direct", lambda *_: None)  # the C launcher, which no kernel has that was not compiled

"""The seam to the kernels: whatever the current device is, kernels are started on that of their tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

pytest.importorskip("triton")

from regard.kernels import launch


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", [name for name in launch.__all__ if name != "on_hopper"])  # which starts none
def test_kernels_are_started_on_the_device_of_their_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Guard:
        def __init__(self, x: Any) -> None:
            asked.append(x)

        def __enter__(self) -> NoReturn:
            raise StoppedError

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    monkeypatch.setattr(launch, "is_current_device", lambda device: False)
    w = SimpleNamespace(query=SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1)))
    with pytest.raises(StoppedError):
        getattr(launch, name)(w)
    assert asked == [w.query]

"""The tests of this folder need a GPU; without one they are not tried one by one."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch

LONGEST = 300.0  # seconds of a test; the slowest takes some 80


def pytest_sessionstart() -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests/gpu need a CUDA device, and torch sees none here.", returncode=2)


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """A kernel that hangs cannot be interrupted: its process ends, and says where it was."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()

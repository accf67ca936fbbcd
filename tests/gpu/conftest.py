"""The tests of this folder need a GPU; without one they are not tried one by one."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest
import torch

LONGEST = 300.0  # seconds of a test; the slowest takes some 80
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # tests have another one, which would be lost with the process


def pytest_sessionstart() -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests/gpu need a CUDA device, and torch sees none here.", returncode=2)


@pytest.fixture(autouse=True)
def ends(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs ends its process, with a traceback; without pytest-xdist that is the whole run."""
    faulthandler.dump_traceback_later(LONGEST, exit=True, file=request.config.stash[STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()

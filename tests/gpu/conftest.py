"""The tests of this folder need a GPU; without one they are not tried one by one."""

from __future__ import annotations

import pytest
import torch


def pytest_sessionstart() -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests/gpu need a CUDA device, and torch sees none here.", returncode=2)

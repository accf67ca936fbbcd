"""All kernels take minutes to compile: `pytest -m slow tests/compiler` asks for those beyond what each run compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("slow") and item.path.parent == HERE]
    config.hook.pytest_deselected(items=left_out)
    kept = set(items).difference(left_out)
    items[:] = [item for item in items if item in kept]

"""Our kernels in Python, by Triton's interpreter: `TRITON_INTERPRET=1 python -m pytest tests/interpreted`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from quick_interpreter import quick

# The interpreter computes with numpy, which warns where a GPU's arithmetic makes its inf or NaN in silence.
SILENT = (
    "divide by zero encountered in log",
    "divide by zero encountered in divide",
    "invalid value encountered in log",
    "invalid value encountered in divide",
    "overflow encountered in exp2",
    "overflow encountered in multiply",
    "overflow encountered in subtract",
    "invalid value encountered in matmul",
    "invalid value encountered in multiply",
    "invalid value encountered in subtract",
)


def pytest_configure(config: pytest.Config) -> None:
    for message in SILENT:
        config.addinivalue_line("filterwarnings", f"ignore:{message}:RuntimeWarning:triton.runtime.interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("triton") is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="triton has no wheel for this system"))


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if find_spec("triton") is None:
        yield
        return
    with quick():
        yield

"""Our kernels in Python, by Triton's interpreter: `TRITON_INTERPRET=1 python -m pytest tests/interpreted`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

# The interpreter computes with numpy, which warns where a GPU's arithmetic makes its inf or NaN in silence.
SILENT = (
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
def looked_up_once() -> Iterator[None]:
    """Let the interpreter look through Triton's language once a launch, and not at every call within a kernel.

    That search takes a third of its time, and finds everything in its place.
    """
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    search: Callable[[Any], Any] = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    found: set[frozenset[int]] = set()

    def once(fn: Any) -> Any:
        seen = frozenset(at for x in fn.__globals__.values() for at, tl in enumerate(languages) if x is tl)
        if seen in found:
            return None  # asked for within a kernel, where nobody takes the answer
        scope = search(fn)
        restore = scope.restore

        def ended() -> None:
            found.clear()
            restore()

        scope.restore = ended
        found.add(seen)
        return scope

    interpreter._patch_lang = once
    yield
    interpreter._patch_lang = search

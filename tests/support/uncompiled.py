"""What Triton would compile for a Hopper GPU, noted and not run."""

from __future__ import annotations

from typing import Any

import pytest

from regard.backends import Triton
from regard.kernels import arguments
from regard.kernels.portable.configs import CHIPS

__all__ = ["noted"]


def noted(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The variants of kernels that calls would compile from now on: (module and name, key)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target = make_backend(GPUTarget("cuda", 90, 32))
    found: set[tuple[str, str]] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, target)
        _, special, options = bind(*args, **options, debug=False, instrumentation_mode="")
        found.add((f"{self.fn.__module__}.{self.fn.__name__}", f"{special} {options}"))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(Triton, "refuses", lambda self, p: [])
    monkeypatch.setattr(arguments, "chip_of", lambda device: CHIPS["9.0"])
    return found

"""`triton`: the seat of our own GPU kernels; it refuses, with its reasons, until they are there."""

from __future__ import annotations

from typing import ClassVar

from ..canonical import Result
from ..errors import BackendError
from ..problem import Problem
from .base import Backend

__all__ = ["Fused"]


class Fused(Backend):
    """Kernels of our own, with the statistics of the weights at the speed of a fused kernel."""

    name: ClassVar[str] = "triton"
    about: ClassVar[str] = "our own GPU kernels"

    def refuses(self, p: Problem) -> list[str]:
        reasons = ["this version of regard has no kernels of its own yet"]
        if p.device.type != "cuda":
            reasons.append(f"the tensors are on {p.device.type}; it needs a GPU")
        return reasons

    def run(self, p: Problem) -> Result:
        raise BackendError("triton: " + "; ".join(self.refuses(p)))

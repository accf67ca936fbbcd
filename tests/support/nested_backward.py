"""Backward passes inside one another, deep enough that torch runs the innermost in another thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["in_a_thread_of_autograd"]

_DEPTH = 62  # torch moves the backward passes below the 60th to another thread


def in_a_thread_of_autograd(work: Callable[[], object]) -> None:
    """Call `work` inside a backward pass of this thread that torch runs in another one."""
    _Nested.apply(torch.zeros(1, requires_grad=True), _DEPTH, work).backward()


class _Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, work: Callable[[], object]) -> Tensor:
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        if ctx.depth:
            with torch.enable_grad():
                _Nested.apply(torch.zeros(1, requires_grad=True), ctx.depth - 1, ctx.work).backward()
        else:
            ctx.work()
        return g, None, None

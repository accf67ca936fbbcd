"""Observe attention calls in training without changing them: same bits, same random numbers, same saved tensors."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from ..backends import Backend
from ..core.problem import Problem
from ..observation import Observation, answered, watching
from .interceptor import CallInterceptor, OnCall, OnMiss
from .listener import Listener, Original, suspended, unobserved

__all__ = ["TrainingInterceptor"]


class TrainingInterceptor(Listener):
    """A `CallInterceptor` for training: each call runs unchanged, then once more without gradient to be observed.

    Activation checkpointing requires that a forward pass and its recomputation save the same tensors. The recomputation
    is not observed, so observing the first pass must not change what it saves.
    """

    observes: ClassVar[bool] = True
    runs_unchanged: ClassVar[bool] = True

    def __init__(self, model: nn.Module, on_call: OnCall, on_miss: OnMiss | None = None) -> None:
        self._interceptor = CallInterceptor(model, on_call, on_miss, unchanged=True)
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._interceptor)
            stack.enter_context(watching(self))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exit.close()

    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        with suspended():
            output = answered(p, backend)
        with torch.no_grad():
            self._interceptor.answer(p._replace(dropout=0.0), backend)
        return output

    def respond(self, p: Problem, original: Original, *, beside: bool = False) -> Tensor:
        with suspended():
            output = unobserved(p, original)
        with torch.no_grad():
            self._interceptor.answer(p._replace(dropout=0.0), "auto")
        return output

    def show(self, seen: Observation) -> None:
        """The inner interceptor is a watcher itself, and sees every observation."""

    def miss(self, reason: str) -> None:
        """The inner interceptor is a watcher itself, and reports every miss."""

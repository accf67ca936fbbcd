"""Looking at calls beside a computation that stays as it is: its bits, its random numbers, and what autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..backends import Backend
from ..backends.dispatch import choose, run
from ..core.problem import Problem
from ..observation import WATCHERS, Observation, Watcher
from .interceptor import CallInterceptor, OnCall, OnMiss

__all__ = ["TrainingInterceptor"]

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MULTIHEAD = F.multi_head_attention_forward.__code__.co_varnames


class TrainingInterceptor(Watcher):
    """`CallInterceptor` for training: the model's own computation runs, then each call is shown to `CallInterceptor` without gradient.

    Activation checkpointing compares what a forward pass saved with what its repetition saves. The repetition is not
    observed, so the pass that is must save the same.
    """

    def __init__(self, model: nn.Module, on_call: OnCall, on_miss: OnMiss | None = None) -> None:
        self._calls = CallInterceptor(model, on_call, on_miss)
        self._leave = ExitStack()

    def __enter__(self) -> TrainingInterceptor:
        with ExitStack() as stack:
            stack.enter_context(self._calls)
            WATCHERS.append(self)
            stack.callback(WATCHERS.remove, self)
            stack.enter_context(_Torch(self))
            self._leave = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave.close()

    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        with CallInterceptor.unseen():
            output = run(p, choose(p, backend)).output
        with torch.no_grad():
            self._calls.answer(p._replace(dropout=0.0), backend)
        return output

    def show(self, seen: Observation) -> None:
        """Its calls are a witness of their own."""


class _Torch(TorchFunctionMode):
    """Repeats torch's functions of attention, without dropout, for the calls to see."""

    def __init__(self, beside: TrainingInterceptor) -> None:
        super().__init__()
        self._beside = beside

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        again = _again(func, args, kwargs)
        if again is None or CallInterceptor.busy:
            return func(*args, **kwargs)
        with CallInterceptor.unseen():
            output = func(*args, **kwargs)
        with torch.no_grad():
            func(**again)
        return output


def _again(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments by which a function of attention draws no random numbers; None for any other function."""
    if func is F.scaled_dot_product_attention:
        return {**dict(zip(_SDPA, args, strict=False)), **kwargs, "dropout_p": 0.0}
    if func is F.multi_head_attention_forward:
        return {**dict(zip(_MULTIHEAD, args, strict=False)), **kwargs, "training": False, "need_weights": False}
    return None

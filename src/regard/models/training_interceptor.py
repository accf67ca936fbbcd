"""Observe attention calls in training without changing them: same bits, same random numbers, same saved tensors."""

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
from ..observation import Observation, Watcher, watching
from .interceptor import CallInterceptor, OnCall, OnMiss

__all__ = ["TrainingInterceptor"]

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MULTIHEAD = F.multi_head_attention_forward.__code__.co_varnames


class TrainingInterceptor(Watcher):
    """A `CallInterceptor` for training: each call runs unchanged, then once more without gradient to be observed.

    Activation checkpointing requires that a forward pass and its recomputation save the same tensors. The recomputation
    is not observed, so observing the first pass must not change what it saves.
    """

    def __init__(self, model: nn.Module, on_call: OnCall, on_miss: OnMiss | None = None) -> None:
        self._interceptor = CallInterceptor(model, on_call, on_miss)
        self._exit = ExitStack()

    def __enter__(self) -> TrainingInterceptor:
        with ExitStack() as stack:
            stack.enter_context(self._interceptor)
            stack.enter_context(watching(self))
            stack.enter_context(_TorchFunctions())
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exit.close()

    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        with CallInterceptor.suspend():
            output = run(p, choose(p, backend)).output
        with torch.no_grad():
            self._interceptor.answer(p._replace(dropout=0.0), backend)
        return output

    def show(self, seen: Observation) -> None:
        """The inner interceptor is a watcher itself, and sees every observation."""


class _TorchFunctions(TorchFunctionMode):
    """Repeats torch's attention functions without dropout, for the interceptor to observe."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        repeated = _without_dropout(func, args, kwargs)
        if repeated is None or CallInterceptor.is_suspended():
            return func(*args, **kwargs)
        with CallInterceptor.suspend():
            output = func(*args, **kwargs)
        with torch.no_grad():
            func(**repeated)
        return output


def _without_dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments with which an attention function draws no random numbers; None for any other function."""
    if func is F.scaled_dot_product_attention:
        return {**dict(zip(_SDPA, args, strict=False)), **kwargs, "dropout_p": 0.0}
    if func is F.multi_head_attention_forward:
        return {**dict(zip(_MULTIHEAD, args, strict=False)), **kwargs, "training": False, "need_weights": False}
    return None

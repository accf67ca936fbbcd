"""Seeing every attention call that a model makes: torch's function, ours, and torch.nn.MultiheadAttention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, TracebackType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from regard.backends import Backend
from regard.backends.dispatch import choose, run
from regard.core.problem import Problem
from regard.core.validation import pose
from regard.errors import BackendError, RegardError
from regard.functional import posed_as_torch
from regard.masks import causal
from regard.observation import WATCHERS, Observation, Watcher, notify, observed

__all__ = ["CallInterceptor"]

OnCall = Callable[[str, Observation], None]
OnMiss = Callable[[str, str], None]


class CallInterceptor(Watcher):
    """A context in which each attention call of `model` is observed and told: `on_call(name, observation)`.

    The name is that of the module that made the call. What cannot be observed runs as it would have, and is told to
    `on_miss(name, reason)`. On exit, also after an exception, nothing is left behind.
    """

    busy: ClassVar[bool] = False
    """Whether a call is being answered, whose own calls of torch are not a model's: for all that watch together."""

    def __init__(self, model: nn.Module, on_call: OnCall, on_miss: OnMiss | None = None) -> None:
        self._model, self._on_call, self._on_miss = model, on_call, on_miss
        self._inside: list[str] = []
        self._leave = ExitStack()

    def __enter__(self) -> CallInterceptor:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if name:  # what no part of the model does is its own
                    self._follow(stack, name, module)
            WATCHERS.append(self)
            stack.callback(WATCHERS.remove, self)
            if "torch._dynamo" in sys.modules:  # compiled code would pass us by; without the compiler there is none
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_Torch(self))
            self._leave = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inside.clear()
        self._leave.close()

    def _follow(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return

        def enter(*_: object) -> None:
            self._inside.append(name)

        def leave(*_: object) -> None:
            if name in self._inside:
                while self._inside.pop() != name:  # modules that an exception left
                    pass

        stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    @property
    def name(self) -> str:
        """The module that is at work."""
        return self._inside[-1] if self._inside else ""

    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        with self.unseen():
            return self._answered(p, backend)

    @staticmethod
    @contextmanager
    def unseen() -> Iterator[None]:
        """Let calls of torch run as if nobody looked."""
        before, CallInterceptor.busy = CallInterceptor.busy, True
        try:
            yield
        finally:
            CallInterceptor.busy = before

    def _answered(self, p: Problem, backend: str | Backend) -> Tensor:
        if torch._C._are_functorch_transforms_active():
            self.miss("it is inside a torch.func transform")
            return run(p, choose(p, backend)).output
        try:
            seen = observed(p, backend)
        except BackendError:  # the named backend has no statistics; it runs, and another one looks
            output = run(p, choose(p, backend)).output
            self._look(p._replace(dropout=0.0))
            return output
        notify(seen)
        return seen.output

    def show(self, seen: Observation) -> None:
        with torch.no_grad():
            self._on_call(self.name, seen.kept())

    def torchs(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
        """A call of torch's function: the observed output takes its place, but for dropout, which torch draws."""
        try:
            p: Problem | None = _posed(query, key, value, *others, **named)
        except (RegardError, TypeError) as error:  # what torch makes of such arguments is torch's
            self.miss(str(error))
            p = None
        if p is None or p.dropout:
            with self.unseen():
                output = F.scaled_dot_product_attention(query, key, value, *others, **named)
                if p is not None:
                    self._look(p._replace(dropout=0.0))
            return output
        output = self.answer(p, "auto")
        return output.view(*output.shape[:-3][: query.dim() - 2], *output.shape[-2:]) if query.dim() < 4 else output

    def _look(self, p: Problem) -> None:
        if torch._C._are_functorch_transforms_active():
            self.miss("it is inside a torch.func transform")
            return
        with torch.no_grad():
            notify(observed(p))

    def miss(self, reason: str) -> None:
        """Take note of a call that could not be observed."""
        if self._on_miss is not None:
            self._on_miss(self.name, reason)


class _Torch(TorchFunctionMode):
    """Sees torch's functions on their way to torch."""

    def __init__(self, calls: CallInterceptor) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._calls.busy:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._calls.torchs(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multihead(**dict(zip(_names(func), args, strict=False)), **kwargs)
        return func(*args, **kwargs)

    def _multihead(self, **given: Any) -> tuple[Tensor, Tensor | None]:
        """torch.nn.MultiheadAttention's function, led to its fused path; weights that are asked for come from us."""
        original = F.multi_head_attention_forward
        if given.get("dropout_p", 0.0) and given.get("training", True):
            answer: tuple[Tensor, Tensor | None] = original(**given)
            with torch.no_grad():
                self._fused(given | {"training": False})
            return answer
        output, seen = self._fused(given)
        if not given.get("need_weights", True):
            return output, None
        if seen is None:
            return original(**given)
        weights = seen.weights()
        weights = weights.mean(-3) if given.get("average_attn_weights", True) else weights
        return output, weights.squeeze(0) if given["query"].dim() == 2 else weights

    def _fused(self, given: dict[str, Any]) -> tuple[Tensor, Observation | None]:
        """The function without weights, where the call of torch's attention in it is ours."""
        found: list[Observation] = []

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            try:
                seen = observed(_posed(*args, **kwargs))
            except RegardError as error:
                self._calls.miss(str(error))
                return F.scaled_dot_product_attention(*args, **kwargs)
            notify(seen)
            found.append(seen)
            return seen.output

        original = F.multi_head_attention_forward
        scope = {**original.__globals__, "scaled_dot_product_attention": attend, "has_torch_function": _never}
        twin = FunctionType(original.__code__, scope, original.__name__, original.__defaults__)
        output, _ = twin(**given | {"need_weights": False})
        return output, found[-1] if found else None


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def _never(*_: object) -> bool:
    return False


def _posed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """The problem that a call of torch's function poses, with a dimension for heads."""
    if query.dim() < 4:
        if query.dim() == 3 and enable_gqa:
            query, key, value = query[None], key[None], value[None]
        else:
            query, key, value = (x.unsqueeze(-3) for x in (query, key, value))
            attn_mask = attn_mask.unsqueeze(-3) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    if isinstance(attn_mask, CausalBias):
        aligned = causal() if attn_mask.variant == CausalVariant.LOWER_RIGHT else causal(offset=0)
        return pose(query, key, value, mask=aligned, scale=scale, dropout=dropout_p)
    if attn_mask is not None and attn_mask.dtype.is_floating_point:
        attn_mask = _hiding(attn_mask)
    return posed_as_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _hiding(bias: Tensor) -> Tensor:
    """A bias in which the lowest finite numbers, which many write for −inf, are −inf in rows that see something."""
    deep = bias <= torch.finfo(bias.dtype).min / 2
    return torch.where(deep & ~deep.all(-1, keepdim=True), -torch.inf, bias)

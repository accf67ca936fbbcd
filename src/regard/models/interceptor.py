"""Intercept every attention call of a model: torch's function, ours, and torch.nn.MultiheadAttention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.backends import Backend
from regard.backends.dispatch import choose, run
from regard.compat.compiled import original_name
from regard.compat.torch import causal_bias, dynamo_is_loaded, transforms_are_active
from regard.core.problem import Problem
from regard.errors import BackendError, RegardError
from regard.functional import posed_as_torch
from regard.observation import Observation, Watcher, notify, observed, watchers, watching

__all__ = ["CallInterceptor", "OnCall", "OnMiss", "with_infinities"]

OnCall = Callable[[str, Observation], None]
OnMiss = Callable[[str, str], None]


class _Suspension(threading.local):
    """Whether this thread computes an intercepted call: what it calls in torch is then not the model's own call.

    All interceptors of a thread share it, since they may be nested.
    """

    on = False


_SUSPENSION = _Suspension()


class _Running(threading.local):
    """The names of the modules that are running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.names: list[str] = []


class CallInterceptor(Watcher):
    """A context that observes each attention call of `model` and reports it: `on_call(name, observation)`.

    The name is that of the module that made the call. A call that cannot be observed runs as usual, and is reported to
    `on_miss(name, reason)`. Only calls of the thread that entered the context are observed, and those that its backward
    passes repeat in autograd's threads. On exit, even after an exception, no hook remains.
    """

    def __init__(self, model: nn.Module, on_call: OnCall, on_miss: OnMiss | None = None) -> None:
        self._model, self._on_call, self._on_miss = model, on_call, on_miss
        self._running = _Running()
        self._exit = ExitStack()

    def __enter__(self) -> CallInterceptor:
        with ExitStack() as stack:
            for full, module in self._model.named_modules():
                name = original_name(full)
                if name and _may_attend(module):  # calls outside every submodule are the model's own
                    self._track(stack, name, module)
            stack.enter_context(watching(self))
            if dynamo_is_loaded():  # compiled code would bypass us; if dynamo is not loaded, there is none
                stack.enter_context(_EAGER)
            stack.enter_context(_TorchFunctions(self))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.names.clear()
        self._exit.close()

    @property
    def is_active_here(self) -> bool:
        """Whether calls of the current thread are observed."""
        return self in watchers()

    def _track(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return

        def enter(*_: object) -> None:
            if self.is_active_here:
                self._running.names.append(name)

        def leave(*_: object) -> None:
            names = self._running.names
            if name in names:
                while names.pop() != name:  # drop modules that an exception left
                    pass

        stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    @property
    def name(self) -> str:
        """The name of the module that is running in this thread."""
        return self._running.names[-1] if self._running.names else ""

    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        with self.suspend():
            return self._observed_output(p, backend)

    @staticmethod
    @contextmanager
    def suspend() -> Iterator[None]:
        """Let torch's functions run in this thread without interception."""
        before, _SUSPENSION.on = _SUSPENSION.on, True
        try:
            yield
        finally:
            _SUSPENSION.on = before

    @staticmethod
    def is_suspended() -> bool:
        """Whether torch's functions run in this thread without interception."""
        return _SUSPENSION.on

    def _observed_output(self, p: Problem, backend: str | Backend) -> Tensor:
        if transforms_are_active():
            self.miss("it is inside a torch.func transform")
            return run(p, choose(p, backend)).output
        try:
            seen = observed(p, backend)
        except BackendError:  # the named backend has no statistics: run it, and observe with another one
            output = run(p, choose(p, backend)).output
            self._observe(p._replace(dropout=0.0))
            return output
        notify(seen)
        return seen.output

    def show(self, seen: Observation) -> None:
        with torch.no_grad():
            self._on_call(self.name, seen.kept())

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
        """Answer a call of torch's function with the observed output; with dropout, torch computes it and draws."""
        try:
            p: Problem | None = _sdpa_problem(query, key, value, *others, **named)
        except (RegardError, TypeError) as error:  # leave such arguments to torch
            self.miss(str(error))
            p = None
        if p is None or p.dropout:
            with self.suspend():
                output = F.scaled_dot_product_attention(query, key, value, *others, **named)
                if p is not None:
                    self._observe(p._replace(dropout=0.0))
            return output
        output = self.answer(p, "auto")
        return output.view(*output.shape[:-3][: query.dim() - 2], *output.shape[-2:]) if query.dim() < 4 else output

    def _observe(self, p: Problem) -> None:
        if transforms_are_active():
            self.miss("it is inside a torch.func transform")
            return
        with torch.no_grad():
            notify(observed(p))

    def miss(self, reason: str) -> None:
        """Report a call that could not be observed."""
        if self._on_miss is not None:
            self._on_miss(self.name, reason)


class _EagerStance:
    """A context in which compiled code runs eagerly. All threads share the stance, so the last to leave restores it."""

    def __init__(self) -> None:
        self._lock, self._entered = threading.Lock(), 0
        self._stance = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._stance.close()


_EAGER = _EagerStance()


def _may_attend(module: nn.Module) -> bool:
    """Whether a module may call attention: any but the small ones of torch, which hooks would slow down."""
    small = type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())
    return not small or isinstance(module, nn.MultiheadAttention)


_ATTENTION = frozenset((F.scaled_dot_product_attention, F.multi_head_attention_forward))


class _TorchFunctions(TorchFunctionMode):
    """Intercepts torch's attention functions."""

    def __init__(self, interceptor: CallInterceptor) -> None:
        super().__init__()
        self._interceptor = interceptor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _ATTENTION or self._interceptor.is_suspended():  # nearly all calls of a model are others
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._interceptor.sdpa(*args, **kwargs)
        return self._multihead(**dict(zip(_parameters(func), args, strict=False)), **kwargs)

    def _multihead(self, **given: Any) -> tuple[Tensor, Tensor | None]:
        """Run torch.nn.MultiheadAttention's function on its fused path; requested weights come from the observation."""
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
        """Run it without weights, with our attention in place of its call of torch's."""
        found: list[Observation] = []

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            try:
                seen = observed(_sdpa_problem(*args, **kwargs))
            except RegardError as error:
                self._interceptor.miss(str(error))
                return F.scaled_dot_product_attention(*args, **kwargs)
            notify(seen)
            found.append(seen)
            return seen.output

        original = F.multi_head_attention_forward
        scope = {**original.__globals__, "scaled_dot_product_attention": attend, "has_torch_function": _false}
        patched = FunctionType(original.__code__, scope, original.__name__, original.__defaults__)
        output, _ = patched(**given | {"need_weights": False})
        return output, found[-1] if found else None


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def _false(*_: object) -> bool:
    return False


def _sdpa_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """The problem of a call of torch's function, with a dimension for heads."""
    headless = query.dim() < 4 and not (query.dim() == 3 and enable_gqa)
    if query.dim() < 4:
        query, key, value = (x.unsqueeze(-3) if headless else x[None] for x in (query, key, value))
    if attn_mask is not None and causal_bias(attn_mask) is None:
        attn_mask = attn_mask.unsqueeze(-3) if headless and attn_mask.dim() == 3 else attn_mask
        attn_mask = with_infinities(attn_mask) if attn_mask.dtype.is_floating_point else attn_mask
    return posed_as_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def with_infinities(bias: Tensor) -> Tensor:
    """Replace the lowest finite numbers, which many models use for −inf, by −inf in rows that see something."""
    lowest = bias <= torch.finfo(bias.dtype).min / 2
    return torch.where(lowest & ~lowest.all(-1, keepdim=True), -torch.inf, bias)

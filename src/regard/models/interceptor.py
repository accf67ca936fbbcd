"""Intercept every attention call of a model, know which module made it, and observe it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.backends import Backend
from regard.compat.compiled import submodules
from regard.compat.torch import dynamo_is_loaded, in_backward, transforms_are_active
from regard.core.problem import Problem
from regard.errors import BackendError
from regard.observation import Observation, answered, notify, observed, watchers, watching

from .flex_calls import flex_operator
from .foreign_calls import hear_foreign_calls
from .listener import Listener, Original, suspended, unobserved
from .torch_calls import TorchCalls

__all__ = ["CallInterceptor", "CallListener", "OnCall", "OnMiss", "remove_hooks"]

OnCall = Callable[[str, Observation], None]
OnMiss = Callable[[str, str], None]


class _Running(threading.local):
    """The names of the modules that are running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.repeats: ExitStack | None = None  # while a backward pass repeats a call: torch's modes are off there


class CallListener(Listener):
    """A context that hears each attention call of `model`, and knows which of its modules made the call.

    Only calls of the thread that entered the context are heard, and those that its backward passes repeat in autograd's
    threads. On exit, even after an exception, no hook remains. With `unchanged`, the model's own functions run.
    """

    def __init__(self, model: nn.Module, *, unchanged: bool = False) -> None:
        self._model, self._unchanged = model, unchanged
        self.submodules: list[tuple[str, nn.Module, bool]] = []  # as `compat.compiled.submodules` has them, on entry
        self._running = _Running()
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            hooks: list[RemovableHandle] = []
            stack.callback(remove_hooks, hooks)
            self.submodules = submodules(self._model)
            for name, module, is_leaf in self.submodules:
                if name and _may_attend(module, is_leaf):  # calls outside every submodule are the model's own
                    self._track(hooks, name, module)
            stack.enter_context(watching(self))
            if dynamo_is_loaded() or flex_operator() is not None:  # compiled code would bypass us
                stack.enter_context(_EAGER)
            stack.enter_context(hear_foreign_calls(self._model, self._unchanged))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.names.clear()
        self.submodules = []
        self._exit.close()

    @property
    def is_active_here(self) -> bool:
        """Whether calls of the current thread are heard."""
        return self in watchers()

    def _track(self, hooks: list[RemovableHandle], name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return

        running = self._running

        def enter(*_: object) -> None:
            if self in watchers():
                if not running.names and in_backward():
                    running.repeats = ExitStack()
                    running.repeats.enter_context(TorchCalls())
                running.names.append(name)

        def leave(*_: object) -> None:
            names = running.names
            if name in names:
                while names.pop() != name:  # drop modules that an exception left
                    pass
            if not names and running.repeats is not None:
                running.repeats.close()
                running.repeats = None

        hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))

    @property
    def name(self) -> str:
        """The name of the module that is running in this thread."""
        names = self._running.names
        return names[-1] if names else ""


class CallInterceptor(CallListener):
    """A context that observes each attention call of `model` and reports it: `on_call(name, observation)`.

    The name is that of the module that made the call. A call that cannot be observed runs as usual, and is reported to
    `on_miss(name, reason)`.
    """

    observes: ClassVar[bool] = True

    def __init__(
        self, model: nn.Module, on_call: OnCall, on_miss: OnMiss | None = None, *, unchanged: bool = False
    ) -> None:
        super().__init__(model, unchanged=unchanged)
        self._on_call, self._on_miss = on_call, on_miss

    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        with suspended():
            return self._observed_output(p, backend)

    def _observed_output(self, p: Problem, backend: str | Backend) -> Tensor:
        if transforms_are_active():
            self.miss("it is inside a torch.func transform")
            return answered(p, backend)
        try:
            seen = observed(p, backend)
        except BackendError:  # the named backend has no statistics: run it, and observe with another one
            output = answered(p, backend)
            self._observe(p._replace(dropout=0.0))
            return output
        notify(seen)
        return seen.output

    def show(self, seen: Observation) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.show(seen)
        else:
            self._on_call(self.name, seen.kept())

    def respond(self, p: Problem, original: Original, *, beside: bool = False) -> Tensor:
        """Answer with the observed output; with dropout, the original computes it and draws."""
        if not p.dropout and not beside:
            return self.answer(p, "auto")
        with suspended():
            output = unobserved(p, original)
            self._observe(p._replace(dropout=0.0))
        return output

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


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove all of them."""
    for hook in hooks:
        hook.remove()


def _may_attend(module: nn.Module, is_leaf: bool) -> bool:
    """Whether a module may call attention: any but the small ones of torch, which hooks would slow down."""
    small = is_leaf and type(module).__module__.startswith("torch.nn.modules.")
    return not small or isinstance(module, nn.MultiheadAttention)

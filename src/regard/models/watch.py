"""watch: observe the attention of a whole model while it runs."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ArgumentError, DtypeError
from regard.observation import Observation

from .interceptor import CallInterceptor, remove_hooks
from .seen import Seen

__all__ = ["watch"]

_ATTENTION = re.compile(r"(attention|attn)\d*$", re.IGNORECASE)  # how attention classes are named
_NOT_SEEN = (
    "it ran and made no attention call that can be observed (torch's scaled_dot_product_attention, MultiheadAttention "
    "and flex_attention, FlashAttention, regard)"
)
_BY_HAND = (
    f"{_NOT_SEEN}; if it computes softmax(q @ k.T) @ v by hand, write regard.attention(q, k, v, mask=…, scale=…) "
    f"in its place: one line, the same numbers, and it is seen"
)


def watch(model: nn.Module, tell: Callable[[str], None] | None = None) -> AbstractContextManager[Seen]:
    """Observe every attention call that `model` makes inside the `with` block, in linear memory.

    It sees torch's `scaled_dot_product_attention`, `torch.nn.MultiheadAttention` and `flex_attention`, the functions of
    FlashAttention, every call of regard, and Hugging Face models with any `attn_implementation`: inside the block, they
    answer through regard. It cannot see attention that a module computes by hand; `seen.missed` names modules that seem
    to do so, and `regard.attention(q, k, v)` in place of their formula is seen. The model's output does not change.
    `tell`, if given, is called with the name of each layer when it has been seen. Only calls of the thread that entered
    the block are observed. Inside the block, compiled code runs eagerly: the graphs stay compiled, and run again after
    it.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True)
    >>> with regard.watch(model) as seen:
    ...     _ = model(torch.zeros(1, 8, 16))
    >>> [round(head.effective_keys, 3) for head in seen.heads]
    [8.0, 8.0, 8.0, 8.0]
    """
    if not isinstance(model, nn.Module):
        given = (
            f"the class {model.__name__}; create an instance first" if isinstance(model, type) else type(model).__name__
        )
        raise DtypeError(f"watch: model must be a torch.nn.Module. Got {given}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise DtypeError(
            "watch: model is TorchScript, whose calls cannot be observed. Watch the module it was compiled from."
        )
    if tell is not None and not callable(tell):
        raise DtypeError(f"watch: tell must be a function of a layer's name. Got {type(tell).__name__}.")
    return _Watch(model, tell)


class _Reported(threading.local):
    """How many calls had been reported when each running call of a module began in this thread, the innermost last."""

    def __init__(self) -> None:
        self.before: list[int] = []


class _Watch(AbstractContextManager[Seen]):
    """Watches a model from the beginning of a `with` block to its end."""

    def __init__(self, model: nn.Module, tell: Callable[[str], None] | None) -> None:
        self._model, self._tell, self._seen = model, tell, Seen(title=type(model).__name__)
        self._interceptor = CallInterceptor(model, self._see, self._miss)
        self._runs, self._reported = 0, 0  # runs of the model; calls that were seen, or missed with a reason
        self._entered = False
        self._exit = ExitStack()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"watch: it has no attribute {name!r}; write `with regard.watch(model) as seen:` and use `seen`."
        )

    def __enter__(self) -> Seen:
        if self._entered:
            raise ArgumentError("watch: it can be entered only once. Call regard.watch(model) again.")
        self._entered = True
        with ExitStack() as stack:
            stack.enter_context(self._interceptor)
            hooks = [self._model.register_forward_pre_hook(self._before_run, with_kwargs=True)]
            stack.callback(remove_hooks, hooks)
            for name, module, _ in self._interceptor.submodules:
                if _is_named_attention(type(module).__name__):
                    self._track(hooks, name, module)
            self._exit = stack.pop_all()
        return self._seen

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exit.close()
        if kind is None and not self._reported and not self._seen.missed:
            self._seen.missed[""] = _NOT_SEEN if self._runs else "it was not called inside the with block"
        if kind is None and self._runs and not self._seen.calls:
            name, reason = next(iter(self._seen.missed.items()))
            more = f" and {len(self._seen.missed) - 1:,} more" if len(self._seen.missed) > 1 else ""
            place = f"{name}{more}" if name else "the model"
            warnings.warn(f"watch: no attention was seen in {place}: {reason}.", stacklevel=2)

    def _track(self, hooks: list[RemovableHandle], name: str, module: nn.Module) -> None:
        """Record it if a module named attention ran and no call of it was reported."""
        here = _Reported()

        def enter(*_: object) -> None:
            if self._interceptor.is_active_here:
                here.before.append(self._reported)

        def leave(*_: object) -> None:
            began = here.before.pop() if here.before else None  # None: before the watch, or in another thread
            if began == self._reported and not self._missed_inside(name):
                self._seen.missed.setdefault(name, _BY_HAND)

        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave))

    def _missed_inside(self, name: str) -> bool:
        return any(other != name and other.startswith(f"{name}." if name else "") for other in self._seen.missed)

    def _see(self, name: str, seen: Observation) -> None:
        self._reported += 1
        self._seen.add(name, seen)
        if self._tell is not None:
            self._tell(name)

    def _miss(self, name: str, reason: str) -> None:
        self._reported += 1
        self._seen.missed[name] = reason

    def _before_run(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any] | None = None) -> None:
        # Another thread can reach this hook while torch still registers it, and then gives it no keyword arguments.
        if self._interceptor.is_active_here:
            self._runs += 1
            self._seen.tokens = _ids(args, named or {})


@lru_cache
def _is_named_attention(name: str) -> bool:
    return _ATTENTION.search(name) is not None


def _ids(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """The token ids among a model's arguments: `input_ids`, or else the first integer tensor with 1 or 2 dimensions."""
    others = (x for name, x in named.items() if not any(word in name for word in ("mask", "position", "type")))
    for x in (named.get("input_ids"), *args, *others):
        if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim() in (1, 2):
            return x.detach()[None] if x.dim() == 1 else x.detach()
    return None

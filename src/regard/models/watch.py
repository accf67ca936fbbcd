"""watch: look at the attention of a whole model while it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DtypeError
from regard.observation import Observation

from .interceptor import CallInterceptor
from .seen import Seen

__all__ = ["watch"]

_ATTENTION = re.compile(r"(attention|attn)\d*$", re.IGNORECASE)  # how classes of attention are called
_NOT_SEEN = (
    "it ran and called no attention that can be seen (torch's scaled_dot_product_attention, regard, "
    "torch.nn.MultiheadAttention)"
)
_BY_HAND = (
    f"{_NOT_SEEN}; it may compute attention by hand, as with transformers' "
    f'attn_implementation="eager": choose "sdpa" or "regard"'
)


def watch(model: nn.Module, tell: Callable[[str], None] | None = None) -> AbstractContextManager[Seen]:
    """Observe every attention call that `model` makes inside the `with` block, in linear memory.

    It sees torch's `scaled_dot_product_attention`, every call of regard, and `torch.nn.MultiheadAttention`; what a
    model computes by hand, as with `attn_implementation="eager"`, it cannot see; modules that seem to are named in
    `seen.missed`. The model's output stays what it was. `tell`, if given, is called with the name of each layer when
    it has been seen.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True)
    >>> with regard.watch(model) as seen:
    ...     _ = model(torch.zeros(1, 8, 16))
    >>> [round(head.effective_keys, 3) for head in seen.heads]
    [8.0, 8.0, 8.0, 8.0]
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}; make one first" if isinstance(model, type) else type(model).__name__
        raise DtypeError(f"watch: model must be a torch.nn.Module. Got {given}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise DtypeError("watch: model is TorchScript, whose calls nobody sees. Watch the module it was made from.")
    if tell is not None and not callable(tell):
        raise DtypeError(f"watch: tell must be a function of a layer's name. Got {type(tell).__name__}.")
    return _Watch(model, tell)


class _Watch(AbstractContextManager[Seen]):
    """One look at a model: from the beginning of a `with` block to its end."""

    def __init__(self, model: nn.Module, tell: Callable[[str], None] | None) -> None:
        self._model, self._tell, self._seen = model, tell, Seen()
        self._runs, self._told = 0, 0  # of the model; calls that were seen, or missed with a reason
        self._entered = False
        self._leave = ExitStack()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"watch: it has no {name!r} itself; what is seen comes from `with regard.watch(model) as seen:`."
        )

    def __enter__(self) -> Seen:
        if self._entered:
            raise ArgumentError("watch: it is entered once. Call regard.watch(model) again to look again.")
        self._entered = True
        with ExitStack() as stack:
            stack.callback(self._model.register_forward_pre_hook(self._note, with_kwargs=True).remove)
            for name, module in self._model.named_modules():
                if _ATTENTION.search(type(module).__name__):
                    self._follow(stack, name, module)
            stack.enter_context(CallInterceptor(self._model, self._see, self._miss))
            self._leave = stack.pop_all()
        return self._seen

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave.close()
        if kind is None and not self._told and not self._seen.missed:
            self._seen.missed[""] = _NOT_SEEN if self._runs else "it was not called inside of the with block"

    def _follow(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        """Take note if a module that is called attention ran, and nothing was told of it."""
        before: list[int] = []

        def enter(*_: object) -> None:
            before.append(self._told)

        def leave(*_: object) -> None:
            if before.pop() == self._told and not self._names_what_is_in(name):
                self._seen.missed.setdefault(name, _BY_HAND)

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave).remove)

    def _names_what_is_in(self, name: str) -> bool:
        return any(other != name and other.startswith(f"{name}." if name else "") for other in self._seen.missed)

    def _see(self, name: str, what: Observation) -> None:
        self._told += 1
        self._seen.add(name, what)
        if self._tell is not None:
            self._tell(name)

    def _miss(self, name: str, reason: str) -> None:
        self._told += 1
        self._seen.missed[name] = reason

    def _note(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._runs += 1
        self._seen.tokens = _ids(args, named)


def _ids(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """The token ids among a model's arguments: `input_ids`, else the first whole numbers in one or two dimensions."""
    others = (x for name, x in named.items() if not any(word in name for word in ("mask", "position", "type")))
    for x in (named.get("input_ids"), *args, *others):
        if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim() in (1, 2):
            return x.detach()[None] if x.dim() == 1 else x.detach()
    return None

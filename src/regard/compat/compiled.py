"""How torch.compile marks what it compiled, and how operators are seen while compiled code runs.

`tests/compat/test_compiled.py` holds each function: if a release of torch changes one of these, its test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "EagerOperatorMode",
    "OperatorMode",
    "operator_arguments",
    "original_name",
    "replace_compiled_call",
    "runs_compiled",
    "submodules",
]

_WRAPPED = "_orig_mod"  # how torch.compile(module) registers the module that it wraps


class OperatorMode(TorchDispatchMode):
    """A mode that sees every operator, those of compiled graphs included; graphs are compiled and run as without it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class EagerOperatorMode(OperatorMode):
    """The same for code that is not compiled: torch does not import the compiler for it, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def operator_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operator by name."""
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def original_name(name: str) -> str:
    """The name of a submodule without the parts that torch.compile adds.

    >>> original_name("_orig_mod.blocks.0._orig_mod.attn")
    'blocks.0.attn'
    """
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def submodules(model: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """Every module once, in the order of `named_modules`: its `original_name`, itself, and whether it has no children.

    >>> [(name, leaf) for name, _, leaf in submodules(nn.Sequential(nn.Sequential(nn.ReLU())))]
    [('', False), ('0', False), ('0.0', True)]
    """
    found, known, waiting = [], set(), [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in known:
            continue
        known.add(id(module))
        children = [(part, child) for part, child in module._modules.items() if child is not None]
        found.append((name, module, not children))
        for part, child in reversed(children):
            inner = name if part == _WRAPPED else f"{name}.{part}" if name else part
            waiting.append((inner, child))
    return found


def runs_compiled(model: nn.Module) -> bool:
    """Whether a module or one of its submodules was compiled, by torch.compile(module) or module.compile()."""
    return any(_WRAPPED in module._modules or module._compiled_call_impl is not None for module in model.modules())


def replace_compiled_call(
    module: nn.Module, replaced_by: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None] | None:
    """Replace what a call of a module runs that was compiled in place, by module.compile(); returns the way back.

    A hook of such a module would be compiled with it. None for all other modules.
    """
    compiled = module._compiled_call_impl
    if compiled is None:
        return None
    module._compiled_call_impl = replaced_by(compiled)

    def restore() -> None:
        module._compiled_call_impl = compiled

    return restore

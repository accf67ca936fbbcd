"""Every kind of mask that holds or reads a tensor, and what a change of it before the backward pass must not do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard.errors import ChangedError

__all__ = ["KINDS", "Held", "N", "change", "gradients", "holds_what_the_call_saw", "leaves", "table"]

N = 6


class Case(NamedTuple):
    tensor: Callable[[], Tensor]
    mask: Callable[[Tensor], Any]


def table(*lead: int) -> Tensor:
    return torch.rand(*lead, N, N, generator=torch.Generator().manual_seed(0)) > 0.4


class Held:
    def __init__(self, t: Tensor) -> None:
        self.t, self.unread = t, torch.zeros(1)

    def __call__(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.t[i, j]


class Module(torch.nn.Module):
    def __init__(self, t: Tensor) -> None:
        super().__init__()
        self.register_buffer("t", t)

    def forward(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.t[i, j]  # type: ignore[index]


class Slots:
    """It has its tensor in a slot, and reads it by a property and a method."""

    __slots__ = ("t",)

    def __init__(self, t: Tensor) -> None:
        self.t = t

    @property
    def read(self) -> Tensor:
        return self.t

    def look(self, i: Tensor, j: Tensor) -> Tensor:
        return self.read[i, j]

    def __call__(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.look(i, j)


def inner(t: Tensor) -> regard.masks.Mask:
    held = {"tables": [torch.zeros(1)] * 70 + [t]}
    return regard.predicate(lambda batch, head, i, j: (lambda a, b: held["tables"][70][a, b])(i, j))


KINDS = {
    "a tensor": Case(table, lambda t: t),
    "a tensor per head": Case(lambda: table(2, 2), lambda t: t),
    "dense": Case(table, regard.dense),
    "lengths": Case(lambda: torch.tensor([2, 5]), regard.padding),
    "keep": Case(lambda: table()[:2], lambda t: regard.padding(keep=t)),
    "documents": Case(lambda: torch.tensor([0, 0, 1, 1, 1, 2]), regard.documents),
    "documents of keys": Case(lambda: torch.tensor([0, 0, 1, 1, 1, 2]), lambda t: regard.documents([0] * N, t)),
    "packed": Case(lambda: torch.tensor([1, 2, 3]), regard.packed),
    "causal": Case(lambda: torch.tensor([-1, 2]), regard.causal),
    "window": Case(lambda: torch.tensor([-1, 2]), lambda t: regard.window(1, offset=t)),
    "prefix": Case(lambda: torch.tensor([1, 4]), regard.prefix),
    "global_tokens": Case(lambda: torch.tensor([0, 2]), regard.global_tokens),
    "composed": Case(table, lambda t: regard.causal() & ~regard.dense(t) | regard.prefix(1)),
    "predicate": Case(table, lambda t: regard.predicate(lambda batch, head, i, j: t[i, j])),
    "partial": Case(
        table, lambda t: regard.predicate(functools.partial(lambda t, batch, head, i, j: t[i, j], t)) & regard.window(4)
    ),
    "an object that is called": Case(table, lambda t: regard.predicate(Held(t))),
    "a module": Case(table, lambda t: regard.predicate(Module(t))),
    "a method that reads a property": Case(table, lambda t: regard.predicate(Slots(t))),
    "a long list in a dict": Case(table, inner),
    "a default": Case(table, lambda t: regard.predicate(lambda batch, head, i, j, t=t: t[i, j])),
}


def leaves() -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, N, 4, generator=made).requires_grad_() for _ in range(3)]


def change(t: Tensor) -> None:
    t.logical_not_() if t.dtype == torch.bool else t.copy_(t.flip(0) + (0 if t.dim() == 1 and t.sum() == N else 1))


def gradients(output: Tensor, given: list[Tensor], order: int) -> list[Tensor]:
    first = torch.autograd.grad(output.pow(3).sum(), given, create_graph=order > 1)
    return list(first if order == 1 else torch.autograd.grad(sum(x.square().sum() for x in first), given))


def holds_what_the_call_saw(
    kind: str, call: Callable[..., Tensor], order: int, truth: Callable[..., Tensor] | None = None
) -> bool:
    """Whether the backward raises after a change; if it does not, it must give the gradient of the first mask."""
    case, given, truth = KINDS[kind], leaves(), truth or call
    tensor = case.tensor()
    output = call(*given, case.mask(tensor))
    expected = gradients(truth(*given, case.mask(tensor.clone())), given, order)
    change(tensor)
    other = gradients(truth(*given, case.mask(tensor)), given, order)
    assert any(not torch.allclose(a, b) for a, b in zip(expected, other, strict=True)), "the change must matter"
    try:
        found = gradients(output, given, order)
    except ChangedError:
        return True
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return False

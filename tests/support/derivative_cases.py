"""The cases of the contract at sizes that finite differences can check, and each as a function of its leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from contract_cases import ARGUMENTS, MASKS, SCORES, Case, Shape
from regard.backends import Backend, Chunked

__all__ = ["BY_ROWS", "CHECKED", "SMALL", "checkable", "small"]

SMALL = Shape(batch=2, heads=2, kv_heads=1, n=3, m=5, d=2, dv=3)
BY_ROWS = Chunked(chunk_size=2)
SIZED = {
    "causal offset per item",
    "padding",
    "padding by keep",
    "prefix per item",
    "composed",
    "packed",
    "cumulative lengths",
    "documents",
}
RESIZED = [
    Case("causal offset per item, small", lambda s: {"mask": regard.causal(offset=torch.tensor([0, 2]))}),
    Case("padding, small", lambda s: {"mask": regard.padding([4, 0])}),
    Case("padding by keep, small", lambda s: {"mask": regard.padding(torch.arange(10).view(2, 5) % 3 > 0)}),
    Case("prefix per item, small", lambda s: {"mask": regard.prefix(torch.tensor([0, 3]))}),
    Case("documents, small", lambda s: {"mask": regard.documents(torch.arange(3) // 2, torch.arange(5) // 3)}),
    Case("composed, small", lambda s: {"mask": (regard.causal() & regard.padding([3, 5])) | ~regard.window(1, 1)}),
]
PARTNERS = [regard.causal(), regard.strided(2), regard.padding([4, 1])]


def crossed(case: Case, at: int) -> Case:
    """A score with a mask of another kind, a bias and, every other time, a cap and a sink."""

    def make(s: Shape) -> dict[str, Any]:
        more = {"softcap": 2.0, "sink": torch.linspace(-1, 1, s.heads)} if at % 2 else {}
        return {**case.make(s), "mask": PARTNERS[at % 3], "bias": torch.randn(s.heads, s.n, s.m), **more}

    return Case(f"{case.name} with mask, bias{' and all' if at % 2 else ''}", make)


CHECKED = [
    *(c for c in ARGUMENTS if "square" not in c.name and c.name != "several strips"),
    *(c for c in MASKS if c.name not in SIZED),
    *RESIZED,
    *SCORES,
    *(crossed(case, at) for at, case in enumerate(SCORES)),
]


def small(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    return Case(case.name, case.make, SMALL).inputs()


def of_leaves(tensors: list[Tensor], kwargs: dict[str, Any], backend: str | Backend) -> Any:
    """(function of every leaf, the leaves): parameters of scores and biases by functional substitution."""
    direct = [k for k, v in kwargs.items() if isinstance(v, Tensor) and v.requires_grad]
    fixed = {k: v for k, v in kwargs.items() if k not in direct and v is not None}

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(direct, args[3:], strict=True))
        seen = regard.observe(*args[:3], **given, **fixed, backend=backend)
        return seen.output, torch.where(seen.lse > -torch.inf, seen.lse, 0.0), seen.entropy

    return function, [*tensors, *(kwargs[k] for k in direct)]


def checkable(case: Case, backend: str | Backend) -> tuple[Any, list[Tensor]]:
    tensors, kwargs = small(case)
    if case.name == "bias with −inf":
        kwargs["bias"] = kwargs["bias"].detach()  # finite differences cannot start from −inf
    function, args = of_leaves(tensors, kwargs, backend)
    return function, args

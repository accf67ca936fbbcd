"""The softmax: stable, online over blocks, merged, and its Jacobian."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError, DtypeError, ShapeError

__all__ = [
    "Finished",
    "Partial",
    "arithmetic_dtype",
    "finish",
    "jacobian",
    "lowest",
    "merge",
    "online",
    "partial",
    "stable",
]

# Intel's MKL initialises itself at its first exponentials. When several threads took them at once, they were right to
# 1e−4 only, in about one process of twenty; so one thread takes the first ones here.
torch.zeros(8, device="cpu").exp()


class Partial(NamedTuple):
    """The state of a softmax-weighted sum that has seen some of the keys."""

    max: Tensor
    """(…, N) the largest logit so far; finite even if there is none."""
    denominator: Tensor
    """(…, N) Σ exp(logit − max)."""
    numerator: Tensor
    """(…, N, E) Σ exp(logit − max) · value."""


class Finished(NamedTuple):
    """The result of a `Partial` that has seen all keys."""

    output: Tensor
    """(…, N, E) the weighted mean of the values; 0 for a row that saw nothing."""
    lse: Tensor
    """(…, N) ln Σ exp(logit); −inf for a row that saw nothing."""


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which numbers of this dtype are computed: float64 for float64, float32 for all others.

    >>> arithmetic_dtype(torch.bfloat16), arithmetic_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def stable(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax along `dim` that never overflows, and gives zeros where all of `x` is −inf.

    >>> x = torch.tensor([[20.0, 22.0, 18.0, 21.0], [-torch.inf] * 4])
    >>> stable(x)
    tensor([[0.0889, 0.6572, 0.0120, 0.2418],
            [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    _need_floating("softmax.stable", x=x)
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise ShapeError(
            f"softmax.stable: dim must name a dimension of x; got dim={dim} for x of shape {tuple(x.shape)}."
        )
    if x.numel() == 0:
        return x.clone()
    wide = x.to(arithmetic_dtype(x.dtype))
    # The result does not depend on the maximum that is subtracted, so the maximum needs no derivative.
    top = wide.detach().amax(dim, keepdim=True)
    exponentials = torch.exp(wide - top.masked_fill(top == -torch.inf, 0.0))
    total = exponentials.sum(dim, keepdim=True)
    return (exponentials / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def lowest(dtype: torch.dtype) -> float:
    """Give the initial value of a running maximum: finite, so that an empty block never computes inf − inf.

    >>> lowest(torch.float32)
    -3.4028234663852886e+38
    """
    return torch.finfo(dtype).min


def partial(logits: Tensor, values: Tensor) -> Partial:
    """Summarise one block of keys, logits (…, N, m) and values (…, m, E), as the state of an online softmax.

    >>> block = partial(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[3.0], [5.0]]))
    >>> block.max, block.denominator, block.numerator
    (tensor([0.]), tensor([1.]), tensor([[3.]]))
    """
    _need_floating("softmax.partial", logits=logits, values=values)
    if logits.ndim < 2 or values.ndim < 2 or logits.shape[-1] != values.shape[-2]:
        raise ShapeError(
            "softmax.partial: logits (…, N, m) and values (…, m, E) must agree in m. "
            f"Got logits {tuple(logits.shape)}, values {tuple(values.shape)}."
        )
    dtype = arithmetic_dtype(torch.promote_types(logits.dtype, values.dtype))
    logits, values = logits.to(dtype), values.to(dtype)
    if logits.shape[-1] == 0:
        top = logits.new_full(logits.shape[:-1], lowest(dtype))
    else:
        top = logits.detach().amax(-1).clamp(min=lowest(dtype))
    exponentials = torch.exp(logits - top.unsqueeze(-1))
    return Partial(top, exponentials.sum(-1), exponentials @ values)


def merge(a: Partial, b: Partial) -> Partial:
    """Merge the states of two disjoint sets of keys; order and grouping do not matter beyond rounding.

    >>> left = partial(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    >>> right = partial(torch.tensor([[1.0]]), torch.tensor([[4.0]]))
    >>> finish(merge(left, right)).output
    tensor([[3.]])
    """
    top = torch.maximum(a.max, b.max)
    keep_a, keep_b = torch.exp(a.max - top), torch.exp(b.max - top)
    return Partial(
        top,
        keep_a * a.denominator + keep_b * b.denominator,
        keep_a.unsqueeze(-1) * a.numerator + keep_b.unsqueeze(-1) * b.numerator,
    )


def finish(state: Partial) -> Finished:
    """Normalise a state into its output and the logarithm of its denominator.

    >>> output, lse = finish(partial(torch.full((1, 2), -torch.inf), torch.ones(2, 1)))
    >>> output, lse
    (tensor([[0.]]), tensor([-inf]))
    """
    empty = state.denominator == 0
    denominator = state.denominator.masked_fill(empty, 1.0)
    lse = (state.max + denominator.log()).masked_fill(empty, -torch.inf)
    return Finished(state.numerator / denominator.unsqueeze(-1), lse)


def online(blocks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Average values with softmax weights, reading the keys one (logits, values) block at a time.

    >>> logits, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.eye(3)
    >>> online([(logits[:, :2], values[:2]), (logits[:, 2:], values[2:])])
    tensor([[0.0900, 0.2447, 0.6652]])
    """
    state: Partial | None = None
    dtype: torch.dtype | None = None
    for logits, values in blocks:
        block = partial(logits, values)
        state = block if state is None else merge(state, block)
        dtype = dtype or values.dtype
    if state is None:
        raise ArgumentError("softmax.online: there must be at least one block, or the result has no shape; got none.")
    return finish(state).output.to(dtype)


def jacobian(p: Tensor) -> Tensor:
    """Derivative of softmax weights `p` (…, n) by their logits: diag(p) − p pᵀ, (…, n, n).

    >>> jacobian(torch.tensor([0.5, 0.5]))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    _need_floating("softmax.jacobian", p=p)
    if p.ndim == 0:
        raise ShapeError("softmax.jacobian: p must have at least one dimension, the weights of a row; got a scalar.")
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def _need_floating(name: str, **tensors: Tensor) -> None:
    for what, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise DtypeError(
                f"{name}: {what} must be of a floating dtype; got {tensor.dtype}. Convert it with .float()."
            )

"""What the weights of one call say, without the weights: statistics of rows now, passes over tiles when asked."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from .backends import Backend
from .canonical import Result
from .errors import ArgumentError, ChangedError, DtypeError, ShapeError
from .passes import logits_at
from .problem import Problem

__all__ = ["Observation"]

Index = slice | Tensor | list[int] | None


class Observation:
    """One call of attention that you can see through.

    `output`, `lse` and `entropy` are differentiable and come with the forward pass, `max_logit` too; the rest is
    computed when asked for and never holds N × M numbers, unless `weights()` or `scores()` are asked for whole.

    >>> import torch, regard
    >>> seen = regard.observe(*torch.randn(3, 1, 2, 16, 8).unbind())
    >>> seen
    Observation(heads (1, 2), 16 queries, 16 keys, by chunked)
    >>> seen.received.sum(-1)
    tensor([[16.0000, 16.0000]])
    """

    output: Tensor
    lse: Tensor
    entropy: Tensor
    max_logit: Tensor

    def __init__(self, problem: Problem, backend: Backend, result: Result) -> None:
        if result.lse is None or result.entropy is None or result.max_logit is None:
            raise RuntimeError(f"the backend {backend.name} gave no statistics")
        self.output, self.lse, self.entropy, self.max_logit = (
            result.output,
            result.lse,
            result.entropy,
            result.max_logit,
        )
        if problem.query.is_inference():  # their changes cannot be traced: look at copies
            problem = replace(problem, query=problem.query.clone(), key=problem.key.clone())
        self._problem, self._backend, self._found = problem, backend, result
        self._versions = [(t, _version(t)) for t in problem.tensors]

    def __repr__(self) -> str:
        p = self._problem
        return f"Observation(heads {tuple(p.lead)}, {p.rows} queries, {p.keys} keys, by {self._backend.name})"

    @property
    def perplexity(self) -> Tensor:
        """exp(entropy): how many keys each row effectively attends, (…, Hq, N)."""
        return self.entropy.exp()

    @cached_property
    def visible(self) -> Tensor:
        """How many keys each row may attend, (…, Hq, N)."""
        return self._backend.visible(self._unchanged("visible"))

    @cached_property
    def received(self) -> Tensor:
        """Σ over queries of the weight each key receives, (…, Hq, M)."""
        return self._backend.received(self._unchanged("received"), self._found)

    @cached_property
    def gradient_health(self) -> Tensor:
        """Σ p(1 − p), the trace of the softmax Jacobian: 0 where the softmax is saturated, (…, Hq, N)."""
        return self._backend.health(self._unchanged("gradient_health"), self._found)

    def scores(self, rows: Index = None, cols: Index = None) -> Tensor:
        """The logits that entered the softmax, −inf where hidden: (…, Hq, rows, cols); differentiable."""
        p = self._unchanged("scores")
        return logits_at(p, _picked(rows, p.rows, "rows", p), _picked(cols, p.keys, "cols", p))

    def weights(self, rows: Index = None, cols: Index = None) -> Tensor:
        """The exact weights before dropout, or the asked part of them: (…, Hq, rows, cols); differentiable."""
        p = self._unchanged("weights")
        i = _picked(rows, p.rows, "rows", p)
        S = logits_at(p, i, _picked(cols, p.keys, "cols", p))
        seen = -torch.inf < S
        lse = self.lse.index_select(-1, i)[..., None]
        lse = torch.where(lse > -torch.inf, lse, 0.0)
        P = torch.where(seen, (torch.where(seen, S, 0.0) - lse).exp(), 0.0)
        return P.to(p.dtype)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their keys, each (…, Hq, N, k); ties to the lowest index.

        Where fewer keys are visible, the weight is 0 and the index −1.
        """
        p = self._unchanged("top")
        if not isinstance(k, int) or isinstance(k, bool) or not k >= 1:
            raise ArgumentError(f"top: k must be a whole number, at least 1. Got {k!r}.")
        return self._backend.top(p, self._found, k)

    def map(self, height: int, width: int) -> Tensor:
        """The mean weight in each cell of a grid over N × M; row i is in cell ⌊i·height/N⌋: (…, Hq, height, width)."""
        p = self._unchanged("map")
        for name, size, limit in (("height", height, p.rows), ("width", width, p.keys)):
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= limit:
                raise ArgumentError(
                    f"map: {name} must be a whole number from 1 to {limit}, so that no cell is empty. Got {size!r}."
                )
        return self._backend.pooled(p, self._found, height, width)

    def _unchanged(self, member: str) -> Problem:
        if any(_version(t) != version for t, version in self._versions):
            raise ChangedError(
                f"{member}: an input of observe was changed in place since; its weights are no longer there to see. "
                f"Ask for {member} before the change, or observe again."
            )
        return self._problem


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else int(x._version)


def _picked(index: Index, length: int, name: str, p: Problem) -> Tensor:
    """Rows or keys as a 1-D index."""
    device = p.device
    if index is None or isinstance(index, slice):
        chosen = range(length)[index or slice(None)]
        return torch.arange(len(chosen), device=device) * chosen.step + chosen.start
    if isinstance(index, list):
        index = torch.tensor(index, dtype=torch.int64)
    if not isinstance(index, Tensor) or index.dtype.is_floating_point or index.dtype.is_complex:
        raise DtypeError(f"weights: {name} must be a slice, or whole numbers in one dimension. Got {index!r}.")
    if index.dtype == torch.bool:
        index = index.nonzero().squeeze(-1)
    if index.dim() != 1:
        raise ShapeError(f"weights: {name} must have one dimension. Got shape {tuple(index.shape)}.")
    index = index.to(device=device, dtype=torch.int64)
    if index.numel() and not bool(((index >= -length) & (index < length)).all()):
        raise ArgumentError(f"weights: {name} must be within {length}. Got {index.min()} to {index.max()}.")
    return torch.where(index < 0, index + length, index)

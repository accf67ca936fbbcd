"""Similarity of points: the kernels of kernel regression, expressed as attention between scaled points."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..scores import Score
from ..scores.base import Prepared

__all__ = ["KERNELS", "KernelInputs", "TemperedScore", "kernel_inputs"]

KERNELS = ("gaussian", "dot")


class KernelInputs(NamedTuple):
    """Queries and keys whose attention weights are those of the kernel, and the options of the call."""

    query: Tensor
    key: Tensor
    options: dict[str, Any]


class TemperedScore(Score):
    """The logits of another score divided by h², as a bandwidth h divides the exponent of a Gaussian.

    >>> import torch, regard
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> TemperedScore(regard.scores.Cosine(), torch.tensor(0.5))(x, x)
    tensor([[4., 0.],
            [0., 4.]])
    """

    def __init__(self, score: Score, bandwidth: Tensor) -> None:
        super().__init__()
        self.score = score
        self.bandwidth = bandwidth
        self.pairwise = score.pairwise  # type: ignore[misc]
        self.same_dims = score.same_dims  # type: ignore[misc]

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return self._tempered(self.score.prepare(query, key))

    def centre(self, query: Tensor, key: Tensor) -> Tensor | None:
        return self.score.centre(query, key)

    def prepare_around(self, centre: Tensor, query: Tensor, key: Tensor) -> Prepared:
        return self._tempered(self.score.prepare_around(centre, query, key))

    def _tempered(self, prepared: Prepared) -> Prepared:
        query, key, shared = prepared
        precision = self.bandwidth.to(query.dtype) ** -2
        return Prepared(query, key, (*shared, precision)) if self.pairwise else Prepared(query * precision, key, shared)

    def pair(self, query: Tensor, key: Tensor, *shared: Tensor) -> Tensor:  # type: ignore[override]
        if not self.pairwise:
            return query @ key.mT
        *inner, precision = shared
        return self.score.pair(query, key, *inner) * precision

    def width(self, query_dim: int, key_dim: int) -> int:
        return self.score.width(query_dim, key_dim)

    @property
    def cost(self) -> int:
        return self.score.cost

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        return self.score.misfit(query_dim, key_dim, heads)


def kernel_inputs(
    kernel: str | Score, query: Tensor, key: Tensor, bandwidth: Tensor, log_weight: Tensor | None = None
) -> KernelInputs:
    """Transform queries (n, d) and keys (m, d) so that their attention weights are those of the kernel.

    The bandwidth has one value, or one per feature, and may require a gradient. The weight of each key is multiplied by
    exp(log_weight). A Gaussian is the dot product of points with one more feature: −‖q − k‖²/2 = q·k − ‖k‖²/2, up to
    a constant per row that the softmax cancels.

    >>> x = torch.tensor([[0.0], [2.0]])
    >>> found = kernel_inputs("gaussian", x, x, torch.tensor(2.0))
    >>> torch.softmax(found.query @ found.key.mT, -1)
    tensor([[0.6225, 0.3775],
            [0.3775, 0.6225]])
    """
    if isinstance(kernel, Score):
        if bandwidth.numel() != 1:
            raise ArgumentError(
                f"kernel_inputs: a score has one bandwidth, which divides its logits by h². Got {bandwidth.numel()}; "
                f"one per feature needs kernel='gaussian' or 'dot'."
            )
        options = {"score": TemperedScore(kernel, bandwidth.reshape(())), "bias": log_weight}
        return KernelInputs(query, key, options)
    query, key = query / bandwidth, key / bandwidth
    term = torch.zeros_like(key[:, :1]) if kernel == "dot" else key.square().sum(-1, keepdim=True) * -0.5
    if log_weight is not None:
        term = term + log_weight[:, None]
    query = torch.cat((query, torch.ones_like(query[:, :1])), -1)
    return KernelInputs(query, torch.cat((key, term), -1), {"scale": 1.0})

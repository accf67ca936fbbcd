"""The dot product times a scale: the score of the formula."""

from __future__ import annotations

from torch import Tensor, nn

from regard.errors import ArgumentError, DtypeError, ShapeError
from regard.scores.base import Prepared, Score, finite

__all__ = ["Scaled"]


class Scaled(Score):
    """Dot product times a scale: q·k · scale, by default 1/√D.

    The scale is a number, or a tensor with one value or one per head; an `nn.Parameter` is learned with the module.

    >>> import torch
    >>> Scaled()(torch.ones(1, 4), torch.ones(2, 4))
    tensor([[2., 2.]])
    """

    scale: float | Tensor | None

    def __init__(self, scale: float | Tensor | None = None) -> None:
        super().__init__()
        if not isinstance(scale, Tensor):
            self.scale = None if scale is None else finite("Scaled", "scale", scale)
            return
        if not scale.is_floating_point():
            raise DtypeError(f"Scaled: scale must be of a floating dtype; got {scale.dtype}. Convert it with .float().")
        if scale.ndim > 1:
            raise ShapeError(
                f"Scaled: scale must have one value, or one per head, (heads,); got shape {tuple(scale.shape)}."
            )
        if scale.numel() == 0:
            raise ArgumentError("Scaled: scale must have at least one value; got an empty tensor.")
        if isinstance(scale, nn.Parameter):
            self.scale = scale
        else:
            self.register_buffer("scale", scale)

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        if isinstance(self.scale, Tensor) and self.scale.numel() not in (1, heads):
            return f"its scale has one value for each of {self.scale.numel()} heads, but query has {heads}"
        return super().misfit(query_dim, key_dim, heads)

    def factor(self, query: Tensor) -> float | Tensor | None:
        if self.scale is None:
            return float(max(query.shape[-1], 1) ** -0.5)
        return self.own(self.scale, query) if isinstance(self.scale, Tensor) else self.scale

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        if self.scale is None:
            return Prepared(query * max(query.shape[-1], 1) ** -0.5, key)
        if not isinstance(self.scale, Tensor):
            return Prepared(query * self.scale, key)
        return Prepared(query * self.own(self.scale, query).reshape(-1, 1, 1), key)

    def extra_repr(self) -> str:
        if isinstance(self.scale, Tensor):
            return f"scale=tensor of shape {tuple(self.scale.shape)}"
        return f"scale={self.scale}"

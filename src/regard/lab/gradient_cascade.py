"""What happens to a gradient in a stack of layers, with and without 1/√d."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..functional import attention
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["GradientCascade"]

_POWERS = {"none": 0.0, "√d": 0.5, "d": 1.0}
_STACKS = ("chain", "residual")


@dataclass(frozen=True)
class GradientCascade(Study):
    """The norm of the gradient at the first of L layers, for two kinds of stack and three scalings.

    In the chain each layer has its own keys and values, so that a gradient can only pass through the softmax; the
    residual stack is self-attention with residual connections, as in transformers.

    >>> GradientCascade(depths=(1, 6), dim=64, chains=16, stacks=2, scaling="none").run().verdict
    False
    """

    name: ClassVar[str] = "gradient-cascade"
    brief: ClassVar[str] = "Through many layers, unscaled scores lose the gradient"
    claim: ClassVar[str] = (
        "Through a stack of layers the derivatives of the softmax multiply: with 1/√d a layer passes on most of a "
        "gradient; unscaled it passes on almost nothing, so that the gradient vanishes with depth. (If it can also "
        "bypass the softmax, as in a transformer, it explodes instead of vanishing.)"
    )
    test: ClassVar[str] = (
        "In the chain, from the fewest layers to the most, each layer keeps over 0.6 of the median norm if scaled and "
        "under 0.4 if unscaled; in the residual stack the median norm stays between 0.1 and 10 if scaled, and exceeds "
        "10 if unscaled."
    )
    caption: ClassVar[str] = (
        "Left: through the softmax alone, a gradient vanishes both if scores are not scaled (saturated rows pass "
        "nothing on) and if they are divided by d (uniform weights do not depend on the query). Right: with residual "
        "connections it survives, and unscaled scores make it explode: a saturated softmax is flat almost everywhere "
        "and very steep where two keys tie."
    )
    fewest: ClassVar[dict[str, int]] = {"depths": 2}
    among: ClassVar[dict[str, Collection[str]]] = {"scaling": _POWERS}

    depths: tuple[int, ...] = (1, 2, 4, 8, 12, 18, 24)
    dim: int = 128
    keys: int = 32
    chains: int = 64
    stacks: int = 6
    scaling: str = "√d"  # the scaling that the claim is tested with

    def measure(self, progress: Progress) -> list[Row]:
        """Build each stack once and backpropagate a gradient of norm 1 from each depth."""
        rows: list[Row] = [{"layers": depth} for depth in self.depths]
        for stack, scaling in counted([*product(_STACKS, _POWERS)], progress):
            torch.manual_seed(0)  # the same keys and weights for each scaling
            for row, norm in zip(rows, self._norms(stack, self.dim ** -_POWERS[scaling]), strict=True):
                row[f"{stack}, {scaling}"] = norm
        return rows

    def _norms(self, stack: str, scale: float) -> list[float]:
        shape = (self.chains, 1, self.dim) if stack == "chain" else (self.stacks, self.keys, self.dim)
        start = torch.randn(
            shape, dtype=torch.float64
        ).requires_grad_()  # in float32 the smallest norms would underflow
        x, norms = start, []
        for depth in range(1, max(self.depths) + 1):
            x = self._chain_layer(x, scale) if stack == "chain" else self._residual_layer(x, scale)
            cotangent = torch.randn_like(x)
            if depth in self.depths:
                cotangent = cotangent / cotangent.flatten(1).norm(dim=-1)[:, None, None]
                (gradient,) = torch.autograd.grad((x * cotangent).sum(), start, retain_graph=True)
                norms.append(gradient.flatten(1).norm(dim=-1).median().item())
        return norms

    def _chain_layer(self, x: Tensor, scale: float) -> Tensor:
        key, value = torch.randn(2, self.chains, self.keys, self.dim, dtype=x.dtype)
        return _normalized(attention(x, key, value, scale=scale))

    def _residual_layer(self, x: Tensor, scale: float) -> Tensor:
        weights = torch.randn(3, self.dim, self.dim, dtype=x.dtype) * self.dim**-0.5
        query, key, value = (x @ weight for weight in weights)
        return _normalized(x + attention(query, key, value, scale=scale))

    def holds(self, rows: list[Row]) -> bool:
        """Gradients are kept with the scaling under test, and vanish or explode without any."""
        kept, lost = _kept_per_layer(rows, f"chain, {self.scaling}") > 0.6, _kept_per_layer(rows, "chain, none") < 0.4
        steady = all(0.1 < row[f"residual, {self.scaling}"] < 10.0 for row in rows)
        return kept and lost and steady and rows[-1]["residual, none"] > 10.0

    def draw(self, rows: list[Row]) -> Figure:
        """Norm against depth, one panel per stack."""
        figure, axes = canvas(9.0, 3.8, columns=2)
        layers = [row["layers"] for row in rows]
        titles = ("only through the softmax", "self-attention with residuals")
        for one, stack, title in zip(axes, _STACKS, titles, strict=True):
            for scaling in _POWERS:
                label = "unscaled" if scaling == "none" else f"divided by {scaling}"
                one.semilogy(layers, [row[f"{stack}, {scaling}"] for row in rows], marker="o", label=label)
            one.axhline(1.0, color="0.5", linewidth=0.8)
            one.set(xlabel="layers", title=title)
        axes[0].set_ylabel("gradient at the bottom (median norm)")
        axes[0].legend(frameon=False)
        return figure


def _normalized(x: Tensor) -> Tensor:
    """Scale entries to mean square 1, so that every layer gets queries of the same size."""
    unit: Tensor = normalize(x, dim=-1)
    return unit * math.sqrt(x.shape[-1])


def _kept_per_layer(rows: list[Row], column: str) -> float:
    """The share of the norm that a layer keeps: the geometric mean."""
    first, last = rows[0], rows[-1]
    if not first[column]:
        return 0.0
    return float((last[column] / first[column]) ** (1 / (last["layers"] - first["layers"])))

"""The bandwidth that tells each point best from the others: leave-one-out with its exact gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scores import Score
from .leave_one_out import Points
from .similarity import likeness

__all__ = ["Chosen", "choose_bandwidth", "sample", "span"]

Array = NDArray[np.float64]
Loss = Callable[[Points, str | Score, Tensor], Tensor]

_STRIDE = 0.7  # between the bandwidths tried before the gradient is followed, as a logarithm
_STARTS = 2  # valleys of the grid from which it is
_LOOKED_AT = 400  # points that tell where the grid lies
_BEYOND = 3.0  # how far outside the grid the search may go, as a logarithm
_STEPS = 60


class Chosen(NamedTuple):
    """A bandwidth, one or one a feature, and the loss it leaves."""

    bandwidth: Array
    loss: float


def sample(count: int, limit: int) -> NDArray[np.intp]:
    """Which points take part: all, or `limit` of them, the same ones every time.

    >>> sample(3, 10), len(sample(1000, 10))
    (array([0, 1, 2]), 10)
    """
    if count <= limit:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:limit])


def choose_bandwidth(points: Points, kernel: str | Score, loss: Loss, per_feature: bool) -> Chosen:
    """Minimise a leave-one-out loss over the logarithm of one bandwidth, or of one a feature.

    The best valleys of a grid are followed down by L-BFGS, which asks for the loss and its gradient; bounds keep it
    where the loss still moves.
    """
    unit = points.x.std(0, correction=0).clamp(min=0.0) if per_feature else points.x.new_ones(1)
    unit = torch.where(unit > 0, unit, 1.0)
    bounds = span(points._replace(x=points.x / unit), kernel)
    if bounds is None:  # every bandwidth tells the same
        spread = points.x.std(0, correction=0).square().mean().sqrt() if not per_feature else points.x.new_ones(())
        spread = torch.where(spread > 0, spread, 1.0)
        return Chosen((unit * spread).cpu().numpy(), float(loss(points, kernel, (unit * spread).log())))
    centre = unit.log()

    def downhill(at: Array) -> tuple[float, Array]:
        step = torch.tensor(at, device=centre.device).requires_grad_()
        value = loss(points, kernel, centre + step)
        (gradient,) = torch.autograd.grad(value, step)
        return float(value.detach()), gradient.cpu().numpy()

    low, high = np.log(bounds)
    grid = np.linspace(low, high, 1 + int(np.ceil((high - low) / _STRIDE)))
    with torch.no_grad():
        heights = np.array([float(loss(points, kernel, centre + at)) for at in grid])
    limits = [(grid[0] - _BEYOND, grid[-1] + _BEYOND)] * len(centre)
    found = min((_descent(downhill, np.full(len(centre), grid[v]), limits) for v in _valleys(heights)), key=_loss)
    return Chosen(np.exp(centre.cpu().numpy() + found.bandwidth), found.loss)


def span(points: Points, kernel: str | Score) -> tuple[float, float] | None:
    """Between which bandwidths predictions change: from where the likest point decides alone to where all count alike.

    None if no bandwidth makes a difference.
    """
    x = points.x[torch.linspace(0, len(points.x) - 1, min(len(points.x), _LOOKED_AT), device=points.x.device).long()]
    like = likeness(kernel, x, x, x.new_ones(()))
    S = like.options["score"](x, x) if "score" in like.options else like.query @ like.key.mT
    S = S[~torch.eye(len(x), dtype=torch.bool, device=x.device)].reshape(len(x), max(len(x) - 1, 0))
    if S.shape[1] < 2:
        return None
    ranked = S.sort(-1, descending=True).values
    reach = float((ranked[:, 0] - ranked[:, -1]).median())
    steps = ranked[:, 0] - ranked[:, 1]
    steps = steps[steps > 1e-12 * float(S.abs().max())]
    if not steps.numel() or not reach > 0:
        return None
    return (float(steps.median()) / 8) ** 0.5, (4 * reach) ** 0.5


def _valleys(heights: Array) -> list[int]:
    """The lowest places of a grid that have no lower neighbour."""
    padded = np.concatenate(([np.inf], heights, [np.inf]))
    low = [i for i in range(len(heights)) if padded[i + 1] <= padded[i] and padded[i + 1] <= padded[i + 2]]
    return sorted(low, key=lambda i: float(heights[i]))[:_STARTS]


def _descent(
    downhill: Callable[[Array], tuple[float, Array]], start: Array, limits: list[tuple[float, float]]
) -> Chosen:
    from scipy.optimize import minimize

    found = minimize(downhill, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": _STEPS})
    return Chosen(found.x, float(found.fun))


def _loss(found: Chosen) -> float:
    return found.loss

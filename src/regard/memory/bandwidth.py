"""Bandwidth selection: minimise a leave-one-out loss with its exact gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scores import Score
from .leave_one_out import Points
from .similarity import kernel_inputs

__all__ = ["SelectedBandwidth", "bandwidth_range", "sample_indices", "select_bandwidth"]

Array = NDArray[np.float64]
Loss = Callable[[Points, str | Score, Tensor], Tensor]

_GRID_STEP = 0.7  # between the logarithms of the bandwidths on the initial grid
_STARTS = 2  # local minima of the grid at which a descent starts
_RANGE_POINTS = 400  # points from which the range of the grid is estimated
_MARGIN = 3.0  # how far the logarithm may leave the grid during the descent
_MAX_ITERATIONS = 60


class SelectedBandwidth(NamedTuple):
    """A bandwidth, one number or one per feature, and its loss."""

    bandwidth: Array
    loss: float


def sample_indices(count: int, limit: int) -> NDArray[np.intp]:
    """Select all points, or `limit` of them at random, the same ones every time.

    >>> sample_indices(3, 10), len(sample_indices(1000, 10))
    (array([0, 1, 2]), 10)
    """
    if count <= limit:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:limit])


def select_bandwidth(points: Points, kernel: str | Score, loss: Loss, per_feature: bool) -> SelectedBandwidth:
    """Minimise a leave-one-out loss over the logarithm of one bandwidth, or of one per feature.

    L-BFGS starts from the best local minima of a grid and uses the loss and its gradient; bounds keep it where the loss
    still changes.
    """
    unit = points.x.std(0, correction=0).clamp(min=0.0) if per_feature else points.x.new_ones(1)
    unit = torch.where(unit > 0, unit, 1.0)
    bounds = bandwidth_range(points._replace(x=points.x / unit), kernel)
    if bounds is None:  # every bandwidth gives the same predictions
        std = points.x.std(0, correction=0).square().mean().sqrt() if not per_feature else points.x.new_ones(())
        std = torch.where(std > 0, std, 1.0)
        return SelectedBandwidth((unit * std).cpu().numpy(), float(loss(points, kernel, (unit * std).log())))
    centre = unit.log()

    def loss_and_gradient(at: Array) -> tuple[float, Array]:
        step = torch.tensor(at, device=centre.device).requires_grad_()
        value = loss(points, kernel, centre + step)
        (gradient,) = torch.autograd.grad(value, step)
        return float(value.detach()), gradient.cpu().numpy()

    low, high = np.log(bounds)
    grid = np.linspace(low, high, 1 + int(np.ceil((high - low) / _GRID_STEP)))
    with torch.no_grad():
        losses = np.array([float(loss(points, kernel, centre + at)) for at in grid])
    bounds_per_feature = [(grid[0] - _MARGIN, grid[-1] + _MARGIN)] * len(centre)
    starts = (np.full(len(centre), grid[i]) for i in _local_minima(losses))
    best = min((_descend(loss_and_gradient, start, bounds_per_feature) for start in starts), key=lambda end: end.fun)
    return SelectedBandwidth(np.exp(centre.cpu().numpy() + best.x), float(best.fun))


def bandwidth_range(points: Points, kernel: str | Score) -> tuple[float, float] | None:
    """Estimate the bandwidths between which predictions change.

    At the lower end the nearest point decides alone; at the upper end all points count equally. None if no bandwidth
    makes a difference.
    """
    x = points.x[torch.linspace(0, len(points.x) - 1, min(len(points.x), _RANGE_POINTS), device=points.x.device).long()]
    inputs = kernel_inputs(kernel, x, x, x.new_ones(()))
    S = inputs.options["score"](x, x) if "score" in inputs.options else inputs.query @ inputs.key.mT
    S = S[~torch.eye(len(x), dtype=torch.bool, device=x.device)].reshape(len(x), max(len(x) - 1, 0))
    if S.shape[1] < 2:
        return None
    ranked = S.sort(-1, descending=True).values
    widest = float((ranked[:, 0] - ranked[:, -1]).median())
    gaps = ranked[:, 0] - ranked[:, 1]
    gaps = gaps[gaps > 1e-12 * float(S.abs().max())]
    if not gaps.numel() or not widest > 0:
        return None
    return (float(gaps.median()) / 8) ** 0.5, (4 * widest) ** 0.5


def _local_minima(losses: Array) -> list[int]:
    """The indices of the best local minima of a grid."""
    padded = np.concatenate(([np.inf], losses, [np.inf]))
    found = [i for i in range(len(losses)) if padded[i + 1] <= padded[i] and padded[i + 1] <= padded[i + 2]]
    return sorted(found, key=lambda i: float(losses[i]))[:_STARTS]


def _descend(
    loss_and_gradient: Callable[[Array], tuple[float, Array]], start: Array, bounds: list[tuple[float, float]]
) -> Any:
    """Where a descent ended, `x`, and the loss there, `fun`."""
    from scipy.optimize import minimize

    options = {"maxiter": _MAX_ITERATIONS}
    return minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)

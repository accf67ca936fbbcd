"""The statistics of each head: computed from an observation, averaged over the batch and the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from regard.observation import Observation

__all__ = ["STATISTICS", "Head", "HeadStatistics", "measure_heads"]

SATURATED = 0.99  # hardly any gradient passes through a row whose largest weight is above this
_ROWS_ON_CPU = 256  # rows per step when reading weights near the diagonal
_ROWS_ON_GPU = 512  # more, since a launch costs more than the work


@dataclass(frozen=True)
class Head:
    """One head: means over the batch and the rows that see something, averaged over repeated calls.

    Entropies are in nats, logits are scaled as they enter the softmax, shares are between 0 and 1, distances are in
    tokens. An undefined number is nan, such as the relative entropy of rows that see one key.
    """

    layer: str
    head: int
    entropy: float  # of the weights of a row
    relative_entropy: float  # divided by the log of the number of visible keys: 1 is uniform
    effective_keys: float  # exp(entropy)
    max_logit: float  # the largest over all rows and calls
    first_share: float  # the weight on the first key that any row may see
    self_share: float  # on the row's own position, with the ends of queries and keys aligned; over rows that have one
    previous_share: float  # on the previous position; over rows that have one
    saturated_share: float  # the share of rows with more than 0.99 on one key, among those that see several
    distance: float  # mean distance from the row's own position to what it attends to
    concentration: float  # Σ p²: 1 if one key has all the weight, 1 / visible keys if all have the same

    def numbers(self) -> dict[str, float]:
        """Every statistic by its name."""
        return {name: getattr(self, name) for name in STATISTICS}


STATISTICS = tuple(field.name for field in fields(Head) if field.name not in ("layer", "head"))


@dataclass(frozen=True)
class HeadStatistics:
    """The statistics of all heads in one call, and the pooled map."""

    numbers: dict[str, Tensor]  # each (heads,), float64
    map: Tensor  # (heads, height, width)


@torch.no_grad()
def measure_heads(seen: Observation, side: int) -> HeadStatistics:
    """Compute every statistic of every head of a call, and a map of at most side × side cells, in linear memory."""
    rows, keys = seen.shape[-2:]
    grid = seen.survey(min(side, rows), min(side, keys))
    visible = seen.visible
    some, several = visible > 0, visible > 1
    first, own, previous = _shares(seen, keys)
    position = torch.arange(keys - rows, keys, device=visible.device)  # of each row among the keys
    broken = seen.entropy.isnan()  # rows whose logits are not finite have no weights
    first, own, previous = (x.masked_fill(broken, torch.nan) for x in (first, own, previous))
    largest = (seen.max_logit - seen.lse).exp()
    total = seen.received.sum(-1, keepdim=True) / some.sum(-1, keepdim=True)  # 1, or less with a sink
    numbers = {
        "entropy": _mean(seen.entropy, some),
        "relative_entropy": _mean(seen.entropy / visible.log(), several),
        "effective_keys": _mean(seen.perplexity, some),
        "max_logit": _by_head(seen.max_logit).amax((0, 2)).double(),
        "first_share": _mean(first, some),
        "self_share": _mean(own, some & (position >= 0)),
        "previous_share": _mean(previous, some & (position >= 1)),
        "saturated_share": _mean((largest > SATURATED).double().masked_fill(broken, torch.nan), several),
        "distance": _mean(seen.distance, some),
        "concentration": _mean(total - seen.gradient_health, some),
    }
    return HeadStatistics({name: x.cpu() for name, x in numbers.items()}, _by_head(grid, 2).mean(0).float().cpu())


def _by_head(x: Tensor, inner: int = 1) -> Tensor:
    """Reshape (…, H, inner dimensions) to (items, H, inner dimensions)."""
    return x.reshape(-1, *x.shape[-inner - 1 :])


def _mean(x: Tensor, chosen: Tensor) -> Tensor:
    """The mean over the chosen rows of each head; nan if there are none."""
    x, chosen = _by_head(x), _by_head(chosen)
    total = torch.where(chosen, x.double(), 0.0).sum((0, 2))
    return total / chosen.sum((0, 2))


def _shares(seen: Observation, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of each row on the first key, on its own position, and on the previous one: (…, H, N) each."""
    rows = seen.shape[-2]
    first = _first(seen)
    own, previous = torch.zeros_like(first), torch.zeros_like(first)
    ahead = keys - rows
    step = _ROWS_ON_CPU if first.is_cpu else _ROWS_ON_GPU
    for top in range(max(0, -ahead), rows, step):
        bottom = min(top + step, rows)
        left = max(top + ahead - 1, 0)
        W = seen.weights(slice(top, bottom), slice(left, bottom + ahead)).to(first.dtype)  # (…, H, r, c)
        shift = top + ahead - left
        own[..., top:bottom] = W.diagonal(shift, -2, -1)
        before = W.diagonal(shift - 1, -2, -1)
        previous[..., bottom - before.shape[-1] : bottom] = before
    return first, own, previous


def _first(seen: Observation) -> Tensor:
    """The weight on the first key that any row of the batch item may see; with padding in front this is not key 0."""
    first = seen.weights(cols=slice(0, 1))[..., 0].to(seen.entropy.dtype)
    if math.prod(first.shape) and not bool((seen.received[..., 0] > 0).all()):
        starts = _by_head(seen.received > 0).any(1).int().argmax(-1)  # (items,)
        for start in starts.unique().tolist():
            here = seen.weights(cols=slice(start, start + 1))[..., 0].to(first.dtype)
            chosen = (starts == start).view(*first.shape[:-2], 1, 1)
            first = torch.where(chosen, here, first)
    return first

"""The statistics of each head: computed from an observation, averaged over the batch and the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from regard.chunked.statistics import Survey
from regard.observation import Observation

__all__ = ["STATISTICS", "Head", "SurveyedCall", "measure_heads"]

SATURATED = 0.99  # hardly any gradient passes through a row whose largest weight is above this
_MOST_ROWS = 1 << 22  # rows of heads that are averaged at a time


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


@dataclass(frozen=True, eq=False)
class SurveyedCall:
    """A call and what the pass over its weights found, all on its device; (items, heads, …) each."""

    seen: Observation
    survey: Survey

    @classmethod
    @torch.no_grad()
    def of(cls, seen: Observation, side: int) -> SurveyedCall:
        """Survey a call, with a map of at most side × side cells; nothing is read back to the host."""
        rows, keys = seen.shape[-2:]
        call = cls(seen, seen.survey(min(side, rows), min(side, keys)))
        if not seen.visible_by_lengths:  # its tensors may be changed in place before anyone looks
            seen.visible  # noqa: B018
        return call

    @property
    def layout(self) -> tuple[object, ...]:
        """Calls with the same layout can be averaged together."""
        return self.seen.shape, self.seen.entropy.dtype, self.seen.entropy.device


@torch.no_grad()
def measure_heads(calls: Sequence[SurveyedCall]) -> list[Tensor]:
    """Average every statistic of every head over batch and rows: for each call (statistics, heads), float64.

    Calls of the same layout are averaged together: the work for the host does not grow with the number of layers.
    """
    found: dict[int, Tensor] = {}
    for group in _groups(calls):
        means = _means([calls[i] for i in group])  # (statistics, calls, heads)
        found.update(zip(group, means.unbind(1), strict=True))
    return [found[i] for i in range(len(calls))]


def _groups(calls: Sequence[SurveyedCall]) -> Iterator[list[int]]:
    """The calls of each layout, in groups that fit in memory."""
    layouts: dict[tuple[object, ...], list[int]] = {}
    for i, call in enumerate(calls):
        layouts.setdefault(call.layout, []).append(i)
    for same in layouts.values():
        size = max(1, _MOST_ROWS // max(1, calls[same[0]].seen.entropy.numel()))
        yield from (same[at : at + size] for at in range(0, len(same), size))


def _means(calls: list[SurveyedCall]) -> Tensor:
    entropy, lse, max_logit, visible = (
        torch.stack([getattr(call.seen, name) for call in calls])  # (calls, items, heads, N)
        for name in ("entropy", "lse", "max_logit", "visible")
    )
    received, health, distance, first, own, previous = (
        torch.stack([getattr(call.survey, name) for call in calls])
        for name in ("received", "health", "distance", "first", "own", "previous")
    )
    some, several = visible > 0, visible > 1
    rows, keys = calls[0].seen.shape[-2:]
    position = torch.arange(keys - rows, keys, device=visible.device)  # of each row among the keys
    broken = entropy.isnan()  # rows whose logits are not finite have no weights
    first, own, previous = (x.masked_fill(broken, torch.nan) for x in (first, own, previous))
    largest = (max_logit - lse).exp()
    total = received.sum(-1, keepdim=True) / some.sum(-1, keepdim=True)  # 1, or less with a sink
    numbers = {
        "entropy": _mean(entropy, some),
        "relative_entropy": _mean(entropy / visible.log(), several),
        "effective_keys": _mean(entropy.exp(), some),
        "max_logit": max_logit.amax((1, 3)).double(),
        "first_share": _mean(first, some),
        "self_share": _mean(own, some & (position >= 0)),
        "previous_share": _mean(previous, some & (position >= 1)),
        "saturated_share": _mean((largest > SATURATED).double().masked_fill(broken, torch.nan), several),
        "distance": _mean(distance, some),
        "concentration": _mean(total - health, some),
    }
    return torch.stack([numbers[name] for name in STATISTICS])


def _mean(x: Tensor, chosen: Tensor) -> Tensor:
    """The mean over the chosen rows of each head, (calls, heads); nan if there are none."""
    return torch.where(chosen, x.double(), 0.0).sum((1, 3)) / chosen.sum((1, 3))

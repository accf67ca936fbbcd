"""The statistics of each head: computed from an observation, averaged over the batch and the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from regard.chunked.stacked_survey import StackedSurvey
from regard.chunked.statistics import SATURATED, RowTotals, Survey
from regard.observation import Observation

from .transfer import on_host

__all__ = ["STATISTICS", "Head", "HeadSums", "SurveyedCall", "average_heads", "sum_heads", "survey_call"]

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


class HeadSums(NamedTuple):
    """Sums over the rows and keys of each head: (…, items, heads) each, float64."""

    rows: RowTotals
    received: Tensor  # Σ over keys: the number of rows that see something, or less with a sink
    most: Tensor  # the most that a key receives
    key: Tensor  # that key

    def of_call(self, index: int) -> HeadSums:
        """The sums of one of several calls."""
        return HeadSums(RowTotals(*(x[index] for x in self.rows)), *(x[index] for x in self[1:]))


STATISTICS = tuple(field.name for field in fields(Head) if field.name not in ("layer", "head"))


@dataclass(frozen=True, eq=False)
class SurveyedCall:
    """A call and what the pass over its weights found, all on its device; (items, heads, …) each."""

    seen: Observation
    survey: Survey

    @classmethod
    def of(cls, seen: Observation, side: int) -> SurveyedCall:
        """Survey a call, with a map of at most side × side cells; nothing is read back to the host."""
        found = survey_call(seen, side)
        return cls(seen, found if isinstance(found, Survey) else found.survey)

    @property
    def layout(self) -> tuple[object, ...]:
        """Calls with the same layout can be averaged together."""
        return self.seen.shape, self.seen.entropy.dtype, self.seen.entropy.device, self.survey.totals is None


def survey_call(seen: Observation, side: int) -> Survey | StackedSurvey:
    """Survey a call, with a map of at most side × side cells; nothing is read back to the host."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return survey_call(seen, side)
    *_, rows, keys = seen.shape
    found = seen.stacked_survey(min(side, rows), min(side, keys))
    if not seen.visible_by_lengths:  # its tensors may be changed in place before anyone looks
        seen.visible  # noqa: B018
    return found


@torch.no_grad()
def sum_heads(calls: Sequence[SurveyedCall], read_back: bool = False) -> list[HeadSums]:
    """The sums over each head's rows and keys, for each call (items, heads).

    Calls of the same layout are summed together: the work for the host hardly grows with the number of layers. With
    `read_back`, what kernels summed up is read back and added up on the host: a GPU loads the code of each operation at
    its first use, which takes longer than the sums.
    """
    found: dict[int, HeadSums] = {}
    for group in _groups(calls):
        sums = _sums([calls[i] for i in group], read_back)
        found.update((i, sums.of_call(at)) for at, i in enumerate(group))
    return [found[i] for i in range(len(calls))]


def _groups(calls: Sequence[SurveyedCall]) -> Iterator[list[int]]:
    """The calls of each layout, in groups that fit in memory."""
    layouts: dict[tuple[object, ...], list[int]] = {}
    for i, call in enumerate(calls):
        layouts.setdefault(call.layout, []).append(i)
    for same in layouts.values():
        summed = calls[same[0]].survey.totals is not None
        size = len(same) if summed else max(1, _MOST_ROWS // max(1, calls[same[0]].seen.entropy.numel()))
        yield from (same[at : at + size] for at in range(0, len(same), size))


def _sums(calls: list[SurveyedCall], read_back: bool) -> HeadSums:
    """The sums of calls with the same layout, (calls, items, heads) each."""
    totals = [call.survey.totals for call in calls if call.survey.totals is not None]
    peaks = [call.survey.peaks for call in calls if call.survey.peaks is not None]
    if not totals:
        return _sums_of_rows(calls)
    if read_back:
        both = on_host([*totals, *peaks])
        totals, peaks = both[: len(totals)], both[len(totals) :]
    parts = torch.stack(totals)  # (calls, items, heads, parts, totals)
    received, most, key = torch.stack(peaks).unbind(-1)  # (calls, items, heads, parts)
    largest, part = most.max(-1)
    rows = RowTotals(*parts.double().sum(-2).unbind(-1))._replace(max_logit=parts[..., -1].amax(-1).double())
    return HeadSums(rows, received.sum(-1), largest, key.gather(-1, part[..., None])[..., 0])


def _sums_of_rows(calls: list[SurveyedCall]) -> HeadSums:
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
    with_own, with_previous = some & (position >= 0), some & (position >= 1)
    broken = entropy.isnan()  # rows whose logits are not finite have no weights
    saturated = ((max_logit - lse).exp() > SATURATED).double()
    first, own, previous, saturated = (x.masked_fill(broken, torch.nan) for x in (first, own, previous, saturated))
    summed = RowTotals(
        some=some.sum(-1).double(),
        several=several.sum(-1).double(),
        with_own=with_own.sum(-1).double(),
        with_previous=with_previous.sum(-1).double(),
        entropy=_sum(entropy, some),
        relative_entropy=_sum(entropy / visible.log(), several),
        perplexity=_sum(entropy.exp(), some),
        first=_sum(first, some),
        own=_sum(own, with_own),
        previous=_sum(previous, with_previous),
        saturated=_sum(saturated, several),
        distance=_sum(distance, some),
        health=_sum(health, some),
        uniform=_sum(1.0 / visible, some),
        max_logit=max_logit.amax(-1).double(),
    )
    most, key = received.max(-1)
    return HeadSums(summed, received.double().sum(-1), most.double(), key.double())


def _sum(x: Tensor, chosen: Tensor) -> Tensor:
    """The sum over the chosen rows of each head."""
    return torch.where(chosen, x.double(), 0.0).sum(-1)


@torch.no_grad()
def average_heads(sums: HeadSums) -> Tensor:
    """Every statistic of every head of a call, averaged over batch and rows: (statistics, heads); nan without rows."""
    x = RowTotals(*(total.sum(0) for total in sums.rows))._replace(max_logit=sums.rows.max_logit.amax(0))
    numbers = {
        "entropy": x.entropy / x.some,
        "relative_entropy": x.relative_entropy / x.several,
        "effective_keys": x.perplexity / x.some,
        "max_logit": x.max_logit,
        "first_share": x.first / x.some,
        "self_share": x.own / x.with_own,
        "previous_share": x.previous / x.with_previous,
        "saturated_share": x.saturated / x.several,
        "distance": x.distance / x.some,
        "concentration": (sums.received.sum(0) - x.health) / x.some,
    }
    return torch.stack([numbers[name] for name in STATISTICS])

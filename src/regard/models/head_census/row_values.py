"""Every statistic of every row of a call, and how well each row serves as an example of a behaviour; on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...chunked.statistics import SATURATED, Survey, first_keys
from ...chunked.token_repeats import TokenRepeats
from ...observation import Observation
from .scales import NAMES
from .sequences import CallRows, Sequences

__all__ = ["BEHAVIOURS", "SAMPLE", "RowValues", "row_values", "surveyed"]

SAMPLE = "sample"
BEHAVIOURS = {
    "strongest": "the largest weight away from the first token and the diagonal",
    "certain": "the fewest keys of those it sees: log of their number less the entropy, in nats",
    "induction": "the most weight on tokens that follow an earlier copy of its own",
    "duplicate": "the most weight on earlier copies of its own token",
    "distant": "the largest mean distance to what it attends to",
    "spread": "the largest entropy",
    SAMPLE: "drawn by a hash of document and position, the same for every head: what is typical",
}
"""Every kind of exemplar, and the score that ranks it."""

_NONE = -torch.inf  # a statistic that does not apply to a row, such as the previous position of the first


@dataclass(frozen=True)
class RowValues:
    """The rows that count, R of them: NaN where logits are not finite, −inf where a statistic does not apply."""

    values: Tensor  # float32 (statistics, H, R)
    scores: Tensor  # float32 (behaviours but the sample, H, R); −1 for rows that show no such behaviour
    received: Tensor  # float32 (H, R): what the token of each row receives as a key; empty unless keys are rows
    active: Tensor  # float32 (H, R): the strongest weight where it is away from first token and diagonal, otherwise 0


@torch.no_grad()
def surveyed(seen: Observation, sequences: Sequences) -> tuple[Survey, TokenRepeats | None]:
    """What the passes over the weights of a call (items, H, N, M) find, as if only rows that count had any weight."""
    items, _, n, m = seen.shape
    call = sequences.call_rows(items, n)
    among = seen if call.counted is None else seen.among(call.counted)
    tokens = sequences.token_labels if call.fits and n == m else None
    return (among.survey(1, 1), None) if tokens is None else among.survey_with_repeats(tokens)


@torch.no_grad()
def row_values(seen: Observation, survey: Survey, repeats: TokenRepeats | None, call: CallRows) -> RowValues:
    """The values of a call; padding, and rows that are counted elsewhere, have none."""
    return _Rows(seen, survey, call.chosen).read(repeats, call.copies)


def _visible(seen: Observation) -> Tensor:
    """How many keys each row may attend to (items, H, N); a mask that sees intervals says it without a pass."""
    p = seen.problem_for("census")
    if p.bias is not None or (p.mask is not None and p.mask.lead[0] not in (1, p.query.shape[0])):
        return seen.visible
    rows = torch.arange(p.rows, device=p.device)
    count = torch.full_like(rows, p.keys) if p.mask is None else p.mask.visible(rows, p.rows, p.keys)
    return count.expand(p.query.shape[0], p.query.shape[1], p.rows)


class _Rows:
    """Members of an observation and a survey as (H, R)."""

    def __init__(self, seen: Observation, survey: Survey, chosen: Tensor | None) -> None:
        self._seen, self._survey, self._chosen = seen, survey, chosen
        self.items, self.heads, self.n, self.m = seen.shape

    def of(self, x: Tensor) -> Tensor:
        """(items, H, N) as (H, R)."""
        flat = x.transpose(0, 1).reshape(x.shape[1], -1)
        return flat if self._chosen is None else flat.index_select(1, self._chosen)

    def per_item(self, x: Tensor) -> Tensor:
        """(items, N) as (R,)."""
        return x.reshape(-1) if self._chosen is None else x.reshape(-1).index_select(0, self._chosen)

    def read(self, repeats: TokenRepeats | None, copies: tuple[Tensor, Tensor] | None) -> RowValues:
        seen, survey = self._seen, self._survey
        entropy, lse, max_logit = (self.of(x).float() for x in (seen.entropy, seen.lse, seen.max_logit))
        visible = self.of(_visible(seen) if survey.visible is None else survey.visible)
        places = torch.arange(self.m - self.n, self.m, device=visible.device).expand(self.items, -1)
        place = self.per_item(places)  # (R,) of each row among the keys
        some, several, broken = visible > 0, visible > 1, entropy.isnan() | max_logit.eq(torch.inf)
        keys = visible.clamp(min=2).float().log()
        sink = seen.problem_for("census").sink
        total = 1.0 if sink is None else 1.0 - (sink.detach().float()[:, None] - lse).exp()
        largest = self.of(survey.largest).float()
        found = {
            "entropy": (entropy, some),
            "relative_entropy": (entropy / keys, several),
            "effective_keys": (entropy.exp(), some),
            "max_logit": (max_logit, some),
            "first_share": (self.of(survey.first), some),
            "self_share": (self.of(survey.own), some & (place >= 0)),
            "previous_share": (self.of(survey.previous), some & (place >= 1)),
            "saturated_share": (((max_logit - lse).exp() > SATURATED).float(), several),
            "distance": (self.of(survey.distance), some),
            "concentration": (total - self.of(survey.health), some),
        }
        if repeats is not None and copies is not None:
            for name, value, back in zip(("duplicate", "induction"), repeats, copies, strict=True):
                distance = self.per_item(back)  # (R,) to the nearest; 0 if there is none
                found[name] = (self.of(value), some & (distance > 0) & (distance < visible))
        values = torch.full((len(NAMES), *entropy.shape), _NONE, device=entropy.device)
        for at, name in enumerate(NAMES):
            if name in found:
                value, applies = found[name]
                values[at] = torch.where(applies, value.float().masked_fill(broken, torch.nan), _NONE)
        active = torch.where(self._is_away(place), largest, 0.0).nan_to_num(0.0)
        informed = torch.where(several, keys - entropy, -1.0)
        return RowValues(values, self._scores(values, informed, active), self._received(repeats is not None), active)

    def _is_away(self, place: Tensor) -> Tensor:
        """Whether the strongest key of a row is neither the first nor next to the row's own position."""
        key = self.of(self._survey.key)
        first = first_keys(self._survey.received)[:, None].expand(-1, self.n)
        return (key >= 0) & ((key - place).abs() > 1) & (key != self.per_item(first))

    def _received(self, square: bool) -> Tensor:
        if not square:
            return torch.zeros(self.heads, 0, device=self._seen.lse.device)
        return self.of(self._survey.received).float()

    def _scores(self, values: Tensor, informed: Tensor, active: Tensor) -> Tensor:
        """The scores in the order of `BEHAVIOURS`."""
        by_name = {name: values[at] for at, name in enumerate(NAMES)}
        found = (
            torch.where(active > 0, active, -1.0),
            informed,
            *(by_name[name] for name in ("induction", "duplicate", "distance", "entropy")),
        )
        scores = torch.stack(found)
        return torch.where(scores >= 0, scores, -1.0)  # NaN and −inf too

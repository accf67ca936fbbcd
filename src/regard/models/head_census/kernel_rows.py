"""Count the rows of a call by kernels: the numbers of `row_values` and `tally`, with nothing read back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...chunked.statistics import Survey, first_keys
from ...chunked.token_repeats import TokenRepeats
from ...observation import Observation
from .scales import BINS, SCALES
from .sequences import CallRows
from .tally import WEIGHT_UNIT, BatchColumns, LayerTally

if TYPE_CHECKING:
    from ...kernels.row_tally import RowSurvey

__all__ = ["best_by_kernel", "count_by_kernels", "made_by_kernels", "products_by_kernel"]


def made_by_kernels(survey: Survey) -> bool:
    """Whether kernels made a survey: then they run on its device, and its statistics are float32."""
    return survey.totals is not None


@torch.no_grad()
def count_by_kernels(
    seen: Observation,
    survey: Survey,
    repeats: TokenRepeats | None,
    call: CallRows,
    tally: LayerTally,
    tokens: BatchColumns | None,
    width: int,
) -> Tensor:
    """Add a call to a tally, and return the scores of all rows (behaviours, H, items · N), −1 for those not counted."""
    from ...kernels import row_tally as kernels

    copies = (None, None) if repeats is None or call.copies is None else call.copies
    tables = None
    if tokens is not None:
        received = None if repeats is None else tally.token_table("received", width)
        tables = kernels.TokenTables(received, tally.token_table("active", width))
    labels = kernels.RowLabels(
        survey.seen_from if survey.seen_from is not None else seen.shape[-1] - first_keys(survey.received),
        None if call.counted is None else call.counted.view(torch.uint8),
        None if tokens is None else tokens.of_each,
        *copies,
    )
    stats = kernels.RowStats(*(_plain(x) for x in (seen.entropy, seen.lse, seen.max_logit)))
    sink = seen.problem_for("census").sink
    sink = None if sink is None else sink.detach().float().expand(seen.shape[1]).contiguous()
    again = None if repeats is None else kernels.RowRepeats(*map(_plain, repeats))
    values, scores = kernels.row_values(stats, _members(survey), again, labels, tables, sink, WEIGHT_UNIT)
    table = kernels.Tally(**{name: tally.parts[name] for name in kernels.Tally._fields})
    kernels.tally_values(values, _scales(values.device), kernels.RowBuckets(*call.bucket_of_each), table)
    return scores


def best_by_kernel(scores: Tensor, count: int, floor: Tensor | None) -> Tensor:
    """The same as `candidates.best_rows` for the scores of all rows, without those below `floor` (behaviours, H)."""
    from ...kernels.row_tally import best_rows

    floor = scores.new_zeros(scores.shape[:2]) if floor is None else floor
    return best_rows(scores, floor, min(count, scores.shape[-1]))


def products_by_kernel(calls: Sequence[tuple[Observation, Tensor]]) -> tuple[Tensor, Tensor]:
    """As `candidates.products`, float32."""
    from ...kernels.row_tally import ChosenRows, row_products

    rows = []
    for seen, at in calls:
        p = seen.problem_for("census")
        rows.append(ChosenRows(p.query.detach(), p.key.detach(), seen.lse.detach().float(), at))
    found = row_products(rows)
    return found.products, found.lse


def _members(survey: Survey) -> RowSurvey:
    from ...kernels.row_tally import RowSurvey

    return RowSurvey(*(getattr(survey, name).contiguous() for name in RowSurvey._fields))


def _plain(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


@cache
def _scales(device: torch.device) -> Tensor:
    """The first edge, bins per unit, transform and units per 1 of each statistic, as `tally_values` takes them."""
    from ...kernels.row_tally import TRANSFORMS

    rows = [[s.low, BINS / (s.high - s.low), TRANSFORMS.index(s.transform), 1.0 / s.unit] for s in SCALES]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(device)

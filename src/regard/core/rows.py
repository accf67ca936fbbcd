"""The result of a forward pass, row by row: one named tuple from the kernels up to the caller."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Rows", "StackedRows", "stacked", "unstacked"]

_MISSING: Any = None  # in results without statistics: the call is not observed, or the backend has none


class Rows(NamedTuple):
    """Output and statistics of every row.

    The leading dimensions are those of the layer: (L, K, G, N) in tiles, (L, H, N) in kernels, the caller's dimensions
    in backends. The statistics that callers get include the sink; those of tiles do not.
    """

    output: Tensor  # (…, N, E)
    lse: Tensor = _MISSING  # (…, N)
    entropy: Tensor = _MISSING  # if the call is not observed: zeros in tiles, None in kernels
    max_logit: Tensor = _MISSING
    log_row_sum: Tensor = _MISSING  # lse − max_logit, to all digits even where the logits are large


class StackedRows(NamedTuple):
    """The same with the statistics in one tensor, as `unstacked` reads it; one tensor is made sooner than four."""

    output: Tensor
    statistics: Tensor


def stacked(rows: Rows, parts: int) -> tuple[Tensor, Tensor]:
    """The output, and lse, max_logit, log_row_sum and, of four parts, entropy in one tensor."""
    return rows.output, torch.stack((rows.lse, rows.max_logit, rows.log_row_sum, rows.entropy)[:parts])


def unstacked(output: Tensor, statistics: Tensor) -> Rows:
    """The rows again, as views."""
    lse, max_logit, log_row_sum, *entropy = statistics.unbind()
    return Rows(output, lse, entropy[0] if entropy else _MISSING, max_logit, log_row_sum)

"""The exact merge of partial rows: attention of the same queries to two disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.rows import Rows
from ..softmax import lowest

__all__ = ["empty_rows", "merge_partials"]


def empty_rows(output: Tensor) -> Rows:
    """Rows that attend to no key, for an output of this shape."""
    zero = output.new_zeros(output.shape[:-1])
    empty = torch.full_like(zero, -torch.inf)
    return Rows(torch.zeros_like(output), lse=empty, entropy=zero, max_logit=empty, log_row_sum=zero)


def merge_partials(a: Rows | None, b: Rows, observed: bool) -> Rows:
    """The rows for the keys of both.

    A set of keys has the mass exp(lse); its share of the total weights its output and its mean logit. With X the logits
    minus the row max, entropy = ln Σ exp X − E[X].
    """
    if a is None:
        return b
    max_logit = torch.maximum(a.max_logit, b.max_logit)
    row_max = max_logit.clamp(min=lowest(max_logit.dtype))
    # Clamped, because the shift is multiplied by a share that may be 0.
    shifts = [(x.max_logit - row_max).clamp_(min=lowest(max_logit.dtype)) for x in (a, b)]
    masses = [(x.max_logit - row_max + x.log_row_sum).exp_() for x in (a, b)]
    total = masses[0] + masses[1]
    empty = total == 0
    total = total.masked_fill_(empty, 1.0)
    shares = [mass.div_(total) for mass in masses]
    log_row_sum = total.log()
    output = a.output.mul(shares[0][..., None]).addcmul_(b.output, shares[1][..., None])
    entropy = a.entropy
    if observed:
        means = [x.log_row_sum - x.entropy + shift for x, shift in zip((a, b), shifts, strict=True)]
        entropy = log_row_sum - (shares[0] * means[0] + shares[1] * means[1])
        entropy = entropy.masked_fill_(empty, 0.0)
    return Rows(output, (row_max + log_row_sum).masked_fill_(empty, -torch.inf), entropy, max_logit, log_row_sum)

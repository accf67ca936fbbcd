"""The exact merge of what two disjoint sets of keys say of the same rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.rows import Rows
from ..softmax import lowest

__all__ = ["merged", "nothing"]


def nothing(output: Tensor) -> Rows:
    """What no key at all says of rows whose output has this shape."""
    zero = output.new_zeros(output.shape[:-1])
    empty = torch.full_like(zero, -torch.inf)
    return Rows(torch.zeros_like(output), empty, zero, empty, zero)


def merged(a: Rows | None, b: Rows, observed: bool) -> Rows:
    """Rows that have seen the keys of both.

    A set of keys has the mass exp(lse); its share of the whole weighs its output and its mean logit. With X the logits
    below the largest, entropy = ln Σ exp X − E[X].
    """
    if a is None:
        return b
    row_max = torch.maximum(a.max_logit, b.max_logit)
    level = row_max.clamp(min=lowest(row_max.dtype))
    downs = [(x.max_logit - level).clamp_(min=lowest(row_max.dtype)) for x in (a, b)]  # finite: times a share of 0
    masses = [(x.max_logit - level + x.log_row_sum).exp_() for x in (a, b)]
    total = masses[0] + masses[1]
    empty = total == 0
    total = total.masked_fill_(empty, 1.0)
    shares = [mass.div_(total) for mass in masses]
    log_row_sum = total.log()
    output = a.output.mul(shares[0][..., None]).addcmul_(b.output, shares[1][..., None])
    entropy = a.entropy
    if observed:
        means = [x.log_row_sum - x.entropy + down for x, down in zip((a, b), downs, strict=True)]
        entropy = log_row_sum - (shares[0] * means[0] + shares[1] * means[1])
        entropy = entropy.masked_fill_(empty, 0.0)
    return Rows(output, (level + log_row_sum).masked_fill_(empty, -torch.inf), entropy, row_max, log_row_sum)

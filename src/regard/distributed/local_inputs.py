"""A rank's tensors as they enter the exchange: score and scale folded in, and what nobody may see left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.nonfinite import visible_rows_and_keys
from ..core.problem import Problem
from ..core.spec import Spec
from ..scores.base import Prepared
from ..scores.lending import lent_factor, lent_prepare
from .blocks import block_spec
from .layout import Piece
from .ranks import Ranks
from .ring_plan import Routes

__all__ = ["Lent", "factor", "folded", "grouped", "without_unseen"]


@dataclass(frozen=True, eq=False)
class Lent:
    """What all ranks have alike, with gradients that are added up over them: it stands in for the call's own."""

    scale: float | Tensor
    sink: Tensor | None
    tables: tuple[Tensor, ...]  # of the structured bias
    parameters: dict[str, Tensor]  # of the score


def factor(p: Problem, lent: Lent) -> float | Tensor | None:
    """What q·k is multiplied by, one number or one a head, where that is all that score and scale do; else None."""
    if p.score is None:
        return lent.scale
    return lent_factor(p.score, lent.parameters, p.query.new_empty(0, p.query.shape[-1], dtype=p.exact_dtype))


def folded(p: Problem, lent: Lent) -> Prepared:
    """Fold score and scale into this rank's queries, in exact arithmetic, and keys, in their own if left alone."""
    exact = p.exact_dtype
    query, times = p.query.to(exact), factor(p, lent)
    if times is None and p.score is not None:
        return lent_prepare(p.score, lent.parameters, query, p.key.to(exact))
    if isinstance(times, Tensor):
        times = times.to(exact).reshape(-1, 1, 1)
    return Prepared(query if times is None else query * times, p.key)


def grouped(bias: Tensor | None, heads: int, groups: int) -> Tensor | None:
    """A bias (L|1, H|1, N|1, M|1) as (L|1, K|1, G|1, N|1, M|1)."""
    if bias is None:
        return None
    return bias.unsqueeze(1) if bias.shape[1] == 1 else bias.unflatten(1, (heads, groups))


def without_unseen(
    p: Problem, ranks: Ranks, routes: Routes, spec: Spec, mask_rows: int | None, bias: Tensor | None
) -> Problem:
    """Zero what takes no part anywhere: queries without a key, and keys that no row of any rank may see."""
    batch, heads = p.key.shape[:2]
    rows = torch.zeros(*p.query.shape[:3], dtype=torch.bool, device=p.device)
    keys = torch.zeros(batch, heads, spec.m, dtype=torch.bool, device=p.device)
    everywhere = Piece(ranks.rank, 0, spec.m, 0)
    for row in routes.rows[ranks.rank]:
        part = None if bias is None or bias.shape[-2] == 1 else bias.narrow(-2, row.here, row.size)
        some = block_spec(spec, mask_rows, row, everywhere, state=1)
        fake = p.key.new_zeros(()).expand(batch, heads, spec.m, 1)
        by_row, by_key = visible_rows_and_keys(some, p.query, fake, bias if part is None else part)
        rows.narrow(-1, row.here, row.size).copy_(by_row)
        keys |= by_key
    keys = ranks.everyones(keys.to(torch.uint8)).bool().any(0)
    mine = torch.cat([keys[..., piece.start : piece.stop] for piece in routes.keys[ranks.rank]] or [keys[..., :0]], -1)
    mine = mine[..., None]
    return p._replace(
        query=torch.where(rows[..., None], p.query, 0.0),
        key=torch.where(mine, p.key, 0.0),
        value=torch.where(mine, p.value, 0.0),
    )

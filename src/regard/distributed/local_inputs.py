"""A rank's tensors as they enter the exchange: score and scale folded in, unseen queries and keys zeroed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.nonfinite import visible_rows_and_keys
from ..core.problem import Problem
from ..core.spec import Spec
from ..masks.base import PARTIAL
from ..scores.base import Prepared
from ..scores.functional_call import functional_factor, functional_prepare
from .blocks import Block, block_spec
from .layout import TokenRange
from .ranks import Ranks
from .ring_plan import RingPlan

__all__ = ["ReplicatedInputs", "fold_scale", "logit_scale", "zero_unseen_everywhere"]


@dataclass(frozen=True, eq=False)
class ReplicatedInputs:
    """What is the same on all ranks, with gradients that are summed over them; it replaces the call's own tensors."""

    scale: float | Tensor
    sink: Tensor | None
    tables: tuple[Tensor, ...]  # of the structured bias
    parameters: dict[str, Tensor]  # of the score
    centre: Tensor | None  # of the score


def logit_scale(p: Problem, replicated: ReplicatedInputs) -> float | Tensor | None:
    """The factor of q·k, one number or one per head, if score and scale do nothing else; otherwise None."""
    if p.score is None:
        return replicated.scale
    probe = p.query.new_empty(0, p.query.shape[-1], dtype=p.exact_dtype)
    return functional_factor(p.score, replicated.parameters, probe)


def fold_scale(p: Problem, replicated: ReplicatedInputs) -> Prepared:
    """Fold score and scale into this rank's queries, in exact arithmetic, and into its keys only if the score does."""
    exact = p.exact_dtype
    query, scale = p.query.to(exact), logit_scale(p, replicated)
    if scale is None and p.score is not None:
        return functional_prepare(p.score, replicated.parameters, query, p.key.to(exact), replicated.centre)
    if isinstance(scale, Tensor):
        scale = scale.to(exact).reshape(-1, 1, 1)
    return Prepared(query if scale is None else query * scale, p.key)


def zero_unseen_everywhere(
    p: Problem, ranks: Ranks, plan: RingPlan, spec: Spec, local_mask_rows: int | None, bias: Tensor | None
) -> Problem:
    """Zero the queries that see no key, and the keys and values that no row of any rank may see."""
    batch, heads = p.key.shape[:2]
    row_seen = torch.zeros(*p.query.shape[:3], dtype=torch.bool, device=p.device)
    key_seen = torch.zeros(batch, heads, spec.m, dtype=torch.bool, device=p.device)
    all_keys = TokenRange(ranks.rank, 0, spec.m, 0)
    for rows in plan.rows[ranks.rank]:
        part = bias if bias is None or bias.shape[-2] == 1 else bias.narrow(-2, rows.local_start, rows.size)
        of_rows = block_spec(spec, local_mask_rows, Block(rows, all_keys, PARTIAL))
        probe = p.key.new_zeros(()).expand(batch, heads, spec.m, 1)
        by_row, by_key = visible_rows_and_keys(of_rows, p.query, probe, part)
        row_seen.narrow(-1, rows.local_start, rows.size).copy_(by_row)
        key_seen |= by_key
    key_seen = ranks.all_gather(key_seen.to(torch.uint8)).bool().any(0)
    mine = [key_seen[..., keys.start : keys.stop] for keys in plan.keys[ranks.rank]] or [key_seen[..., :0]]
    kept = torch.cat(mine, -1)[..., None]
    return p._replace(
        query=torch.where(row_seen[..., None], p.query, 0.0),
        key=torch.where(kept, p.key, 0.0),
        value=torch.where(kept, p.value, 0.0),
    )

"""From a problem whose rows have lists of keys to its rows and their statistics, by the kernels for lists, and why these
cannot take it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..autograd.engine import attend
from ..compat.torch import not_compiled, outside_transforms, without_autocast
from ..compat.triton import INTERPRETED
from ..core.dropout import draw_seed, drawn_in_graph
from ..core.folded import add_sink
from ..core.gathered import lists_of
from ..core.nonfinite import zero_unseen
from ..core.problem import Problem
from ..core.rows import Rows
from ..core.spec import Spec
from ..masks.chosen import beside_lists, lists_keys
from .block_mask import traceable
from .chosen_engine import ChosenEngine

if TYPE_CHECKING:
    from .portable.chosen_launch import ChosenArgs

__all__ = ["attend_by_lists", "has_lists", "received_by_lists", "refusals_of_lists", "top_by_lists"]


def has_lists(p: Problem) -> bool:
    """Whether the rows of a problem have lists that are shorter than all keys; a traced call is told by its mask alone."""
    if p.mask is None or not lists_keys(p.mask):
        return False
    return torch.compiler.is_compiling() or lists_of(Spec.of(p)) is not None


def refusals_of_lists(p: Problem) -> list[str]:
    """Why the kernels for lists cannot take a problem."""
    reasons = []
    if p.bias is not None:
        reasons.append("its kernels for listed keys take no bias")
    if p.score is not None and p.score.pairwise:
        reasons.append(f"its kernels for listed keys have no score {type(p.score).__name__}")
    if isinstance(p.scale, Tensor) or (p.score is not None and _factor(p) is not None):
        reasons.append("its kernels for listed keys take one number as the scale")
    if not _interval_beside_lists(p):
        reasons.append("the mask beside the listed keys is no interval of keys per row")
    return reasons


def _interval_beside_lists(p: Problem) -> bool:
    """Whether what a mask allows besides its lists is an interval of keys per row; no tensor of a traced call is read."""
    if p.mask is None or torch.compiler.is_compiling():
        beside = None if p.mask is None else beside_lists(p.mask)
        return beside is not None and all(map(traceable, beside))
    with outside_transforms():
        lists = p.mask.listed(p.rows, p.keys)
        if lists is None or lists.rest is None:
            return lists is not None
        rows = torch.arange(p.rows, device=lists.entries.device)
        return bool(lists.rest.span(rows, p.rows, p.keys).exact)


def _factor(p: Problem) -> object:
    return None if p.score is None else p.score.factor(p.query.new_empty(0, p.query.shape[-1], dtype=torch.float32))


@without_autocast
def attend_by_lists(p: Problem) -> Rows:
    """Attend; the sink takes its share of the finished rows."""
    compiling = torch.compiler.is_compiling()
    query, key, value, scale = _folded(p)
    seed: int | Tensor = 0
    if p.dropout:
        seed = drawn_in_graph(p.device) if compiling else draw_seed(p.who)
    spec = Spec.of(p, seed)
    spec = replace(spec, read=None) if compiling else spec
    engine = ChosenEngine(spec, scale, key.shape[1], p.observed or p.sink is not None)
    if compiling:
        from . import custom_ops

        rows = custom_ops.attend(engine, (query, key, value))
    else:
        rows = attend(engine, (query, key, value))
    output = rows.output
    if p.sink is not None:
        left, lse, entropy, log_row_sum = add_sink(p.sink.float(), *rows[1:])
        output = output * left.exp()[..., None].to(output.dtype)
        rows = Rows(output, lse, entropy, rows.max_logit, log_row_sum)
    output = p.shaped(output.to(p.dtype))
    return Rows(output, *map(p.shaped, rows[1:])) if p.observed else Rows(output)


@not_compiled
def received_by_lists(p: Problem, rows: Rows) -> Tensor:
    """Σ over queries of the weight each key receives: (…, Hq, M)."""
    from .portable import chosen_launch

    args = _late_args(p)
    with torch.cuda.device_of(args.query):
        return p.shaped(chosen_launch.received(args, *_normalizer(args, rows)))


@not_compiled
def top_by_lists(p: Problem, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
    """The k largest weights of each row and their keys, as `top` of the statistics has them."""
    from .portable import chosen_launch

    args = _late_args(p)
    row_max, log_row_sum = _normalizer(args, rows)
    with torch.cuda.device_of(args.query):
        logits, index = chosen_launch.top(args, k)
    weights = (logits - row_max[..., None] - log_row_sum[..., None]).exp().masked_fill(index < 0, 0.0)
    return p.shaped(weights.to(p.dtype)), p.shaped(index)


@torch.no_grad()
@without_autocast
def _late_args(p: Problem) -> ChosenArgs:
    """What the kernels take for a pass after the forward, which knows no dropout."""
    *x, scale = _folded(p)
    engine = ChosenEngine(Spec.of(p._replace(dropout=0.0)), scale, p.key.shape[1], p.observed)
    return engine.kernel_args(tuple(x))


def _normalizer(args: ChosenArgs, rows: Rows) -> tuple[Tensor, Tensor]:
    """The row max and the log of the row sum, (L, H, N) each."""
    shape = args.query.shape[:3]
    return rows.max_logit.detach().reshape(shape).contiguous(), rows.log_row_sum.detach().reshape(shape).contiguous()


def _folded(p: Problem) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries and keys with the score folded in, values, and the scale of the products."""
    if INTERPRETED and p.dtype == torch.bfloat16:  # Triton's interpreter cannot multiply it
        p = p._replace(query=p.query.float(), key=p.key.float(), value=p.value.float())
    if p.score is None:
        return p.query, p.key, p.value, float(p.scale)
    if torch.compiler.is_compiling():  # a hidden NaN must not pass through the score, whose derivative would spread it
        from . import custom_ops

        query, key = custom_ops.zero_unseen(p)[:2]
    else:
        query, key, _ = zero_unseen(Spec.of(p), p.query, p.key, p.value, None)
    query, key, _ = p.score.prepare(query.float(), key.float())
    return query, key, p.value.float(), 1.0

"""Hear calls of torch's flex_attention: its block masks and the score modifications that can be read become ours."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.validation import pose
from ..masks import Mask
from ..masks.predicate import predicate
from ..observation import observed
from .flex_scores import ScoreModification, read_score_modification
from .listener import report_miss, respond, suspended
from .posing import vmapped

__all__ = ["answer_flex", "flex_operator"]

_MODULE = "torch.nn.attention.flex_attention"
_LN2 = math.log(2.0)


def flex_operator() -> Callable[..., Any] | None:
    """The operator that every call of flex_attention reaches, compiled or not; None if it was never imported."""
    if _MODULE not in sys.modules:
        return None
    found: Callable[..., Any] = torch.ops.higher_order.flex_attention
    return found


def answer_flex(
    operator: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Answer the operator: output, and lse and largest logit in units of log 2 where they are asked for.

    A score modification that cannot be read leaves the call to torch, and is reported.
    """

    def original() -> tuple[Tensor, Tensor, Tensor]:
        with suspended():
            found: tuple[Tensor, Tensor, Tensor] = operator(
                query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
            )
        return found

    shape = (*query.shape[:3], key.shape[2])
    read = read_score_modification(_bound(score_mod, score_buffers), shape, query.device)
    if isinstance(read, str):
        report_miss(f"flex_attention: {read}, so it cannot be read and runs as it is")
        return original()
    p = _problem(query, key, value, _bound(block_mask[-1], mask_buffers), scale, read)
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in read.sources)
    output = respond(p, lambda: original()[0], beside=learned)
    wanted = kernel_options.get("OUTPUT_LOGSUMEXP", False), kernel_options.get("OUTPUT_MAX", False)
    if not any(wanted):
        empty = query.new_empty(0, dtype=torch.float32)
        return output, empty, empty
    seen = observed(p)
    return output, seen.lse / _LN2, seen.max_logit / _LN2


def _problem(
    query: Tensor, key: Tensor, value: Tensor, mask_mod: Callable[..., Tensor], scale: float, read: ScoreModification
) -> Problem:
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    return pose(
        query,
        key,
        value,
        mask=_mask(mask_mod),
        bias=read.bias,
        scale=scale * read.slope,
        softcap=read.softcap,
        who="flex_attention",
    )


def _mask(mask_mod: Callable[..., Tensor]) -> Mask | None:
    """A mask that calls the function for every pair, as flex_attention does; None if it allows all of them."""
    if getattr(mask_mod, "__name__", "") == "noop_mask":
        return None

    def allows(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return vmapped(mask_mod, batch, head, i, j)

    allows.__name__ = getattr(mask_mod, "__name__", type(mask_mod).__name__)
    return predicate(allows)


def _bound(function: Callable[..., Tensor], buffers: tuple[Any, ...]) -> Callable[..., Tensor]:
    if not buffers:
        return function
    return lambda *given: function(*given, *buffers)

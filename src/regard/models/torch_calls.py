"""Hear torch's own attention functions: scaled_dot_product_attention, and that of torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.compat.torch import causal_bias
from regard.core.problem import Problem
from regard.errors import RegardError
from regard.functional import posed_as_torch
from regard.observation import Observation, notify, observed

from .flex_calls import answer_flex, flex_operator
from .listener import Listener, is_changed_here, is_suspended, observer, report_miss, respond, suspended
from .posing import with_infinities

__all__ = ["TorchCalls"]

_ATTENTION = frozenset((F.scaled_dot_product_attention, F.multi_head_attention_forward))


class TorchCalls(TorchFunctionMode):
    """A mode that answers torch's attention functions."""

    def __init__(self) -> None:
        super().__init__()
        flex = flex_operator()
        self._heard = _ATTENTION if flex is None else _ATTENTION | {flex}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self._heard or is_suspended():  # nearly all calls of a model are others
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs, answering = kwargs or {}, observer()
        if answering is None and not is_changed_here():
            with suspended():
                return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _sdpa(answering, *args, **kwargs)
        if func is not F.multi_head_attention_forward:
            return answer_flex(func, *args, **kwargs)
        return _multihead(dict(zip(_parameters(func), args, strict=False)) | kwargs)


def _sdpa(answering: Listener | None, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
    """Answer a call of torch's function; one that cannot be posed stays with torch."""

    def original() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, *others, **named)

    try:
        p = _sdpa_problem(query, key, value, *others, **named)
    except (RegardError, TypeError) as error:  # leave such arguments to torch
        report_miss(str(error))
        with suspended():
            return original()
    if query.dim() >= 4:
        return respond(p, original) if answering is None else answering.respond(p, original)
    output = respond(p, lambda: original().view(*p.lead, p.rows, -1))
    return output.view(*output.shape[:-3][: query.dim() - 2], *output.shape[-2:])


def _multihead(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Run torch.nn.MultiheadAttention's function on its fused path; requested weights come from an observation."""
    original, answering = F.multi_head_attention_forward, observer()
    drops = bool(given.get("dropout_p", 0.0)) and given.get("training", True)
    if (drops or (answering is not None and answering.runs_unchanged)) and not is_changed_here():
        with suspended():
            answer: tuple[Tensor, Tensor | None] = original(**given)
        with torch.no_grad():
            _fused(given | {"training": False, "need_weights": False})
        return answer
    output, seen = _fused(given)
    if not given.get("need_weights", True):
        return output, None
    if seen is None:
        return original(**given)
    weights = seen.weights()
    weights = weights.mean(-3) if given.get("average_attn_weights", True) else weights
    return output, weights.squeeze(0) if given["query"].dim() == 2 else weights


def _fused(given: dict[str, Any]) -> tuple[Tensor, Observation | None]:
    """Run it without weights, with our attention in place of its call of torch's."""
    found: list[Observation] = []

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        try:
            p = _sdpa_problem(*args, **kwargs)
        except RegardError as error:
            report_miss(str(error))
            return F.scaled_dot_product_attention(*args, **kwargs)
        answering = observer()
        if p.dropout or (answering is not None and answering.runs_unchanged):
            output = respond(p, lambda: F.scaled_dot_product_attention(*args, **kwargs))
            if given.get("need_weights", True):
                found.append(observed(p._replace(dropout=0.0)))
            return output
        seen = observed(p)
        notify(seen)
        found.append(seen)
        return seen.output

    original = F.multi_head_attention_forward
    scope = {**original.__globals__, "scaled_dot_product_attention": attend, "has_torch_function": lambda *_: False}
    patched = FunctionType(original.__code__, scope, original.__name__, original.__defaults__)
    output, _ = patched(**given | {"need_weights": False})
    return output, found[-1] if found else None


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def _sdpa_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """The problem of a call of torch's function, with a dimension for heads."""
    dims = query.dim()
    headless = dims < 4 and not (dims == 3 and enable_gqa)
    if dims < 4:
        query, key, value = (x.unsqueeze(-3) if headless else x[None] for x in (query, key, value))
    if attn_mask is not None and causal_bias(attn_mask) is None:
        attn_mask = attn_mask.unsqueeze(-3) if headless and attn_mask.dim() == 3 else attn_mask
        attn_mask = with_infinities(attn_mask) if attn_mask.dtype.is_floating_point else attn_mask
    return posed_as_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

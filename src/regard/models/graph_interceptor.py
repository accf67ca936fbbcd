"""Observe the attention operators that a compiled model runs, without compiling it again or running it eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat.compiled import OperatorMode, operator_arguments
from ..compat.torch import is_capturing, transforms_are_active
from ..errors import RegardError
from ..functional import posed_as_torch
from ..observation import Observation, observed
from .listener import is_suspended, suspended
from .posing import with_infinities

__all__ = ["GraphInterceptor"]

_FUSED = "aten::_scaled_dot_product_"  # what the names of torch's fused attention begin with
_BACKWARD = "_backward"
_OURS = "regard::attend"  # the same of our kernels


class GraphInterceptor(OperatorMode):
    """A context that observes each fused attention operator of its thread, in the order in which they run.

    A compiled graph has no modules left, so the calls have no names; `on_call(observation)` gets them one by one. The
    operators run unchanged; each is observed by a pass of its own. Attention that a graph computes by matrix products,
    or replays from a CUDA graph, is not seen.
    """

    def __init__(self, on_call: Callable[[Observation], None]) -> None:
        super().__init__()
        self._on_call = on_call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.name()
        fused = name.startswith(_FUSED) and _BACKWARD not in name
        if (fused or name == _OURS) and not (is_suspended() or is_capturing()):
            if fused:
                self._observe(operator_arguments(func, args, kwargs or {}))
            else:
                self._observe_ours(args)
        return found

    def _observe_ours(self, args: tuple[Any, ...]) -> None:
        from ..kernels.custom_ops import problem_of

        with suspended(), torch.no_grad():
            p = problem_of(*args)
            if p is not None:
                self._on_call(observed(p).kept())

    def _observe(self, given: dict[str, Any]) -> None:
        query, key, value = (given[name].detach() for name in ("query", "key", "value"))
        mask = given.get("attn_mask", given.get("attn_bias"))
        if mask is not None and mask.dtype.is_floating_point:
            mask = with_infinities(mask.detach())
        grouped = query.shape[-3] != key.shape[-3]
        if transforms_are_active():
            return
        with suspended(), torch.no_grad():
            try:
                causal, scale = bool(given.get("is_causal", False)), given.get("scale")
                seen = observed(posed_as_torch(query, key, value, mask, 0.0, causal, scale, grouped))
            except RegardError:  # a call that we do not take is not seen
                return
            self._on_call(seen.kept())

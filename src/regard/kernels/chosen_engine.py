"""The engine of the kernels for rows with lists of keys; tangents and second derivatives are those of `chunked`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..autograd.engine import Engine, MaybeTensors, Needs
from ..chunked.engine import ChunkedEngine
from ..compat.torch import not_compiled, outside_transforms, without_autocast
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.tiling import TileSizes
from ..masks.lists import NONE, Lists, first_times
from .engine import dropout_args

if TYPE_CHECKING:
    from .portable.chosen_launch import ChosenArgs, ChosenLists

__all__ = ["ChosenEngine", "kernel_lists"]


@dataclass(frozen=True, eq=False)
class ChosenEngine(Engine):
    """Passes over (query (L, H, N, D), key, value) by our kernels."""

    spec: Spec
    scale: float
    key_heads: int
    observed: bool

    @property
    def output_alone(self) -> bool:  # type: ignore[override]
        return not self.observed

    @not_compiled
    @without_autocast
    def forward(self, x: MaybeTensors) -> Rows:
        from .portable import chosen_launch

        args = self.kernel_args(x)
        chip = _chip(args)
        with torch.cuda.device_of(args.query):
            rows: Rows = (chosen_launch if chip is None else chip).forward(args, self.observed)
        return rows

    @not_compiled
    @without_autocast
    def vjp(self, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> Sequence[Tensor | None]:
        from .portable import chosen_launch

        args = self.kernel_args(x)
        dO, g_lse, g_H = (None if t is None else t.detach() for t in g)
        dO = torch.zeros_like(rows.output) if dO is None else _readable(dO)
        g_lse = None if g_lse is None else torch.where(rows.lse > -torch.inf, g_lse, 0.0).contiguous()
        g_H = None if g_H is None else g_H.contiguous()
        rows = Rows(_readable(rows.output), *(None if t is None else t.contiguous() for t in rows[1:]))
        chip = None if g_H is not None else _chip(args)
        by_lists = None if chip is None or chip.refuses_gradients(args) else chip.backward
        with torch.cuda.device_of(args.query):
            found = chosen_launch.backward(args, rows, dO, g_lse, g_H, needs[1] or needs[2], by_lists)
        return tuple(
            None if g is None or not need else g.to(t.dtype).contiguous()
            for g, need, t in zip(found, needs, (args.query, args.key, args.value), strict=True)
        )

    @not_compiled
    def jvp(self, x: MaybeTensors, w: MaybeTensors) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        rows, tangents = self._chunked.jvp(self._folded(x), self._folded(w))
        found = Rows(*(t.flatten(1, 2) for t in rows))
        first, second, third = (t.flatten(1, 2) for t in tangents)
        return found._replace(output=found.output.to(_dtype(x))), (first.to(_dtype(x)), second, third)

    @not_compiled
    def double_backward(
        self, x: MaybeTensors, rows: Rows, d_rows: MaybeTensors, g: MaybeTensors, w: MaybeTensors, dg: MaybeTensors, needs: Needs
    ) -> Sequence[Tensor | None]:
        heads = self.key_heads
        entropy = torch.zeros_like(rows.lse) if rows.entropy is None else rows.entropy
        own = Rows(*(_grouped(t, heads) for t in rows._replace(entropy=entropy)))  # type: ignore[arg-type]
        d_own, g_own, dg_own = (tuple(_grouped(t, heads) for t in each) for each in (d_rows, g, dg))
        found = self._chunked.double_backward(
            self._folded(x), own, d_own, g_own, self._folded(w), dg_own, (*needs, False)
        )
        query = None if found[0] is None else found[0].flatten(1, 2) * self.scale
        grads = (query, *found[1:3])
        return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, x, strict=True))

    def formula(self, x: MaybeTensors) -> tuple[Tensor, ...]:
        output, lse, entropy = (t.flatten(1, 2) for t in self._chunked.formula(self._folded(x)))
        return output.to(_dtype(x)), lse, entropy

    def batched(self, size: int) -> tuple[Engine, int]:
        spec = self.spec
        wider = replace(spec, inner=spec.inner * size, period=spec.period * size, copies=spec.copies * size)
        return replace(self, spec=wider), 1

    @property
    def _chunked(self) -> ChunkedEngine:
        return ChunkedEngine(self.spec, TileSizes(), self.observed)

    def _folded(self, x: MaybeTensors) -> MaybeTensors:
        """Inputs, or tangents of them, as `chunked` takes them."""
        query, key, value = (None if t is None else t.float() for t in x)
        query = None if query is None else _grouped(query * self.scale, self.key_heads)
        return query, key, value, None

    def kernel_args(self, x: MaybeTensors) -> ChosenArgs:
        """The tensors as kernels take them."""
        from .portable.chosen_launch import ChosenArgs

        query, key, value = (_readable(_present(t).detach()) for t in x)
        lists = kernel_lists(self.spec)
        return ChosenArgs(query, key, value, lists, self.scale, self.spec.softcap, dropout_args(self.spec, query))


def _chip(args: ChosenArgs) -> ModuleType | None:
    """The kernels of the chip itself, if they can compute a problem."""
    from . import launch

    if not launch.on_hopper(args.query):
        return None
    from .hopper import chosen_launch

    return None if chosen_launch.refuses(args) else chosen_launch


def kernel_lists(spec: Spec) -> ChosenLists:
    """The lists of a problem as its kernels read them."""
    spec.check_unchanged()
    with outside_transforms():
        lists = None if spec.mask is None else spec.mask.listed(spec.n, spec.m)
        if lists is None or spec.mask is None:
            raise RuntimeError("the rows of this problem have no lists")
        found: ChosenLists = spec.mask.remembered(("kernel lists", spec.n, spec.m), lambda: _kernel_lists(spec, lists))
    return found._replace(inner=spec.inner)


def _kernel_lists(spec: Spec, lists: Lists) -> ChosenLists:
    from .portable.chosen_launch import ChosenLists

    counts = (lists.entries != NONE).sum(-1, dtype=torch.int32)
    lo = hi = None
    if lists.rest is not None:
        device = lists.entries.device
        span = lists.rest.span(torch.arange(spec.n, device=device), spec.n, spec.m)
        if not span.exact:
            raise RuntimeError("the mask beside the lists is no interval of keys per row")
        lo, hi = (end.to(torch.int32).reshape((1,) * (3 - end.dim()) + end.shape).contiguous() for end in span[:2])
    entries = lists.entries.masked_fill(~first_times(lists.entries), NONE)
    return ChosenLists(entries, counts, lo, hi, lists.size, lists.rows, spec.inner)


def _present(x: Tensor | None) -> Tensor:
    if x is None:
        raise RuntimeError("a problem has queries, keys and values")
    return x


def _dtype(x: MaybeTensors) -> torch.dtype:
    return _present(x[2]).dtype


def _grouped(x: Tensor | None, heads: int) -> Tensor | None:
    """A tensor (L, H, …) of rows with its heads grouped by key head, in float32."""
    return None if x is None else x.float().unflatten(1, (heads, x.shape[1] // heads))


def _readable(x: Tensor) -> Tensor:
    """A tensor that kernels can read: unit stride in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()

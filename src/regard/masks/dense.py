"""Dense: a mask written out as a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from regard.compat.torch import is_traced, lacks_values
from regard.errors import MaskError
from regard.masks.arguments import tensor_like
from regard.masks.base import CONVERTERS, HIDDEN, Mask, Span
from regard.masks.causal import causal_of_torch
from regard.masks.index import Index, indices
from regard.masks.span import interval, true_ends
from regard.masks.tiles import block_indices, tile_states, uniform_cover

__all__ = ["Dense", "dense"]

ENTRIES_AT_ONCE = 1 << 24
"""How many entries are searched together for the ends of rows."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Row i sees key j if allowed[…, i, j]; (n, m), (heads, n, m) or (batch, heads, n, m); any size may be 1."""

    allowed: Tensor

    factory: ClassVar[str] = "dense"

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        table = self._with_lead().to(i.device)
        table = table.expand(*table.shape[:-2], n, m)
        rows, keys = _as_slice(i, -2), _as_slice(j, -1)
        return table[..., i, j] if rows is None or keys is None else table[..., rows, keys].clone()

    def span(self, i: Tensor, n: int, m: int) -> Span:
        table = self._with_lead().to(i.device)
        table = table.expand(*table.shape[:-1], m)
        if table.numel() == 0:
            return interval(i, m, 0, i.new_zeros((*table.shape[:-2], len(i))))
        which = i if table.shape[-2] == n and n != 1 else i.new_zeros(1)  # one row serves all
        height = max(1, ENTRIES_AT_ONCE * table.shape[-2] // table.numel())
        los, his, exact = zip(*(true_ends(table.index_select(-2, r)) for r in torch.split(which, height)), strict=True)
        return interval(i, m, torch.cat(los, -1), torch.cat(his, -1), all(exact))

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        table = self._with_lead()
        if 0 in (n, m, table.numel()):
            return uniform_cover(rows, cols, HIDDEN)
        table = table.view(torch.uint8)  # amax is any and amin is all, and both are much faster
        seen, full = (_reduce_tiles(table, rows, cols, reduce) for reduce in (torch.amax, torch.amin))
        return tile_states(seen.bool(), full.bool())

    def dense(self, n: int, m: int, device: torch.device | str | None = None) -> Tensor:
        self.check(n, m)
        table = self._with_lead() if device is None else self._with_lead().to(device)
        return table.expand(*table.shape[:-2], n, m).clone(memory_format=torch.contiguous_format)

    @property
    def lead(self) -> tuple[int, int]:
        shape = (1, 1, *self.allowed.shape)
        return shape[-4], shape[-3]

    def misfit(self, n: int, m: int) -> str | None:
        rows, keys = self.allowed.shape[-2:]
        if rows in (1, n) and keys in (1, m):
            return None
        return f"dense: the tensor has shape {tuple(self.allowed.shape)}; there are {n} rows and {m} keys."

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        return Dense(self.allowed.unsqueeze(1)) if headless and self.allowed.dim() == 3 else self

    def restrict(self, batch: slice, heads: slice) -> Mask:
        items, several = self.lead
        if (items, several) == (1, 1):
            return self
        return Dense(self._with_lead()[batch if items != 1 else slice(None), heads if several != 1 else slice(None)])

    def _with_lead(self) -> Tensor:
        """The tensor with neither or both leading dimensions: (n, m) or (batch, heads, n, m)."""
        return self.allowed[None] if self.allowed.dim() == 3 else self.allowed


def _reduce_tiles(table: Tensor, rows: Tensor, cols: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce (…, n, m) to (R, C): first the leading dimensions, then rows, then keys; a size of 1 is expanded."""
    flat = table.flatten(0, 1) if table.dim() == 4 else table[None]
    flat = reduce(flat, 0) if len(flat) != 1 else flat[0]  # (n, m)
    if len(flat) != 1:
        flat = torch.cat([reduce(block, 1) for block in _row_blocks(flat, rows.tolist())])  # (R, m)
    if flat.shape[1] != 1:
        flat = reduce(flat[:, block_indices(cols).to(flat.device)], -1)
    return flat.expand(len(rows) - 1, len(cols) - 1)


def _row_blocks(table: Tensor, edges: list[int]) -> list[Tensor]:
    """Cut the rows of (n, m) at the edges, as views (blocks, size, m): adjacent blocks of one size together."""
    found, top = [table[:0].unsqueeze(1)], edges[0]
    for size, group in groupby(b - a for a, b in pairwise(edges)):
        count = len(list(group))
        block = table[top : top + size * count].reshape(count, size, -1) if size else table[:1].expand(count, 1, -1)
        found.append(block)
        top += size * count
    return found


def _as_slice(index: Tensor, dim: int) -> slice | None:
    """Read an index along one of two dimensions as a slice, if it is one: slices are faster than gathers."""
    if index.dim() != 2 or index.shape[dim] != index.numel() or index.numel() == 0:
        return None
    if torch.compiler.is_compiling() or index.device.type != "cpu" or is_traced() or lacks_values(index):
        return None
    flat = index.flatten()
    first = int(flat[0])
    return slice(first, first + len(flat)) if first >= 0 and bool((flat.diff() == 1).all()) else None


def dense(tensor: Any) -> Mask:
    """Let row i see key j where the tensor is True (or not 0): (n, m), (heads, n, m) or (batch, heads, n, m).

    >>> print(dense([[1, 0, 1], [0, 1, 1]]).picture(2, 3))
    █·█
    ·██
    """
    if isinstance(tensor, Tensor) and (causal := causal_of_torch(tensor)) is not None:
        return causal
    table = tensor_like("dense", "tensor", tensor)
    if table.is_floating_point() or table.is_complex():
        raise MaskError(
            f"dense: the tensor must be bool, True where a row may attend to a key; got {table.dtype}. "
            f"bias= adds, mask= selects: pass numbers to be added as bias=, or write (tensor != 0)."
        )
    if table.dim() > 4:
        raise MaskError(
            f"dense: the tensor must be (n, m), (heads, n, m) or (batch, heads, n, m); got shape {tuple(table.shape)}. "
            f"Flatten the leading dimensions into one batch."
        )
    table = table if table.dtype == torch.bool else table != 0
    return Dense(table.reshape((1,) * (2 - table.dim()) + table.shape) if table.dim() < 2 else table)


CONVERTERS[Tensor] = dense

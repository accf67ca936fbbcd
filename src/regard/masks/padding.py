"""Padding: keys that only pad a batch are hidden from every row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from regard.errors import ArgumentError, MaskError
from regard.masks.arguments import integers, tensor_like
from regard.masks.base import Mask, Span
from regard.masks.index import Index, expand_to_pairs, indices, per_item, take
from regard.masks.span import interval, true_ends

__all__ = ["Keep", "Padding", "padding"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """In batch item b, every row sees key j if j < lengths[b]."""

    lengths: Tensor = field(kw_only=True)

    factory: ClassVar[str] = "padding"
    items: ClassVar[dict[str, int]] = {"lengths": 0}
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return expand_to_pairs(j < per_item(self.lengths, j), i, j)

    def keys(self, m: int, device: torch.device) -> Tensor:
        """Which keys are visible, (B, 1, 1, M)."""
        return torch.arange(m, device=device) < self.lengths.reshape(-1, 1, 1, 1)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        return interval(i, m, 0, per_item(self.lengths, i))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Keep(Mask):
    """In batch item b, every row sees key j if keep[b, j]; without a batch, if keep[j]."""

    keep: Tensor = field(kw_only=True)

    factory: ClassVar[str] = "padding"
    items: ClassVar[dict[str, int]] = {"keep": 1}
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return expand_to_pairs(take(self.keep, j), i, j)

    def keys(self, m: int, device: torch.device) -> Tensor:
        """Which keys are visible, (B, 1, 1, M), or (1, 1, 1, M) for all items."""
        return self.keep.reshape(-1, 1, 1, m)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        if self.keep.numel() == 0:
            nothing = i.new_zeros((*self.keep.shape[:-1], *(1,) * self.keep.dim()))  # (1,) or (B, 1, 1)
            return interval(i, m, 0, nothing)
        keep = self.keep.to(i.device)
        lo, hi, exact = true_ends(keep if keep.dim() == 1 else keep[:, None, None])
        return interval(i, m, lo, hi, exact)

    def misfit(self, n: int, m: int) -> str | None:
        length = self.keep.shape[-1]
        return None if length == m else f"padding: keep has entries for {length} keys; there are {m}."


def padding(lengths_or_keep: Any = None, /, *, lengths: Any = None, keep: Any = None) -> Mask:
    """Hide the keys that only pad a batch, by `lengths` (B,) or by `keep` (B, M) or (M,), True where a key is visible.

    The dtype of a positional argument decides: bool is `keep`; integers in one dimension are `lengths`; integers in two
    dimensions are `keep`, 1 and 0 as in the `attention_mask` of Hugging Face.

    >>> print(padding([2, 3]).picture(2, 4, batch=1))
    ███·
    ███·
    >>> padding([2, 3]) == padding([[1, 1, 0, 0], [1, 1, 1, 0]])
    False
    """
    given = [value for value in (lengths_or_keep, lengths, keep) if value is not None]
    if len(given) != 1:
        raise ArgumentError(
            f"padding: give either lengths or keep; got {'several' if given else 'neither'}. Use & if both should hold."
        )
    if lengths is not None:
        return Padding(lengths=integers("padding", "lengths", lengths, least=0))
    value = tensor_like("padding", "lengths or keep" if keep is None else "keep", given[0])
    if value.is_floating_point() or value.is_complex():
        raise MaskError(
            f"padding: lengths are integers and keep is bool; got {value.dtype}. "
            f"Write keep as (tensor != 0), or lengths as tensor.long()."
        )
    if keep is None and value.dtype != torch.bool and value.dim() < 2:
        if value.dim() == 0:
            raise MaskError(
                "padding: lengths must have one entry per batch item; got one number. Use prefix(length) instead."
            )
        return Padding(lengths=integers("padding", "lengths", given[0], least=0))
    if value.dim() not in (1, 2):
        raise MaskError(
            f"padding: keep must be (batch, keys) or (keys,); got shape {tuple(value.shape)}. "
            f"Use dense(tensor) for a mask with rows."
        )
    return Keep(keep=value if value.dtype == torch.bool else value != 0)

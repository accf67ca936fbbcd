"""Masking: torch's masks, in which True hides and numbers add, read as a mask and a bias of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DeviceError, DtypeError, MaskError
from ..masks import Mask, dense, padding
from ..masks.base import FULL, PARTIAL, Span
from ..masks.index import Index, indices, spread
from ..masks.tiles import whole_cover

__all__ = ["Masking", "Sizes", "both", "masking", "ours"]


class Masking(NamedTuple):
    """What `regard.attention` takes: pairs that may attend, and numbers that are added to logits."""

    mask: Mask | None
    bias: Tensor | None  # (N|1, H|1, L|1, S)

    def opened(self, extra: int) -> Masking:
        """Add `extra` keys at the end that every row sees."""
        if not extra:
            return self
        mask = None if self.mask is None else _Opened(self.mask, extra)
        return Masking(mask, None if self.bias is None else F.pad(self.bias, (0, extra)))


class Sizes(NamedTuple):
    """The sizes that masks must fit."""

    batch: int
    heads: int
    rows: int
    keys: int
    batched: bool
    device: torch.device


def masking(
    who: str,
    sizes: Sizes,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *masks: Mask | Tensor | None,
) -> Masking:
    """Gather torch's two masks and masks of ours; a pair is seen if all of them allow it."""
    found: Mask | None = None
    biases = []
    for mask in masks:
        found = both(found, ours(who, mask))
    if attn_mask is not None:
        table = _attn(who, attn_mask, sizes)
        if table.dtype == torch.bool:
            found = both(found, dense(~table))
        else:
            biases.append(table)
    if key_padding_mask is not None:
        hidden = _padding(who, key_padding_mask, sizes)
        if hidden.dtype == torch.bool:
            found = both(found, padding(keep=~hidden))
        else:
            biases.append(hidden[:, None, None, :])
    if len(biases) == 2:
        return Masking(found, biases[0] + biases[1])
    return Masking(found, biases[0] if biases else None)


def both(a: Mask | None, b: Mask | None) -> Mask | None:
    """Give the pairs that two masks allow, where None allows all."""
    return b if a is None else a if b is None else a & b


def ours(who: str, mask: Mask | Tensor | None) -> Mask | None:
    """Read a mask of ours, or a tensor in which True means 'may attend'."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise DtypeError(
            f"{who}: mask must be a regard Mask or a tensor in which True means 'may attend'. "
            f"Got {type(mask).__name__}; regard.masks lists the masks."
        )
    return dense(mask)


def _attn(who: str, mask: Tensor, sizes: Sizes) -> Tensor:
    """Read torch's attn_mask as (1, 1, L, S) or (N, heads, L, S), bool or floating."""
    _check(who, "attn_mask", mask, sizes)
    batch, heads, rows, keys = sizes[:4]
    if tuple(mask.shape) == (rows, keys):
        return mask[None, None]
    if tuple(mask.shape) == (batch * heads, rows, keys):
        return mask.reshape(batch, heads, rows, keys)
    raise MaskError(
        f"{who}: attn_mask must be (L, S) or (N·heads, L, S), here {(rows, keys)} or {(batch * heads, rows, keys)}. "
        f"Got {tuple(mask.shape)}; mask= takes every other shape, with True for 'may attend'."
    )


def _padding(who: str, mask: Tensor, sizes: Sizes) -> Tensor:
    """Read torch's key_padding_mask as (N, S), bool where nothing is added but −inf."""
    _check(who, "key_padding_mask", mask, sizes)
    letters, fits = ("(N, S)", (sizes.batch, sizes.keys)) if sizes.batched else ("(S,)", (sizes.keys,))
    if tuple(mask.shape) != fits:
        raise MaskError(f"{who}: key_padding_mask must be {letters}, here {fits}. Got {tuple(mask.shape)}.")
    mask = mask.reshape(sizes.batch, sizes.keys)
    if mask.dtype == torch.bool or mask.requires_grad or torch.compiler.is_compiling():
        return mask
    hidden = mask == -torch.inf
    return hidden if bool((hidden | (mask == 0)).all()) else mask


def _check(who: str, name: str, mask: Tensor, sizes: Sizes) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise DtypeError(
            f"{who}: {name} must be a tensor, bool (True hides) or floating (it is added to the logits). Got {kind}; "
            f"an attention_mask of 1 and 0, 1 for what counts, goes to mask=regard.padding(attention_mask)."
        )
    if mask.device != sizes.device:
        raise DeviceError(
            f"{who}: {name} must be on the query's device. Got {name} on {mask.device}, query on {sizes.device}; "
            f"move it with .to(query.device)."
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class _Opened(Mask):
    """The keys of `part`, and after them `extra` keys that every row sees."""

    part: Mask
    extra: int

    factory: ClassVar[str] = "opened"

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        own = m - self.extra
        beyond = j >= own
        return self.part.allows(i, j.clamp(max=own - 1), n, own) | beyond if own else spread(beyond, i, j)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        own = m - self.extra
        lo, hi, exact = self.part.span(i, n, own)
        nothing = hi <= lo
        whole = exact and bool((nothing | (hi == own)).all())
        return Span(torch.where(nothing, own, lo), torch.full_like(hi, m), whole)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        own = m - self.extra
        inner = int((cols[:-1] < own).sum())  # tiles that begin among the keys of `part`
        found = whole_cover(rows, cols, FULL)
        if inner:
            found[:, :inner] = self.part.cover(rows, cols[: inner + 1].clamp(max=own), n, own)
            if cols[inner] > own:
                found[:, inner - 1].clamp_(min=PARTIAL)
        return found

    @property
    def lead(self) -> tuple[int, int]:
        return self.part.lead

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        return replace(self, part=self.part.bind(batch, heads, headless))

    def restrict(self, batch: slice, heads: slice) -> Mask:
        return replace(self, part=self.part.restrict(batch, heads))

    def misfit(self, n: int, m: int) -> str | None:
        return self.part.misfit(n, m - self.extra)

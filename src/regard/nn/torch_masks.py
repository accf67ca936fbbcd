"""Conversion of torch's masks, in which True hides and floats are added, to a regard mask and a bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DeviceError, DtypeError, MaskError
from ..masks import Mask, dense, padding
from ..masks.arguments import check_readable, textbook_mask
from ..masks.base import FULL, PARTIAL, Span
from ..masks.causal import causal_of_torch
from ..masks.index import Index, expand_to_pairs, indices
from ..masks.tiles import uniform_cover

__all__ = ["MaskAndBias", "MaskSizes", "as_mask", "combine_masks", "intersect"]


class MaskAndBias(NamedTuple):
    """The mask and the bias that `regard.attention` takes."""

    mask: Mask | None
    bias: Tensor | None  # (N|1, H|1, L|1, S)

    def with_visible_keys(self, extra: int) -> MaskAndBias:
        """Append `extra` keys that every row attends to."""
        if not extra:
            return self
        mask = None if self.mask is None else _WithVisibleKeys(self.mask, extra)
        return MaskAndBias(mask, None if self.bias is None else F.pad(self.bias, (0, extra)))


class MaskSizes(NamedTuple):
    """The sizes that masks must fit."""

    batch: int
    heads: int
    rows: int
    keys: int
    batched: bool  # whether the inputs have a batch dimension
    device: torch.device


def combine_masks(
    who: str,
    sizes: MaskSizes,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *masks: Mask | Tensor | None,
) -> MaskAndBias:
    """Combine torch's two masks and regard's masks; a pair is visible if all of them allow it."""
    combined: Mask | None = None
    biases = []
    for mask in masks:
        combined = intersect(combined, as_mask(who, mask))
    if isinstance(attn_mask, Tensor) and (causal := causal_of_torch(attn_mask)) is not None:
        combined, attn_mask = intersect(combined, causal), None
    if attn_mask is not None:
        table = _attn_mask(who, attn_mask, sizes)
        if table.dtype == torch.bool:
            combined = intersect(combined, dense(~table))
        else:
            biases.append(table)
    if key_padding_mask is not None:
        hidden = _key_padding_mask(who, key_padding_mask, sizes)
        if hidden.dtype == torch.bool:
            combined = intersect(combined, padding(keep=~hidden))
        else:
            biases.append(hidden[:, None, None, :])
    if len(biases) == 2:
        return MaskAndBias(combined, biases[0] + biases[1])
    return MaskAndBias(combined, biases[0] if biases else None)


def intersect(a: Mask | None, b: Mask | None) -> Mask | None:
    """Allow the pairs that both masks allow; None allows all."""
    return b if a is None else a if b is None else a & b


def as_mask(who: str, mask: Mask | Tensor | None) -> Mask | None:
    """Return a regard mask as it is, and wrap a tensor in which 0 and False hide."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise DtypeError(
            f"{who}: mask must be a regard Mask or a tensor in which True means 'may attend'. "
            f"Got {type(mask).__name__}; regard.masks lists the masks."
        )
    return dense(textbook_mask(who, mask))


def _attn_mask(who: str, mask: Tensor, sizes: MaskSizes) -> Tensor:
    """Check torch's attn_mask, and view it as (1, 1, L, S) or (N, heads, L, S), bool or floating."""
    _check(who, "attn_mask", mask, sizes)
    batch, heads, rows, keys = sizes.batch, sizes.heads, sizes.rows, sizes.keys
    if tuple(mask.shape) == (rows, keys):
        return mask[None, None]
    if tuple(mask.shape) == (batch * heads, rows, keys):
        return mask.reshape(batch, heads, rows, keys)
    raise MaskError(
        f"{who}: attn_mask must be (L, S) or (N·heads, L, S), here {(rows, keys)} or {(batch * heads, rows, keys)}. "
        f"Got {tuple(mask.shape)}; mask= takes all other shapes, with True for 'may attend'."
    )


def _key_padding_mask(who: str, mask: Tensor, sizes: MaskSizes) -> Tensor:
    """Check torch's key_padding_mask, and view it as (N, S), bool if it holds only 0 and −inf."""
    _check(who, "key_padding_mask", mask, sizes)
    letters, shape = ("(N, S)", (sizes.batch, sizes.keys)) if sizes.batched else ("(S,)", (sizes.keys,))
    if tuple(mask.shape) != shape:
        raise MaskError(f"{who}: key_padding_mask must be {letters}, here {shape}. Got {tuple(mask.shape)}.")
    mask = mask.reshape(sizes.batch, sizes.keys)
    if mask.dtype == torch.bool or mask.requires_grad or torch.compiler.is_compiling():
        return mask
    hidden = mask == -torch.inf
    return hidden if bool((hidden | (mask == 0)).all()) else mask


def _check(who: str, name: str, mask: Tensor, sizes: MaskSizes) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        remedy = "pass an attention_mask of 1 and 0, with 1 for visible tokens, as mask=regard.padding(attention_mask)"
        remedy = "pass a mask of regard as mask=" if isinstance(mask, Mask) else remedy
        raise DtypeError(
            f"{who}: {name} must be a tensor, bool (True hides) or floating (it is added to the logits). Got {kind}; "
            f"{remedy}."
        )
    check_readable(who, name, mask)
    if mask.device != sizes.device:
        raise DeviceError(
            f"{who}: {name} must be on the query's device. Got {name} on {mask.device}, query on {sizes.device}; "
            f"move it with .to(query.device)."
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class _WithVisibleKeys(Mask):
    """The keys of `part`, followed by `extra` keys that every row attends to."""

    part: Mask
    extra: int

    factory: ClassVar[str] = "with_visible_keys"

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        own = m - self.extra
        extra = j >= own
        return self.part.allows(i, j.clamp(max=own - 1), n, own) | extra if own else expand_to_pairs(extra, i, j)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        own = m - self.extra
        lo, hi, exact = self.part.span(i, n, own)
        empty = hi <= lo
        still_exact = exact and bool((empty | (hi == own)).all())
        return Span(torch.where(empty, own, lo), torch.full_like(hi, m), still_exact)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        own = m - self.extra
        inner = int((cols[:-1] < own).sum())  # tiles that start at a key of `part`
        found = uniform_cover(rows, cols, FULL)
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

"""Launch the kernels for lists of keys that a multiple of 64 rows share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...compat.gluon import TensorDescriptor
from ...compat.triton import INTERPRETED
from ...core.rows import Rows
from ..portable.chosen_launch import ChosenArgs, ChosenStrides, RowsAndCotangents, new_rows, tensor_strides
from ..portable.tile_ops import LOG2E
from .chosen_backward import chosen_backward
from .chosen_forward import chosen_forward
from .chosen_tile import KEYS, ROWS
from .descriptors import GLUON_DTYPES

__all__ = ["backward", "forward", "refuses", "refuses_gradients"]

SUMMED = (torch.bfloat16,)  # dtypes in which the backward stores what lists add to gradients
_DIMS = (64, 128)


def refuses(w: ChosenArgs) -> list[str]:
    """Why these kernels cannot compute a problem; empty if they can."""
    reasons = []
    q, k, v, lists = w.query, w.key, w.value, w.lists
    if INTERPRETED or not q.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(q.device) != (9, 0):
        reasons.append("the tensors are not on a GPU of compute capability 9.0")
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        reasons.append(f"it takes float16 or bfloat16 throughout; got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[3] not in _DIMS or v.shape[3] not in _DIMS:
        reasons.append(f"dims are 64 or 128; got {q.shape[3]} and {v.shape[3]}")
    if lists.rows * w.groups % ROWS.value:
        reasons.append(f"a multiple of {ROWS.value} rows share a list; got {lists.rows * w.groups}")
    if q.shape[2] % lists.rows:
        reasons.append(f"all lists have equally many rows; got {q.shape[2]} rows, {lists.rows} for each list")
    if (lists.entries.shape[3] if lists.size == 1 else lists.size) % KEYS.value:
        got = f"{lists.entries.shape[3]} keys" if lists.size == 1 else f"blocks of {lists.size}"
        reasons.append(f"lists have a multiple of {KEYS.value} single keys, or blocks of a multiple of {KEYS.value} keys; got {got}")
    if w.softcap is not None or w.drop.keys is not None or not w.scale > 0:
        reasons.append("there is a cap, dropout, or a scale that is not positive")
    if any(x.data_ptr() % 16 or any(stride % 16 for stride in x.stride()[:3]) for x in (k, v)):
        reasons.append("keys or values have an address that is not a multiple of 16 bytes, or strides that are not of 16 numbers, as Triton asks for")
    return reasons


def refuses_gradients(w: ChosenArgs) -> list[str]:
    """Why `backward` cannot compute a problem; empty if it can."""
    reasons = refuses(w)
    if w.query.dtype not in SUMMED:
        reasons.append("what a list adds to a gradient may be too large for float16")
    if not w.has_room(w.tiles):
        reasons.append(f"each {ROWS.value} rows need memory of their own for what they add to keys; got {w.lists.rows * w.groups} rows for each list")
    return reasons


def forward(w: ChosenArgs, entropy: bool) -> Rows:
    """The forward pass."""
    rows = new_rows(w, entropy)
    strides = ChosenStrides(tensor_strides(w.query), tensor_strides(w.key), tensor_strides(w.value), None, tensor_strides(rows.output))
    sizes, count = _sizes(w), w.lists.entries.shape[2]
    programs = w.query.shape[0] * (w.query.shape[1] // w.groups) * count * w.tiles
    chosen_forward[(programs,)](
        q=w.query, k=w.key, v=w.value, out=rows, strides=strides, lists=w.list_args(), unit=w.scale * LOG2E.value, count=count,
        programs=programs, ENTROPY=entropy, num_warps=4, enable_fp_fusion=True, **sizes,
    )  # fmt: skip
    return rows


def backward(w: ChosenArgs, given: RowsAndCotangents, dq: Tensor, parts: Tensor, strides: ChosenStrides, first: int, count: int) -> None:
    """The gradients of queries, and what the rows of `count` lists from `first` on add to those of their keys, (tiles · entries, D + DV)."""
    programs = w.query.shape[0] * (w.query.shape[1] // w.groups) * count * w.tiles
    dim, wide = w.query.shape[3], w.value.shape[3]
    chosen_backward[(programs,)](
        q=w.query, k=w.key, v=w.value, given=given, dq=dq, dk_parts=_descriptor(parts, dim), dv_parts=_descriptor(parts, wide),
        strides=strides, lists=w.list_args(), scale=w.scale, first_list=first, count=count, num_warps=4, enable_fp_fusion=True, **_sizes(w),
    )  # fmt: skip


def _sizes(w: ChosenArgs) -> dict[str, Any]:
    names = ("n", "m", "heads", "groups", "owners", "tiles", "width")
    return {**{name: w.sizes()[name] for name in names}, "SIZE": w.lists.size, "D": w.query.shape[3], "DV": w.value.shape[3]}


def _descriptor(x: Tensor, dim: int) -> Any:
    """A descriptor of a matrix in blocks of so many columns, for one tile of keys."""
    block = [KEYS.value, dim]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[x.dtype]))

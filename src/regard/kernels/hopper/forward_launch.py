"""From a `KernelArgs` to the Hopper kernels: what they refuse, and their start."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...compat.triton import INTERPRETED
from ...core.rows import Rows
from ..arguments import BIAS_NONE, KernelArgs
from ..block_lists import BITS, MASK_BLOCK, BlockLists
from . import launch_cache
from .configs import ROWS, Tile, cdiv, chunks, config
from .descriptors import describable, described
from .forward import forward

__all__ = ["attend", "forward_arguments", "multiprocessors", "refuses", "room", "tile_for"]

_HALVES = (torch.float16, torch.bfloat16)
_WIDEST = 256
_HIGHEST = 512.0  # cap: the chip's tanh is right to 3e−7 of 1, so a capped logit to 3e−7 of the cap
_CACHED = 32 * 2**20  # bytes of keys and values that stay in the second-level cache


def refuses(w: KernelArgs) -> list[str]:
    """Why the kernel cannot do this work; empty if it can."""
    q, k, v = w.query, w.key, w.value
    reasons = []
    if INTERPRETED:
        reasons.append("Triton's interpreter has no Gluon")
    elif not q.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(q.device) != (9, 0):
        reasons.append("the tensors are not on a GPU of compute capability 9.0")
    if w.vector is not None:
        reasons.append("the additive score is no product of matrices")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _HALVES:
        reasons.append(f"it takes float16 or bfloat16 throughout; got {q.dtype}, {k.dtype} and {v.dtype}")
    if w.softcap is not None and w.softcap > _HIGHEST:
        reasons.append(f"caps are at most {_HIGHEST:g}; got {w.softcap:g}")
    if max(q.shape[3], v.shape[3]) > _WIDEST:
        reasons.append(f"dims are at most {_WIDEST}; got {q.shape[3]} and {v.shape[3]}")
    if not (q.numel() and k.numel() and v.numel()):
        reasons.append("there are no rows, no keys or no dims")
    else:
        reasons += [f"the copy engine cannot describe {name}: strides {tuple(x.stride())}" for name, x in (("query", q), ("key", k), ("value", v)) if not describable(x)]
    return reasons


def tile_for(w: KernelArgs) -> Tile:
    """The tile of a work: by its dims and by what is held beside the logits."""
    return config(max(w.query.shape[3], w.value.shape[3]), w.kind != BIAS_NONE or w.drop.keys is not None)


def attend(w: KernelArgs, entropy: bool, tile: Tile | None = None, section: int | None = None) -> Rows:
    """The forward pass."""
    L, H, N = w.rows
    output = w.value.new_empty(L, H, N, w.value.shape[3])
    lse, row_max, log_row_sum = (w.query.new_empty(L, H, N, dtype=torch.float32) for _ in range(3))
    found = Rows(output, lse, torch.empty_like(lse) if entropy else torch.zeros_like(lse), row_max, log_row_sum)
    tile = tile or tile_for(w)
    key = launch_cache.like(w, entropy, tile) if section is None else None
    call = launch_cache.remembered(key, w)
    if call is not None:
        call.start(w, found, _where(w, tile), _counter(w, tile))
        return found
    args, options = forward_arguments(w, found, entropy, tile, section)
    programs = cdiv(N, tile.BM) * L * H
    if tile.persistent:
        programs = min(programs, multiprocessors(w.query.device))
    compiled = forward[(programs,)](*args, **options)
    launch_cache.remember(key, w, compiled, programs, forward.arg_names, args, options)
    return found


def _where(w: KernelArgs, tile: Tile) -> BlockLists:
    """What the mask's layout says of the tile's blocks; waits for the stream that made it."""
    return w.block_mask.by_rows(tile.BM, tile.BN, tile.before(w.rows[2]))


def _counter(w: KernelArgs, tile: Tile) -> Tensor | None:
    """Where programs that take one block of rows after the other count them, and behind it, of each head, those that came again."""
    L, H, _ = w.rows
    return torch.zeros(1 + L * H, dtype=torch.int32, device=w.query.device) if tile.persistent else None


def forward_arguments(w: KernelArgs, found: Rows, entropy: bool, tile: Tile, section: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the kernel is called with."""
    if w.block_mask.kind == BITS and MASK_BLOCK % tile.BN:
        raise ValueError(f"blocks of bits have {MASK_BLOCK} keys; {tile.BN} do not divide them")
    (L, H, N), E = w.rows, w.value.shape[3]
    (DA, DB), (EA, EB) = chunks(w.query.shape[3]), chunks(E)
    stored = (DA, DB) == (EA, EB) and describable(found.output)  # by the copy engine
    out = described(found.output, ROWS, EA, EB) if stored else (None, None)
    blocks = cdiv(N, tile.BM)
    args = (
        *described(w.query, ROWS, DA, DB), *described(w.key, tile.BN, DA, DB), *described(w.value, tile.BN, EA, EB), *out,
        found.output, found.lse, found.max_logit, found.log_row_sum, found.entropy, found.output.stride()[:3], w.scale, w.scales, w.softcap or 0.0,
        w.sink, w.bias, _where(w, tile), w.drop, N, w.m, E, blocks, L * H, H, w.groups, section or room(w),
        _counter(w, tile),
    )  # fmt: skip
    kinds = {name: w.kinds[name] for name in ("MASK", "BIAS", "CAP", "SCALES")}
    options = {
        "DA": DA, "DB": DB, "EA": EA, "EB": EB, "BN": tile.BN, "STAGES": tile.stages, "GROUPS": tile.groups, "REGISTERS": tile.registers, **kinds,
        "FAST": w.fast, "ENTROPY": entropy, "DROP": w.drop.keys is not None, "SINK": w.sink is not None,
        "PERSISTENT": tile.persistent, "DESCRIBED": stored, "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    return args, options


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once; where there is no GPU, on an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def room(w: KernelArgs) -> int:
    """How many heads are worked on together: as many as have their keys and values in the cache."""
    size = w.m * (w.key.shape[3] + w.value.shape[3]) * w.key.element_size()
    return max(1, min(w.query.shape[0] * w.heads, _CACHED // size * w.groups))

"""Launch the Hopper forward for a `KernelArgs`: what it refuses, its tile, its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import cuda_allocator, is_current_device
from ...compat.triton import INTERPRETED
from ...core.rows import Rows
from .. import launch_cache
from ..arguments import BIAS_ALIBI, BIAS_NONE, KernelArgs
from ..block_lists import BITS, MASK_BLOCK, BlockLists
from ..block_mask import BlockMask
from .configs import ROWS, Tile, cdiv, chunks, config, value_chunks
from .descriptors import describable, descriptors
from .forward import forward

__all__ = ["block_lists", "forward_arguments", "heads_in_l2", "launch_forward", "launch_wide", "multiprocessors", "refuses", "refuses_wide", "tile_for"]

_HALVES = (torch.float16, torch.bfloat16)
_WIDEST = 256
_WIDEST_KEYS = 512  # of the forward, which takes values 256 columns at a time
_HIGHEST = 512.0  # cap: the chip's tanh is accurate to 3e−7, so a capped logit to 3e−7 of the cap
CHANGING = (
    "q", "qb", "k", "kb", "v", "vb", "o", "ob", "output", "lse", "row_max", "log_row_sum", "entropy", "scales", "sinks", "bias", "lists",
    "drop", "counters",
)  # fmt: skip
_L2_BYTES = 32 * 2**20  # of keys and values that stay in the L2 cache


def refuses(w: KernelArgs, widest: int = _WIDEST) -> list[str]:
    """Why the kernel cannot compute this problem; empty if it can."""
    q, k, v = w.query, w.key, w.value
    reasons = []
    if INTERPRETED:
        reasons.append("Triton's interpreter has no Gluon")
    elif not q.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(q.device) != (9, 0):
        reasons.append("the tensors are not on a GPU of compute capability 9.0")
    if w.vector is not None:
        reasons.append("the additive score is not a matrix product")
    if w.pointwise is not None:
        reasons.append("it calls no function of the scores")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _HALVES:
        reasons.append(f"it takes float16 or bfloat16 throughout; got {q.dtype}, {k.dtype} and {v.dtype}")
    if w.softcap is not None and w.softcap > _HIGHEST:
        reasons.append(f"caps are at most {_HIGHEST:g}; got {w.softcap:g}")
    if q.shape[3] > widest or v.shape[3] > _WIDEST:
        reasons.append(f"dims are at most {widest} and {_WIDEST}; got {q.shape[3]} and {v.shape[3]}")
    if not (q.numel() and k.numel() and v.numel()):
        reasons.append("there are no rows, no keys or no dims")
    else:
        reasons += [f"TMA cannot describe {name}: strides {tuple(x.stride())}" for name, x in (("query", q), ("key", k), ("value", v)) if not describable(x)]
    return reasons


def tile_for(w: KernelArgs) -> Tile:
    """The tile: by the dims, a bias or dropout, whether the mask is narrow, and whether the row max can be lazy."""
    bias_or_dropout = w.kind not in (BIAS_NONE, BIAS_ALIBI) or w.drop.keys is not None
    return config(w.query.shape[3], w.value.shape[3], bias_or_dropout, w.block_mask.narrow, w.fast)


def refuses_wide(w: KernelArgs) -> list[str]:
    """Why `launch_wide` cannot compute this problem; empty if it can."""
    if w.kind != BIAS_NONE or w.drop.keys is not None:
        return [f"with a bias or dropout, dims are at most {_WIDEST}"]
    return [reason for part in _parts(w) for reason in refuses(part, _WIDEST_KEYS)]


def launch_wide(w: KernelArgs, entropy: bool) -> Rows:
    """The forward pass for dims above 256: one launch for every 256 columns of the values. All find the same statistics."""
    found = w.new_rows(entropy)
    for part, output in zip(_parts(w), found.output.split(_WIDEST, dim=3), strict=True):
        launch_forward(part, entropy, found=found._replace(output=output))
    return found


def _parts(w: KernelArgs) -> list[KernelArgs]:
    """The problem for every 256 columns of the values."""
    return [replace(w, value=value, shortcuts=None) for value in w.value.split(_WIDEST, dim=3)]


def launch_forward(
    w: KernelArgs, entropy: bool, tile: Tile | None = None, swizzle: int | None = None, found: Rows | None = None
) -> Rows:
    """The forward pass."""
    found = w.new_rows(entropy) if found is None else found
    key = ("hopper forward", entropy, found.output.stride(), w.signature) if tile is None and swizzle is None else None
    launch = launch_cache.find(key)
    if launch is not None:
        q, k, v, output = w.query, w.key, w.value, found.output
        launch.again(
            q=q, qb=q, k=k, kb=k, v=v, vb=v, o=output, ob=output, output=output, lse=found.lse, row_max=found.max_logit,
            log_row_sum=found.log_row_sum, entropy=found.entropy, scales=w.scales, sinks=w.sink, bias=w.bias,
            lists=block_lists(w, launch.about), drop=w.drop, counters=_counters(w, launch.about),
        )  # fmt: skip
        return found
    tile = tile or tile_for(w)
    arguments, options = forward_arguments(w, found, entropy, tile, swizzle)
    L, H, N = w.rows
    programs = cdiv(N, tile.BM) * L * H
    if tile.persistent:
        programs = min(programs, multiprocessors(w.query.device))
    launch_cache.start(key, forward, programs, arguments, options, CHANGING, tile)
    if w.shortcuts is not None and (launch := launch_cache.find(key)) is not None:
        w.shortcuts.forward = _shortcut(w, entropy, launch)
    return found


def _shortcut(w: KernelArgs, entropy: bool, launch: launch_cache.Launch) -> Callable[..., Any] | None:
    """The forward pass from tensors to results, for calls whose sizes, strides and numbers are these; None where it has none."""
    shape, device, tile = w.query.shape[:3], w.query.device, launch.about
    if math.prod(shape) % 4:  # stacked statistics would not begin at multiples of 16 bytes
        return None
    count, step = 4 if entropy else 3, 4 * math.prod(shape)
    new_output, new_statistic = cuda_allocator((*shape, w.value.shape[3]), w.query.dtype), cuda_allocator(shape, torch.float32)
    new_statistics = cuda_allocator((count, *shape), torch.float32)
    kind, before, counters = w.block_mask.kind, tile.rows_before(w.n), 1 + shape[0] * shape[1]
    BM, BN, persistent = tile.BM, tile.BN, tile.persistent
    start = launch.bound(
        "q", "qb", "k", "kb", "v", "vb", "o", "ob", "output", "lse", "row_max", "log_row_sum", "entropy", "sinks", "lists", "counters",
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, block_mask: BlockMask, apart: bool) -> tuple[Tensor, Any] | None:
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | (0 if sink is None else sink.data_ptr())
        if addresses & 15 or block_mask.kind != kind or not is_current_device(device) or not (sink is None or sink.is_contiguous()):
            return None
        output = new_output()
        statistics: Any
        if apart:
            statistics = [new_statistic() for _ in range(count)]
            lse, row_max, log_row_sum, last = statistics[0], statistics[1], statistics[2], statistics[-1]
        else:
            statistics = new_statistics()
            lse = statistics.data_ptr()
            row_max, log_row_sum, last = lse + step, lse + 2 * step, lse + 3 * step
        start(
            q, q, k, k, v, v, output, output, output, lse, row_max, log_row_sum, last, sink, block_mask.for_launch(BM, BN, before),
            launch_cache.zeros(counters, device) if persistent else None,
        )  # fmt: skip
        return output, statistics

    return run


def block_lists(w: KernelArgs, tile: Tile) -> BlockLists:
    """The mask's block lists for a tile; waits for the stream that built them."""
    return w.block_mask.by_rows(tile.BM, tile.BN, tile.rows_before(w.rows[2]))


def _counters(w: KernelArgs, tile: Tile) -> Tensor | None:
    """The work counter of a persistent grid, followed by one retry counter per head."""
    L, H, _ = w.rows
    return launch_cache.zeros(1 + L * H, w.query.device) if tile.persistent else None


def forward_arguments(
    w: KernelArgs, found: Rows, entropy: bool, tile: Tile, swizzle: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments by name, and the options of its launch."""
    if w.block_mask.kind == BITS and MASK_BLOCK % tile.BN:
        raise ValueError(f"blocks of bits have {MASK_BLOCK} keys; {tile.BN} do not divide them")
    (L, H, N), E = w.rows, w.value.shape[3]
    (DA, DB), (EA, EB) = chunks(w.query.shape[3]), value_chunks(E)
    # The output leaves through the buffers of Q if it has their columns: those of both, or of the first alone.
    tma_store = (E <= DA + DB if E > DA else EA == DA) and describable(found.output)
    q, qb = descriptors(w.query, ROWS, DA, DB)
    k, kb = descriptors(w.key, tile.BN, DA, DB)
    v, vb = descriptors(w.value, tile.BN, EA, EB)
    o, ob = descriptors(found.output, ROWS, DA, DB if E > DA else 0) if tma_store else (None, None)
    arguments = {
        "q": q, "qb": qb, "k": k, "kb": kb, "v": v, "vb": vb, "o": o, "ob": ob, "output": found.output, "lse": found.lse,
        "row_max": found.max_logit, "log_row_sum": found.log_row_sum, "entropy": found.entropy,
        "strides": (0, 0, 0) if tma_store else found.output.stride()[:3], "scale": w.scale, "scales": w.scales, "cap": w.softcap or 0.0, "sinks": w.sink, "bias": w.bias,
        "lists": block_lists(w, tile), "drop": w.drop, "n": N, "M": w.m, "E": E, "row_blocks": cdiv(N, tile.BM), "batch_heads": L * H,
        "num_heads": H, "heads_per_kv": w.groups, "swizzle": swizzle or heads_in_l2(w), "counters": _counters(w, tile),
        "DA": DA, "DB": DB, "EA": EA, "EB": EB, "BN": tile.BN, "STAGES": tile.stages, "GROUPS": tile.groups, "REGISTERS": tile.registers,
        **{name: w.kinds[name] for name in ("MASK", "BIAS", "CAP", "SCALES")}, "FAST": w.fast, "ENTROPY": entropy,
        "DROP": w.drop.keys is not None, "SINK": w.sink is not None, "PERSISTENT": tile.persistent, "Q_BUFFERS": tile.q_buffers,
        "ONE_LOOP": w.softcap is not None and w.block_mask.narrow, "TMA_STORE": tma_store,
    }  # fmt: skip
    return arguments, {"num_warps": 4, "enable_fp_fusion": True, "sanitize_overflow": False}


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once; without a GPU, the number of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def heads_in_l2(w: KernelArgs, tensors: int = 2) -> int:
    """How many heads are scheduled together: as many as fit their keys and values into the L2 cache, or fewer in about equal shares.

    `tensors` is 4 if keys and values have tangents too.
    """
    size = w.m * (w.key.shape[3] + w.value.shape[3]) * w.key.element_size() * tensors // 2
    key_heads = w.query.shape[0] * w.heads // w.groups
    sections = cdiv(key_heads, max(1, _L2_BYTES // size))
    return cdiv(key_heads, sections) * w.groups

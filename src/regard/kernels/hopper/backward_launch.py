"""Launch the Hopper backward for a `KernelArgs`: what it refuses, its tile, its workspace, its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...compat.torch import cuda_allocator, is_current_device
from ...compat.triton import Address
from .. import launch_cache
from ..arguments import BIAS_RELATIVE, BIAS_TENSOR, NO_ENTROPY, PREPROCESS_ROWS, BackwardRows, KernelArgs
from ..block_lists import NONE
from ..block_mask import BlockMask
from ..portable.configs import padded
from ..portable.launch import preprocess_key
from . import forward_launch as forward
from .backward import backward
from .configs import ROWS, cdiv, chunks
from .descriptors import GLUON_DTYPES, describable, descriptors, matrix_descriptor, vector_descriptor
from .dq_order import dq_order, dq_order_for_launch
from .dq_sums import dq_postprocess
from .nonfinite import attended

__all__ = [
    "BackwardTile", "BackwardWorkspace", "backward_arguments", "kernel_for", "launch_backward", "postprocess_dq", "programs_for", "refuses", "seen_keys", "tile_for",
    "workspace_for",
]  # fmt: skip

CHANGING = (
    "q", "qb", "k", "kb", "v", "vb", "do", "dob", "lse", "delta", "g_entropy", "dq_sums", "dq_sums_b", "dk_desc", "dkb_desc", "dv_desc", "dvb_desc",
    "dk", "dv", "scales", "bias", "lists", "dq_order", "drop", "empty", "seen", "semaphores",
)  # fmt: skip
_LEAST, _SHARE = 8, 8  # under a mask, one in so many tiles of a head is under way at a time, and at least so many
_CHUNKS, _CHUNKS_192 = chunks(96), chunks(192)
_NARROW = 128  # dims up to which a group holds dK and dV of its keys


# Measured on an H200; docs/kernels/hopper_backward.md has the figures, and those of what was tried.
class BackwardTile(NamedTuple):
    """Rows per block, blocks in flight, registers per thread of the two consumer groups."""

    BM: int = PREPROCESS_ROWS
    stages: int = 2
    registers: int = 240
    dq_group: bool = False  # whether a third group computes dQ
    chunked: bool = False  # whether dims, at most 96, are two chunks, of 64 and 32 columns; with a third group only
    wide: bool = False  # whether both groups work on the same keys: one computes P, the other dS
    d192: bool = False  # whether keys have 129 to 192 dims, in two chunks of 128 and 64 columns, and values 65 to 128

    @property
    def BN(self) -> int:
        return ROWS if self.wide else 2 * ROWS

    @property
    def parts(self) -> int:
        """Parts of dQ's columns that are added to memory one by one."""
        return 4 if self.wide else 1 if self.dq_group else 2

    def widths(self, w: KernelArgs) -> tuple[int, int]:
        """The padded dims of queries and keys, and of values, the columns of a second chunk included."""
        if self.chunked:
            return sum(_CHUNKS), sum(_CHUNKS)
        if self.d192:
            return sum(_CHUNKS_192), _CHUNKS_192[0]
        D, E = (64 if dim <= 64 else 128 if dim <= 128 else 256 for dim in (w.query.shape[3], w.value.shape[3]))
        return (256, E) if self.wide else (D, E)

    @property
    def second_chunk(self) -> int:
        """The columns of a second chunk; 0 if one is enough."""
        return _CHUNKS[1] if self.chunked else _CHUNKS_192[1] if self.d192 else 0


DQ_GROUP = BackwardTile(registers=208, dq_group=True, stages=4)
CHUNKED = DQ_GROUP._replace(chunked=True, stages=2)
D192 = BackwardTile(d192=True)


class BackwardWorkspace(NamedTuple):
    """The tensors that the kernel writes."""

    dk: Tensor
    dv: Tensor
    dq_sums: Tensor  # float32 (row blocks · parts · twice the columns of a part, 32): dQ, unscaled, in the order of registers
    semaphores: Tensor  # int32 (row blocks + 1,): how many key blocks have added; then how many tiles were taken


def refuses(w: KernelArgs, s: BackwardRows) -> list[str]:
    """Why the kernel cannot compute these gradients; empty if it can."""
    reasons = forward.refuses(w)
    if w.kind in (BIAS_TENSOR, BIAS_RELATIVE) and w.bias.at is not None and w.bias.at.dtype not in GLUON_DTYPES:
        reasons.append(f"a bias has float32, float16 or bfloat16 numbers; got {w.bias.at.dtype}")
    if w.kind == BIAS_TENSOR and max(w.bias.row, w.bias.key, (w.n - 1) * w.bias.row + (w.m - 1) * w.bias.key) >= 2**31:
        reasons.append(f"the numbers of a bias are counted in 31 bits; got strides of {w.bias.row} and {w.bias.key}")
    if s.dO.dtype != w.query.dtype or not describable(s.dO):
        reasons.append(f"TMA cannot describe the output's gradient: {s.dO.dtype}, strides {tuple(s.dO.stride())}")
    if w.query.shape[0] * w.heads * max(tile_for(w).widths(w)[0] // 32 * (w.n + 127), w.m + 15) >= 2**31:
        reasons.append(f"rows and keys are counted in 31 bits; got {tuple(w.query.shape[:3])}, and {w.m} keys")
    return reasons


def tile_for(w: KernelArgs) -> BackwardTile:
    """The tile for these dims.

    Up to 64 dims, or with both from 65 to 96, there are registers for a third group. Above 128 a group cannot hold both dK and dV, except
    with keys of up to 192 dims and values of 65 to 128, if there is no dropout and no tensor of scales.
    """
    smaller, dim = sorted((w.query.shape[3], w.value.shape[3]))
    if smaller > _CHUNKS[0] and dim <= sum(_CHUNKS):
        return CHUNKED
    between = _CHUNKS_192[0] // 2 < w.value.shape[3] <= _CHUNKS_192[0] < w.query.shape[3] <= sum(_CHUNKS_192)
    if between and w.scales is None and w.drop.keys is None:
        return D192
    return DQ_GROUP if dim <= 64 else BackwardTile(wide=dim > _NARROW)


def launch_backward(w: KernelArgs, s: BackwardRows, tile: BackwardTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (in float32 and not yet scaled where there is a tensor of scales), dK and dV."""
    key = None if tile is not None else ("hopper backward", w.signature, s.dO.stride(), s.dO.data_ptr() & 15, s.g_entropy is None)
    launch = launch_cache.find(key)
    tile = tile or (tile_for(w) if launch is None else launch.about)
    workspace = workspace_for(w, tile)
    seen = seen_keys(w, tile.BM, tile.BN) if w.kind in (BIAS_TENSOR, BIAS_RELATIVE) else None
    if launch is None:
        arguments, options = backward_arguments(w, s, workspace, tile, seen)
        launch_cache.start(key, kernel_for(tile), programs_for(w, tile), arguments, options, CHANGING, tile)
    else:
        lse, delta, g_entropy = _padded_row_stats(w, s, tile)
        dk, dv = workspace.dk, workspace.dv
        launch.again(
            q=w.query, qb=w.query, k=w.key, kb=w.key, v=w.value, vb=w.value, do=s.dO, dob=s.dO, lse=lse, delta=delta, g_entropy=g_entropy,
            dq_sums=workspace.dq_sums, dq_sums_b=workspace.dq_sums, dk_desc=dk, dkb_desc=dk, dv_desc=dv, dvb_desc=dv, dk=dk, dv=dv, scales=w.scales, bias=w.bias, lists=w.block_mask.by_keys(tile.BM, tile.BN),
            dq_order=dq_order(w.block_mask, tile.BM, tile.BN), drop=w.drop, empty=s.empty, seen=seen, semaphores=workspace.semaphores,
        )  # fmt: skip
    dq = postprocess_dq(w, workspace, tile)
    if w.shortcuts is not None and w.shortcuts.backward is None and s.g_entropy is None and not w.n % tile.BM:
        w.shortcuts.backward = _shortcut(w, s, key, tile)
    return dq, workspace.dk, workspace.dv


def _shortcut(w: KernelArgs, s: BackwardRows, key: Hashable, tile: BackwardTile) -> Callable[..., tuple[Tensor, Tensor, Tensor] | None] | None:
    """The backward pass from tensors to gradients, for calls whose sizes, strides and numbers are these."""
    do_strides, strides = s.dO.stride(), (w.query.stride(), w.key.stride(), w.value.stride())
    preprocess = launch_cache.find(preprocess_key(w, s.dO, w.value.new_empty(*w.rows, w.value.shape[3]), None))
    main, postprocess = launch_cache.find(key), launch_cache.find(("dq postprocess", tile, w.signature))
    if s.dO.data_ptr() & 15 or preprocess is None or main is None or postprocess is None:
        return None
    device, dtype, kind = w.query.device, w.query.dtype, w.block_mask.kind
    (L, H, N), D = w.rows, w.query.shape[3]
    blocks = L * H * cdiv(N, tile.BM)
    new_dq, new_dk, new_dv = (cuda_allocator(size, dtype) for size in ((L, H, N, D), w.key.shape, w.value.shape))
    BM, BN, counters = tile.BM, tile.BN, blocks + 1
    numbers = blocks * BM * tile.widths(w)[0]  # of the sums
    statistic = 4 * L * H * N  # bytes: N is a multiple of BM, so δ, lse and the sums are aligned
    new_scratch = cuda_allocator((numbers + blocks + 2 * L * H * N,), torch.float32)  # of all four
    start_preprocess = preprocess.bound("do", "out", "delta", "lse", "empty")
    start_main = main.bound(
        "q", "qb", "k", "kb", "v", "vb", "do", "dob", "lse", "delta", "dq_sums", "dq_sums_b", "dk_desc", "dkb_desc", "dv_desc", "dvb_desc", "dk", "dv",
        "lists", "dq_order", "empty", "semaphores",
    )  # fmt: skip
    start_postprocess = postprocess.bound("dq_sums", "semaphores", "dq")

    def run(
        q: Tensor, k: Tensor, v: Tensor, output: Tensor, row_max: Tensor | Address, log_row_sum: Tensor | Address, dO: Tensor | None,
        block_mask: BlockMask,
    ) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
        if dO is None or dO.stride() != do_strides or dO.dtype != dtype or (q.stride(), k.stride(), v.stride()) != strides:
            return None
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | dO.data_ptr() | output.data_ptr() | row_max.data_ptr() | log_row_sum.data_ptr()
        if addresses & 15 or not output.is_contiguous() or block_mask.kind != kind or not is_current_device(device):
            return None
        scratch = new_scratch()
        delta = scratch.data_ptr()
        lse, sums = delta + statistic, delta + 2 * statistic
        empty = sums + 4 * numbers
        start_preprocess(dO, (output, lse, NO_ENTROPY, row_max, log_row_sum), delta, lse, empty)
        dk, dv, dq = new_dk(), new_dv(), new_dq()
        semaphores = launch_cache.zeros(counters, device)
        start_main(
            q, q, k, k, v, v, dO, dO, lse, delta, sums, sums, dk, dk, dv, dv, dk, dv, block_mask.for_launch(BM, BN, None),
            dq_order_for_launch(block_mask, BM, BN), empty, semaphores,
        )  # fmt: skip
        start_postprocess(sums, semaphores, dq)
        return dq, dk, dv

    return run


def kernel_for(tile: BackwardTile) -> Any:
    """The kernel for a tile; those that few calls need are imported for these."""
    if tile.d192:
        from .backward_192 import backward as backward_192

        return backward_192
    if tile.wide:
        from .backward_wide import backward as backward_wide

        return backward_wide
    return backward


def programs_for(w: KernelArgs, tile: BackwardTile) -> int:
    """As many as run at once, each of which takes one key block after another; above 128 dims one per key block."""
    L, K, M, _ = w.key.shape
    programs = cdiv(M, tile.BN) * L * K
    return programs if tile.wide or tile.d192 else min(programs, forward.multiprocessors(w.query.device))


def workspace_for(w: KernelArgs, tile: BackwardTile) -> BackwardWorkspace:
    L, H, N = w.rows
    row_blocks = L * H * cdiv(N, tile.BM)
    sums = w.query.new_empty(row_blocks * 2 * tile.widths(w)[0], 32, dtype=torch.float32)
    semaphores = launch_cache.zeros(row_blocks + 1, w.query.device)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (w.key, w.value))
    return BackwardWorkspace(dk, dv, sums, semaphores)


def backward_arguments(
    w: KernelArgs, s: BackwardRows, workspace: BackwardWorkspace, tile: BackwardTile, seen: Tensor | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments by name, and the options of its launch; `seen` (L, H, M) where a bias may hide keys."""
    (L, H, N), D, E = w.rows, w.query.shape[3], w.value.shape[3]
    DB = tile.second_chunk
    EB = DB if tile.chunked else 0
    DA, EA = tile.widths(w)[0] - DB, tile.widths(w)[1] - EB
    BM, BN = tile.BM, tile.BN
    padded_n = -(-N // BM) * BM
    dk, dv = workspace.dk, workspace.dv
    tma_store = describable(dk) and describable(dv)
    (q, qb), (k, kb), (v, vb), (do, dob) = (descriptors(x, rows, *widths) for x, rows, *widths in (
        (w.query, BM, DA, DB), (w.key, ROWS, DA, DB), (w.value, ROWS, EA, EB), (s.dO, BM, EA, EB)))
    (dk_desc, dkb_desc), (dv_desc, dvb_desc) = (
        descriptors(x, ROWS, *widths) if tma_store else (None, None) for x, *widths in ((dk, DA, DB), (dv, EA, EB)))
    lse, delta, g_entropy = (vector_descriptor(x, BM) for x in _padded_row_stats(w, s, tile))
    arguments = {
        "q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta, "g_entropy": g_entropy,
        "dq_sums": matrix_descriptor(workspace.dq_sums, 2 * DA // tile.parts),
        "dk_desc": dk_desc, "dv_desc": dv_desc, "dk": dk, "dv": dv, "dk_strides": (0, 0, 0) if tma_store and not tile.d192 else dk.stride()[:3], "dv_strides": (0, 0, 0) if tma_store else dv.stride()[:3],
        "scale": w.scale, "scales": w.scales, "cap": w.softcap or 0.0, "bias": w.bias, "lists": w.block_mask.by_keys(BM, BN),
        "dq_order": dq_order(w.block_mask, BM, BN), "drop": w.drop, "empty": s.empty, "seen": seen, "semaphores": workspace.semaphores,
        "n": N, "M": w.m, "D": D, "E": E, "padded_n": padded_n, "key_blocks": cdiv(w.m, BN), "batch_kv_heads": L * H // w.groups,
        "num_heads": H, "heads_per_kv": w.groups, "swizzle": _swizzle(w, tile),
        "DA": DA, "EA": EA, "BM": BM, "STAGES": tile.stages, "REGISTERS": tile.registers,
        **({} if tile.wide else {
            "qb": qb, "kb": kb, "dq_sums_b": matrix_descriptor(workspace.dq_sums, 2 * DB // tile.parts) if DB else None, "DB": DB,
        }),
        **({} if tile.wide or tile.d192 else {"vb": vb, "dob": dob, "dkb_desc": dkb_desc, "dvb_desc": dvb_desc, "DQ_GROUP": tile.dq_group}),
        **{name: w.kinds[name] for name in ("MASK", "BIAS", "CAP", "SCALES")}, "FAST": w.fast, "ENTROPY": s.g_entropy is not None,
        "DROP": w.drop.keys is not None, "TMA_STORE": tma_store,
    }  # fmt: skip
    return arguments, {"num_warps": 4, "enable_fp_fusion": True, "sanitize_overflow": False}


def seen_keys(w: KernelArgs, BM: int, BN: int) -> Tensor:
    """int8 (L, H, M): 0 for keys with NaN or inf that the mask and the bias together hide from every row."""
    L, H, _ = w.rows
    D = w.key.shape[3]
    seen = w.key.new_empty(L, H, w.m, dtype=torch.int8)
    arguments = {
        "k": w.key, "strides": w.key.stride(), "seen": seen, "bias": w.bias, "lists": w.block_mask.by_keys(BM, BN), "n": w.n, "M": w.m, "num_heads": H,
        "heads_per_kv": w.groups, "D": D, "DP": padded(D), "BM": BM, "BN": BN, "MASK": w.kinds["MASK"], "BIAS": w.kinds["BIAS"],
    }  # fmt: skip
    launch_cache.start(None, attended, cdiv(w.m, BN) * L * H, arguments, {"num_warps": 4, "enable_fp_fusion": True}, ())
    return seen


def postprocess_dq(w: KernelArgs, workspace: BackwardWorkspace, tile: BackwardTile) -> Tensor:
    """dQ from its sums: scaled and rounded, once."""
    (L, H, N), D = w.rows, w.query.shape[3]
    unscaled = w.scales is not None
    dq = w.query.new_empty(L, H, N, D, dtype=torch.float32 if unscaled else w.query.dtype)
    tensors = {"dq_sums": workspace.dq_sums, "semaphores": workspace.semaphores, "dq": dq}
    key = ("dq postprocess", tile, w.signature)
    launch = launch_cache.find(key)
    if launch is not None:
        launch.again(**tensors)
        return dq
    arguments = {
        **tensors, "scale": 1.0 if unscaled else w.scale, "n": N, "D": D,
        "BM": tile.BM, "PARTS": tile.parts, "C": (tile.widths(w)[0] - tile.second_chunk) // tile.parts, "CB": tile.second_chunk // tile.parts,
    }  # fmt: skip
    launch_cache.start(key, dq_postprocess, cdiv(N, tile.BM) * L * H, arguments, {"num_warps": 4, "enable_fp_fusion": True}, tensors)
    return dq


def _swizzle(w: KernelArgs, tile: BackwardTile) -> int:
    """How many key heads are scheduled together: as many as have tiles for all multiprocessors, or fewer in equal shares.

    Under a mask a few tiles per head run at a time, so that the longest ones of many heads come first.
    """
    blocks, heads = cdiv(w.m, tile.BN), w.key.shape[0] * w.key.shape[1]
    tiles = blocks if w.block_mask.kind == NONE else min(blocks, max(_LEAST, blocks // _SHARE))
    most = min(heads, cdiv(forward.multiprocessors(w.query.device), tiles))
    return min(range(most // 2 + 1, most + 1), key=lambda x: (-heads % x, -x))  # so that the last ones are not left alone


def _row_stats(s: BackwardRows) -> tuple[Tensor, Tensor, Tensor | None]:
    """lse, δ, and g_H per unit of the exponent: dS = P ∘ (dP − (δ − g_H·mean) − g_H·(S − lse))."""
    if s.g_entropy is None or s.mean is None:
        return s.row_max, s.delta, None
    return s.row_max, s.delta - s.g_entropy * s.mean, s.g_entropy * math.log(2)


def _padded_row_stats(w: KernelArgs, s: BackwardRows, tile: BackwardTile) -> list[Tensor | None]:
    """These numbers for whole blocks of rows."""
    more = -w.n % tile.BM
    stats = zip(_row_stats(s), (torch.inf, 0.0, 0.0), strict=True)
    return [pad(x, (0, more), value=beyond) if more and x is not None else x for x, beyond in stats]

"""From a `KernelArgs` to the Hopper backward: what it refuses, its memory, and its start."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import BIAS_RELATIVE, BIAS_TENSOR, BackwardRows, KernelArgs
from ..portable.configs import padded
from . import backward_wide
from . import forward_launch as forward
from .backward import backward, finish
from .configs import ROWS, cdiv
from .descriptors import KINDS, describable, described, in_a_row, of_matrix
from .dq_order import dq_order
from .nonfinite import attended

__all__ = ["Blocks", "backward_arguments", "blocks_for", "kernel_for", "memory_for", "refuses", "seen_keys", "slopes"]

_NARROW = 128  # dims up to which a group holds dK and dV of its keys


# Measured on an H200, bf16, n 16,384, TFLOP/s, full and causal: d128 522 and 498; d64, held, 431 and 447; d256, wide, 415 and 374
# (bench/results/gpu_backward.md). Before masks were read by keys, d64 held 434 and 419, from shared memory 398 and 382.
class Blocks(NamedTuple):
    """Rows of a block, blocks in flight, registers a thread of the two warp groups."""

    BM: int = 64
    stages: int = 2
    registers: int = 240
    held: bool = False  # whether a group has its keys and values in registers
    wide: bool = False  # whether both groups work for the same keys: one weighs, one slopes
    section: int = 0  # key heads that are worked on together; 0: as many as fill the chip

    @property
    def BN(self) -> int:
        return ROWS if self.wide else 2 * ROWS

    @property
    def parts(self) -> int:
        """Parts of dQ's columns that are added to memory one by one."""
        return 4 if self.wide else 2

    @property
    def counters(self) -> int:
        """Of a block of rows: halves of dQ that take turns each on its own."""
        return 2 if self.wide else 1

    def widths(self, w: KernelArgs) -> tuple[int, int]:
        """The dims of queries and keys, and of values, as the kernel has them."""
        D, E = (64 if dim <= 64 else 128 if dim <= 128 else 256 for dim in (w.query.shape[3], w.value.shape[3]))
        return (256, E) if self.wide else (D, E)


class Memory(NamedTuple):
    """What the kernel writes."""

    dk: Tensor
    dv: Tensor
    sums: Tensor  # float32 (blocks of rows · parts · BM, columns of a part): dQ, unscaled
    counters: Tensor  # int32 (blocks of rows · counters,): how many blocks of keys have added


def refuses(w: KernelArgs, s: BackwardRows) -> list[str]:
    """Why the kernel cannot do this work; empty if it can."""
    reasons = forward.refuses(w)
    if w.kind in (BIAS_TENSOR, BIAS_RELATIVE) and w.bias.at is not None and w.bias.at.dtype not in KINDS:
        reasons.append(f"a bias has float32, float16 or bfloat16 numbers; got {w.bias.at.dtype}")
    if w.kind == BIAS_TENSOR and max(w.bias.row, w.bias.key, (w.n - 1) * w.bias.row + (w.m - 1) * w.bias.key) >= 2**31:
        reasons.append(f"the numbers of a bias are counted in 31 bits; got strides of {w.bias.row} and {w.bias.key}")
    if s.dO.dtype != w.query.dtype or not describable(s.dO):
        reasons.append(f"the copy engine cannot describe the output's gradient: {s.dO.dtype}, strides {tuple(s.dO.stride())}")
    if w.query.shape[0] * w.heads * max(blocks_for(w).parts * (w.n + 127), w.m + 15) >= 2**31:
        reasons.append(f"rows and keys are counted in 31 bits; got {tuple(w.query.shape[:3])}, and {w.m} keys")
    return reasons


def blocks_for(w: KernelArgs) -> Blocks:
    """By the larger dim: up to 64, a group has registers enough for its keys and values; above 128, not for dK and dV together."""
    dim = max(w.query.shape[3], w.value.shape[3])
    return Blocks(held=dim <= 64, wide=dim > _NARROW)


def slopes(w: KernelArgs, s: BackwardRows, blocks: Blocks | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (in float32 and not yet scaled where there is a tensor of scales), dK and dV."""
    blocks = blocks or blocks_for(w)
    memory = memory_for(w, blocks)
    seen = seen_keys(w, blocks.BM, blocks.BN) if w.kind in (BIAS_TENSOR, BIAS_RELATIVE) else None
    args, options = backward_arguments(w, s, memory, blocks, seen)
    L, K, M, _ = w.key.shape
    kernel_for(blocks)[(cdiv(M, blocks.BN) * L * K,)](*args, **options)
    return finished(w, memory, blocks), memory.dk, memory.dv


def kernel_for(blocks: Blocks) -> Any:
    return backward_wide.backward if blocks.wide else backward


def memory_for(w: KernelArgs, blocks: Blocks) -> Memory:
    L, H, N = w.rows
    rows = L * H * cdiv(N, blocks.BM)
    sums = w.query.new_empty(rows * blocks.parts * blocks.BM, blocks.widths(w)[0] // blocks.parts, dtype=torch.float32)
    counters = torch.zeros(rows * blocks.counters, dtype=torch.int32, device=w.query.device)
    return Memory(torch.empty_like(w.key, memory_format=torch.contiguous_format), torch.empty_like(w.value, memory_format=torch.contiguous_format), sums, counters)


def backward_arguments(
    w: KernelArgs, s: BackwardRows, memory: Memory, blocks: Blocks, seen: Tensor | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the kernel is called with; `seen`, where a bias may hide keys."""
    (L, H, N), D, E = w.rows, w.query.shape[3], w.value.shape[3]
    DA, EA = blocks.widths(w)
    BM, BN = blocks.BM, blocks.BN
    NP = -(-N // BM) * BM
    entropy = s.g_entropy is not None
    stored = (blocks.wide or DA == EA) and describable(memory.dk) and describable(memory.dv)  # by the copy engine
    where = w.block_mask.by_keys(BM, BN)
    q, k, v, do = (described(x, rows, width)[0] for x, rows, width in (
        (w.query, BM, DA), (w.key, ROWS, DA), (w.value, ROWS, EA), (s.dO, BM, EA)))
    facts = [in_a_row(_rows(x, NP, beyond), BM) for x, beyond in zip(_facts(s), (torch.inf, 0.0, 0.0), strict=True)]
    out = [described(x, ROWS, width)[0] if stored else None for x, width in ((memory.dk, DA), (memory.dv, EA))]
    args = (
        q, k, v, do, *facts, of_matrix(memory.sums, BM), *out, memory.dk, memory.dv, (memory.dk.stride()[:3], memory.dv.stride()[:3]),
        w.scale, w.scales, w.softcap or 0.0, w.bias, where, dq_order(w.block_mask, BM, BN), w.drop, seen, memory.counters, N, w.m, D, E, NP,
        cdiv(w.m, BN), L * H // w.groups, H, w.groups, _section(w, blocks),
    )  # fmt: skip
    options = {
        "DA": DA, "EA": EA, "BM": BM, "STAGES": blocks.stages, "REGISTERS": blocks.registers, **({} if blocks.wide else {"HELD": blocks.held}),
        **{name: w.kinds[name] for name in ("MASK", "BIAS", "CAP", "SCALES")}, "FAST": w.fast, "ENTROPY": entropy,
        "DROP": w.drop.keys is not None, "DESCRIBED": stored, "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    return args, options


def seen_keys(w: KernelArgs, BM: int, BN: int) -> Tensor:
    """int8 (L, H, M): 0 for keys with NaN or inf that the mask and the bias together hide from every row."""
    L, H, _ = w.rows
    D = w.key.shape[3]
    seen = w.key.new_empty(L, H, w.m, dtype=torch.int8)
    attended[(cdiv(w.m, BN) * L * H,)](
        w.key, w.key.stride(), seen, w.bias, w.block_mask.by_keys(BM, BN), w.n, w.m, H, w.groups,
        D=D, DP=padded(D), BM=BM, BN=BN, MASK=w.kinds["MASK"], BIAS=w.kinds["BIAS"], num_warps=4,
    )  # fmt: skip
    return seen


def finished(w: KernelArgs, memory: Memory, blocks: Blocks) -> Tensor:
    """dQ from its sums."""
    (L, H, N), D = w.rows, w.query.shape[3]
    exact = w.scales is not None
    dq = w.query.new_empty(L, H, N, D, dtype=torch.float32 if exact else w.query.dtype)
    scale = 1.0 if exact else w.scale
    finish[(cdiv(N, blocks.BM) * L * H,)](
        memory.sums, memory.counters, dq, scale, N, D,
        BM=blocks.BM, PARTS=blocks.parts, C=memory.sums.shape[1], COUNTERS=blocks.counters, num_warps=4,
    )  # fmt: skip
    return dq


def _section(w: KernelArgs, blocks: Blocks) -> int:
    """How many key heads are worked on together: enough for a program on every multiprocessor."""
    owners = w.key.shape[0] * w.key.shape[1]
    return min(owners, blocks.section or cdiv(forward.multiprocessors(w.query.device), cdiv(w.m, blocks.BN)))


def _facts(s: BackwardRows) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row its level, δ, and g_H by the units of the exponent: dS = P ∘ (dP − (δ − g_H·mean) − g_H·(S − level))."""
    if s.g_entropy is None or s.mean is None:
        return s.row_max, s.delta, None
    return s.row_max, s.delta - s.g_entropy * s.mean, s.g_entropy * math.log(2)


def _rows(x: Tensor | None, rows: int, beyond: float = 0.0) -> Tensor | None:
    """A number for each of so many rows; those beyond the last have `beyond`."""
    return x if x is None or x.shape[-1] == rows else pad(x, (0, rows - x.shape[-1]), value=beyond)

"""From a `Work` to the Hopper backward: what it refuses, its memory, and its start."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..parts import RELATIVE, TENSOR
from ..turns import turns
from ..work import Slopes, Work
from . import launch as forward
from .backward import backward, finish
from .configs import ROWS, cdiv
from .describe import describable, described, in_a_row, of_matrix

__all__ = ["Blocks", "backward_arguments", "blocks_for", "memory_for", "refuses", "slopes"]

_WIDEST = 128


# Measured on an H200, bf16, n 16,384, TFLOP/s, full and causal: d128 523 and 503; d64, held, 425 and 452
# (bench/results/gpu_backward.md). Before masks were read by keys, d64 held 434 and 419, from shared memory 398 and 382.
class Blocks(NamedTuple):
    """Rows of a block, warp groups (each with 64 keys), blocks in flight, registers a thread."""

    BM: int = 64
    groups: int = 2
    stages: int = 2
    registers: int = 240
    held: bool = False  # whether a group has its keys and values in registers
    section: int = 0  # key heads that are worked on together; 0: as many as fill the chip

    @property
    def BN(self) -> int:
        return ROWS * self.groups


class Memory(NamedTuple):
    """What the kernel writes."""

    dk: Tensor
    dv: Tensor
    sums: Tensor  # float32 (blocks of rows · groups · BM, columns): dQ, unscaled
    counters: Tensor  # int32 (blocks of rows,): how many blocks of keys have added


def refuses(w: Work, s: Slopes) -> list[str]:
    """Why the kernel cannot do this work; empty if it can."""
    reasons = forward.refuses(w)
    if max(w.query.shape[3], w.value.shape[3]) > _WIDEST:
        reasons.append(f"dims are at most {_WIDEST}; got {w.query.shape[3]} and {w.value.shape[3]}")
    if w.drop.keys is not None and max(w.query.shape[3], w.value.shape[3]) > 64:
        reasons.append("with dropout and dims above 64 the portable kernels are faster")
    if w.kind in (TENSOR, RELATIVE):
        reasons.append("a bias may hide keys from single blocks of rows, and all blocks share one copy of the keys")
    if s.dO.dtype != w.query.dtype or not describable(s.dO):
        reasons.append(f"the copy engine cannot describe the output's gradient: {s.dO.dtype}, strides {tuple(s.dO.stride())}")
    if w.query.shape[0] * w.heads * max(2 * (w.n + 127), w.m + 15) >= 2**31:
        reasons.append(f"rows and keys are counted in 31 bits; got {tuple(w.query.shape[:3])}, and {w.m} keys")
    return reasons


def blocks_for(w: Work) -> Blocks:
    """By the dims: up to 64, a group has registers enough for its keys and values."""
    return Blocks(held=max(w.query.shape[3], w.value.shape[3]) <= 64)


def slopes(w: Work, s: Slopes, blocks: Blocks | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (in float32 and not yet scaled where there is a tensor of scales), dK and dV."""
    blocks = blocks or blocks_for(w)
    memory = memory_for(w, blocks)
    args, options = backward_arguments(w, s, memory, blocks)
    L, K, M, _ = w.key.shape
    backward[(cdiv(M, blocks.BN) * L * K,)](*args, **options)
    return finished(w, memory, blocks), memory.dk, memory.dv


def memory_for(w: Work, blocks: Blocks) -> Memory:
    L, H, N = w.rows
    rows = L * H * cdiv(N, blocks.BM)
    DA = _padded(w.query.shape[3])
    sums = w.query.new_empty(rows * blocks.BM * blocks.groups, DA // blocks.groups, dtype=torch.float32)
    counters = torch.zeros(rows, dtype=torch.int32, device=w.query.device)
    return Memory(torch.empty_like(w.key, memory_format=torch.contiguous_format), torch.empty_like(w.value, memory_format=torch.contiguous_format), sums, counters)


def backward_arguments(w: Work, s: Slopes, memory: Memory, blocks: Blocks) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the kernel is called with."""
    (L, H, N), D, E = w.rows, w.query.shape[3], w.value.shape[3]
    DA, EA = _padded(D), _padded(E)
    BM, BN = blocks.BM, blocks.BN
    NP = -(-N // BM) * BM
    entropy = s.g_entropy is not None
    stored = DA == EA and describable(memory.dk) and describable(memory.dv)  # by the copy engine
    where = w.layout.by_keys(BM, BN)
    q, k, v, do = (described(x, rows, width)[0] for x, rows, width in (
        (w.query, BM, DA), (w.key, ROWS, DA), (w.value, ROWS, EA), (s.dO, BM, EA)))
    facts = [in_a_row(_rows(x, NP, beyond), BM) for x, beyond in zip(_facts(s), (torch.inf, 0.0, 0.0), strict=True)]
    out = [described(x, ROWS, DA)[0] if stored else None for x in (memory.dk, memory.dv)]
    args = (
        q, k, v, do, *facts, of_matrix(memory.sums, BM), *out, memory.dk, memory.dv, (memory.dk.stride()[:3], memory.dv.stride()[:3]),
        w.scale, w.scales, w.softcap or 0.0, w.bias, where, turns(w.layout, BM, BN), w.drop, memory.counters, N, w.m, D, E, NP,
        cdiv(w.m, BN), L * H // w.groups, H, w.groups, _section(w, blocks),
    )  # fmt: skip
    options = {
        "DA": DA, "EA": EA, "BM": BM, "GROUPS": blocks.groups, "STAGES": blocks.stages, "REGISTERS": blocks.registers, "HELD": blocks.held,
        **{name: w.kinds[name] for name in ("MASK", "BIAS", "CAP", "SCALES")}, "FAST": w.fast, "ENTROPY": entropy,
        "DROP": w.drop.keys is not None, "DESCRIBED": stored, "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    return args, options


def finished(w: Work, memory: Memory, blocks: Blocks) -> Tensor:
    """dQ from its sums."""
    (L, H, N), D = w.rows, w.query.shape[3]
    exact = w.scales is not None
    dq = w.query.new_empty(L, H, N, D, dtype=torch.float32 if exact else w.query.dtype)
    scale = 1.0 if exact else w.scale
    finish[(cdiv(N, blocks.BM), L * H)](
        memory.sums, memory.counters, dq, scale, N, D, BM=blocks.BM, GROUPS=blocks.groups, C=memory.sums.shape[1], num_warps=4
    )
    return dq


def _section(w: Work, blocks: Blocks) -> int:
    """How many key heads are worked on together: enough for a program on every multiprocessor."""
    owners = w.key.shape[0] * w.key.shape[1]
    return min(owners, blocks.section or cdiv(forward.multiprocessors(w.query.device), cdiv(w.m, blocks.BN)))


def _padded(dim: int) -> int:
    return 64 if dim <= 64 else 128


def _facts(s: Slopes) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row its level, δ, and g_H by the units of the exponent: dS = P ∘ (dP − (δ − g_H·mean) − g_H·(S − level))."""
    if s.g_entropy is None or s.mean is None:
        return s.peak, s.delta, None
    return s.peak, s.delta - s.g_entropy * s.mean, s.g_entropy * math.log(2)


def _rows(x: Tensor | None, padded: int, beyond: float = 0.0) -> Tensor | None:
    """A number a row, up to `padded` rows; those beyond the last have `beyond`."""
    return x if x is None or x.shape[-1] == padded else pad(x, (0, padded - x.shape[-1]), value=beyond)

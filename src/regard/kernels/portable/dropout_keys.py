"""The 64 bits of each row from which dropout makes its choice, by one kernel: `row_keys` of `core.dropout`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch_cache
from .tile_ops import PACK, program_tile

__all__ = ["Origin", "dropout_keys"]


class Origin(NamedTuple):
    """Where the first row and key are counted from, and how many items of a batch in a row are the same to dropout."""

    item: int
    head: int
    row: int
    key: int
    copies: int


@triton.jit
def mixed(counter, key):
    """The finaliser of splitmix64, of a counter and a key."""
    x = counter.to(tl.uint64) * 0x9E3779B97F4A7C15 + key
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["origin", "heads", "n"])
def write_keys(out, seed, origin, heads, n):
    """The keys of PACK rows: program (block of rows, batch item and head)."""
    block, owner = program_tile(tl.cdiv(n, PACK))
    i = block * PACK + tl.arange(0, PACK)
    key = mixed(owner // heads // origin.copies + origin.item + 1, tl.load(seed).to(tl.uint64))
    key = mixed(owner % heads + origin.head + 1, key)
    key = mixed(i + origin.row + 1, key)
    low = key.to(tl.uint32) + tl.cast(origin.key, tl.uint32) * 0x9E3779B1  # as if keys were counted from there
    key = (key >> 32 << 32) | low.to(tl.uint64)
    tl.store(out + owner.to(tl.int64) * n + i, key.to(tl.int64, bitcast=True), mask=i < n)


def dropout_keys(seed: int | Tensor, shape: tuple[int, int, int], origin: Origin, device: torch.device) -> Tensor:
    """The keys of all rows, int64 (L, H, N)."""
    L, H, N = shape
    if not isinstance(seed, Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=device)
    out = torch.empty(shape, dtype=torch.int64, device=device)
    tensors = {"out": out, "seed": seed.detach()}
    launch = launch_cache.find(key := ("dropout keys", shape, origin, device, seed.data_ptr() & 15))
    if launch is not None:
        launch.again(**tensors)
    elif L * H * N:
        arguments = {**tensors, "origin": origin, "heads": H, "n": N}
        launch_cache.start(key, write_keys, triton.cdiv(N, PACK.value) * L * H, arguments, {}, tensors)
    return out

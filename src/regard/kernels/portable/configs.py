"""Block shapes by direction, dtype and dim: one small table per generation, with measurements in its comments."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = ["Config", "config", "hopper", "padded"]


class Config(NamedTuple):
    """BM rows, BN keys, warps, and stages of the pipeline."""

    BM: int
    BN: int
    warps: int
    stages: int


# (direction, bytes per number, padded dim) -> blocks. Measured on an H200: bf16, 16,384 tokens, hidden 2048, n 16,384
# unless stated; TFLOP/s for the forward pass, milliseconds for a backward kernel. float32 was chosen by registers alone.
_HOPPER: dict[tuple[str, int, int], Config] = {
    # two programs per multiprocessor: 546 and 514 with entropy, full; 128 × 128 with 8 warps 514 and 494
    ("plain forward", 2, 128): Config(128, 64, 4, 2),
    ("forward", 2, 64): Config(128, 64, 4, 3),  # full 430, causal 411; 128 × 128 with 8 warps 367 and 364
    ("forward", 2, 128): Config(128, 128, 8, 3),  # causal 500; 128 × 64 with 4 warps and 2 stages 492
    ("forward", 2, 256): Config(128, 64, 8, 2),  # full 480, causal 522; nothing else was tried
    ("forward", 4, 64): Config(64, 64, 4, 2),
    ("forward", 4, 128): Config(64, 32, 4, 2),
    ("forward", 4, 256): Config(32, 32, 4, 2),
    ("dkdv", 2, 64): Config(32, 64, 4, 2),  # 10.0 ms; 64 × 64 13.1, 64 × 128 with 8 warps 14.5
    ("dkdv", 2, 128): Config(64, 64, 4, 2),  # 8.2 ms; 32 × 64 8.9, 64 × 128 with 8 warps 9.5
    ("dkdv", 2, 256): Config(32, 64, 8, 1),
    ("dkdv", 4, 64): Config(32, 32, 4, 1),
    ("dkdv", 4, 128): Config(32, 32, 4, 1),
    ("dkdv", 4, 256): Config(16, 16, 4, 1),
    ("dq", 2, 64): Config(64, 64, 4, 3),  # 5.8 ms, causal 3.0; 128 × 64 with 8 warps 7.0 and 3.6
    ("dq", 2, 128): Config(128, 64, 8, 3),  # 5.4 ms; 64 × 64 with 4 warps and 3 stages 6.1
    ("dq", 2, 256): Config(64, 32, 8, 1),
    ("dq", 4, 64): Config(32, 32, 4, 1),
    ("dq", 4, 128): Config(16, 32, 4, 1),
    ("dq", 4, 256): Config(16, 16, 4, 1),
}
_OTHERS: dict[tuple[str, int, int], Config] = {
    ("forward", 2, 64): Config(64, 64, 4, 2),
    ("forward", 2, 128): Config(64, 64, 4, 2),
    ("forward", 2, 256): Config(64, 32, 4, 1),
    ("forward", 4, 64): Config(32, 32, 4, 1),
    ("forward", 4, 128): Config(32, 32, 4, 1),
    ("forward", 4, 256): Config(16, 16, 4, 1),
    ("dkdv", 2, 64): Config(32, 64, 4, 1),
    ("dkdv", 2, 128): Config(32, 64, 4, 1),
    ("dkdv", 2, 256): Config(32, 32, 4, 1),
    ("dkdv", 4, 64): Config(32, 32, 4, 1),
    ("dkdv", 4, 128): Config(16, 32, 4, 1),
    ("dkdv", 4, 256): Config(16, 16, 4, 1),
    ("dq", 2, 64): Config(64, 32, 4, 1),
    ("dq", 2, 128): Config(64, 32, 4, 1),
    ("dq", 2, 256): Config(32, 32, 4, 1),
    ("dq", 4, 64): Config(32, 32, 4, 1),
    ("dq", 4, 128): Config(32, 16, 4, 1),
    ("dq", 4, 256): Config(16, 16, 4, 1),
}
# Passes with tangents hold twice as much. n 8192, two batch items of hidden 2048, milliseconds, full and causal.
_TANGENTS: dict[tuple[str, int, int], Config] = {
    ("jvp", 2, 64): Config(64, 64, 4, 2),  # 6.3 and 3.3 (forward 2.6 and 1.4); 128 × 64 with 8 warps 6.9 and 3.9
    ("jvp", 2, 128): Config(128, 64, 8, 2),  # 5.6 and 3.0 (forward 2.0 and 1.2); 64 × 64 with 4 warps 6.8 and 4.0
    ("jvp", 2, 256): Config(64, 32, 8, 1),
    ("jvp", 4, 64): Config(32, 32, 4, 1),
    ("jvp", 4, 128): Config(32, 32, 4, 1),
    ("jvp", 4, 256): Config(16, 16, 4, 1),
    ("double dkdv", 2, 64): Config(32, 64, 4, 2),  # 12.1 and 6.4; 64 × 64 with one stage 11.6 and 6.7
    ("double dkdv", 2, 128): Config(32, 64, 4, 2),  # 11.6 and 5.3; 32 × 128 with 8 warps 13.4 and 6.0
    ("double dkdv", 2, 256): Config(16, 32, 4, 1),
    ("double dkdv", 4, 64): Config(32, 32, 4, 1),
    ("double dkdv", 4, 128): Config(16, 16, 4, 1),
    ("double dkdv", 4, 256): Config(16, 16, 4, 1),
    ("double dq", 2, 64): Config(64, 64, 4, 2),  # 6.8 and 3.5; 128 × 32 with 8 warps 6.8 and 4.5
    ("double dq", 2, 128): Config(128, 64, 8, 2),  # 6.1 and 3.1; 128 × 32 with 3 stages 6.8 and 3.7
    ("double dq", 2, 256): Config(32, 32, 4, 1),
    ("double dq, all", 2, 128): Config(64, 32, 4, 2),  # with a tangent of dO too, 128 × 64 exceeds shared memory
    ("double dq", 4, 64): Config(32, 32, 4, 1),
    ("double dq", 4, 128): Config(16, 16, 4, 1),
    ("double dq", 4, 256): Config(16, 16, 4, 1),
}
# With a bias or dropout a tile holds more: smaller ones, by direction and padded dim, for 2 bytes.
_WITH_EXTRAS: dict[tuple[str, int], Config] = {
    ("forward", 64): Config(64, 64, 4, 2),
    ("forward", 128): Config(64, 64, 4, 2),
    ("forward", 256): Config(64, 32, 4, 1),
    ("dkdv", 64): Config(32, 64, 4, 2),
    ("dkdv", 128): Config(32, 64, 4, 2),
    ("dkdv", 256): Config(32, 64, 8, 1),
    ("dq", 64): Config(64, 64, 4, 2),
    ("dq", 128): Config(64, 64, 4, 2),
    ("dq", 256): Config(64, 32, 8, 1),
}
# n 1024, 8 heads, 64 hidden units: forward 0.25 ms (32 × 64 0.31), queries 0.83 ms (64 × 64 with 8 warps 0.90).
_ADDITIVE: dict[str, Config] = {
    "forward": Config(16, 64, 4, 1),
    "dkdv": Config(64, 16, 4, 1),
    "dq": Config(16, 64, 4, 1),
    "received": Config(64, 16, 4, 1),
    "pooled": Config(16, 64, 4, 1),
}
# n 8192, 16 heads, d 128: received 0.58 ms (64 × 128 with 8 warps 0.87), map(64, 64) 1.5 ms (8 warps 2.5).
_STATISTICS: dict[tuple[str, int], Config] = {
    ("received", 2): Config(128, 64, 4, 3),
    ("received", 4): Config(32, 32, 4, 1),
    ("pooled", 2): Config(128, 64, 4, 2),
    ("pooled", 4): Config(32, 32, 4, 1),
}


def padded(dim: int) -> int:
    """The power of two that a dim is padded to in registers, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def config(
    direction: str, device: torch.device, size: int, dim: int, additive: bool = False, extras: bool = False
) -> Config:
    """The blocks for a direction, the bytes per number, and the larger padded dim; never a function of the batch."""
    if additive:
        return _ADDITIVE[direction.removeprefix("plain ")]
    if direction.startswith(("jvp", "double")):
        at = (direction, size, max(dim, 64))
        found = _TANGENTS[at] if at in _TANGENTS else _TANGENTS[direction.removesuffix(", all"), *at[1:]]
        small = extras or not (device.type == "cuda" and hopper(device))
        return found._replace(BM=min(found.BM, 32), BN=min(found.BN, 32), warps=4, stages=1) if small else found
    if extras and size == 2 and (heavy := _WITH_EXTRAS.get((direction.removeprefix("plain "), max(dim, 64)))):
        return heavy
    if (direction, size) in _STATISTICS:
        found = _STATISTICS[direction, size]
        return found if dim <= 128 else found._replace(BM=min(found.BM, 32), BN=min(found.BN, 32), stages=1)
    table = _HOPPER if device.type == "cuda" and hopper(device) else _OTHERS
    at = (direction, size, max(dim, 64))
    return table[at] if at in table else table[direction.removeprefix("plain "), *at[1:]]


@lru_cache
def hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU, or a later one."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9

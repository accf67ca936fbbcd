"""Block shapes by chip, direction, dtype and dim: one small table per size of shared memory, with measurements in its comments.

A launch that a chip refuses for lack of resources takes a smaller tile from then on (`shrink`), and `notes` says so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

__all__ = ["CHIPS", "WHOLE", "Chip", "Config", "chip_of", "config", "hopper", "notes", "padded", "shrink", "split"]

WHOLE = 512  # dims of keys that a tile holds; up to REST more are multiplied apart
REST = 64
_LEAST = 16  # rows or keys of a tile
_KIB = 1024


class Chip(NamedTuple):
    """What tiles depend on: the shared memory that a program may have, and whether TMA loads blocks."""

    name: str  # the compute capability of an NVIDIA GPU, the architecture of an AMD one
    shared: int  # bytes
    tma: bool = False


# The chips for which every kernel is compiled in tests.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("8.0", 163 * _KIB),
        Chip("8.6", 99 * _KIB),
        Chip("8.9", 99 * _KIB),
        Chip("9.0", 227 * _KIB, tma=True),
        Chip("10.0", 227 * _KIB, tma=True),
        Chip("12.0", 99 * _KIB),
        Chip("gfx942", 64 * _KIB),
    )
}


class Config(NamedTuple):
    """BM rows, BN keys, warps, and stages of the pipeline."""

    BM: int
    BN: int
    warps: int
    stages: int
    columns: int = 0  # forward: of the values that a program multiplies, if these are a multiple of it; 0 for all


def _by_dim(direction: str, size: int, *tiles: tuple[int, int, int, int]) -> dict[tuple[str, int, int], Config]:
    """The tiles of a direction for padded dims of 64, 128, 256 and 512."""
    return {(direction, size, 64 << at): Config(*tile) for at, tile in enumerate(tiles)}


# (direction, bytes per number, padded dim) -> blocks. Measured on an H200: bf16, 16,384 tokens, hidden 2048, n 16,384
# unless stated; TFLOP/s for the forward pass, milliseconds for a backward kernel. float32 was chosen by registers alone, and no
# measurement chose the tiles of decoding and of the gradient of a bias.
_LARGE: dict[tuple[str, int, int], Config] = {
    # two programs per multiprocessor: 546 and 514 with entropy, full; 128 × 128 with 8 warps 514 and 494
    ("plain forward", 2, 128): Config(128, 64, 4, 2),
    ("forward", 2, 64): Config(128, 64, 4, 3),  # full 430, causal 411; 128 × 128 with 8 warps 367 and 364
    ("forward", 2, 128): Config(128, 128, 8, 3),  # causal 500; 128 × 64 with 4 warps and 2 stages 492
    ("forward", 2, 256): Config(128, 64, 8, 2),  # full 480, causal 522; nothing else was tried
    ("forward", 2, 512): Config(128, 32, 8, 2, columns=256),
    ("forward", 2, 576): Config(128, 32, 8, 1, columns=256),
    **_by_dim("forward", 4, (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)),
    ("dkdv", 2, 64): Config(32, 64, 4, 2),  # 10.0 ms; 64 × 64 13.1, 64 × 128 with 8 warps 14.5
    ("dkdv", 2, 128): Config(64, 64, 4, 2),  # 8.2 ms; 32 × 64 8.9, 64 × 128 with 8 warps 9.5
    ("dkdv", 2, 256): Config(32, 64, 8, 1),
    ("dkdv", 2, 512): Config(32, 64, 8, 1),
    **_by_dim("dkdv", 4, (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ("dq", 2, 64): Config(64, 64, 4, 3),  # 5.8 ms, causal 3.0; 128 × 64 with 8 warps 7.0 and 3.6
    ("dq", 2, 128): Config(128, 64, 8, 3),  # 5.4 ms; 64 × 64 with 4 warps and 3 stages 6.1
    ("dq", 2, 256): Config(64, 32, 8, 1),
    ("dq", 2, 512): Config(64, 32, 8, 1),
    **_by_dim("dq", 4, (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    **_by_dim("decode", 2, (64, 128, 4, 3), (64, 128, 4, 3), (64, 32, 4, 3), (64, 32, 8, 2)),
    **_by_dim("decode", 4, (64, 32, 4, 3), (64, 32, 4, 3), (64, 32, 4, 2), (16, 16, 4, 1)),
    **_by_dim("bias gradient", 2, (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
    **_by_dim("bias gradient", 4, (64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
}
# At most 99 KiB of shared memory, and products of 16 × 8 numbers by a warp. Chosen by shared memory and registers.
_SMALL: dict[tuple[str, int, int], Config] = {
    **_by_dim("forward", 2, (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 1), (16, 16, 4, 1)),
    **_by_dim("forward", 4, (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    **_by_dim("dkdv", 2, (32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    **_by_dim("dkdv", 4, (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    **_by_dim("dq", 2, (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    **_by_dim("dq", 4, (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    **_by_dim("decode", 2, (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
    **_by_dim("decode", 4, (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
    **_by_dim("bias gradient", 2, (64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    **_by_dim("bias gradient", 4, (64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
# Passes with tangents hold twice as much. n 8192, two batch items of hidden 2048, milliseconds, full and causal.
_TANGENTS: dict[tuple[str, int, int], Config] = {
    ("jvp", 2, 64): Config(64, 64, 4, 2),  # 6.3 and 3.3 (forward 2.6 and 1.4); 128 × 64 with 8 warps 6.9 and 3.9
    ("jvp", 2, 128): Config(128, 64, 8, 2),  # 5.6 and 3.0 (forward 2.0 and 1.2); 64 × 64 with 4 warps 6.8 and 4.0
    ("jvp", 2, 256): Config(64, 32, 8, 1),
    **_by_dim("jvp", 4, (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    ("double dkdv", 2, 64): Config(32, 64, 4, 2),  # 12.1 and 6.4; 64 × 64 with one stage 11.6 and 6.7
    ("double dkdv", 2, 128): Config(32, 64, 4, 2),  # 11.6 and 5.3; 32 × 128 with 8 warps 13.4 and 6.0
    ("double dkdv", 2, 256): Config(16, 32, 4, 1),
    **_by_dim("double dkdv", 4, (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ("double dq", 2, 64): Config(64, 64, 4, 2),  # 6.8 and 3.5; 128 × 32 with 8 warps 6.8 and 4.5
    ("double dq", 2, 128): Config(128, 64, 8, 2),  # 6.1 and 3.1; 128 × 32 with 3 stages 6.8 and 3.7
    ("double dq", 2, 256): Config(32, 32, 4, 1),
    ("double dq, all", 2, 128): Config(64, 32, 4, 2),  # with a tangent of dO too, 128 × 64 exceeds shared memory
    **_by_dim("double dq", 4, (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
# With a bias or dropout a tile holds more: smaller ones, for 2 bytes.
_WITH_EXTRAS: dict[tuple[str, int, int], Config] = {
    **_by_dim("forward", 2, (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 1)),
    **_by_dim("dkdv", 2, (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 8, 1)),
    **_by_dim("dq", 2, (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 1)),
}
# With a function of the scores, for 2 bytes on Hopper: n 8192, 16 heads, causal, scores that decay with distance, milliseconds of
# the whole backward without and with the entropy.
_WITH_FUNCTION: dict[tuple[str, int], Config] = {
    ("dkdv", 64): Config(32, 64, 4, 3),  # 1.43 and 1.51; 32 × 128 with 2 stages 1.64 and 1.91, 64 × 64 with 3 1.41 and 1.72
    ("dkdv", 128): Config(32, 64, 4, 3),  # 2.12 and 2.22; with 2 stages 2.18 and 2.31, 64 × 64 2.17 and 2.47
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
_STATISTICS_SMALL: dict[tuple[str, int], Config] = {
    **_STATISTICS,
    ("received", 2): Config(64, 64, 4, 2),
    ("pooled", 2): Config(64, 64, 4, 1),
}

_refused: dict[tuple[str, Chip, int, int, bool, bool, bool], tuple[Config, Config]] = {}  # the table's tile, and what is taken instead

# Two attentions side by side, for 2 bytes. By time on an H200 with 16 heads, causal, n 8192 with 64 dims and 4096 with 128, in
# milliseconds, KL and JS, each pass alone.
# 64 dims: 0.51 and 0.63 (64 × 64 0.53 and 0.64), queries 0.65 and 0.75 (64 × 32 0.74 and 0.96), keys 0.74 and 0.94 (64 × 32 1.25 and 1.46).
# 128 dims: 0.22 and 0.24 (64 × 32 0.26 and 0.34), queries 0.31 and 0.37 (64 × 32 0.33 and 0.39), keys 0.37 and 0.42 (128 × 64 with 8
# warps 0.43 and 0.50).
# 256 dims: tiles that leave the fewest numbers without a register.
_PAIRS: dict[tuple[str, int, int], Config] = {
    **_by_dim("divergence", 2, (64, 128, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    **_by_dim("divergence dq", 2, (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 8, 1)),
    **_by_dim("divergence dk", 2, (64, 64, 4, 3), (64, 64, 4, 2), (32, 32, 8, 1)),
}


def padded(dim: int) -> int:
    """The power of two that a dim is padded to in registers, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def split(dim: int) -> tuple[int, int]:
    """The padded dims of keys that a tile holds, and of those that are multiplied apart; 0 if there are none.

    >>> split(80), split(576)
    ((128, 0), (512, 64))
    """
    return (padded(dim), 0) if dim <= WHOLE else (WHOLE, REST)


def config(direction: str, chip: Chip, size: int, dim: int, additive: bool = False, extras: bool = False, function: bool = False) -> Config:
    """The blocks for a direction, the bytes per number, and the larger padded dim; never a function of the batch."""
    key = (direction, chip, size, dim, additive, extras, function)
    found = _refused.get(key)
    return _listed(*key) if found is None else found[1]


def _listed(direction: str, chip: Chip, size: int, dim: int, additive: bool, extras: bool, function: bool) -> Config:
    """The blocks that the tables have."""
    large = chip.shared >= CHIPS["9.0"].shared
    if additive and (found := _ADDITIVE.get(direction.removeprefix("plain "))):
        return found
    if direction.startswith(("jvp", "double")):
        at = (direction, size, max(dim, 64))
        found = _TANGENTS[at] if at in _TANGENTS else _TANGENTS[direction.removesuffix(", all"), *at[1:]]
        most = 32 if large or dim * size <= 256 else _LEAST
        small = extras or not large
        return found._replace(BM=min(found.BM, most), BN=min(found.BN, most), warps=4, stages=1) if small else found
    if direction.startswith("divergence"):
        if size == 2 and large:
            return _PAIRS[direction, size, max(dim, 64)]
        return Config(32, 32, 4, 1) if dim <= 128 else Config(16, 16, 4, 1)
    if extras and large and size == 2 and (heavy := _WITH_EXTRAS.get((direction.removeprefix("plain "), size, max(dim, 64)))):
        return heavy
    if (direction, size) in _STATISTICS:
        found = (_STATISTICS if large else _STATISTICS_SMALL)[direction, size]
        most = 32 if dim * size <= 1024 else _LEAST
        return found if dim <= 128 else found._replace(BM=min(found.BM, most), BN=min(found.BN, most), stages=1)
    if function and large and size == 2 and (direction, dim) in _WITH_FUNCTION:
        return _WITH_FUNCTION[direction, dim]
    table = _LARGE if large else _SMALL
    for name in (direction, direction.removeprefix("plain ")):
        for width in (max(dim, 64), WHOLE):  # with a rest, unless it has a tile of its own
            if (name, size, width) in table:
                return table[name, size, width]
    raise KeyError((direction, size, dim))


def shrink(direction: str, chip: Chip, size: int, dim: int, additive: bool = False, extras: bool = False, function: bool = False) -> bool:
    """Take a smaller tile for these from now on, since the chip refused this one; False if there is none."""
    key = (direction, chip, size, dim, additive, extras, function)
    listed, now = _listed(*key), config(*key)
    if now.stages > 1:
        smaller = now._replace(stages=now.stages - 1)
    elif max(now.BM, now.BN) <= _LEAST:
        return False
    elif now.BN >= now.BM:
        smaller = now._replace(BN=now.BN // 2)
    else:
        smaller = now._replace(BM=now.BM // 2)
    _refused[key] = (listed, smaller)
    return True


def notes(device: torch.device) -> list[str]:
    """Which tiles the device refused so far, for `why`."""
    chip = chip_of(device)
    return [
        f"the {key[0]} at dim {key[3]} takes tiles of {now.BM} × {now.BN} in {now.stages} stages: "
        f"the chip has no room for {listed.BM} × {listed.BN} in {listed.stages}"
        for key, (listed, now) in _refused.items()
        if key[1] == chip
    ]


@lru_cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a device; one that is in no list counts by its shared memory."""
    if device.type != "cuda":
        return CHIPS["8.6"]
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Chip(properties.gcnArchName.split(":")[0], CHIPS["gfx942"].shared)
    major, minor = torch.cuda.get_device_capability(device)
    known = CHIPS.get(f"{major}.{minor}")
    return known or Chip(f"{major}.{minor}", properties.shared_memory_per_block_optin, tma=major in (9, 10))


@lru_cache
def hopper(device: torch.device) -> bool:
    """Whether kernels made for Hopper may be asked: they say themselves which chips they take."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9

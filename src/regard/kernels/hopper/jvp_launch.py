"""Launch the Hopper jvp for a `KernelArgs` and its tangents: what it refuses, its tile, its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.rows import Rows
from .. import launch_cache
from ..arguments import KernelArgs, Tangents
from . import forward_launch
from .configs import ROWS, Tile, cdiv
from .descriptors import describable, descriptors
from .jvp import jvp

__all__ = ["TILES", "jvp_arguments", "launch_jvp", "padded", "refuses", "tangent_signature"]

# By the padded dim. Chosen by shared memory and registers: 192 and 160 KiB; two groups hide each other's softmax.
TILES: dict[int, Tile] = {64: Tile(2, 64, 4, 240), 128: Tile(2, 64, 2, 240)}
CHANGING = (
    "q", "k", "v", "dq", "dk", "dv", "o", "do", "lse", "row_max", "log_row_sum", "entropy", "d_lse", "d_entropy", "lists",
)  # fmt: skip


def padded(w: KernelArgs) -> int:
    """The dim that queries, keys and values are padded to: 64, or the next power of two."""
    return 1 << (max(w.query.shape[3], w.value.shape[3], 64) - 1).bit_length()


def refuses(w: KernelArgs, tangents: Tangents) -> list[str]:
    """Why the kernel cannot compute this problem; empty if it can."""
    reasons = forward_launch.refuses(w)
    E = w.value.shape[3]
    if not w.fast or tangents.scales is not None:
        reasons.append("it has one positive scale, no cap and no bias")
    if w.drop.keys is not None:
        reasons.append("it has no dropout")
    if padded(w) not in TILES:
        reasons.append(f"it has tiles for dims up to {max(TILES)}; got {w.query.shape[3]} and {E}")
    if E % 8:
        reasons.append(f"TMA cannot store outputs of dim {E}, which is no multiple of 8")
    if tangents.query is None and tangents.key is None:
        reasons.append("neither queries nor keys have a tangent")
    named = (("query", tangents.query, w.query), ("key", tangents.key, w.key), ("value", tangents.value, w.value))
    for name, t, x in named:
        if t is not None and (t.dtype != x.dtype or not describable(t)):
            reasons.append(f"TMA cannot describe the tangent of {name}: {t.dtype}, strides {tuple(t.stride())}")
    return reasons


def launch_jvp(w: KernelArgs, tangents: Tangents, entropy: bool, tile: Tile | None = None) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """The forward pass, and the tangents of output, lse and entropy."""
    key = ("hopper jvp", entropy, tangent_signature(tangents), w.signature) if tile is None else None
    launch = launch_cache.find(key)
    found = w.new_rows(entropy)
    d_entropy = (torch.empty_like if entropy else torch.zeros_like)(found.lse)
    moved = Rows(torch.empty_like(found.output), torch.empty_like(found.lse), d_entropy)
    if launch is not None:
        launch.again(
            q=w.query, k=w.key, v=w.value, dq=tangents.query, dk=tangents.key, dv=tangents.value, o=found.output, do=moved.output,
            **_statistics(found, moved), lists=forward_launch.block_lists(w, launch.about),
        )  # fmt: skip
    else:
        tile = tile or TILES[padded(w)]
        arguments, options = jvp_arguments(w, tangents, found, moved, tile)
        L, H, N = w.rows
        launch_cache.start(key, jvp, cdiv(N, tile.BM) * L * H, arguments, options, CHANGING, tile)
    if not entropy:
        found = found._replace(entropy=torch.zeros_like(found.lse))
    return found, (moved.output, moved.lse, moved.entropy)


def tangent_signature(tangents: Tangents) -> tuple[Any, ...]:
    """What a launch depends on beside the signature of the problem."""
    tensors = tuple(None if t is None else (t.dtype, t.stride(), t.data_ptr() & 15) for t in tangents[:3])
    return (*tensors, tangents.scales is None, tangents.bias.at is None)


def _statistics(found: Rows, moved: Rows) -> dict[str, Tensor]:
    entropy, d_entropy = (found.lse, moved.lse) if found.entropy is None else (found.entropy, moved.entropy)
    return {
        "lse": found.lse, "row_max": found.max_logit, "log_row_sum": found.log_row_sum, "entropy": entropy, "d_lse": moved.lse,
        "d_entropy": d_entropy,
    }  # fmt: skip


def jvp_arguments(w: KernelArgs, tangents: Tangents, found: Rows, moved: Rows, tile: Tile) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments by name, and the options of its launch."""
    L, H, N = w.rows
    D = padded(w)
    sizes = (("q", w.query, ROWS), ("k", w.key, tile.BN), ("v", w.value, tile.BN), ("dq", tangents.query, ROWS),
             ("dk", tangents.key, tile.BN), ("dv", tangents.value, tile.BN), ("o", found.output, ROWS), ("do", moved.output, ROWS))  # fmt: skip
    arguments = {
        **{name: None if x is None else descriptors(x, rows, D)[0] for name, x, rows in sizes}, **_statistics(found, moved),
        "scale": w.scale, "lists": forward_launch.block_lists(w, tile), "n": N, "M": w.m, "row_blocks": cdiv(N, tile.BM), "batch_heads": L * H,
        "num_heads": H, "heads_per_kv": w.groups, "swizzle": forward_launch.heads_in_l2(w, tensors=4), "D": D, "BN": tile.BN, "STAGES": tile.stages,
        "GROUPS": tile.groups, "REGISTERS": tile.registers, "MASK": w.kinds["MASK"], "ENTROPY": found.entropy is not None,
    }  # fmt: skip
    return arguments, {"num_warps": 4, "enable_fp_fusion": True}

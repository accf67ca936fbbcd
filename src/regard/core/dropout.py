"""Which weights are dropped: a function of (seed, batch item, head, row, key) and of nothing else.

Each (item, head, row) has a 64-bit key from three rounds of the splitmix64 finaliser; each pair mixes that key with its
column in 32-bit arithmetic. There is no state and no order: every backend, tile size and pass drops the same pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat.torch import is_batched, is_traced, lacks_values
from ..errors import ArgumentError

__all__ = ["draw_seed", "drawn_in_graph", "keep", "keep_pairs", "keep_threshold", "row_keys"]

_GOLDEN64 = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX64 = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_GOLDEN32 = 0x9E3779B1 - (1 << 32)
_MIX32 = (0x7FEB352D, 0x846CA68B - (1 << 32))


def keep(probability: float, seed: int | Tensor, items: Tensor, heads: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Say which weights are kept: bool (items, heads, rows, cols) for 1-D index tensors.

    >>> i = torch.arange(200)
    >>> one = keep(0.25, 7, i[:1], i[:1], i, i)
    >>> bool((one[:, :, 50:60, 100:] == keep(0.25, 7, i[:1], i[:1], i[50:60], i[100:])).all())
    True
    >>> abs(one.float().mean().item() - 0.75) < 0.01
    True
    """
    return keep_pairs(probability, row_keys(seed, items, heads, rows), cols)


def keep_pairs(probability: float, keys: Tensor, cols: Tensor) -> Tensor:
    """The same for the 64 bits of rows, (…, rows), and columns that broadcast to (…, rows, cols)."""
    low, high = (_int32(keys), _int32(keys >> 32))
    x = low[..., None] + _int32(cols * _GOLDEN32)  # (items, heads, rows, cols) int32, wrapping
    x ^= (x >> 16) & 0xFFFF
    x *= _MIX32[0]
    x += high[..., None]
    x ^= (x >> 15) & 0x1FFFF
    x *= _MIX32[1]
    x ^= (x >> 16) & 0xFFFF
    x *= _MIX32[0]
    return x >= keep_threshold(probability)


def row_keys(seed: int | Tensor, items: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
    """The 64 bits of each row, int64 (items, heads, rows)."""
    key = _mixed(items[:, None, None] + 1, seed)
    key = _mixed(heads[:, None] + 1, key)
    return _mixed(rows + 1, key)


def keep_threshold(probability: float) -> int:
    """The smallest hash of a pair, a signed 32-bit integer, at which its weight is kept."""
    return min(round(probability * 2**32), 2**32 - 1) - 2**31


def draw_seed(who: str) -> int:
    """Draw a seed from torch's generator."""
    if is_traced():
        raise ArgumentError(
            f"{who}: dropout draws a seed at each call, which an exported program cannot do. Export the module in "
            f"evaluation mode, model.eval(), or with dropout=0.0."
        )
    seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu")
    if is_batched(seed):
        raise ArgumentError(
            f"{who}: dropout under vmap drops the same weights for every sample; use vmap(…, randomness='same')."
        )
    return 0 if lacks_values(seed) else int(seed)


def drawn_in_graph(device: torch.device) -> Tensor:
    """A seed that a compiled graph draws anew whenever it runs, on its own device, so that it can be captured."""
    return torch.randint(2**62, (), dtype=torch.int64, device=device)


def _mixed(counter: Tensor, key: Tensor | int) -> Tensor:
    x = counter * _GOLDEN64 + key
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX64[0]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX64[1]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _int32(x: Tensor) -> Tensor:
    """The low 32 bits, as a signed number."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000).sub_(0x80000000).to(torch.int32)

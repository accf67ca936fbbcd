"""How many bytes a rank sends: what the exchange costs, known before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..masks import Mask
from ..softmax import arithmetic_dtype
from .layout import check, pieces, sizes
from .ring_plan import Routes, routes

__all__ = ["Widths", "heads_bytes", "ring_bytes", "traffic"]


class Widths(NamedTuple):
    """Bytes of one token's vectors, over all batch items and heads."""

    query: int
    key: int
    value: int
    output: int
    back: int  # the gradients of key and value, which are added up in exact arithmetic
    statistics: int  # lse, entropy, largest logit, spread; 0 where nobody observes

    @staticmethod
    def of(
        batch: int, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, observed: bool = False
    ) -> Widths:
        size, exact = dtype.itemsize, arithmetic_dtype(dtype).itemsize
        key, value = batch * kv_heads * dim, batch * kv_heads * value_dim
        return Widths(
            batch * heads * dim * size,
            key * size,
            value * size,
            batch * heads * value_dim * size,
            (key + value) * exact,
            4 * batch * heads * exact if observed else 0,
        )


def ring_bytes(found: Routes, w: Widths, backward: bool = False) -> list[int]:
    """Keys and values once to each rank that needs them; on the way back these again, and their gradients home."""
    out = [found.outward(rank) * (w.key + w.value) for rank in range(found.count)]
    if not backward:
        return out
    return [sent + found.homeward(rank) * w.back for rank, sent in enumerate(out)]


def heads_bytes(rows: Sequence[int], keys: Sequence[int], w: Widths, backward: bool = False) -> list[int]:
    """A share (1 − 1/ranks) of the own queries, keys, values; and of the own heads' output the rows of others.

    The way back is the same the other way round.
    """
    count, n, m = len(rows), sum(rows), sum(keys)
    found = []
    for own, held in zip(rows, keys, strict=True):
        inputs = own * w.query + held * (w.key + w.value)
        outputs = own * (w.output + w.statistics)
        if backward:
            inputs = n * w.query + m * (w.key + w.value) - inputs
            found.append((inputs + (count - 1) * outputs) // count)
        else:
            found.append(((count - 1) * inputs + n * (w.output + w.statistics) - outputs) // count)
    return found


def traffic(
    length: int,
    ranks: int,
    *,
    keys: int | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    dim: int = 64,
    value_dim: int | None = None,
    mask: Mask | None = None,
    layout: str = "contiguous",
    strategy: str = "ring",
    dtype: torch.dtype = torch.float32,
    observed: bool = False,
    backward: bool = False,
) -> list[int]:
    """Give the bytes that each rank sends in one pass over a sequence that `shard` has cut.

    >>> import regard
    >>> traffic(8, 4, dim=1), traffic(8, 4, dim=1, mask=regard.causal())
    ([48, 48, 48, 48], [16, 32, 48, 0])
    """
    who = "traffic"
    check(who, layout)
    kv_heads, value_dim, keys = kv_heads or heads, value_dim or dim, length if keys is None else keys
    w = Widths.of(batch, heads, kv_heads, dim, value_dim, dtype, observed)
    held = sizes(length, ranks, layout), sizes(keys, ranks, layout)
    if strategy == "heads":
        if heads % ranks or kv_heads % ranks:
            raise ArgumentError(f"{who}: {heads} and {kv_heads} heads do not both divide by {ranks} ranks.")
        return heads_bytes(*held, w, backward)
    if strategy != "ring":
        raise ArgumentError(f"{who}: strategy must be 'ring' or 'heads'. Got {strategy!r}.")
    own, others = (pieces(who, what, some, layout) for what, some in zip(("rows", "keys"), held, strict=True))
    return ring_bytes(routes(own, others, mask, length, keys), w, backward)

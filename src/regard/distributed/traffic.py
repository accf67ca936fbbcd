"""How many bytes each rank sends, known before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..masks import Mask
from ..softmax import arithmetic_dtype
from .layout import check_layout, shard_sizes, sharding_of
from .ring_plan import RingPlan, plan_ring

__all__ = ["TokenBytes", "heads_bytes", "ring_bytes", "traffic"]


class TokenBytes(NamedTuple):
    """Bytes of one token's vectors, over all batch items and heads."""

    query: int
    key: int
    value: int
    output: int
    kv_gradients: int  # the gradients of key and value, which are summed in exact arithmetic
    statistics: int  # lse, entropy, max_logit, log_row_sum; 0 if the call is not observed

    @staticmethod
    def of(
        batch: int, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, observed: bool = False
    ) -> TokenBytes:
        size, exact = dtype.itemsize, arithmetic_dtype(dtype).itemsize
        key, value = batch * kv_heads * dim, batch * kv_heads * value_dim
        return TokenBytes(
            query=batch * heads * dim * size,
            key=key * size,
            value=value * size,
            output=batch * heads * value_dim * size,
            kv_gradients=(key + value) * exact,
            statistics=4 * batch * heads * exact if observed else 0,
        )


def ring_bytes(plan: RingPlan, per_token: TokenBytes, backward: bool = False) -> list[int]:
    """Keys and values go once to each rank that needs them; in the backward pass again, and gradients to the owners."""
    forward = [plan.keys_sent(rank) * (per_token.key + per_token.value) for rank in range(plan.count)]
    if not backward:
        return forward
    return [sent + plan.gradients_sent(rank) * per_token.kv_gradients for rank, sent in enumerate(forward)]


def heads_bytes(rows: Sequence[int], keys: Sequence[int], per_token: TokenBytes, backward: bool = False) -> list[int]:
    """The other ranks' heads of this rank's queries, keys and values; and the other ranks' rows of its heads' output.

    The backward pass sends the same the other way round.
    """
    w = per_token
    count, n, m = len(rows), sum(rows), sum(keys)
    sent = []
    for own_rows, own_keys in zip(rows, keys, strict=True):
        inputs = own_rows * w.query + own_keys * (w.key + w.value)
        outputs = own_rows * (w.output + w.statistics)
        if backward:
            inputs = n * w.query + m * (w.key + w.value) - inputs
            sent.append((inputs + (count - 1) * outputs) // count)
        else:
            sent.append(((count - 1) * inputs + n * (w.output + w.statistics) - outputs) // count)
    return sent


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
    check_layout(who, layout)
    kv_heads, value_dim, keys = kv_heads or heads, value_dim or dim, length if keys is None else keys
    per_token = TokenBytes.of(batch, heads, kv_heads, dim, value_dim, dtype, observed)
    row_sizes, key_sizes = shard_sizes(length, ranks, layout), shard_sizes(keys, ranks, layout)
    if strategy == "heads":
        if heads % ranks or kv_heads % ranks:
            raise ArgumentError(f"{who}: {heads} and {kv_heads} heads are not both divisible by {ranks} ranks.")
        return heads_bytes(row_sizes, key_sizes, per_token, backward)
    if strategy != "ring":
        raise ArgumentError(f"{who}: strategy must be 'ring' or 'heads'. Got {strategy!r}.")
    rows_of, keys_of = sharding_of(who, "rows", row_sizes, layout), sharding_of(who, "keys", key_sizes, layout)
    return ring_bytes(plan_ring(rows_of, keys_of, mask, length, keys), per_token, backward)

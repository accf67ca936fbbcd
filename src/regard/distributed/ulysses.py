"""The "heads" strategy (Ulysses): an all-to-all exchange gives every rank all tokens of its share of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..autograd.engine import attend
from ..backends.dispatch import choose, run
from ..biases import Alibi, Bias, Relative
from ..chunked.engine import ChunkedEngine
from ..core.folded import fold, unfold
from ..core.problem import Problem
from ..core.rows import Rows
from ..masks import Mask, dense
from .call import GroupCall
from .collectives import Splits, all_to_all
from .layout import Sharding, tokens_per_rank
from .local_inputs import ReplicatedInputs, fold_scale, logit_scale
from .ranks import Ranks
from .slices import slice_bias_heads

__all__ = ["attend_by_heads", "heads_refusal", "heads_to_sequence", "sequence_to_heads"]

_SLICEABLE = (Alibi, Relative)  # structured biases whose heads can be sliced


def heads_refusal(call: GroupCall) -> str | None:
    """Why a call cannot exchange sequence for heads; None if it can."""
    heads, kv_heads, count = call.local.query.shape[1], call.local.key.shape[1], call.ranks.count
    if heads % count or kv_heads % count or not heads:
        return f"{heads} query heads and {kv_heads} key heads are not both divisible by {count} ranks"
    if isinstance(call.bias, Bias) and not isinstance(call.bias, _SLICEABLE):
        return f"the heads of {call.bias!r} cannot be sliced"
    chunked = call.backend in ("auto", "chunked") or getattr(call.backend, "name", None) == "chunked"
    if not chunked and (call.local.dropout or (call.local.score is not None and call.local.score.pairwise)):
        return "here only 'chunked' computes dropout, and scores that are not a dot product"
    return None


def attend_by_heads(call: GroupCall, p: Problem, replicated: ReplicatedInputs) -> Rows:
    """Exchange sequence for heads, attend, and exchange back."""
    ranks, rows, keys = call.ranks, call.plan.rows, call.plan.keys
    query, key, scale = p.query, p.key, logit_scale(p, replicated)
    shared: tuple[Tensor, ...] = ()
    if scale is None or p.dropout:
        (query, key, shared), scale = fold_scale(p, replicated), 1.0
    q, k, v = sequence_to_heads(ranks, (query, key, p.value), (rows, keys, keys))
    heads = slice(ranks.rank * q.shape[1], (ranks.rank + 1) * q.shape[1])
    problem = p._replace(
        query=q,
        key=k.to(q.dtype),
        value=v.to(q.dtype),
        mask=_mask_of_heads(call, heads),
        bias=_bias_of_heads(call, replicated, heads),
        score=None,
        scale=scale[heads] if isinstance(scale, Tensor) and scale.numel() > 1 else scale,
        sink=None if replicated.sink is None else replicated.sink[heads],
        dropout=0.0,
        lead=(q.shape[0], q.shape[1]),
    )
    found = _attend_locally(call, problem, shared, heads.start)
    results = [found.output.to(p.dtype)]
    if p.observed:
        results.append(torch.stack([t for t in found[1:] if t is not None], -1))  # (L, H / ranks, N, 4)
    output, *statistics = heads_to_sequence(ranks, results, rows)
    if not statistics:
        return Rows(p.shaped(output))
    return Rows(p.shaped(output), *map(p.shaped, statistics[0].unbind(-1)))


def _attend_locally(call: GroupCall, p: Problem, shared: tuple[Tensor, ...], first_head: int) -> Rows:
    """A plain call; by `chunked` if dropout must know the position of the heads, or a score is not a dot product."""
    score, dropout = call.local.score, call.local.dropout
    pairwise = score is not None and score.pairwise
    if not pairwise and not dropout:
        return run(p, choose(p, call.backend))
    x = fold(p, seed=call.seed)
    first_item, first = call.origin
    spec = replace(x.spec, dropout=dropout, origin=(first_item, first + first_head))
    if pairwise and score is not None:
        spec = replace(spec, pair=score.pair, cost=score.cost, paired=len(shared))
    else:
        shared = ()
    engine = ChunkedEngine(spec, call.tile_sizes, p.observed)
    return unfold(p, attend(engine, (x.query, x.key, x.value, x.bias, *shared, *x.shared)))


def _mask_of_heads(call: GroupCall, heads: slice) -> Mask | None:
    if call.mask is None or call.local_mask_rows is None:
        return None if call.mask is None else call.mask.restrict(slice(None), heads)
    allowed = call.mask.tensors[0].to(torch.uint8)
    return dense(_all_rows(call, allowed).bool())


def _bias_of_heads(call: GroupCall, replicated: ReplicatedInputs, heads: slice) -> Tensor | Bias | None:
    bias = call.bias
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        return _all_rows(call, bias)
    found = slice_bias_heads(bias, replicated.tables[0], heads)
    if found is None:
        raise RuntimeError("such a bias is refused before")
    return found


def _all_rows(call: GroupCall, x: Tensor) -> Tensor:
    """All rows of a tensor (L|1, H|1, rows of this rank|1, M|1), and this rank's share of its heads if it has them."""
    x = x.expand(-1, -1, call.local.rows, -1)
    x = x if x.shape[1] > 1 else x.expand(-1, call.ranks.count, -1, -1)
    return sequence_to_heads(call.ranks, [x], [call.plan.rows])[0]


def sequence_to_heads(ranks: Ranks, tensors: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """(L, H, n, D) of this rank's rows -> (L, H / ranks, N, D) of all rows, for each tensor."""
    splits, flat = [], []
    for x, sharding in zip(tensors, shardings, strict=True):
        per_row = x.shape[0] * x.shape[1] * x.shape[3] // ranks.count  # numbers of a row that go to one rank
        splits.append(Splits([per_row * x.shape[2]] * ranks.count, _times(tokens_per_rank(sharding), per_row)))
        flat.append(x.movedim(1, 0).reshape(-1))
    received = all_to_all(ranks, flat, splits)
    return [
        _in_sequence_order(part, x, sharding, ranks.count)
        for part, x, sharding in zip(received, tensors, shardings, strict=True)
    ]


def _in_sequence_order(received: Tensor, x: Tensor, sharding: Sharding, count: int) -> Tensor:
    """What all ranks sent as (L, H / ranks, N, D), in the order of the sequence."""
    batch, heads, _, dim = x.shape
    share = heads // count
    parts, counts = [], tokens_per_rank(sharding)
    by_rank = received.split(_times(counts, share * batch * dim))
    for rows, ranges, part in zip(counts, sharding, by_rank, strict=True):
        pieces = part.view(share, batch, rows, dim).split([tokens.size for tokens in ranges], 2) if ranges else ()
        parts += list(zip(ranges, pieces, strict=True))
    ordered = [part for _, part in sorted(parts, key=lambda pair: pair[0].start)]
    return torch.cat(ordered or [received.view(share, batch, 0, dim)], 2).movedim(0, 1)


def heads_to_sequence(ranks: Ranks, tensors: Sequence[Tensor], sharding: Sharding) -> list[Tensor]:
    """(L, H / ranks, N, D) of all rows -> (L, H, n, D) of this rank's rows, for each tensor."""
    counts = tokens_per_rank(sharding)
    rows, splits, flat = counts[ranks.rank], [], []
    for x in tensors:
        by_head = x.movedim(1, 0)  # (H / ranks, L, N, D)
        parts = [
            [by_head[:, :, tokens.start : tokens.stop] for tokens in ranges] or [by_head[:, :, :0]]
            for ranges in sharding
        ]
        per_row = x.shape[0] * x.shape[1] * x.shape[3]
        splits.append(Splits(_times(counts, per_row), [per_row * rows] * ranks.count))
        flat.append(torch.cat([torch.cat(of_rank, 2).reshape(-1) for of_rank in parts]))
    received = all_to_all(ranks, flat, splits)
    shapes = ((x.shape[1] * ranks.count, x.shape[0], rows, x.shape[3]) for x in tensors)
    return [part.view(shape).movedim(0, 1) for part, shape in zip(received, shapes, strict=True)]


def _times(counts: list[int], each: int) -> list[int]:
    return [each * count for count in counts]

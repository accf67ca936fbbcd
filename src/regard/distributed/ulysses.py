"""Sequence for heads: after one exchange every rank has all rows and keys of its share of the heads."""

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
from .call import Asked
from .collectives import Swap, swapped
from .layout import Held, counted
from .local_inputs import Lent, factor, folded
from .ranks import Ranks
from .slices import share_of_bias

__all__ = ["by_heads", "cannot", "to_heads", "to_rows"]

_KNOWN = (Alibi, Relative)  # structured biases of which a share of the heads can be taken


def cannot(asked: Asked) -> str | None:
    """Why a call cannot exchange sequence for heads; None if it can."""
    heads, shared, count = asked.mine.query.shape[1], asked.mine.key.shape[1], asked.ranks.count
    if heads % count or shared % count or not heads:
        return f"{heads} heads of queries and {shared} of keys do not both divide by {count} ranks"
    if isinstance(asked.bias, Bias) and not isinstance(asked.bias, _KNOWN):
        return f"no share of the heads can be taken of {asked.bias!r}"
    whole = asked.backend in ("auto", "chunked") or getattr(asked.backend, "name", None) == "chunked"
    if not whole and (asked.mine.dropout or (asked.mine.score is not None and asked.mine.score.pairwise)):
        return "dropout and scores that are no product are computed by 'chunked' here"
    return None


def by_heads(asked: Asked, p: Problem, lent: Lent) -> Rows:
    """Exchange, attend, and exchange back."""
    ranks, rows, keys = asked.ranks, asked.routes.rows, asked.routes.keys
    query, key, scale = p.query, p.key, factor(p, lent)
    shared: tuple[Tensor, ...] = ()
    if scale is None or p.dropout:
        (query, key, shared), scale = folded(p, lent), 1.0
    q, k, v = to_heads(ranks, (query, key, p.value), (rows, keys, keys))
    share = slice(ranks.rank * q.shape[1], (ranks.rank + 1) * q.shape[1])
    problem = p._replace(
        query=q,
        key=k.to(q.dtype),
        value=v.to(q.dtype),
        mask=_mask(asked, share),
        bias=_bias(asked, lent, share),
        score=None,
        scale=scale[share] if isinstance(scale, Tensor) and scale.numel() > 1 else scale,
        sink=None if lent.sink is None else lent.sink[share],
        dropout=0.0,
        lead=(q.shape[0], q.shape[1]),
        notes={},
    )
    found = _attended(asked, problem, shared, share.start)
    back = [found.output.to(p.dtype)]
    if p.observed:
        back.append(torch.stack([t for t in found[1:] if t is not None], -1))  # (L, H / ranks, N, 4)
    output, *statistics = to_rows(ranks, back, rows)
    if not statistics:
        return Rows(p.shaped(output))
    return Rows(p.shaped(output), *map(p.shaped, statistics[0].unbind(-1)))


def _attended(asked: Asked, p: Problem, shared: tuple[Tensor, ...], first: int) -> Rows:
    """The plain call; by strips where dropout must know the head's place, or a score is no product."""
    score, dropout = asked.mine.score, asked.mine.dropout
    pairwise = score is not None and score.pairwise
    if not pairwise and not dropout:
        return run(p, choose(p, asked.backend))
    x = fold(p, seed=asked.seed)
    spec = replace(x.spec, dropout=dropout, origin=(asked.origin[0], asked.origin[1] + first))
    if pairwise and score is not None:
        spec = replace(spec, pair=score.pair, cost=score.cost, paired=len(shared))
    else:
        shared = ()
    engine = ChunkedEngine(spec, asked.tile_sizes, p.observed)
    return unfold(p, attend(engine, (x.query, x.key, x.value, x.bias, *shared, *x.shared)))


def _mask(asked: Asked, share: slice) -> Mask | None:
    if asked.mask is None or asked.mask_rows is None:
        return None if asked.mask is None else asked.mask.restrict(slice(None), share)
    allowed = asked.mask.tensors[0].to(torch.uint8)
    return dense(_whole(asked, allowed).bool())


def _bias(asked: Asked, lent: Lent, share: slice) -> Tensor | Bias | None:
    bias = asked.bias
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        return _whole(asked, bias)
    found = share_of_bias(bias, lent.tables[0], share)
    if found is None:
        raise RuntimeError("such a bias was refused")
    return found


def _whole(asked: Asked, x: Tensor) -> Tensor:
    """All rows of a tensor (L|1, H|1, rows of this rank|1, M|1), of this rank's share of the heads if it tells them."""
    x = x.expand(-1, -1, asked.mine.rows, -1)
    x = x if x.shape[1] > 1 else x.expand(-1, asked.ranks.count, -1, -1)
    return to_heads(asked.ranks, [x], [asked.routes.rows])[0]


def to_heads(ranks: Ranks, tensors: Sequence[Tensor], helds: Sequence[Held]) -> list[Tensor]:
    """(L, H, n, D) of this rank's rows as (L, H / ranks, N, D) of all, for each tensor."""
    swaps, flat = [], []
    for x, held in zip(tensors, helds, strict=True):
        each = x.shape[0] * x.shape[1] * x.shape[3] // ranks.count  # the numbers of a row that go to one rank
        swaps.append(Swap([each * x.shape[2]] * ranks.count, _sized(counted(held), each)))
        flat.append(x.movedim(1, 0).reshape(-1))
    came = swapped(ranks, flat, swaps)
    return [_ordered(part, x, held, ranks.count) for part, x, held in zip(came, tensors, helds, strict=True)]


def _ordered(came: Tensor, x: Tensor, held: Held, count: int) -> Tensor:
    """What came from all ranks as (L, H / ranks, N, D), in the order of the sequence."""
    batch, heads, _, dim = x.shape
    share = heads // count
    parts, counts = [], counted(held)
    for rows, some, part in zip(counts, held, came.split(_sized(counts, share * batch * dim)), strict=True):
        pieces = part.view(share, batch, rows, dim).split([p.size for p in some], 2) if some else ()
        parts += list(zip(some, pieces, strict=True))
    ordered = [part for _, part in sorted(parts, key=lambda pair: pair[0].start)]
    return torch.cat(ordered or [came.view(share, batch, 0, dim)], 2).movedim(0, 1)


def to_rows(ranks: Ranks, tensors: Sequence[Tensor], held: Held) -> list[Tensor]:
    """(L, H / ranks, N, D) of all rows as (L, H, n, D) of this rank's, for each tensor."""
    counts = counted(held)
    rows, swaps, flat = counts[ranks.rank], [], []
    for x in tensors:
        by_head = x.movedim(1, 0)  # (H / ranks, L, N, D)
        parts = [[by_head[:, :, p.start : p.stop] for p in some] or [by_head[:, :, :0]] for some in held]
        each = x.shape[0] * x.shape[1] * x.shape[3]
        swaps.append(Swap(_sized(counts, each), [each * rows] * ranks.count))
        flat.append(torch.cat([torch.cat(some, 2).reshape(-1) for some in parts]))
    came = swapped(ranks, flat, swaps)
    shapes = ((x.shape[1] * ranks.count, x.shape[0], rows, x.shape[3]) for x in tensors)
    return [part.view(shape).movedim(0, 1) for part, shape in zip(came, shapes, strict=True)]


def _sized(counts: list[int], each: int) -> list[int]:
    return [each * count for count in counts]

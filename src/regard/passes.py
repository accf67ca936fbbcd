"""What the weights say, from q, k and what is known of the rows: passes over tiles that never hold N × M numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .arithmetic import exactly
from .canonical import Canonical, Result, canonical
from .formula import bias_tile, hidden, logits
from .problem import Problem
from .scan import Look, Room, masked_logits, weights
from .tile import BIAS, ROW, Spots
from .tiling import Cut, strips

__all__ = ["logits_at", "moments", "pooled", "received", "top", "visible"]

_SPLIT = 32  # keys that compete before the strongest of them compete for the top


@torch.no_grad()
@exactly
def received(p: Problem, found: Result, cut: Cut) -> Tensor:
    """Σ over queries of the weight each key receives: (…, Hq, M)."""
    x, look = _looking(p, found)
    total = x.query.new_zeros(*x.query.shape[:3], x.rule.m)
    room = Room()
    for strip in strips(x.rule, x.query.shape, cut):
        for run in strip.runs:
            tile = strip.tile(run)
            P = weights(x, tile, run, look, room)  # (l, k, g, r, c)
            total[tile.batch, tile.heads, :, tile.cols] += P.sum(-2)
    return p.shaped(total.flatten(1, 2))


@torch.no_grad()
@exactly
def moments(p: Problem, found: Result, cut: Cut) -> tuple[Tensor, Tensor]:
    """Σ p(1 − p) and Σ p |i + M − N − j| of each row: (…, Hq, N) each."""
    x, look = _looking(p, found)
    n, m = x.rule.n, x.rule.m
    health, distance = torch.zeros_like(look.spread), torch.zeros_like(look.spread)
    i, j = (torch.arange(size, dtype=health.dtype, device=health.device) for size in (n, m))
    room = Room()
    for strip in strips(x.rule, x.query.shape, cut):
        for run in strip.runs:
            tile = strip.tile(run)
            P = weights(x, tile, run, look, room)
            apart = (i[tile.rows, None] + (m - n) - j[tile.cols]).abs_()  # (r, c)
            ROW.part(distance, tile).add_(torch.mul(P, apart, out=room.like("apart", P)).sum(-1))
            ROW.part(health, tile).add_(torch.addcmul(P, P, P, value=-1, out=room.like("weights", P)).sum(-1))
    return p.shaped(health.flatten(1, 2)), p.shaped(distance.flatten(1, 2))


@torch.no_grad()
@exactly
def pooled(p: Problem, found: Result, height: int, width: int, cut: Cut) -> Tensor:
    """The mean weight in each cell of a grid over N × M: (…, Hq, height, width)."""
    x, look = _looking(p, found)
    n, m = x.rule.n, x.rule.m
    down = torch.arange(n, device=look.peak.device) * height // max(n, 1)  # the cell of each row
    across = torch.arange(m, device=look.peak.device) * width // max(m, 1)
    total = x.query.new_zeros(*x.query.shape[:3], height, width)
    room = Room()
    for strip in strips(x.rule, x.query.shape, cut):
        for run in strip.runs:
            tile = strip.tile(run)
            P = weights(x, tile, run, look, room)  # (l, k, g, r, c)
            top, bottom = (i * height // n for i in (tile.rows.start, tile.rows.stop - 1))
            left, right = (j * width // m for j in (tile.cols.start, tile.cols.stop - 1))
            rows = one_hot(down[tile.rows] - top, bottom + 1 - top).to(P.dtype)  # (r, cells): a product, not a scatter,
            cols = one_hot(across[tile.cols] - left, right + 1 - left).to(P.dtype)  # has the same bits every time
            cells = total[tile.batch, tile.heads, :, top : bottom + 1, left : right + 1]
            cells += (rows.mT @ P) @ cols
    area = torch.bincount(down, minlength=height)[:, None] * torch.bincount(across, minlength=width)
    return p.shaped((total / area).flatten(1, 2))


@torch.no_grad()
@exactly
def visible(p: Problem, cut: Cut) -> Tensor:
    """How many keys each row may attend: (…, Hq, N), int64."""
    x = canonical(p)
    shape = x.query.shape[:-1]
    count = torch.zeros(shape, dtype=torch.int64, device=x.query.device)
    for strip in strips(x.rule, x.query.shape, cut):
        for run in strip.runs:
            tile = strip.tile(run)
            part = ROW.part(count, tile)
            size = (*part.shape, run.stop - run.start)
            shown = torch.ones((), dtype=torch.bool, device=count.device).expand(size)
            if not run.full and (hide := hidden(x.rule, tile, shape[2], count.device)) is not None:
                shown = (~hide).expand(size)
            bias = None if x.bias is None else BIAS.part(x.bias, tile)
            if (added := bias_tile(x.rule, tile, shape[2], bias, x.shared)) is not None:
                shown = shown & (added != -torch.inf)
            part.add_(run.stop - run.start if run.full and added is None else shown.sum(-1))
    return p.shaped(count.flatten(1, 2))


@torch.no_grad()
@exactly
def top(p: Problem, found: Result, k: int, cut: Cut) -> tuple[Tensor, Tensor]:
    """The k largest weights of each row and their keys, ties to the lowest index; −1 where fewer are visible."""
    x, look = _looking(p, found)
    shape = (*x.query.shape[:-1], k)
    best = x.query.new_full(shape, -torch.inf)
    where = torch.full(shape, -1, dtype=torch.int64, device=look.peak.device)
    room = Room()
    for strip in strips(x.rule, x.query.shape, cut):
        for run in strip.runs:
            tile = strip.tile(run)
            S = masked_logits(x, tile, run, room)  # (l, k, g, r, c)
            values, index = _strongest(S, min(k, S.shape[-1]))
            rows = (tile.batch, tile.heads, slice(None), tile.rows)
            values = torch.cat((best[rows], values), -1)
            index = torch.cat((where[rows], index + run.start), -1)
            order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]  # earlier runs have lower keys
            best[rows], where[rows] = values.gather(-1, order), index.gather(-1, order)
    seen = best > -torch.inf
    share = torch.where(seen, (best - look.peak[..., None] - look.spread[..., None]).exp(), 0.0).to(p.dtype)
    where = where.masked_fill(~seen, -1)
    return p.shaped(share.flatten(1, 2)), p.shaped(where.flatten(1, 2))


@exactly
def logits_at(p: Problem, rows: Tensor, cols: Tensor) -> Tensor:
    """The logits of chosen rows and keys, −inf where hidden, with derivatives: (…, Hq, rows, cols)."""
    x = canonical(p)
    batch, heads, groups = x.query.shape[:3]
    spots = Spots(slice(0, batch), slice(0, heads), rows, cols)
    bias = x.bias
    if bias is not None:
        bias = bias if bias.shape[-2] == 1 else bias.index_select(-2, rows)
        bias = bias if bias.shape[-1] == 1 else bias.index_select(-1, cols)
    S = logits(x.rule, spots, x.query.index_select(-2, rows), x.key.index_select(-2, cols), bias, x.shared)
    if (hide := hidden(x.rule, spots, groups, S.device)) is not None:
        S = torch.where(hide, -torch.inf, S)
    return p.shaped(S.flatten(1, 2))


def _strongest(S: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, largest first, ties to the lowest index.

    Keys compete in blocks first: the k largest lie in the k blocks with the largest maxima, so most keys are read once.
    """
    count = S.shape[-1]
    blocks = count // _SPLIT
    if blocks < 2 * k:
        return _by_rank(S, torch.arange(count, device=S.device), k)
    body = S[..., : blocks * _SPLIT].unflatten(-1, (blocks, _SPLIT))
    peaks = body.amax(-1)  # (…, blocks)
    _, chosen = _by_rank(peaks, torch.arange(blocks, device=S.device), k)  # (…, k)
    chosen = chosen.sort(-1).values
    found = body.gather(-2, chosen[..., None].expand(*chosen.shape, _SPLIT)).flatten(-2)
    index = (chosen[..., None] * _SPLIT + torch.arange(_SPLIT, device=S.device)).flatten(-2)
    tail = torch.arange(blocks * _SPLIT, count, device=S.device)
    found = torch.cat((found, S[..., blocks * _SPLIT :]), -1)
    index = torch.cat((index, tail.expand(*index.shape[:-1], -1)), -1)
    return _by_rank(found, index, k)


def _by_rank(S: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest by (value, then lower position)."""
    if S.dtype != torch.float32:
        values, order = S.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], index.expand(S.shape).gather(-1, order[..., :k])
    bits = (S + 0.0).view(torch.int32).to(torch.int64)  # −0 and 0 tie
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # the order of the floats, as integers
    last = S.shape[-1] - 1
    rank = bits * 2**31 + (last - torch.arange(last + 1, device=S.device))
    order = last - (rank.topk(k).values & 0x7FFFFFFF)
    return S.gather(-1, order), index.expand(S.shape).gather(-1, order)


def _looking(p: Problem, found: Result) -> tuple[Canonical, Look]:
    """The problem without its graph, and what is known of its rows."""
    x = canonical(p)
    shape = x.query.shape[:-1]
    if found.max_logit is None or found.spread is None:
        raise RuntimeError("a pass needs what the forward pass found")
    return x, Look.at(found.max_logit.detach().reshape(shape), found.spread.detach().reshape(shape))

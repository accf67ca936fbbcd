"""The divergence between two attentions over the same keys: one number per row, in linear memory.

If both see the same keys, and the logits of one are dot products, the KL divergence is two calls of attention. All else
is computed in strips of whole rows: a strip computes the log weights of both sides and compares them. That is a
`StripMap`, so its derivatives of every order are maps over the same strips, and no pass holds N × M numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.strip_map import MapStrips, StripMap, Tensors
from ..compat.torch import call_function, not_traced, without_autocast
from ..core.folded import FoldedProblem, fold
from ..core.formula import hidden, logits
from ..core.options import Heads, Kind
from ..core.problem import Problem
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.tiling import BIAS, KEY, QUERY, SHARED, Axes, Tile, TileSizes, strips
from ..errors import MaskError
from ..masks import Mask
from ..softmax import lowest

__all__ = ["divergence_in_strips", "row_divergence"]

Attend = Callable[[Problem], Rows]


class PairTile(NamedTuple):
    """The same rows and keys of both sides; their key heads differ if they group their heads differently."""

    a: Tile
    b: Tile
    result: Tile  # its heads are query heads


class PartOf(NamedTuple):
    """Which dimensions of a tensor are tiled, and by which tile of a pair."""

    axes: Axes
    which: int

    def part(self, x: Tensor, tile: PairTile) -> Tensor:
        return self.axes.part(x, tile[self.which])

    def add(self, whole: Tensor, tile: PairTile, part: Tensor) -> None:
        self.part(whole, tile).add_(part)


class LogWeights(NamedTuple):
    """The log weights of a strip, and what is hidden; both (l, H, r, c), or broadcastable to it."""

    log: Tensor  # 0 where hidden
    hide: Tensor | None

    @property
    def weights(self) -> Tensor:
        P = self.log.exp()
        return P if self.hide is None else torch.where(self.hide, 0.0, P)

    def unsqueeze(self, dim: int) -> LogWeights:
        return LogWeights(self.log.unsqueeze(dim), None if self.hide is None else self.hide.unsqueeze(dim))


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two attentions: its tensors, and its log weights on a tile."""

    x: FoldedProblem
    sink: Tensor | None  # (1, K, G, 1, 1)
    outside: bool  # whether one of the sides has a sink, so that both have one more outcome

    @staticmethod
    def of(p: Problem, outside: bool) -> Side:
        x = fold(p)
        sink = None if p.sink is None else p.sink.to(p.dtype).view(1, *x.query.shape[1:3], 1, 1)
        return Side(x, sink, outside)

    @property
    def tensors(self) -> Tensors:
        more = (t for t in (self.x.bias, self.sink) if t is not None)
        return (self.x.query, self.x.key, *more, *self.x.shared)

    @property
    def axes(self) -> tuple[Axes, ...]:
        more = [BIAS for t in (self.x.bias, self.sink) if t is not None]
        return (QUERY, KEY, *more, *(SHARED,) * len(self.x.shared))

    @property
    def heads(self) -> int:
        return self.x.query.shape[1] * self.groups

    @property
    def groups(self) -> int:
        return self.x.query.shape[2]

    def log_weights(self, tile: Tile, query: Tensor, key: Tensor, *rest: Tensor) -> LogWeights:
        """The log weights (l, H, r, c), where c has one more outcome if there is a sink."""
        spec, others = self.x.spec, list(rest)
        bias = others.pop(0) if self.x.bias is not None else None
        sink = others.pop(0) if self.sink is not None else None
        S = logits(spec, tile, query, key, bias, tuple(others))  # (l, k, g, r, c)
        hide = hidden(spec, tile, self.groups, S.device)
        if bias is not None or spec.hides_by_value:
            lost = torch.isneginf(S)
            hide = lost if hide is None else torch.logical_or(hide, lost)
        if self.outside:
            end = (*S.shape[:-1], 1)
            S = torch.cat((S, S.new_zeros(end) if sink is None else sink.expand(end)), -1)
            if hide is not None or sink is None:
                hide = (
                    torch.zeros_like(S[..., :-1], dtype=torch.bool) if hide is None else hide.expand(S[..., :-1].shape)
                )
                hide = torch.cat((hide, hide.new_full(end, sink is None)), -1)
        S = S.flatten(1, 2)
        if hide is not None:
            shared = hide.dim() < 5 or hide.shape[1:3] == (1, 1)
            lead = hide.shape[:-2].numel()  # not -1, which torch cannot infer without keys
            if shared:
                hide = hide.reshape(lead, 1, *hide.shape[-2:])
            else:
                hide = hide.expand(-1, -1, self.groups, -1, -1).flatten(1, 2)
        return _normalized(S, hide, -1)


def _normalized(S: Tensor, hide: Tensor | None, dim: int) -> LogWeights:
    """Subtract from logits the log Σ exp of those along a dimension that are not hidden."""
    total = _log_sum_exp(S, hide, dim)
    return LogWeights(S - total if hide is None else torch.where(hide, 0.0, S - total), hide)


def _log_sum_exp(S: Tensor, hide: Tensor | None, dim: int) -> Tensor:
    """Log Σ exp along a dimension, which is kept with size 1, of what is not hidden; 0 where all is hidden."""
    if not S.shape[dim]:
        return S.sum(dim, keepdim=True)
    if hide is None:
        return S.logsumexp(dim, keepdim=True)
    level = S.detach().masked_fill(hide, -torch.inf).amax(dim, keepdim=True).clamp(min=lowest(S.dtype))
    X = torch.where(hide, 0.0, S - level)
    total = torch.where(hide, 0.0, X.exp()).sum(dim, keepdim=True)
    empty = total == 0
    return torch.where(empty, 0.0, level + torch.where(empty, 1.0, total).log())


def _mean_over_heads(w: LogWeights) -> LogWeights:
    """The log of the mean weight over heads, (l, 1, r, c)."""
    heads = w.log.shape[1]
    total = _log_sum_exp(w.log, w.hide, 1)
    hide = None if w.hide is None else w.hide.all(1, keepdim=True)
    log = total - math.log(max(heads, 1))
    return LogWeights(log if hide is None else torch.where(hide, 0.0, log), hide)


def _kl(p: LogWeights, r: LogWeights, epsilon: float | None) -> Tensor:
    """Σ p·(log p − log r) of each row; infinite, with gradient 0, where p has weight on a key that r hides."""
    P = p.weights
    log_r, gone = (r.log, r.hide) if epsilon is None else (_mixed(p, r, epsilon), None)
    live = P != 0  # a weight that is 0 adds nothing, whatever its log is; NaN counts as a weight
    shared = live if gone is None else torch.logical_and(live, torch.logical_not(gone))
    total = (P * torch.where(shared, p.log - log_r, 0.0)).sum(-1)
    if gone is None:
        return total
    return torch.where(torch.logical_and(live, gone).any(-1), torch.inf, total)


def _mixed(p: LogWeights, r: LogWeights, epsilon: float) -> Tensor:
    """Log of (1 − ε)·r + ε·u, with u uniform over the keys that one of the sides sees."""
    kept = r.log + math.log1p(-epsilon)
    if p.hide is None or r.hide is None:
        count = torch.full_like(r.log[..., :1], r.log.shape[-1])
    else:
        count = torch.logical_not(torch.logical_and(p.hide, r.hide)).sum(-1, keepdim=True).clamp(min=1).to(r.log.dtype)
    floor = math.log(epsilon) - count.log()
    mixed = torch.logaddexp(kept, floor)
    return mixed if r.hide is None else torch.where(r.hide, floor, mixed)


def _js(p: LogWeights, r: LogWeights) -> Tensor:
    """½·Σ p·log(p/m) + ½·Σ r·log(r/m) of each row with m = (p + r)/2: from 0 to log 2."""
    D = (p.log - r.log).clamp(-1e4, 1e4)  # finite, and beyond it the smaller weight is 0

    def half(own: LogWeights, D: Tensor) -> Tensor:
        """Σ p·log(p/m), as log(p/m) = log 2 − log(1 + r/p)."""
        term = math.log(2) - torch.logaddexp(torch.zeros_like(D), -D)
        for hide in (p.hide, r.hide):
            term = term if hide is None else torch.where(hide, math.log(2), term)
        return (own.weights * term).sum(-1)

    return (half(p, D) + half(r, -D)) / 2


def _tiles(a: Side, b: Side, heads: Heads) -> Iterator[PairTile]:
    """Strips of rows with every key that one of the sides may see."""
    batch, n, m = a.x.query.shape[0], a.x.spec.n, a.x.spec.m
    cost = max(a.x.spec.cost, b.x.spec.cost)
    if heads is None:
        unit = math.lcm(max(a.groups, 1), max(b.groups, 1))  # so many heads are whole key heads on both sides
    else:
        unit = max(a.heads, b.heads)
        cost *= min(a.heads, b.heads) if heads == "pairs" else 1
    mask = _either(a, b)
    spec = Spec(n, m, mask, cost=cost, inner=a.x.spec.inner if mask is not None else 1, period=batch)
    sizes = TileSizes().on(a.x.query.device, masked=mask is not None, independent=True)
    for strip in strips(spec, (batch, max(a.heads, b.heads) // max(unit, 1), unit), sizes, whole=True):
        tile = strip.hull(m)
        whole = slice(tile.heads.start * unit, tile.heads.stop * unit)
        of_sides = [
            slice(whole.start // s.groups, whole.stop // s.groups if heads is None else s.x.query.shape[1])
            for s in (a, b)
        ]
        yield PairTile(tile._replace(heads=of_sides[0]), tile._replace(heads=of_sides[1]), tile._replace(heads=whole))


def _either(a: Side, b: Side) -> Mask | None:
    """A mask that shows what one of the sides shows; None if that is everything, or has no common form."""
    first, second = a.x.spec.mask, b.x.spec.mask
    if first is None or second is None or a.x.spec.inner != b.x.spec.inner:
        return None
    if a.heads != b.heads and (first.lead[1] > 1 or second.lead[1] > 1):
        return None
    if first is second:
        return first
    try:
        return first | second
    except MaskError:
        return None


def _strip_map(a: Side, b: Side, kind: Kind, heads: Heads, epsilon: float | None) -> StripMap:
    """The map from the tensors of both sides to the divergence of each row."""
    count = len(a.tensors)

    def body(tile: PairTile, *parts: Tensor) -> Tensors:
        p, r = a.log_weights(tile.a, *parts[:count]), b.log_weights(tile.b, *parts[count:])
        if heads == "mean":
            p, r = _mean_over_heads(p), _mean_over_heads(r)
        elif heads == "pairs":
            p, r = p.unsqueeze(2), r.unsqueeze(1)  # (l, Ha, 1, r, c) and (l, 1, Hb, r, c)
        if kind == "js":
            return (_js(p, r),)
        return (_kl(p, r, epsilon) if kind == "kl" else _kl(r, p, epsilon),)

    batch, n = a.x.query.shape[0], a.x.spec.n
    shape, axes = {
        None: ((batch, a.heads, n), Axes(batch=-3, heads=-2, rows=-1)),
        "mean": ((batch, 1, n), Axes(batch=-3, rows=-1)),
        "pairs": ((batch, a.heads, b.heads, n), Axes(batch=-4, rows=-1)),
    }[heads]
    takes = (*(PartOf(axis, 0) for axis in a.axes), *(PartOf(axis, 1) for axis in b.axes))
    return StripMap(tuple(_tiles(a, b, heads)), body, takes, (PartOf(axes, 2),), (shape,))


@not_traced
@without_autocast
def row_divergence(
    first: Problem, second: Problem, kind: Kind, heads: Heads, epsilon: float | None, attend: Attend
) -> Tensor:
    """The divergence of each row: (B, H, N), (B, 1, N) for the mean over heads, or (B, Ha, Hb, N) for pairs of heads.

    On a CPU it is computed in float64. `attend` runs an observed problem.
    """
    exact = torch.promote_types(first.exact_dtype, second.exact_dtype)
    wide = torch.float64 if first.device.type == "cpu" else exact  # the digits of two attentions that are close
    a, b = (
        each._replace(query=each.query.to(wide), key=each.key.to(wide), value=each.key[..., :0].to(wide), dropout=0.0)
        for each in (first, second)
    )
    p, r = (b, a) if kind == "reverse" else (a, b)
    if kind != "js" and heads is None and epsilon is None and _is_attention(p, r):
        found = _kl_by_attention(p, r, attend)
    else:
        found = divergence_in_strips(a, b, kind, heads, epsilon)
    return torch.where(found < 0, found - found.detach(), found).to(exact)  # rounding; the derivatives are as they are


def _is_attention(p: Problem, r: Problem) -> bool:
    """Whether Σ p·(logits of r) is attention: r's logits are dot products over the keys that p sees."""
    plain = r.bias is None and r.softcap is None and (r.score is None or not r.score.pairwise)
    same = p.mask is r.mask or p.mask == r.mask
    return plain and same and p.sink is r.sink is None and p.key.shape[1] == r.key.shape[1] and p.keys > 0


def _kl_by_attention(p: Problem, r: Problem, attend: Attend) -> Tensor:
    """KL(p ‖ r) = −H(p) − Σ p·s + lse of r. As s = q·k, the sum is q times the attention of p to r's keys as values."""
    x = fold(r)
    both = [problem._replace(observed=True, lead=tuple(problem.query.shape[:2])) for problem in (p, r)]
    rows = attend(both[0]._replace(value=x.key))
    lse = attend(both[1]._replace(value=r.key)).lse
    seen = torch.logical_and(rows.lse != -torch.inf, lse != -torch.inf)
    cross = (x.query.flatten(1, 2) * rows.output).sum(-1)  # (B, H, N)
    return torch.where(seen, torch.where(seen, lse, 0.0) - rows.entropy - cross, 0.0)


def divergence_in_strips(first: Problem, second: Problem, kind: Kind, heads: Heads, epsilon: float | None) -> Tensor:
    """The same in the dtype of the queries, in strips whatever the sides are."""
    outside = first.sink is not None or second.sink is not None
    a, b = Side.of(first, outside), Side.of(second, outside)
    found: Tensor = call_function(MapStrips, _strip_map(a, b, kind, heads, epsilon), *a.tensors, *b.tensors)[0]
    return found

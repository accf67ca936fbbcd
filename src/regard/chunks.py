"""Attention in chunks of rows, in plain torch: the passes of the backend `chunked`, on any device, in linear memory.

Rows are cut into strips, keys into runs; a run is folded into its strip by the online softmax. What moves (tangents)
is folded along: with t the tangent of the logits, Σ P t V + P dV and Σ P t are rescaled as the numerator is. The other
passes keep the rows' largest logit and what lse has above it, and compute the weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import exactly
from .canonical import Canonical
from .derivatives import Mapped, applied, attention_map, pull_back, pushed
from .formula import Rows, bias_tile, kept, products
from .orders import Engine, Needs, Some
from .rule import Rule
from .scan import Look, Room, below, masked_logits
from .softmax import Partial, lowest, merge
from .tile import BIAS, KEY, QUERY, ROW, TURNED, Tile
from .tiling import Cut, Strip, strips

__all__ = ["Chunks"]

Grads = list[Tensor | None]


@dataclass(frozen=True, eq=False)
class Chunks(Engine):
    """Passes over (query, key, value, bias, *shared) as `Canonical` has them."""

    rule: Rule
    cut: Cut
    observed: bool

    @exactly
    def attend(self, x: Some) -> Rows:
        return _forward(_canonical(self.rule, x), self.cut, self.observed, None)[0]

    @exactly
    def push(self, x: Some, w: Some) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        given = _canonical(self.rule, x)
        return _forward(given, self.cut, self.observed, Moving(given, w))

    @exactly
    def pull(self, x: Some, found: Rows, g: Some, needs: Needs) -> Sequence[Tensor | None]:
        return _backward(_canonical(self.rule, x), self.cut, needs, found, g)

    @exactly
    def bend(
        self, x: Some, found: Rows, moved: Some, g: Some, w: Some, dg: Some, needs: Needs
    ) -> Sequence[Tensor | None]:
        given = _canonical(self.rule, x)
        return _bend(given, Moving(given, w), self.cut, needs, Bending.at(found, moved, g, dg))

    def meaning(self, x: Some) -> tuple[Tensor, ...]:
        given = _canonical(self.rule, x)
        found: tuple[Tensor, ...] = applied(Mapped, attention_map(given, self.cut), *(t for t in x if t is not None))
        return found

    def over(self, size: int) -> tuple[Engine, int]:
        return self, 0  # a rule begins again after its period


def _canonical(rule: Rule, x: Some) -> Canonical:
    query, key, value, bias, *shared = x
    if query is None or key is None or value is None:
        raise RuntimeError("a problem has queries, keys and values")
    return Canonical(query, key, value, bias, tuple(t for t in shared if t is not None), rule)


class Moving:
    """The tangents of a problem's tensors, and of the logits of a tile."""

    def __init__(self, x: Canonical, w: Some) -> None:
        self.x = x
        self.query, self.key, self.value, self.bias, *self.shared = w

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor] | None:
        """Rows and keys whose products are dq·k + q·dk; None if both stand still."""
        pairs = [(self.query, self.x.key)] if self.query is not None else []
        pairs += [(self.x.query, self.key)] if self.key is not None else []
        return (torch.cat([q for q, _ in pairs], -1), torch.cat([k for _, k in pairs], -1)) if pairs else None

    @cached_property
    def values(self) -> Tensor:
        """Values, and their tangents beside them if they have some."""
        return self.x.value if self.value is None else torch.cat((self.x.value, self.value), -1)

    def scores(self, tile: Tile, room: Room) -> Tensor | None:
        """The tangent of the scores (l, k, g, r, c), before cap and bias; None if they stand still."""
        rule = self.x.rule
        if rule.pair is not None:
            given = (QUERY.part(self.x.query, tile), KEY.part(self.x.key, tile), *self.x.shared[: rule.paired])
            moved = [self.query, self.key, *self.shared[: rule.paired]]
            moved[0] = None if moved[0] is None else QUERY.part(moved[0], tile)
            moved[1] = None if moved[1] is None else KEY.part(moved[1], tile)
            return pushed(lambda q, k, *s: (products(rule, q, k, s),), given, filled(given, moved))[1][0]
        if self._factors is None:
            return None
        rows, keys = self._factors
        return room.product(
            "moving", QUERY.part(rows, tile), TURNED.part(room.turned("moving keys", keys, rule.n), tile)
        )

    def logits(self, tile: Tile, scores: Tensor | None, groups: int) -> Tensor | None:
        """The tangent of the logits, made of that of the scores; None if they stand still."""
        rule, T = self.x.rule, scores
        if T is not None and rule.softcap is not None:
            T = T * (1 - _tanh(self.x, tile).square_())
        added = None if self.bias is None else BIAS.part(self.bias, tile)
        tables = self.shared[rule.paired :]
        if rule.bias is not None and any(t is not None for t in tables):
            given = self.x.shared[rule.paired :]
            fixed = self.x.shared[: rule.paired]
            added = pushed(
                lambda *t: (bias_tile(rule, tile, groups, None, (*fixed, *t)),), given, filled(given, tables)
            )[1][0]
        if added is None or T is None:
            return T if added is None else added.to(self.x.query.dtype)
        return T.add_(added)


def filled(given: Sequence[Tensor], moved: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Tangents, zeros for what stands still."""
    return tuple(torch.zeros_like(x) if t is None else t for x, t in zip(given, moved, strict=True))


def _tanh(x: Canonical, tile: Tile) -> Tensor:
    """tanh(score / cap) of a tile."""
    raw = products(x.rule, QUERY.part(x.query, tile), KEY.part(x.key, tile), x.shared)
    return raw if x.rule.softcap is None else (raw / x.rule.softcap).tanh_()


def _forward(
    x: Canonical, cut: Cut, observed: bool, moving: Moving | None
) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """Output, lse, entropy and largest logit of every row, strip by strip; and the tangents of the first three."""
    shape = x.query.shape[:-1]
    dim = x.value.shape[-1]
    output = x.query.new_zeros(*shape, dim)
    lse = x.query.new_full(shape, -torch.inf)
    peak = torch.full_like(lse, -torch.inf)
    entropy, spread = torch.zeros_like(lse), torch.zeros_like(lse)
    still = (output, lse, entropy)
    tangents = (
        still if moving is None else (torch.zeros_like(output), torch.zeros_like(spread), torch.zeros_like(spread))
    )
    room = Room()
    for strip in strips(x.rule, x.query.shape, cut):
        if not strip.runs:
            continue
        state, e, c = _fold(x, strip, observed, moving, room)
        hull = strip.tile(strip.runs[0])
        l = state.denominator  # noqa: E741
        empty = l == 0
        l = torch.where(empty, 1.0, l)  # noqa: E741
        scale = 1.0 / (l * (1 - x.rule.dropout)) if x.rule.dropout else 1.0 / l
        O = torch.mul(state.numerator[..., :dim], scale[..., None], out=QUERY.part(output, hull))  # noqa: E741
        above = torch.log(l, out=ROW.part(spread, hull))
        ROW.part(lse, hull).copy_((state.max + above).masked_fill_(empty, -torch.inf))
        ROW.part(peak, hull).copy_(state.max.masked_fill(empty, -torch.inf))
        if e is not None:
            torch.sub(above, e / l, out=ROW.part(entropy, hull))
        if moving is not None:
            u = torch.div(state.numerator[..., -1], l, out=ROW.part(tangents[1], hull))  # Σ P t
            A = torch.mul(state.numerator[..., dim:-1], scale[..., None], out=QUERY.part(tangents[0], hull))
            A.sub_(u[..., None] * O)
            if e is not None and c is not None:
                torch.div(u * e - c, l, out=ROW.part(tangents[2], hull))  # −Cov(t, S)
    return Rows(output, lse, entropy, peak, spread), tangents


class Folded(NamedTuple):
    """A strip's running sums: with X the logits below their max, e = Σ exp(X)·X and c = Σ exp(X)·t·X."""

    state: Partial
    e: Tensor | None
    c: Tensor | None


def _fold(x: Canonical, strip: Strip, observed: bool, moving: Moving | None, room: Room) -> Folded:
    """Fold the runs of a strip; what moves makes the numerator wider: Σ exp(X)·(V | t V + dV | t)."""
    sums: Folded | None = None
    for run in strip.runs:
        tile = strip.tile(run)
        S = masked_logits(x, tile, run, room)  # (l, k, g, r, c)
        m = S.amax(-1).clamp_(min=lowest(S.dtype))  # (l, k, g, r)
        X = below(x, S, m, run)
        P = torch.exp(X, out=room.like("weights", X))
        l = P.sum(-1)  # noqa: E741
        XP = X.mul_(P) if observed else None
        new = Folded(Partial(m, l, l), None if XP is None else XP.sum(-1), None)
        keep = kept(x.rule, tile, S.shape[2], S.device) if x.rule.dropout else None
        if moving is None:
            O = _averaged(P if keep is None else P.mul_(keep), KEY.part(x.value, tile))  # noqa: E741
        else:
            T = moving.logits(tile, moving.scores(tile, room), S.shape[2])
            c = None if XP is None or T is None else (XP * T).sum(-1)
            O = _moved(x, moving, tile, P, T, keep)  # noqa: E741
            new = new._replace(c=torch.zeros_like(l) if c is None else c)
        new = new._replace(state=Partial(m, l, O))
        sums = new if sums is None else _merged(sums, new)
    if sums is None:
        raise RuntimeError("a strip without runs has nothing to fold")
    return sums


def _moved(x: Canonical, moving: Moving, tile: Tile, P: Tensor, T: Tensor | None, keep: Tensor | None) -> Tensor:
    """Σ P·(V | t V + dV | t) over the keys of a tile."""
    PT = None if T is None else P * T
    u = P.new_zeros(P.shape[:-1]) if PT is None else PT.sum(-1)
    if keep is not None:
        P = P.mul_(keep)
        PT = None if PT is None else PT.mul_(keep)
    dim = x.value.shape[-1]
    both = _averaged(P, KEY.part(moving.values, tile))
    A = both[..., dim:] if moving.value is not None else torch.zeros_like(both)
    if PT is not None:
        A = A + _averaged(PT, KEY.part(x.value, tile))
    return torch.cat((both[..., :dim], A, u[..., None]), -1)


def _averaged(P: Tensor, values: Tensor) -> Tensor:
    """(l, k, g, r, c) times (l, k, c, E)."""
    O: Tensor = (P.flatten(2, 3) @ values).unflatten(2, P.shape[2:4])  # noqa: E741
    return O


def _merged(old: Folded, new: Folded) -> Folded:
    state = merge(old.state, new.state)
    e = None if old.e is None or new.e is None else _shifted(old.e, old, state) + _shifted(new.e, new, state)
    c = None if old.c is None or new.c is None else _shifted(old.c, old, state, -1) + _shifted(new.c, new, state, -1)
    return Folded(state, e, c)


def _shifted(sum_: Tensor, old: Folded, new: Partial, column: int | None = None) -> Tensor:
    """A sum of exp(X)·y·X relative to a new max: exp(down)·(sum + down·Σ exp(X)·y)."""
    down = (old.state.max - new.max).clamp_(min=-1e4)  # finite, and deep enough for exp to be 0
    mass = old.state.denominator if column is None else old.state.numerator[..., column]
    return down.exp() * (sum_ + down * mass)


def _backward(
    x: Canonical,
    cut: Cut,
    needs: tuple[bool, ...],
    found: Rows,
    cotangents: Some,
) -> tuple[Tensor | None, ...]:
    """Cotangents of (query, key, value, bias, *shared) where needed: dS = P ∘ (dP − δ + g_lse − g_H·(S − E[S]))."""
    output, _, entropy, peak, spread = found
    dO, g_lse, g_H = cotangents
    dO = torch.zeros_like(output) if dO is None else dO
    delta = -(dO * output).sum(-1) if g_lse is None else g_lse - (dO * output).sum(-1)  # (L, K, G, N)
    look = Look.at(peak, spread)
    mean = spread - entropy  # E[S] above the largest logit
    inputs = (x.query, x.key, x.value, x.bias, *x.shared)
    grads = [_zeros(t, x.query.dtype) if need else None for t, need in zip(inputs, needs, strict=True)]
    room = Room()
    for strip in strips(x.rule, x.query.shape, cut):
        for run in strip.runs:
            tile = strip.tile(run)
            X = below(x, masked_logits(x, tile, run, room), ROW.part(look.peak, tile), run)  # (l, k, g, r, c)
            P = torch.sub(X, ROW.part(spread, tile)[..., None], out=room.like("weights", X)).exp_()
            dO_tile = _rows(QUERY.part(dO, tile))  # (l, k, g·r, E)
            values = TURNED.part(room.turned("values", x.value, x.rule.n), tile)
            dP = room.product("slopes", QUERY.part(dO, tile), values)
            Pd = P
            if x.rule.dropout:
                keep = kept(x.rule, tile, X.shape[2], X.device).to(X.dtype) / (1 - x.rule.dropout)
                dP.mul_(keep)
                Pd = P * keep
            if grads[2] is not None:
                KEY.part(grads[2], tile).add_(_rows(Pd).mT @ dO_tile)
            dS = dP.add_(ROW.part(delta, tile)[..., None]).mul_(P)
            if g_H is not None:
                surprise = X.sub_(ROW.part(mean, tile)[..., None]).mul_(P)
                dS.sub_(surprise.mul_(ROW.part(g_H, tile)[..., None]))
            _pull(x, tile, dS, grads, room)
    return tuple(g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))


class Bending(NamedTuple):
    """What `_bend` needs of every row: (L, K, G, N, …) each, with a dot for what moves."""

    dO: Tensor
    dO_dot: Tensor | None
    look: Look
    delta: Tensor  # g_lse − Σ dO ∘ O
    delta_dot: Tensor
    u: Tensor  # the tangent of lse
    mean: Tensor  # E[S] above the largest logit
    mean_dot: Tensor
    g_H: Tensor | None
    g_H_dot: Tensor | None

    @staticmethod
    def at(found: Rows, moved: Some, g: Some, dg: Some) -> Bending:
        output, _, entropy, peak, spread = found
        O_dot, u, H_dot = moved
        dO, g_lse, g_H = g
        dO_dot, g_lse_dot, g_H_dot = dg
        if O_dot is None or u is None or H_dot is None:
            raise RuntimeError("rows that move have tangents")
        dO = torch.zeros_like(output) if dO is None else dO
        delta = -(dO * output).sum(-1) if g_lse is None else g_lse - (dO * output).sum(-1)
        delta_dot = -(dO * O_dot).sum(-1)
        if dO_dot is not None:
            delta_dot = delta_dot - (dO_dot * output).sum(-1)
        if g_lse_dot is not None:
            delta_dot = delta_dot + g_lse_dot
        means = (spread - entropy, u - H_dot)
        return Bending(dO, dO_dot, Look.at(peak, spread), delta, delta_dot, u, *means, g_H, g_H_dot)


def _bend(x: Canonical, moving: Moving, cut: Cut, needs: Needs, b: Bending) -> tuple[Tensor | None, ...]:
    """The tangent of the backward pass: with B = dP + δ − g_H·(S − E[S]) and t the tangent of S less that of lse,

    dS = P ∘ B moves by P ∘ (t B + dB), and everything that dS is multiplied with moves too.
    """
    inputs = (x.query, x.key, x.value, x.bias, *x.shared)
    grads = [_zeros(t, x.query.dtype) if need else None for t, need in zip(inputs, needs, strict=True)]
    room = Room()
    for strip in strips(x.rule, x.query.shape, cut):
        for run in strip.runs:
            tile = strip.tile(run)
            X = below(x, masked_logits(x, tile, run, room), ROW.part(b.look.peak, tile), run)  # (l, k, g, r, c)
            P = torch.sub(X, ROW.part(b.look.spread, tile)[..., None], out=room.like("weights", X)).exp_()
            T_raw = moving.scores(tile, room)
            T = moving.logits(tile, T_raw, X.shape[2])
            T = torch.zeros_like(X) if T is None else T.expand_as(X)
            keep = (
                kept(x.rule, tile, X.shape[2], X.device).to(X.dtype) / (1 - x.rule.dropout) if x.rule.dropout else None
            )
            B, B_dot = _slopes(x, moving, tile, b, X, T, keep, room)
            R = T - ROW.part(b.u, tile)[..., None]
            dS = P * B
            dS_dot = B.mul_(R).add_(B_dot).mul_(P)
            if grads[2] is not None:
                P = P if keep is None else P.mul_(keep)
                part = KEY.part(grads[2], tile)
                if b.dO_dot is not None:
                    part.add_(_rows(P).mT @ _rows(QUERY.part(b.dO_dot, tile)))
                part.add_(_rows(R.mul_(P)).mT @ _rows(QUERY.part(b.dO, tile)))
            _pull_moving(x, moving, tile, (dS, dS_dot, T_raw), grads, room)
    return tuple(g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))


def _slopes(
    x: Canonical, moving: Moving, tile: Tile, b: Bending, X: Tensor, T: Tensor, keep: Tensor | None, room: Room
) -> tuple[Tensor, Tensor]:
    """B and its tangent, (l, k, g, r, c)."""
    values = TURNED.part(room.turned("values", x.value, x.rule.n), tile)
    dO = QUERY.part(b.dO, tile)
    B = room.product("slopes", dO, values)
    B_dot = torch.zeros_like(B)
    if moving.value is not None:
        B_dot += room.product("bent", dO, TURNED.part(room.turned("moving values", moving.value, x.rule.n), tile))
    if b.dO_dot is not None:
        B_dot += room.product("bent", QUERY.part(b.dO_dot, tile), values)
    if keep is not None:
        B, B_dot = B.mul_(keep), B_dot.mul_(keep)
    B.add_(ROW.part(b.delta, tile)[..., None])
    B_dot.add_(ROW.part(b.delta_dot, tile)[..., None])
    surprise = X - ROW.part(b.mean, tile)[..., None]
    if b.g_H is not None:
        g = ROW.part(b.g_H, tile)[..., None]
        B.sub_(g * surprise)
        B_dot.sub_(g * (T - ROW.part(b.mean_dot, tile)[..., None]))
    if b.g_H_dot is not None:
        B_dot.sub_(surprise.mul_(ROW.part(b.g_H_dot, tile)[..., None]))
    return B, B_dot


def _pull_moving(
    x: Canonical, moving: Moving, tile: Tile, slopes: tuple[Tensor, Tensor, Tensor | None], grads: Grads, room: Room
) -> None:
    """Carry the tangent of the cotangent of a tile's logits back, as `_pull` carries the cotangent."""
    rule = x.rule
    dS, dS_dot, T_raw = slopes
    if grads[3] is not None:
        part = BIAS.part(grads[3], tile)
        part.add_(dS_dot.sum_to_size(part.shape))
    if rule.bias is not None and any(g is not None for g in grads[4 + rule.paired :]):
        tables, fixed = x.shared[rule.paired :], x.shared[: rule.paired]
        groups = dS.shape[2]
        found = _pull_moved(
            lambda *t: bias_tile(rule, tile, groups, None, (*fixed, *t)),
            tables,
            moving.shared[rule.paired :],
            dS,
            dS_dot,
        )
        _add(grads, 4 + rule.paired, found)
    query, key = QUERY.part(x.query, tile), KEY.part(x.key, tile)
    if rule.softcap is not None:
        th = _tanh(x, tile)
        slope = 1 - th * th
        dS_dot = dS_dot.mul_(slope)
        if T_raw is not None:
            dS_dot.sub_(dS * slope * th * T_raw * (2 / rule.softcap))
        dS = dS.mul_(slope)
    d_query, d_key = (
        None if t is None else kind.part(t, tile) for t, kind in ((moving.query, QUERY), (moving.key, KEY))
    )
    if rule.pair is not None:
        moved = (d_query, d_key, *moving.shared[: rule.paired])
        given = (query, key, *x.shared[: rule.paired])
        g_query, g_key, *g_shared = _pull_moved(lambda q, k, *s: products(rule, q, k, s), given, moved, dS, dS_dot)
        _add(grads, 4, g_shared)
    else:
        g_query, g_key = _pulled(query, key, dS_dot)
        if d_key is not None:
            g_query = g_query + (_rows(dS) @ d_key).unflatten(2, dS.shape[2:4])
        if d_query is not None:
            g_key = g_key + _rows(dS).mT @ _rows(d_query)
    if grads[0] is not None:
        QUERY.part(grads[0], tile).add_(g_query)
    if grads[1] is not None:
        KEY.part(grads[1], tile).add_(g_key)


def _pulled(query: Tensor, key: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
    """The cotangents of queries and keys from that of their products."""
    return (_rows(dS) @ key).unflatten(2, dS.shape[2:4]), _rows(dS).mT @ _rows(query)


def _pull_moved(
    function: Callable[..., Tensor | None],
    given: Sequence[Tensor],
    moved: Sequence[Tensor | None],
    g: Tensor,
    g_dot: Tensor,
) -> tuple[Tensor, ...]:
    """The tangent of a function's cotangents, as its arguments and its result's cotangent move."""
    count = len(given)

    def pull(*both: Tensor) -> tuple[Tensor, ...]:
        result, back = pull_back(function, *both[:count])
        found: tuple[Tensor, ...] = back(both[count].sum_to_size(result.shape))
        return found

    return pushed(pull, (*given, g), (*filled(given, moved), g_dot))[1]


def _pull(x: Canonical, tile: Tile, dS: Tensor, grads: list[Tensor | None], room: Room) -> None:
    """Carry the cotangent of a tile's logits back to bias, queries, keys and parameters."""
    rule = x.rule
    groups = dS.shape[2]
    if grads[3] is not None:
        part = BIAS.part(grads[3], tile)
        part.add_(dS.sum_to_size(part.shape))
    tables = x.shared[rule.paired :]
    if rule.bias is not None and any(g is not None for g in grads[4 + rule.paired :]):
        skipped = x.shared[: rule.paired]
        added, pull = pull_back(lambda *t: bias_tile(rule, tile, groups, None, (*skipped, *t)), *tables)
        _add(grads, 4 + rule.paired, pull(dS.sum_to_size(added.shape)))
    query, key = QUERY.part(x.query, tile), KEY.part(x.key, tile)
    if rule.softcap is not None:
        raw = products(rule, query, key, x.shared)
        dS = dS.mul_(1 - (raw / rule.softcap).tanh_().square_())
    if rule.pair is not None:
        paired = x.shared[: rule.paired]
        _, pull = pull_back(lambda q, k, *w: products(rule, q, k, w), query, key, *paired)
        d_query, d_key, *d_shared = pull(dS)
        _add(grads, 4, d_shared)
    else:
        d_query = (_rows(dS) @ key).unflatten(2, dS.shape[2:4]) if grads[0] is not None else None
        d_key = _rows(dS).mT @ _rows(query) if grads[1] is not None else None
    if grads[0] is not None and d_query is not None:
        QUERY.part(grads[0], tile).add_(d_query)
    if grads[1] is not None and d_key is not None:
        KEY.part(grads[1], tile).add_(d_key)


def _add(grads: list[Tensor | None], first: int, found: Sequence[Tensor]) -> None:
    for at, g in enumerate(found, first):
        if (total := grads[at]) is not None:
            total.add_(g)


def _rows(x: Tensor) -> Tensor:
    """(l, k, g, r, …) as (l, k, g·r, …)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _zeros(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else torch.zeros(x.shape, dtype=dtype, device=x.device)

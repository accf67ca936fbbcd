"""`chunked`: exact attention in linear memory, in pure torch, on any device, with every feature.

Rows are cut into strips, keys into runs; a run is folded into its strip by the online softmax. The backward pass keeps
q, k, v, the output and three numbers a row, and computes the rest again. Higher derivatives come from `derivatives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _functorch

from ..arithmetic import exactly
from ..canonical import Canonical, Result, canonical, finish
from ..derivatives import Map, Mapped, applied, attention_map, pull_back, watched
from ..dropout import draw
from ..errors import ArgumentError
from ..formula import Rows, bias_tile, kept, products
from ..problem import Problem
from ..rule import Rule
from ..scan import Look, Room, below, masked_logits
from ..softmax import Partial, lowest, merge
from ..tile import BIAS, KEY, QUERY, ROW, TURNED, Tile
from ..tiling import Cut, Strip, strips
from .base import Backend

__all__ = ["Chunked"]


class Chunked(Backend):
    """Linear memory on any device; `chunk_size` rows are in flight at a time, those of grouped heads counted together.

    >>> import regard
    >>> q = torch.randn(1, 2, 100, 8)
    >>> small = regard.attention(q, q, q, backend=regard.backends.Chunked(chunk_size=16))
    >>> torch.allclose(small, regard.attention(q, q, q), atol=1e-5)
    True
    """

    name: ClassVar[str] = "chunked"
    about: ClassVar[str] = "strips of rows in plain torch, linear memory"

    def __init__(self, chunk_size: int = 512) -> None:
        if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
            raise ArgumentError(f"Chunked: chunk_size must be a whole number of rows, at least 1. Got {chunk_size!r}.")
        self.chunk_size = chunk_size

    @property
    def cut(self) -> Cut:
        return Cut(rows=self.chunk_size)

    def refuses(self, p: Problem) -> list[str]:
        return []

    def run(self, p: Problem) -> Result:
        return self._untraced(p) if torch.compiler.is_compiling() else self._run(p)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # it imports the compiler, so only what is compiled asks it
    def _untraced(self, p: Problem) -> Result:
        return self._run(p)

    @exactly
    def _run(self, p: Problem) -> Result:
        x = canonical(p, seed=draw(p.who) if p.dropout else 0)
        tensors = (x.query, x.key, x.value, x.bias, *x.shared)
        if not watched(*tensors):
            return finish(p, Rows(*forward(x, self.cut, p.observed)))
        return finish(p, Rows(*applied(Attend, x.rule, self.cut, p.observed, *tensors)))

    def __repr__(self) -> str:
        return f"regard.backends.Chunked(chunk_size={self.chunk_size})"


class Attend(torch.autograd.Function):
    """(query, key, value, bias, *shared) -> (output, lse, entropy, max logit, spread)."""

    @staticmethod
    def forward(rule: Rule, cut: Cut, observed: bool, *inputs: Any) -> tuple[Tensor, ...]:
        return forward(_canonical(rule, inputs), cut, observed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rule, ctx.cut, _ = inputs[:3]
        ctx.mark_non_differentiable(*output[3:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[3:], output[0], *output[2:])
        ctx.save_for_forward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        fixed = (ctx.rule, ctx.cut, tuple(ctx.needs_input_grad[3:]))
        given = (*ctx.saved_tensors, *cotangents[:3])
        if any(c is not None and _functorch.is_legacy_batchedtensor(c) for c in cotangents):
            return None, None, None, *_grads_batched(fixed, given)
        return None, None, None, *applied(AttendBackward, *fixed, *given)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        plan = attention_map(_canonical(ctx.rule, inputs), ctx.cut).jvp()
        return *applied(Mapped, plan, *_present(inputs), *_filled(inputs, tangents[3:])), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rule: Rule, cut: Cut, observed: bool, *inputs: Any) -> Any:
        return _batched(Attend, info.batch_size, in_dims[3:], (rule, cut, observed), inputs, simple=len(inputs) == 4)


class AttendBackward(torch.autograd.Function):
    """(query, key, value, bias, *shared), what the forward pass found, and its cotangents -> cotangents of the first.

    What the forward pass found spares work; mathematically the result depends on the inputs and cotangents alone.
    """

    @staticmethod
    def forward(rule: Rule, cut: Cut, needs: tuple[bool, ...], *given: Any) -> tuple[Tensor | None, ...]:
        inputs, found, cotangents = given[:-7], given[-7:-3], given[-3:]
        return backward(_canonical(rule, inputs), cut, needs, found, cotangents)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rule, ctx.cut, ctx.needs = inputs[:3]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[3:-7], *inputs[-3:])
        ctx.save_for_forward(*inputs[3:-7], *inputs[-3:])

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor | None) -> tuple[Tensor | None, ...]:
        args, plan = AttendBackward._plan(ctx)
        inputs = ctx.saved_tensors[:-3]
        found = iter(applied(Mapped, plan.vjp(), *args, *_filled(inputs, seconds)))
        firsts = [None if x is None else next(found) for x in inputs]
        lasts = [None if g is None else f for f, g in zip(found, ctx.saved_tensors[-3:], strict=True)]
        return None, None, None, *firsts, None, None, None, None, *lasts

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        args, plan = AttendBackward._plan(ctx)
        inputs = ctx.saved_tensors[:-3]
        moved = _filled((*inputs, *args[-3:]), (*tangents[3:-7], *tangents[-3:]))
        found = iter(applied(Mapped, plan.jvp(), *args, *moved))
        firsts = [None if x is None else next(found) for x in inputs]
        return tuple(f if need else None for f, need in zip(firsts, ctx.needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rule: Rule, cut: Cut, needs: tuple[bool, ...], *given: Any) -> Any:
        return _batched(AttendBackward, info.batch_size, in_dims[3:], (rule, cut, needs), given, len(given) == 11)

    @staticmethod
    def _plan(ctx: Any) -> tuple[tuple[Tensor, ...], Map]:
        """The arguments, absent cotangents as zeros, and this pass as a map."""
        *inputs, d_output, d_lse, d_entropy = ctx.saved_tensors
        x = _canonical(ctx.rule, inputs)
        d_output = x.query.new_zeros(*x.query.shape[:-1], x.value.shape[-1]) if d_output is None else d_output
        d_lse, d_entropy = (x.query.new_zeros(x.query.shape[:-1]) if d is None else d for d in (d_lse, d_entropy))
        return (*_present(inputs), d_output, d_lse, d_entropy), attention_map(x, ctx.cut).vjp()


def _canonical(rule: Rule, inputs: Sequence[Any]) -> Canonical:
    query, key, value, bias, *shared = inputs
    return Canonical(query, key, value, bias, tuple(shared), rule)


def _present(inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(x for x in inputs if x is not None)


def _filled(inputs: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The tangents of the inputs that are there, zeros for those that have none."""
    pairs = zip(inputs, tangents, strict=True)
    return tuple(torch.zeros_like(x) if t is None else t for x, t in pairs if x is not None)


def _batched(
    function: Any, size: int, in_dims: tuple[Any, ...], fixed: tuple[Any, ...], given: tuple[Any, ...], simple: bool
) -> tuple[Any, Any]:
    """Apply a function over one more dimension: folded into the batch, or item by item if a bias shares it."""
    if simple and given[3] is None:
        front = [x if x is None or d is None else x.movedim(d, 0) for x, d in zip(given, in_dims, strict=True)]
        wide = [
            x.expand(size, *x.shape) if x is not None and d is None else x for x, d in zip(front, in_dims, strict=True)
        ]
        batch = wide[0].shape[1]
        folded = applied(function, *fixed, *(None if x is None else x.flatten(0, 1) for x in wide))
        results = [None if r is None else r.unflatten(0, (size, batch)) for r in folded]
    else:
        items = [
            applied(
                function, *fixed, *(x if d is None else x.select(d, v) for x, d in zip(given, in_dims, strict=True))
            )
            for v in range(size)
        ]
        results = [None if column[0] is None else torch.stack(column) for column in zip(*items, strict=True)]
    return tuple(results), tuple(None if r is None else 0 for r in results)


def _grads_batched(fixed: tuple[Any, ...], given: tuple[Any, ...]) -> list[Tensor | None]:
    """The backward pass under `torch.autograd.grad(…, is_grads_batched=True)`, which batches behind our back."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = [x is not None and _functorch.is_legacy_batchedtensor(x) for x in given]
    plain = tuple(torch._remove_batch_dim(x, level, 1, 0) if b else x for x, b in zip(given, batched, strict=True))
    size = next(x.shape[0] for x, b in zip(plain, batched, strict=True) if b)
    in_dims = tuple(0 if b else None for b in batched)
    found, _ = _batched(AttendBackward, size, in_dims, fixed, plain, simple=len(given) == 11)
    return [None if g is None else torch._add_batch_dim(g, 0, level) for g in found]


@exactly
def forward(x: Canonical, cut: Cut, observed: bool) -> tuple[Tensor, ...]:
    """Output, lse, entropy and largest logit of every row, strip by strip."""
    shape = x.query.shape[:-1]
    output = x.query.new_zeros(*shape, x.value.shape[-1])
    lse = x.query.new_full(shape, -torch.inf)
    peak = torch.full_like(lse, -torch.inf)
    entropy, spread = torch.zeros_like(lse), torch.zeros_like(lse)
    room = Room()
    for strip in strips(x.rule, x.query.shape, cut):
        if not strip.runs:
            continue
        state, e = _fold(x, strip, observed, room)
        hull = strip.tile(strip.runs[0])
        l = state.denominator  # noqa: E741
        empty = l == 0
        l = torch.where(empty, 1.0, l)  # noqa: E741
        scale = 1.0 / (l * (1 - x.rule.dropout)) if x.rule.dropout else 1.0 / l
        torch.mul(state.numerator, scale[..., None], out=QUERY.part(output, hull))
        above = torch.log(l, out=ROW.part(spread, hull))
        ROW.part(lse, hull).copy_((state.max + above).masked_fill_(empty, -torch.inf))
        ROW.part(peak, hull).copy_(state.max.masked_fill(empty, -torch.inf))
        if e is not None:
            torch.sub(above, e / l, out=ROW.part(entropy, hull))
    return output, lse, entropy, peak, spread


def _fold(x: Canonical, strip: Strip, observed: bool, room: Room) -> tuple[Partial, Tensor | None]:
    """Fold the runs of a strip into (max, denominator, numerator), and e = Σ exp(s − max)·(s − max) for the entropy."""
    state: Partial | None = None
    e: Tensor | None = None
    for run in strip.runs:
        tile = strip.tile(run)
        S = masked_logits(x, tile, run, room)  # (l, k, g, r, c)
        m = S.amax(-1).clamp_(min=lowest(S.dtype))  # (l, k, g, r)
        X = below(x, S, m, run)
        P = torch.exp(X, out=room.like("weights", X))
        l = P.sum(-1)  # noqa: E741
        e_run = X.mul_(P).sum(-1) if observed else None
        if x.rule.dropout:
            P.mul_(kept(x.rule, tile, S.shape[2], S.device))
        O = (P.flatten(2, 3) @ KEY.part(x.value, tile)).unflatten(2, P.shape[2:4])  # noqa: E741
        new = Partial(m, l, O)
        if state is None:
            state, e = new, e_run
            continue
        old, state = state, merge(state, new)
        if e is not None and e_run is not None:
            e = _shifted(e, old, state) + _shifted(e_run, new, state)
    if state is None:
        raise RuntimeError("a strip without runs has nothing to fold")
    return state, e


def _shifted(e: Tensor, old: Partial, new: Partial) -> Tensor:
    """e relative to a new max: exp(old − new)·(e + (old − new)·l)."""
    down = (old.max - new.max).clamp_(min=-1e4)  # finite, and deep enough for exp to be 0
    return down.exp() * (e + down * old.denominator)


@exactly
def backward(
    x: Canonical,
    cut: Cut,
    needs: tuple[bool, ...],
    found: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Cotangents of (query, key, value, bias, *shared) where needed: dS = P ∘ (dP − δ + g_lse − g_H·(S − E[S]))."""
    output, entropy, peak, spread = found
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
                keep = kept(x.rule, tile, X.shape[2], X.device) / (1 - x.rule.dropout)
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

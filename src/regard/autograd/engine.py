"""Attention with derivatives of every order, whoever computes it.

An engine knows four passes over tensors. With f the map from inputs x to output, lse and entropy, and J its Jacobian:

    attend(x)           f(x)
    push(x, w)          f(x) and its tangent J w
    pull(x, g)          the cotangents Jᵀ g
    bend(x, g, w, ġ)    the tangent of pull: ∇(g · J w) + Jᵀ ġ

One more derivative leads back to them, because second derivatives commute: the transpose of pull is push in g and bend
in x, that of push is pull in w and bend in x, the tangent of pull is bend, and bend is symmetric. So double backward,
forward over reverse and reverse over forward are these passes. What lies beyond comes from the engine's `meaning`, a
function that torch can differentiate as often as it likes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from ..compat.torch import applied, recorded, signed, watched
from ..core.formula import Rows
from ..errors import ArgumentError
from .strip_map import pull_back, pushed

__all__ = ["Engine", "attended", "bent_by_meaning", "cotangents", "pushed_by_meaning", "tangents"]

Some = tuple[Tensor | None, ...]
Needs = tuple[bool, ...]
NOTHING: Some = (None, None, None)
FOUND, SEEN = 5, 3  # what a forward pass finds, and how much of it has derivatives: output, lse, entropy


class Engine(ABC):
    """Four passes without a graph, and the meaning of the first as a function with one. Inputs may be None."""

    @abstractmethod
    def attend(self, x: Some) -> Rows:
        """The forward pass."""

    @abstractmethod
    def push(self, x: Some, w: Some) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        """The same, with the tangents of output, lse and entropy for tangents w of the inputs."""

    @abstractmethod
    def pull(self, x: Some, found: Rows, g: Some, needs: Needs) -> Sequence[Tensor | None]:
        """The cotangents of the inputs that need one, for cotangents g of output, lse and entropy."""

    @abstractmethod
    def bend(
        self, x: Some, found: Rows, moved: Some, g: Some, w: Some, dg: Some, needs: Needs
    ) -> Sequence[Tensor | None]:
        """The tangents of these cotangents, as x moves by w and g by dg; `moved` is what push found."""

    @abstractmethod
    def meaning(self, x: Some) -> tuple[Tensor, ...]:
        """Output, lse and entropy by differentiable operations."""

    @abstractmethod
    def over(self, size: int) -> tuple[Engine, int]:
        """The engine for `size` times as many batch items, and whether they come before the batch (0) or after (1)."""


def attended(engine: Engine, x: Some) -> Rows:
    """Attend, with a graph where one may be asked for; a tangent that is there comes with the output, in one pass."""
    if not watched(*x):
        return engine.attend(x)
    if recorded():  # passes write into buffers that are used again, which a record of operations takes for constants
        raise ArgumentError(
            "attention: torch.func.linearize records operations, and the passes of this backend cannot be recorded. "
            "Call torch.func.jvp for each tangent, or take backend='reference', which holds the matrix."
        )
    if not _only_moves(x):
        return Rows(*applied(Attend, engine, *x))
    duals = [(None, None) if t is None else forward_ad.unpack_dual(t) for t in x]
    if all(tangent is None for _, tangent in duals):
        return Rows(*applied(Attend, engine, *x))
    found = applied(Push, engine, *(primal for primal, _ in duals), *(tangent for _, tangent in duals))
    seen = [forward_ad.make_dual(y, t) for y, t in zip(found[:SEEN], found[FOUND:], strict=True)]
    return Rows(*seen, *found[SEEN:FOUND])


def cotangents(engine: Engine, x: Some, g: Some, needs: Needs) -> tuple[Any, ...]:
    """The cotangents of the inputs that need one, as a differentiable function of x and g."""
    return _derived(Pull, (engine, needs), (*x, *applied(Attend, engine, *x), *g))


def tangents(engine: Engine, x: Some, w: Some) -> tuple[Tensor, ...]:
    """The tangents of output, lse and entropy, as a differentiable function of x and w."""
    return tuple(applied(Push, engine, *x, *w)[FOUND:])


def _only_moves(x: Some) -> bool:
    """Whether forward mode is the innermost transform and no graph is recorded, which would need tensors whole."""
    if forward_ad._current_level < 0 or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)):
        return False
    innermost = _functorch.peek_interpreter_stack()
    return innermost is None or innermost.key() == _functorch.TransformType.Jvp


@signed
class Attend(torch.autograd.Function):
    """x -> found."""

    @staticmethod
    def forward(engine: Engine, *x: Tensor | None) -> Rows:
        return engine.attend(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.engine = inputs[0]
        ctx.mark_non_differentiable(*output[SEEN:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        if _none(g):  # torch asks even so, where a derivative of a derivative goes past here
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # read once: under activation checkpointing that computes them
        return None, *_derived(Pull, (ctx.engine, ctx.needs_input_grad[1:]), (*saved, *g[:SEEN]))

    @staticmethod
    def jvp(ctx: Any, *w: Tensor | None) -> tuple[Tensor | None, ...]:
        return *applied(Push, ctx.engine, *ctx.saved_tensors, *w[1:])[FOUND:], None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], engine: Engine, *x: Any) -> Any:
        return _batched(Attend, info.batch_size, in_dims[1:], (engine,), x)


@signed
class Push(torch.autograd.Function):
    """x, w -> found, tangents."""

    @staticmethod
    def forward(engine: Engine, *given: Tensor | None) -> tuple[Tensor, ...]:
        x, w = _split(given, (len(given) // 2,) * 2)
        found, tangents = engine.push(x, w)
        return *found, *tangents

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.engine = inputs[0]
        ctx.mark_non_differentiable(*output[SEEN:FOUND])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if _none(cotangents):
            return (None,) * len(ctx.needs_input_grad)
        n = (len(ctx.needs_input_grad) - 1) // 2
        x, w, found, tangents = _split(ctx.saved_tensors, (n, n, FOUND, SEEN))
        dg, _, g = _split(cotangents, (SEEN, FOUND - SEEN, SEEN))
        need_x, need_w = ctx.needs_input_grad[1 : n + 1], ctx.needs_input_grad[n + 1 :]
        if _none(g):
            return None, *_derived(Pull, (ctx.engine, need_x), (*x, *found, *dg)), *(None,) * n
        firsts: Some = (None,) * n
        lasts: Some = (None,) * n
        if any(need_x):
            firsts = _derived(Bend, (ctx.engine, need_x), (*x, *found, *g, *tangents, *w, *dg))[SEEN:]
        if any(need_w):
            lasts = _derived(Pull, (ctx.engine, need_w), (*x, *found, *g))
        return None, *firsts, *lasts

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor | None) -> tuple[Tensor | None, ...]:
        n = len(ctx.saved_tensors) // 2
        x, w = _split(ctx.saved_tensors, (n, n))
        kinds = (x, w)

        def meant(*tensors: Tensor) -> tuple[Tensor, ...]:
            results, tangents = pushed_by_meaning(ctx.engine, *_restored(kinds, tensors))
            return *results, *tangents

        found = _pushed(meant, kinds, _split(moved[1:], (n, n)))
        return *found[:SEEN], None, None, *found[SEEN:]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], engine: Engine, *given: Any) -> Any:
        return _batched(Push, info.batch_size, in_dims[1:], (engine,), given, inputs=len(given) // 2)


@signed
class Pull(torch.autograd.Function):
    """x, found, g -> cotangents of x. What was found spares work: the result is a function of x and g."""

    @staticmethod
    def forward(engine: Engine, needs: Needs, *given: Any) -> tuple[Tensor | None, ...]:
        x, found, g = _split(given, (len(needs), FOUND, SEEN))
        return tuple(engine.pull(x, Rows(*found), g, needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.engine, ctx.needs = inputs[:2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *w: Tensor | None) -> tuple[Tensor | None, ...]:
        if _none(w):
            return (None,) * len(ctx.needs_input_grad)
        n = len(ctx.needs)
        x, found, g = _split(ctx.saved_tensors, (n, FOUND, SEEN))
        need_x = ctx.needs_input_grad[2 : n + 2]
        firsts: Some = (None,) * n
        if any(need_x):
            bent = _derived(Bend, (ctx.engine, need_x), (*x, *found, *g, *NOTHING, *w, *NOTHING))
            tangents, firsts = bent[:SEEN], bent[SEEN:]
        else:
            tangents = _derived(Push, (ctx.engine,), (*x, *w))[FOUND:]
        lasts = (None if c is None else t for c, t in zip(g, tangents, strict=True))
        return None, None, *firsts, *(None,) * FOUND, *lasts

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor | None) -> tuple[Tensor | None, ...]:
        n = len(ctx.needs)
        x, found, g = _split(ctx.saved_tensors, (n, FOUND, SEEN))
        w, seen, dg = _split(moved[2:], (n, FOUND, SEEN))
        if _none(w):
            result: Some = applied(Pull, ctx.engine, ctx.needs, *x, *found, *dg)
            return result
        # What was found moves along: where its tangents are there, push need not run again.
        known = NOTHING if any(t is None for t in seen[:SEEN]) else seen[:SEEN]
        return tuple(applied(Bend, ctx.engine, ctx.needs, *x, *found, *g, *known, *w, *dg)[SEEN:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], engine: Engine, needs: Needs, *given: Any) -> Any:
        return _batched(Pull, info.batch_size, in_dims[2:], (engine, needs), given, inputs=len(needs))


@signed
class Bend(torch.autograd.Function):
    """x, found, g, moved, w, dg -> tangents of what was found (where `moved` does not have them), of the cotangents."""

    @staticmethod
    def forward(engine: Engine, needs: Needs, *given: Any) -> tuple[Tensor | None, ...]:
        x, found, g, moved, w, dg = _split(given, _sizes(needs))
        tangents: Some = NOTHING
        if moved[0] is None:
            tangents = moved = engine.push(x, w)[1]
        return *tangents, *engine.bend(x, Rows(*found), moved, g, w, dg, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.engine, ctx.needs = inputs[:2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if _none(cotangents):
            return (None,) * len(ctx.needs_input_grad)
        sizes = _sizes(ctx.needs)
        n = sizes[0]
        x, found, g, _, w, dg = _split(ctx.saved_tensors, sizes)
        c_tangents, c_grads = _split(cotangents, (SEEN, n))
        need = _split(ctx.needs_input_grad[2:], sizes)
        before = (None,) * (n + FOUND + SEEN + SEEN)
        if not any((*need[0], *need[2])):  # linear in w and dg, and symmetric
            if _none(c_grads):
                return None, None, *before, *_derived(Pull, (ctx.engine, need[4]), (*x, *found, *c_tangents)), *NOTHING
            back = (*x, *found, *g, *NOTHING, *c_grads, *c_tangents)
            bent = _derived(Bend, (ctx.engine, need[4]), back)
            return (
                None,
                None,
                *before,
                *bent[SEEN:],
                *(b if t is not None else None for t, b in zip(dg, bent[:SEEN], strict=True)),
            )
        kinds = (x, g, w, dg)
        results, pull = pull_back(_meant_bend(ctx.engine, kinds), *_present(kinds))
        given = (*c_tangents, *(c for t, c in zip(x, c_grads, strict=True) if t is not None))
        found_back = pull(tuple(torch.zeros_like(r) if c is None else c for r, c in zip(results, given, strict=True)))
        d_x, d_g, d_w, d_dg = _restored(kinds, found_back)
        return None, None, *d_x, *(None,) * FOUND, *d_g, *NOTHING, *d_w, *d_dg

    @staticmethod
    def jvp(ctx: Any, *changes: Tensor | None) -> tuple[Tensor | None, ...]:
        x, _, g, moved, w, dg = _split(ctx.saved_tensors, _sizes(ctx.needs))
        kinds = (x, g, w, dg)
        cx, _, cg, _, cw, cdg = _split(changes[2:], _sizes(ctx.needs))
        found = iter(_pushed(_meant_bend(ctx.engine, kinds), kinds, (cx, cg, cw, cdg)))
        tangents = [next(found) for _ in range(SEEN)]
        grads = [None if t is None else next(found) for t in x]
        known = moved[0] is not None
        return *(NOTHING if known else tangents), *(
            c if need else None for c, need in zip(grads, ctx.needs, strict=True)
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], engine: Engine, needs: Needs, *given: Any) -> Any:
        return _batched(Bend, info.batch_size, in_dims[2:], (engine, needs), given, inputs=len(needs))


def pushed_by_meaning(engine: Engine, x: Some, w: Some) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output, lse and entropy, and their tangents."""
    xs = _present((x,))
    return pushed(lambda *t: engine.meaning(_restored((x,), t)[0]), xs, _filled(x, w))


def bent_by_meaning(engine: Engine, x: Some, g: Some, w: Some, dg: Some) -> tuple[tuple[Tensor, ...], Some]:
    """The tangents of output, lse and entropy, and of the cotangents of all inputs."""
    xs = _present((x,))
    ws = _filled(x, w)

    def pull(*given: Tensor) -> tuple[Tensor, ...]:
        _, back = pull_back(lambda *t: engine.meaning(_restored((x,), t)[0]), *given[: len(xs)])
        found: tuple[Tensor, ...] = back(given[len(xs) :])
        return found

    results, tangents = pushed_by_meaning(engine, x, w)
    gs = tuple(torch.zeros_like(r) if c is None else c for r, c in zip(results, g, strict=True))
    dgs = tuple(torch.zeros_like(r) if c is None else c for r, c in zip(results, dg, strict=True))
    _, moved = pushed(pull, (*xs, *gs), (*ws, *dgs))
    return tangents, _restored((x,), moved)[0]


def _meant_bend(engine: Engine, kinds: tuple[Some, ...]) -> Callable[..., tuple[Tensor, ...]]:
    def meant(*tensors: Tensor) -> tuple[Tensor, ...]:
        tangents, grads = bent_by_meaning(engine, *_restored(kinds, tensors))
        return *tangents, *_present((grads,))

    return meant


def _pushed(
    function: Callable[..., tuple[Tensor, ...]], kinds: tuple[Some, ...], moved: tuple[Some, ...]
) -> tuple[Tensor, ...]:
    """The tangents of a function of the tensors that are there."""
    given = tuple(t for x, w in zip(kinds, moved, strict=True) for t in _filled(x, w))
    return pushed(function, _present(kinds), given)[1]


def _sizes(needs: Needs) -> tuple[int, ...]:
    return len(needs), FOUND, SEEN, SEEN, len(needs), SEEN


def _split(given: Sequence[Any], sizes: Iterable[int]) -> tuple[tuple[Any, ...], ...]:
    rest = iter(given)
    return tuple(tuple(next(rest) for _ in range(size)) for size in sizes)


def _none(given: Some) -> bool:
    return all(t is None for t in given)


def _present(kinds: Iterable[Some]) -> tuple[Tensor, ...]:
    return tuple(t for kind in kinds for t in kind if t is not None)


def _restored(kinds: Iterable[Some], tensors: Iterable[Tensor]) -> tuple[Some, ...]:
    """Tensors in the places of those that are there."""
    rest = iter(tensors)
    return tuple(tuple(None if t is None else next(rest) for t in kind) for kind in kinds)


def _filled(x: Some, w: Some) -> tuple[Tensor, ...]:
    """The tangents of the tensors that are there, zeros for those that have none."""
    return tuple(torch.zeros_like(t) if v is None else v for t, v in zip(x, w, strict=True) if t is not None)


def _batched(
    function: Any,
    size: int,
    in_dims: tuple[Any, ...],
    fixed: tuple[Any, ...],
    given: tuple[Any, ...],
    inputs: int | None = None,
) -> tuple[Any, Any]:
    """Apply a function over one more dimension: folded into the batch, or item by item if inputs have no batch."""
    x = given[: len(given) if inputs is None else inputs]
    if _none(x[3:]):
        engine, at = fixed[0].over(size)
        folded = [_folded(t, d, size, at) for t, d in zip(given, in_dims, strict=True)]
        batch = folded[0].shape[0] // size
        shape = (size, batch) if at == 0 else (batch, size)
        results = [None if r is None else r.unflatten(0, shape) for r in applied(function, engine, *fixed[1:], *folded)]
        return tuple(results), tuple(None if r is None else at for r in results)
    items = [
        applied(function, *fixed, *(t if d is None else t.select(d, v) for t, d in zip(given, in_dims, strict=True)))
        for v in range(size)
    ]
    results = [None if column[0] is None else torch.stack(column) for column in zip(*items, strict=True)]
    return tuple(results), tuple(None if r is None else 0 for r in results)


def _folded(t: Any, d: int | None, size: int, at: int) -> Any:
    if t is None:
        return None
    wide = t.unsqueeze(at).expand(*t.shape[:at], size, *t.shape[at:]) if d is None else t.movedim(d, at)
    return wide.flatten(0, 1)


def _derived(function: Any, fixed: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Apply a derivative; `torch.autograd.grad(…, is_grads_batched=True)` batches tensors behind our back."""
    batched = [t is not None and _functorch.is_legacy_batchedtensor(t) for t in given]
    if not any(batched):
        result: tuple[Tensor | None, ...] = applied(function, *fixed, *given)
        return result
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    plain = tuple(torch._remove_batch_dim(t, level, 1, 0) if b else t for t, b in zip(given, batched, strict=True))
    size = next(t.shape[0] for t, b in zip(plain, batched, strict=True) if b)
    in_dims = tuple(0 if b else None for b in batched)
    inputs = len(given) // 2 if function is Push else len(fixed[1])
    found, at = _batched(function, size, in_dims, fixed, plain, inputs)
    return tuple(None if r is None else torch._add_batch_dim(r, d, level) for r, d in zip(found, at, strict=True))

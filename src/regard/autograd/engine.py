"""Attention with derivatives of every order, whatever computes it.

An engine has four passes. With f the map from the inputs x to (output, lse, entropy), and J its Jacobian:

    forward(x)                      f(x)
    jvp(x, w)                       f(x) and its tangents J w
    vjp(x, g)                       the cotangents Jᵀ g
    double_backward(x, g, w, ġ)     the tangents of vjp: ∇(g · J w) + Jᵀ ġ

One more derivative leads back to these four, because second derivatives commute: the transpose of vjp is jvp in g and
double_backward in x, the transpose of jvp is vjp in w and double_backward in x, the tangent of vjp is double_backward,
and double_backward is symmetric. So double backward, forward over reverse and reverse over forward need no other pass.
Higher orders differentiate the engine's `formula`, which torch can do as often as it likes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..compat.torch import (
    cached_signature,
    call_function,
    forward_mode_is_active,
    innermost_transform_is_jvp,
    is_legacy_batched,
    is_recording,
    legacy_batch,
    legacy_unbatch,
    may_need_grad,
    not_compiled,
    transforms_are_active,
)
from ..core.rows import Rows, stacked, unstacked
from ..errors import ArgumentError
from .batching import apply_batched
from .strip_map import filled, jvp_of, vjp_of

__all__ = [
    "Engine",
    "attend",
    "attend_eagerly",
    "double_backward_of_formula",
    "jvp",
    "jvp_of_formula",
    "required",
    "vjp",
    "vjp_of_formula",
]

MaybeTensors = tuple[Tensor | None, ...]
Needs = tuple[bool, ...]
NO_TENSORS: MaybeTensors = (None, None, None)
FIELDS = len(Rows._fields)
WITH_GRAD = 3  # the first fields of Rows have derivatives: output, lse, entropy


def required(x: Tensor | None) -> Tensor:
    """An input that every problem has, such as its queries."""
    if x is None:
        raise RuntimeError("a problem has queries, keys and values")
    return x


class Engine(ABC):
    """Four passes that record no graph, and the same function as a formula that torch can differentiate.

    `x` are the inputs, `w` their tangents, `g` the cotangents of (output, lse, entropy), `dg` the tangents of `g`. Any
    of them may be None.
    """

    output_alone: bool = False
    """Whether nobody reads the statistics of the rows apart from the engine's own passes."""
    stacks: bool = False
    """Whether each call saves its statistics as one tensor: a checkpoint that repeats it must save as many."""

    def expect_vjp(self, x: MaybeTensors, needs: Needs) -> None:  # noqa: B027  (most engines need not)
        """Get ready for `vjp`, which may be asked for after the forward pass."""

    @abstractmethod
    def forward(self, x: MaybeTensors) -> Rows:
        """The forward pass."""

    def forward_stacked(self, x: MaybeTensors) -> tuple[Tensor, Tensor] | None:
        """The output, and the statistics in one tensor, as `unstacked` reads it; None if it has no such pass."""
        return None

    def vjp_stacked(
        self, x: MaybeTensors, output: Tensor, statistics: Tensor, g: Tensor | None, needs: Needs
    ) -> Sequence[Tensor | None] | None:
        """`vjp` for the cotangent of the output alone, from `forward_stacked`; None where it takes the rows apart."""
        return None

    @abstractmethod
    def jvp(self, x: MaybeTensors, w: MaybeTensors) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        """The forward pass, and the tangents of output, lse and entropy."""

    @abstractmethod
    def vjp(self, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> Sequence[Tensor | None]:
        """The cotangents of the inputs that need one; `rows` is what `forward` returned."""

    @abstractmethod
    def double_backward(
        self,
        x: MaybeTensors,
        rows: Rows,
        d_rows: MaybeTensors,
        g: MaybeTensors,
        w: MaybeTensors,
        dg: MaybeTensors,
        needs: Needs,
    ) -> Sequence[Tensor | None]:
        """The tangents of these cotangents along (w, dg); `d_rows` are the tangents that `jvp` returned."""

    @abstractmethod
    def formula(self, x: MaybeTensors) -> tuple[Tensor, ...]:
        """Output, lse and entropy by differentiable operations."""

    @abstractmethod
    def batched(self, size: int) -> tuple[Engine, int]:
        """The engine for `size` times as many batch items, and where they go: before the batch (0) or after it (1)."""


@not_compiled
def attend(engine: Engine, x: MaybeTensors) -> Rows:
    """Attend, and record a graph if a derivative may be asked for; in forward mode, tangents come in the same pass."""
    # Not compiled: where forward mode has broken the graph, torch would compile the methods of `Forward` one by one.
    if not may_need_grad(*x):
        return engine.forward(x)
    if is_recording():  # passes reuse their buffers, which a recording would take for constants
        raise ArgumentError(
            "attention: torch.func.linearize records operations, and the passes of this backend cannot be recorded. "
            "Call torch.func.jvp for each tangent, or take backend='reference', which holds the matrix."
        )
    if not (forward_mode_is_active() or transforms_are_active()):
        return attend_eagerly(engine, x)
    if not _only_forward_mode(x):
        return Rows(*call_function(Forward, engine, *x))
    duals = [(None, None) if t is None else forward_ad.unpack_dual(t) for t in x]
    if all(tangent is None for _, tangent in duals):
        return Rows(*call_function(Forward, engine, *x))
    found = _derived(Jvp, (engine,), (*(primal for primal, _ in duals), *(tangent for _, tangent in duals)))
    seen = [forward_ad.make_dual(y, t) for y, t in zip(found[:WITH_GRAD], found[FIELDS:], strict=True)]
    return Rows(*seen, *found[WITH_GRAD:FIELDS])


def attend_eagerly(engine: Engine, x: MaybeTensors) -> Rows:
    """Attend, and record a graph, outside of torch.func and forward mode."""
    found = call_function(EagerForward, engine, *x)
    return Rows(found) if isinstance(found, Tensor) else Rows(*found)


def vjp(engine: Engine, x: MaybeTensors, g: MaybeTensors, needs: Needs) -> tuple[Any, ...]:
    """The cotangents of the inputs that need one, as a differentiable function of x and g."""
    return _derived(Vjp, (engine, needs), (*x, *call_function(Forward, engine, *x), *g))


def jvp(engine: Engine, x: MaybeTensors, w: MaybeTensors) -> tuple[Tensor, ...]:
    """The tangents of output, lse and entropy, as a differentiable function of x and w."""
    return tuple(_derived(Jvp, (engine,), (*x, *w))[FIELDS:])


def _only_forward_mode(x: MaybeTensors) -> bool:
    """Whether forward mode is the innermost transform, and no graph is recorded, which needs the dual tensors."""
    if not forward_mode_is_active() or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)):
        return False
    return innermost_transform_is_jvp()


@cached_signature
class Forward(torch.autograd.Function):
    """x -> rows."""

    @staticmethod
    def forward(engine: Engine, *x: Tensor | None) -> Rows:
        rows = engine.forward(x)
        return rows if rows.entropy is not None else rows._replace(entropy=torch.zeros_like(rows.lse))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.engine = inputs[0]
        ctx.mark_non_differentiable(*output[WITH_GRAD:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        if _none(g):  # torch calls this even if a second derivative does not depend on it
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # read once: activation checkpointing computes them here
        return None, *_derived(Vjp, (ctx.engine, ctx.needs_input_grad[1:]), (*saved, *g[:WITH_GRAD]))

    @staticmethod
    def jvp(ctx: Any, *w: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_derived(Jvp, (ctx.engine,), (*ctx.saved_tensors, *w[1:]))[FIELDS:], None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], engine: Engine, *x: Any) -> Any:
        return apply_batched(Forward, info.batch_size, in_dims[1:], (engine,), x)


class EagerForward(torch.autograd.Function):
    """The same outside of torch.func and forward mode: torch applies it in half the time, without `setup_context`."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, *x: Tensor | None) -> Rows | Tensor:
        engine.expect_vjp(x, ctx.needs_input_grad[1:])
        ctx.engine = engine
        ctx.set_materialize_grads(False)
        found = engine.forward_stacked(x) if engine.output_alone else None
        if found is not None:
            ctx.save_for_backward(*x, *found)
            return found[0]
        rows = engine.forward(x)
        ctx.save_for_backward(*x, *(stacked(rows, 3) if engine.stacks else rows))
        if engine.output_alone:
            return rows.output
        ctx.mark_non_differentiable(rows.max_logit, rows.log_row_sum)
        return rows

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        if _none(g):
            return None, *(None,) * len(needs)
        saved, n = ctx.saved_tensors, len(needs)
        g = (*g, None, None) if len(g) == 1 else g[:WITH_GRAD]
        recorded = torch.is_grad_enabled() or transforms_are_active()
        plain = not recorded and not any([t is not None and is_legacy_batched(t) for t in g])  # noqa: C419  (sooner)
        x, rows = saved[:n], saved[n:]
        if len(rows) < FIELDS:
            found = ctx.engine.vjp_stacked(x, *rows, g[0], needs) if plain else None
            if found is not None:
                return None, *found
            rows = unstacked(*rows)
        if plain:
            return None, *ctx.engine.vjp(x, Rows(*rows), g, needs)
        return None, *_derived(Vjp, (ctx.engine, needs), (*x, *rows, *g))


@cached_signature
class Jvp(torch.autograd.Function):
    """x, w -> rows, tangents."""

    @staticmethod
    def forward(engine: Engine, *given: Tensor | None) -> tuple[Tensor, ...]:
        x, w = _split(given, (len(given) // 2,) * 2)
        rows, tangents = engine.jvp(x, w)
        return *rows, *tangents

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.engine = inputs[0]
        ctx.mark_non_differentiable(*output[WITH_GRAD:FIELDS])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if _none(cotangents):
            return (None,) * len(ctx.needs_input_grad)
        n = (len(ctx.needs_input_grad) - 1) // 2
        x, w, rows, tangents = _split(ctx.saved_tensors, (n, n, FIELDS, WITH_GRAD))
        dg, _, g = _split(cotangents, (WITH_GRAD, FIELDS - WITH_GRAD, WITH_GRAD))
        need_x, need_w = ctx.needs_input_grad[1 : n + 1], ctx.needs_input_grad[n + 1 :]
        if _none(g):
            return None, *_derived(Vjp, (ctx.engine, need_x), (*x, *rows, *dg)), *(None,) * n
        firsts: MaybeTensors = (None,) * n
        lasts: MaybeTensors = (None,) * n
        if any(need_x):
            firsts = _derived(DoubleBackward, (ctx.engine, need_x), (*x, *rows, *g, *tangents, *w, *dg))[WITH_GRAD:]
        if any(need_w):
            lasts = _derived(Vjp, (ctx.engine, need_w), (*x, *rows, *g))
        return None, *firsts, *lasts

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        n = len(ctx.saved_tensors) // 2
        x, w = _split(ctx.saved_tensors, (n, n))
        kinds = (x, w)

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            results, tangents = jvp_of_formula(ctx.engine, *_restored(kinds, tensors))
            return *results, *tangents

        found = _tangents_of(function, kinds, _split(tangents[1:], (n, n)))
        return *found[:WITH_GRAD], None, None, *found[WITH_GRAD:]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], engine: Engine, *given: Any) -> Any:
        return apply_batched(Jvp, info.batch_size, in_dims[1:], (engine,), given, inputs=len(given) // 2)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.engine, ctx.needs = inputs[:2]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[2:])
    ctx.save_for_forward(*inputs[2:])


@cached_signature
class Vjp(torch.autograd.Function):
    """x, rows, g -> cotangents of x. The rows only save work: the result is a function of x and g."""

    @staticmethod
    def forward(engine: Engine, needs: Needs, *given: Any) -> tuple[Tensor | None, ...]:
        x, rows, g = _split(given, (len(needs), FIELDS, WITH_GRAD))
        return tuple(engine.vjp(x, Rows(*rows), g, needs))

    setup_context = staticmethod(_save_inputs)

    @staticmethod
    def backward(ctx: Any, *w: Tensor | None) -> tuple[Tensor | None, ...]:
        if _none(w):
            return (None,) * len(ctx.needs_input_grad)
        n = len(ctx.needs)
        x, rows, g = _split(ctx.saved_tensors, (n, FIELDS, WITH_GRAD))
        need_x = ctx.needs_input_grad[2 : n + 2]
        firsts: MaybeTensors = (None,) * n
        if any(need_x):
            bent = _derived(DoubleBackward, (ctx.engine, need_x), (*x, *rows, *g, *NO_TENSORS, *w, *NO_TENSORS))
            tangents, firsts = bent[:WITH_GRAD], bent[WITH_GRAD:]
        else:
            tangents = _derived(Jvp, (ctx.engine,), (*x, *w))[FIELDS:]
        lasts = (None if c is None else t for c, t in zip(g, tangents, strict=True))
        return None, None, *firsts, *(None,) * FIELDS, *lasts

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        n = len(ctx.needs)
        x, rows, g = _split(ctx.saved_tensors, (n, FIELDS, WITH_GRAD))
        w, d_rows, dg = _split(tangents[2:], (n, FIELDS, WITH_GRAD))
        if _none(w):
            return _derived(Vjp, (ctx.engine, ctx.needs), (*x, *rows, *dg))
        # The rows have tangents too: with these, jvp need not run again.
        known = NO_TENSORS if any(t is None for t in d_rows[:WITH_GRAD]) else d_rows[:WITH_GRAD]
        return _derived(DoubleBackward, (ctx.engine, ctx.needs), (*x, *rows, *g, *known, *w, *dg))[WITH_GRAD:]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], engine: Engine, needs: Needs, *given: Any) -> Any:
        return apply_batched(Vjp, info.batch_size, in_dims[2:], (engine, needs), given, inputs=len(needs))


@cached_signature
class DoubleBackward(torch.autograd.Function):
    """x, rows, g, d_rows, w, dg -> tangents of the rows (if `d_rows` lacks them) and of the cotangents."""

    @staticmethod
    def forward(engine: Engine, needs: Needs, *given: Any) -> tuple[Tensor | None, ...]:
        x, rows, g, d_rows, w, dg = _split(given, _sizes(needs))
        tangents: MaybeTensors = NO_TENSORS
        if d_rows[0] is None:
            tangents = d_rows = engine.jvp(x, w)[1]
        return *tangents, *engine.double_backward(x, Rows(*rows), d_rows, g, w, dg, needs)

    setup_context = staticmethod(_save_inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if _none(cotangents):
            return (None,) * len(ctx.needs_input_grad)
        sizes = _sizes(ctx.needs)
        n = sizes[0]
        x, rows, g, _, w, dg = _split(ctx.saved_tensors, sizes)
        c_tangents, c_grads = _split(cotangents, (WITH_GRAD, n))
        need = _split(ctx.needs_input_grad[2:], sizes)
        before = (None,) * (n + FIELDS + WITH_GRAD + WITH_GRAD)
        if not any((*need[0], *need[2])):  # linear in w and dg, and symmetric
            if _none(c_grads):
                return None, None, *before, *_derived(Vjp, (ctx.engine, need[4]), (*x, *rows, *c_tangents)), *NO_TENSORS
            back = (*x, *rows, *g, *NO_TENSORS, *c_grads, *c_tangents)
            bent = _derived(DoubleBackward, (ctx.engine, need[4]), back)
            return (
                None,
                None,
                *before,
                *bent[WITH_GRAD:],
                *(b if t is not None else None for t, b in zip(dg, bent[:WITH_GRAD], strict=True)),
            )
        kinds = (x, g, w, dg)
        results, pull = vjp_of(_double_backward_of(ctx.engine, kinds), *_present(kinds))
        given = (*c_tangents, *(c for t, c in zip(x, c_grads, strict=True) if t is not None))
        d_x, d_g, d_w, d_dg = _restored(kinds, pull(filled(results, given)))
        return None, None, *d_x, *(None,) * FIELDS, *d_g, *NO_TENSORS, *d_w, *d_dg

    @staticmethod
    def jvp(ctx: Any, *changes: Tensor | None) -> tuple[Tensor | None, ...]:
        x, _, g, d_rows, w, dg = _split(ctx.saved_tensors, _sizes(ctx.needs))
        kinds = (x, g, w, dg)
        cx, _, cg, _, cw, cdg = _split(changes[2:], _sizes(ctx.needs))
        found = iter(_tangents_of(_double_backward_of(ctx.engine, kinds), kinds, (cx, cg, cw, cdg)))
        tangents = [next(found) for _ in range(WITH_GRAD)]
        grads = [None if t is None else next(found) for t in x]
        known = d_rows[0] is not None
        return *(NO_TENSORS if known else tangents), *(
            c if need else None for c, need in zip(grads, ctx.needs, strict=True)
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], engine: Engine, needs: Needs, *given: Any) -> Any:
        return apply_batched(DoubleBackward, info.batch_size, in_dims[2:], (engine, needs), given, inputs=len(needs))


def jvp_of_formula(engine: Engine, x: MaybeTensors, w: MaybeTensors) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output, lse and entropy, and their tangents."""
    xs = _present((x,))
    return jvp_of(lambda *t: engine.formula(_restored((x,), t)[0]), xs, _filled(x, w))


def vjp_of_formula(engine: Engine, x: MaybeTensors, g: MaybeTensors) -> MaybeTensors:
    """The cotangents of all inputs, from those of output, lse and entropy."""
    results, back = vjp_of(lambda *t: engine.formula(_restored((x,), t)[0]), *_present((x,)))
    return _restored((x,), back(filled(results, g)))[0]


def double_backward_of_formula(
    engine: Engine, x: MaybeTensors, g: MaybeTensors, w: MaybeTensors, dg: MaybeTensors
) -> tuple[tuple[Tensor, ...], MaybeTensors]:
    """The tangents of output, lse and entropy, and of the cotangents of all inputs."""
    xs = _present((x,))
    ws = _filled(x, w)

    def pull(*given: Tensor) -> tuple[Tensor, ...]:
        _, back = vjp_of(lambda *t: engine.formula(_restored((x,), t)[0]), *given[: len(xs)])
        found: tuple[Tensor, ...] = back(given[len(xs) :])
        return found

    results, tangents = jvp_of_formula(engine, x, w)
    _, moved = jvp_of(pull, (*xs, *filled(results, g)), (*ws, *filled(results, dg)))
    return tangents, _restored((x,), moved)[0]


def _double_backward_of(engine: Engine, kinds: tuple[MaybeTensors, ...]) -> Callable[..., tuple[Tensor, ...]]:
    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        tangents, grads = double_backward_of_formula(engine, *_restored(kinds, tensors))
        return *tangents, *_present((grads,))

    return function


def _tangents_of(
    function: Callable[..., tuple[Tensor, ...]], kinds: tuple[MaybeTensors, ...], moved: tuple[MaybeTensors, ...]
) -> tuple[Tensor, ...]:
    """The tangents of a function of the tensors that are not None."""
    given = tuple(t for x, w in zip(kinds, moved, strict=True) for t in _filled(x, w))
    return jvp_of(function, _present(kinds), given)[1]


def _sizes(needs: Needs) -> tuple[int, ...]:
    return len(needs), FIELDS, WITH_GRAD, WITH_GRAD, len(needs), WITH_GRAD


def _split(given: Sequence[Any], sizes: Iterable[int]) -> tuple[tuple[Any, ...], ...]:
    rest = iter(given)
    return tuple(tuple(next(rest) for _ in range(size)) for size in sizes)


def _none(given: MaybeTensors) -> bool:
    return given[0] is None and all(t is None for t in given)


def _present(kinds: Iterable[MaybeTensors]) -> tuple[Tensor, ...]:
    return tuple(t for kind in kinds for t in kind if t is not None)


def _restored(kinds: Iterable[MaybeTensors], tensors: Iterable[Tensor]) -> tuple[MaybeTensors, ...]:
    """Put tensors back where the inputs are not None."""
    rest = iter(tensors)
    return tuple(tuple(None if t is None else next(rest) for t in kind) for kind in kinds)


def _filled(x: MaybeTensors, w: MaybeTensors) -> tuple[Tensor, ...]:
    """The tangents of the inputs that are not None, zeros where a tangent is missing."""
    return tuple(torch.zeros_like(t) if v is None else v for t, v in zip(x, w, strict=True) if t is not None)


@not_compiled
def _derived(function: Any, fixed: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a derivative; `torch.autograd` batches cotangents or tangents without telling us if it vectorises."""
    batched = [t is not None and is_legacy_batched(t) for t in given]
    if not any(batched):
        result: tuple[Any, ...] = call_function(function, *fixed, *given)
        return result
    plain = tuple(legacy_unbatch(t) if b else t for t, b in zip(given, batched, strict=True))
    size = next(t.shape[0] for t, b in zip(plain, batched, strict=True) if b)
    in_dims = tuple(0 if b else None for b in batched)
    inputs = len(given) // 2 if function is Jvp else len(fixed[1])
    found, at = apply_batched(function, size, in_dims, fixed, plain, inputs)
    alike = FIELDS if function is Jvp and not any(batched[:inputs]) else 0  # rows depend on x alone
    return tuple(
        None if r is None else r.select(d, 0) if n < alike else legacy_batch(r, d)
        for n, (r, d) in enumerate(zip(found, at, strict=True))
    )

"""The forward and the backward pass of every engine as operators of torch.library, for torch.compile only.

An operator gets the tensors that have derivatives as a list, and the engine as `core.encoding` encodes it; when it runs,
it builds the engine again and calls the pass that eager mode calls. Eager mode itself uses autograd functions, which
have every derivative; an operator has the first one.

`torch.library.custom_op` would take some 100 µs per call on its own; these are plain kernels without a step of autograd.
`attend_with_gradient` is composite: it is gone when a graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..autograd.engine import WITH_GRAD, Engine, MaybeTensors
from ..biases import Bias
from ..chunked import nonfinite
from ..chunked.engine import ChunkedEngine
from ..compat.torch import call_function, is_capturing, not_compiled
from ..core.encoding import decode, encode
from ..core.folded import group_bias
from ..core.nonfinite import all_finite, visible_rows_and_keys
from ..core.problem import Problem
from ..core.rows import Rows, stacked, unstacked
from ..core.spec import Spec
from ..masks import dense
from ..softmax import arithmetic_dtype
from .arguments import BIAS_NONE, BIAS_TENSOR
from .block_mask import block_mask
from .chosen_engine import ChosenEngine
from .engine import Inputs, TritonEngine
from .launch_cache import Shortcuts

__all__ = ["attend", "encodable", "problem_of", "zero_unseen"]

_ENGINE = "str code, SymInt[] integers, float[] floats, Tensor[] tensors"
_SCHEMAS = {
    "attend": f"(Tensor?[] inputs, bool alone, {_ENGINE}) -> Tensor[]",
    "attend_backward": f"(Tensor?[] inputs, Tensor[] found, Tensor?[] cotangents, bool[] needs, {_ENGINE}) -> Tensor[]",
    "attend_with_gradient": f"(Tensor?[] inputs, bool alone, {_ENGINE}) -> Tensor[]",
    "visible": f"(Tensor query, Tensor key, Tensor value, Tensor? bias, {_ENGINE}) -> (Tensor rows, Tensor keys)",
}
# A block mask is kept for later calls, and memory of a CUDA graph is not: mode="reduce-overhead" leaves these ops outside.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
_LIBRARY = torch.library.Library("regard", "DEF")
_SHORTCUTS: dict[tuple[Any, ...], Shortcuts] = {}
_ENGINES: dict[tuple[Any, ...], TritonEngine | ChunkedEngine | ChosenEngine] = {}
_MOST = 256
T = TypeVar("T")


def attend(engine: Engine, x: MaybeTensors) -> Rows:
    """The rows of an engine, in a graph that is traced; without statistics where nobody reads them."""
    encoded = encode(engine)
    if encoded is None:
        raise RuntimeError(f"{type(engine).__name__} has a part that no operator can take")
    return Rows(*torch.ops.regard.attend_with_gradient(list(x), engine.output_alone, *encoded))


def encodable(p: Problem) -> Problem:
    """The problem with a mask and a bias that can be encoded; any other is written out, n × m numbers, in the graph."""
    if p.mask is not None and encode(p.mask) is None:
        p = p._replace(mask=dense(p.mask.dense(p.rows, p.keys, p.device)))
    if isinstance(p.bias, Bias) and encode(p.bias) is None:
        p = p._replace(bias=p.bias.dense(p.rows, p.keys)[None])
    return p


def zero_unseen(p: Problem) -> Problem:
    """The problem with rows and keys zeroed that take no part, if a NaN or inf is among them; as a score needs it."""
    if p.mask is None and p.bias is None:
        return p
    encoded = encode(replace(Spec.of(p), read=None))
    if encoded is None:
        raise RuntimeError("a spec of an encodable problem can be encoded")
    bias = p.bias if isinstance(p.bias, Tensor) else None
    rows, keys = torch.ops.regard.visible(p.query, p.key, p.value, bias, *encoded)
    rows, keys = rows[..., None], keys[..., None]
    query, key, value = torch.where(rows, p.query, 0.0), torch.where(keys, p.key, 0.0), torch.where(keys, p.value, 0.0)
    return p._replace(query=query, key=key, value=value)


def problem_of(inputs: list[Tensor | None], alone: bool, *encoded: Any) -> Problem | None:
    """The problem that a call of `regard::attend` computes, for those who watch a graph; None where parts are elsewhere.

    `chunked` adds the sink after the operator, and a structured bias or an additive score has become a tensor.
    """
    engine = _engine(inputs, encoded)
    if not isinstance(engine, TritonEngine) or engine.bias_kind not in (BIAS_NONE, BIAS_TENSOR):
        return None
    x, spec = Inputs(*inputs), engine.spec  # type: ignore[arg-type]
    if x.vector is not None:
        return None
    scale = engine.scale if x.scale is None else x.scale
    lead = (x.query.shape[0], x.query.shape[1])
    return Problem(
        x.query, x.key, x.value, spec.mask, x.bias, None, scale, spec.softcap, x.sink, 0.0, lead, True, "attention"
    )


def _engine(inputs: Sequence[Tensor | None], encoded: tuple[Any, ...]) -> TritonEngine | ChunkedEngine | ChosenEngine:
    """The engine of a call; one without tensors but a seed is kept, with its block mask, for calls with the same shapes and strides."""
    code, integers, floats, tensors = encoded
    layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in inputs]
    key = (code, *integers, *floats, *layouts)
    known = None if len(tensors) > 1 or is_capturing() else _ENGINES.get(key)
    if known is not None:
        return replace(known, spec=replace(known.spec, seed=tensors[0])) if tensors else known
    engine: TritonEngine | ChunkedEngine | ChosenEngine = decode(*encoded)
    spec = engine.spec
    alike = not tensors or (len(tensors) == 1 and spec.seed is tensors[0])  # calls with this key differ in the seed at most
    device = _first(inputs).device
    if spec.mask is not None and any(t.device != device for t in spec.mask.tensors):
        spec = replace(spec, mask=spec.mask.to(device))
        engine = replace(engine, spec=spec)
    if isinstance(engine, TritonEngine):
        mask = block_mask(spec.mask, spec.n, spec.m, device, spec.inner)
        engine = replace(engine, block_mask=mask, shortcuts=_shortcuts(engine, inputs, key))
    if alike and (spec.mask is None or spec.mask.constant) and not is_capturing():
        _keep(_ENGINES, key, replace(engine, spec=replace(spec, seed=0)) if tensors else engine)
    return engine


def _shortcuts(engine: TritonEngine, inputs: Sequence[Tensor | None], key: tuple[Any, ...]) -> Shortcuts | None:
    """Those of calls with the same code, numbers, shapes and strides."""
    if engine.bias_kind != BIAS_NONE or engine.spec.dropout or any(t is not None for t in (inputs[4], inputs[6])):
        return None
    found = _SHORTCUTS.get(key)
    return _keep(_SHORTCUTS, key, Shortcuts()) if found is None else found


def _keep(things: dict[tuple[Any, ...], T], key: tuple[Any, ...], thing: T) -> T:
    if len(things) >= _MOST:
        things.clear()
    things[key] = thing
    return thing


@not_compiled
def _attend(inputs: list[Tensor | None], alone: bool, *encoded: Any) -> list[Tensor]:
    """The output and the statistics of its rows; if callers read the output `alone`, three of them, stacked in one tensor.

    Statistics that callers read are tensors of their own: where a graph saves a tensor and a view of it, Inductor may write
    over the view before the backward pass has read the tensor.
    """
    if torch.is_grad_enabled():  # seldom: a graph runs without
        with torch.no_grad():
            return _attend(inputs, alone, *encoded)
    engine, x = _engine(inputs, encoded), tuple(inputs)
    found = engine.forward_stacked(x) if alone else None
    if found is not None:
        return list(found)
    rows = nonfinite.forward(engine, x) if isinstance(engine, ChunkedEngine) else engine.forward(x)
    return [t.contiguous() for t in (stacked(rows, 3) if alone else rows)]


def _fake_attend(inputs: list[Tensor | None], alone: bool, *encoded: Any) -> list[Tensor]:
    query, value = _first(inputs), _first(inputs[2:])
    shape, dtype = query.shape[:-1], arithmetic_dtype(query.dtype)
    output = value.new_empty(*shape, value.shape[-1])
    if alone:
        return [output, query.new_empty(3, *shape, dtype=dtype)]
    return [output, *(query.new_empty(shape, dtype=dtype) for _ in Rows._fields[1:])]


@not_compiled
def _attend_backward(
    inputs: list[Tensor | None], found: list[Tensor], cotangents: list[Tensor | None], needs: list[bool], *encoded: Any
) -> list[Tensor]:
    """The gradients of the inputs that need one; `found` is what `_attend` returned."""
    if torch.is_grad_enabled():
        if any(t is not None and t.requires_grad for t in (*inputs, *cotangents)):
            raise RuntimeError(
                "attention: a compiled call has no second derivative. Differentiate twice outside of torch.compile."
            )
        with torch.no_grad():
            return _attend_backward(inputs, found, cotangents, needs, *encoded)
    engine, x, g, wanted = _engine(inputs, encoded), tuple(inputs), tuple(cotangents), tuple(needs)
    grads = None
    if len(found) == 2:  # the output alone
        output, statistics = found
        grads = engine.vjp_stacked(x, output, statistics, g[0], wanted)
        rows = unstacked(output, statistics)
    else:
        rows = Rows(*found)
    if grads is None:
        if isinstance(engine, ChunkedEngine):
            grads = nonfinite.vjp(engine, x, rows, g, wanted)
        else:
            grads = engine.vjp(x, rows, g, wanted)
    return [_gradient(t, d) for t, d, need in zip(inputs, grads, needs, strict=True) if need and t is not None]


def _gradient(x: Tensor, gradient: Tensor | None) -> Tensor:
    """As `_fake_attend_backward` says that it is."""
    if gradient is None:
        return torch.zeros_like(x)
    return gradient if gradient.dtype == x.dtype and gradient.is_contiguous() else gradient.to(x.dtype).contiguous()


def _fake_attend_backward(
    inputs: list[Tensor | None], found: Any, cotangents: Any, needs: list[bool], *encoded: Any
) -> list[Tensor]:
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, need in zip(inputs, needs, strict=True)
        if need and t is not None
    ]


class _Attend(torch.autograd.Function):
    """The two operators joined, while a graph is traced."""

    @staticmethod
    def forward(ctx: Any, encoded: tuple[Any, ...], alone: bool, *x: Tensor | None) -> tuple[Tensor, ...]:
        found = torch.ops.regard.attend(list(x), alone, *encoded)
        ctx.rest, ctx.parts = encoded[:3], (len(x), len(found))
        ctx.save_for_backward(*x, *found, *encoded[3])
        ctx.set_materialize_grads(False)
        if alone:
            return (found[0],)
        ctx.mark_non_differentiable(*found[WITH_GRAD:])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[2:])
        if all(t is None for t in g):
            return None, None, *(None for _ in needs)
        saved, (n, count) = list(ctx.saved_tensors), ctx.parts
        cotangents = [*g, None, None][:WITH_GRAD]
        back = (saved[:n], saved[n : n + count], cotangents, needs, *ctx.rest, saved[n + count :])
        grads = iter(torch.ops.regard.attend_backward(*back))
        return None, None, *(next(grads) if need else None for need in needs)


def _attend_with_gradient(inputs: list[Tensor | None], alone: bool, *encoded: Any) -> list[Tensor]:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return list(call_function(_Attend, encoded, alone, *inputs))
    found: list[Tensor] = torch.ops.regard.attend(inputs, alone, *encoded)
    return found[:1] if alone else found


@not_compiled
@torch.no_grad()
def _visible(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *encoded: Any) -> tuple[Tensor, Tensor]:
    if query.is_cpu and all_finite(query, key, value):  # a GPU would have to be waited for
        return _fake_visible(query, key)
    spec: Spec = decode(*encoded)
    if spec.mask is not None and any(t.device != query.device for t in spec.mask.tensors):
        spec = replace(spec, mask=spec.mask.to(query.device))
    return visible_rows_and_keys(spec, query, key, group_bias(bias, key.shape[1]))


def _fake_visible(query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return query.new_ones(query.shape[:3], dtype=torch.bool), key.new_ones(key.shape[:3], dtype=torch.bool)


def _first(tensors: Sequence[Tensor | None]) -> Tensor:
    if tensors[0] is None:
        raise RuntimeError("a problem has queries, keys and values")
    return tensors[0]


for _name, _kernel, _fake in (
    ("attend", _attend, _fake_attend),
    ("attend_backward", _attend_backward, _fake_attend_backward),
    ("visible", _visible, _fake_visible),
):
    _LIBRARY.define(_name + _SCHEMAS[_name], tags=_TAGS)
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"regard::{_name}", _fake, lib=_LIBRARY)
_LIBRARY.define("attend_with_gradient" + _SCHEMAS["attend_with_gradient"])
_LIBRARY.impl("attend_with_gradient", _attend_with_gradient, "CompositeImplicitAutograd")

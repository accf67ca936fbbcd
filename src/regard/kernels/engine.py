"""The engine of our own kernels: forward, jvp, vjp and double backward over the tensors that kernels take.

The double-backward kernels know no tangent of a bias and no additive score: those come from the formula in strips. For
second derivatives, scales and sinks that are tensors are plain torch around the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import (
    Engine,
    MaybeTensors,
    Needs,
    attend,
    double_backward_of_formula,
    jvp_of_formula,
    vjp_of_formula,
)
from ..autograd.strip_map import MapStrips, attention_strips, jvp_of
from ..chunked.vjp import vjp as strips_vjp
from ..compat.torch import call_function, is_capturing, not_compiled, without_autocast
from ..compat.triton import INTERPRETED, Address
from ..core.dropout import keep_threshold
from ..core.folded import FoldedProblem, add_sink, group_bias
from ..core.nonfinite import zero_unseen
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.tiling import TileSizes
from . import ahead
from .arguments import BIAS_ALIBI, BIAS_RELATIVE, BIAS_TENSOR, NO_ENTROPY, BiasArgs, DropoutArgs
from .block_mask import BlockMask
from .launch_cache import Shortcuts
from .pointwise import PointwiseKernel, flat_tables, split_tables
from .portable.configs import WHOLE

if TYPE_CHECKING:
    from .arguments import BackwardRows, DoubleBackwardRows, KernelArgs, Tangents

__all__ = ["Derivatives", "Inputs", "Needed", "TritonEngine", "dropout_args"]


class Inputs(NamedTuple):
    """The tensors of a problem that may have derivatives."""

    query: Tensor  # (L, H, N, D), the score folded in
    key: Tensor  # (L, K, M, D)
    value: Tensor  # (L, K, M, E)
    bias: Tensor | None  # (L|1, H|1, N|1, M|1), slopes (H,), or a table (H|1, 2R + 1)
    scale: Tensor | None  # float32 (1,) or (H,)
    sink: Tensor | None  # float32 (H,)
    vector: Tensor | None  # float32 (D,), of the additive score
    tables: Tensor | None = None  # float32, flat: what a function of the scores reads

    @property
    def wide(self) -> bool:
        """Whether passes with tangents have no kernel for these dims."""
        return max(self.query.shape[-1], self.value.shape[-1]) > 256


class Derivatives(NamedTuple):
    """Tangents or cotangents of the inputs; None where there is none."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    sink: Tensor | None = None
    vector: Tensor | None = None
    tables: Tensor | None = None


class Needed(NamedTuple):
    """Which inputs need a cotangent."""

    query: bool
    key: bool
    value: bool
    bias: bool
    scale: bool
    sink: bool
    vector: bool
    tables: bool = False


_SHORT_BACKWARD = 64  # dims; with more, it compiles longer than the forward under a narrow mask, and so begins before it
_QUERY_KEY_VALUE = Needed(True, True, True, False, False, False, False, False)


@dataclass(frozen=True, eq=False)
class TritonEngine(Engine):
    """Passes over `Inputs` by our kernels."""

    spec: Spec
    block_mask: BlockMask
    bias_kind: int
    bias_offset: int  # of a structured bias: row i is at key i + offset
    scale: float  # 1 if there is a tensor of scales
    observed: bool
    shortcuts: Shortcuts | None = None  # of a remembered call

    @property
    def output_alone(self) -> bool:  # type: ignore[override]
        return not self.observed

    def forward(self, x: MaybeTensors) -> Rows:
        found = self._short_forward(x, apart=True)
        if found is None:
            return self._forward(x)
        output, (lse, max_logit, log_row_sum, *entropy) = found
        return Rows(output, lse, entropy[0] if entropy else NO_ENTROPY, max_logit, log_row_sum)

    def forward_stacked(self, x: MaybeTensors) -> tuple[Tensor, Tensor] | None:
        """The output, and the statistics in one tensor, as `core.rows.unstacked` reads it; None without a shortcut to it."""
        return self._short_forward(x, apart=False)

    @property
    def stacks(self) -> bool:  # type: ignore[override]
        return not self.observed  # `forward_stacked` has a result once the call is remembered

    def _short_forward(self, x: MaybeTensors, apart: bool) -> tuple[Tensor, Any] | None:
        short = self.shortcuts
        if short is None or short.forward is None:
            return None
        return short.forward(x[0], x[1], x[2], x[5], self.block_mask, apart)

    def vjp_stacked(
        self, x: MaybeTensors, output: Tensor, statistics: Tensor, g: Tensor | None, needs: Needs
    ) -> Sequence[Tensor | None] | None:
        """`vjp` for the cotangent of the output alone, from statistics in one tensor; None without a shortcut to it."""
        if not statistics.is_contiguous():
            return None
        at, step = statistics.data_ptr(), statistics.stride(0) * statistics.element_size()
        return self._short_vjp(x, output, Address(at + step), Address(at + 2 * step), g, needs)

    def _short_vjp(
        self, x: MaybeTensors, output: Tensor, row_max: Tensor | Address, log_row_sum: Tensor | Address, g: Tensor | None, needs: Needs
    ) -> Sequence[Tensor | None] | None:
        short = self.shortcuts
        if short is None or short.backward is None or needs != _QUERY_KEY_VALUE:
            return None
        found = short.backward(x[0], x[1], x[2], output, row_max, log_row_sum, g, self.block_mask)
        return None if found is None else (*found, None, None, None, None, None)

    def expect_vjp(self, x: MaybeTensors, needs: Needs) -> None:
        """Let the kernels of the first forward and those of its backward compile side by side."""
        if self.shortcuts is not None and self.shortcuts.forward is not None:
            return
        if needs == _QUERY_KEY_VALUE and not self.spec.dropout and _inputs(x).query.shape[-1] <= WHOLE:
            self._compile(_inputs(x), needs)

    @not_compiled
    @without_autocast
    def _compile(self, x: Inputs, needs: Needs | None) -> KernelArgs:
        """The problem as kernels take it. The kernels of a first forward, and with `needs` those of its backward, compile side by side."""
        if not x.query.is_cuda or INTERPRETED or x.vector is not None or is_capturing():
            return self.kernel_args(x)
        ahead.prepare(x.query.device)
        args = self.kernel_args(x)
        from . import launch

        passes, variant = ("forward",) if needs is None else ("forward", "backward"), (*args.variant, self.observed)
        new = [name for name in passes if ahead.is_new((name, *variant))]
        if args.block_mask.narrow and args.query.shape[3] > _SHORT_BACKWARD:
            new.reverse()
        for name in new:
            with ahead.collecting(args.query.device):
                if name == "forward":
                    launch.forward(args, self.observed)
                elif needs is not None:
                    rows = args.new_rows(self.observed)
                    self._vjp(x, rows, (torch.empty_like(rows.output), None, None), Needed(*needs))
        if "backward" in new:
            ahead.import_meanwhile()
        return args

    @not_compiled
    @without_autocast
    def _forward(self, x: MaybeTensors) -> Rows:
        inputs = _inputs(x)
        args = self.kernel_args(inputs) if self.spec.dropout else self._compile(inputs, None)
        from . import launch

        return launch.forward(args, self.observed)

    @not_compiled
    @without_autocast
    def jvp(self, x: MaybeTensors, w: MaybeTensors) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        if _inputs(x).vector is not None or _inputs(x).wide or Derivatives(*w).tables is not None:
            rows, tangents = self._forward(x), jvp_of_formula(self, x, w)[1]
            rows = rows if self.observed else rows._replace(entropy=torch.zeros_like(rows.lse))
            return rows, (tangents[0], tangents[1], tangents[2])
        return self._jvp(_inputs(x), Derivatives(*w))

    def vjp(self, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> Sequence[Tensor | None]:
        if g[1] is None and g[2] is None and rows.max_logit.is_contiguous() and rows.log_row_sum.is_contiguous():
            found = self._short_vjp(x, rows.output, rows.max_logit, rows.log_row_sum, g[0], needs)
            if found is not None:
                return found
        return self._checked_vjp(x, rows, g, needs)

    @not_compiled
    @without_autocast
    def _checked_vjp(self, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> Sequence[Tensor | None]:
        if _inputs(x).query.shape[-1] > WHOLE:  # no program holds dQ or dK
            return [t if need else None for t, need in zip(vjp_of_formula(self, x, g), needs, strict=True)]
        return self._vjp(_inputs(x), _aligned_rows(rows), g, Needed(*needs))

    @not_compiled
    @without_autocast
    def double_backward(
        self, x: MaybeTensors, rows: Rows, d_rows: MaybeTensors, g: MaybeTensors, w: MaybeTensors, dg: MaybeTensors, needs: Needs
    ) -> Sequence[Tensor | None]:
        inputs, tangents, needed = _inputs(x), Derivatives(*w), Needed(*needs)
        scale_or_sink = inputs.scale is not None or inputs.sink is not None
        beyond = tangents.bias is not None or needed.bias or tangents.tables is not None or needed.tables
        if inputs.vector is not None or inputs.wide or beyond or scale_or_sink:
            engine = TorchScaleEngine(**{**vars(self), "shortcuts": None}) if scale_or_sink and inputs.vector is None else self
            grads = double_backward_of_formula(engine, x, g, w, dg)[1]
        else:
            grads = self._double_backward(inputs, _aligned_rows(rows), d_rows, g, tangents, dg, needed)
        return [t if need else None for t, need in zip(grads, needs, strict=True)]

    def formula(self, x: MaybeTensors) -> tuple[Tensor, ...]:
        """Output, lse and entropy in strips of plain torch: (L, H, N, …)."""
        inputs = _inputs(x)
        folded = self._folded(inputs)
        tensors = (*folded[:3], *(() if folded.bias is None else (folded.bias,)), *folded.shared)
        strips = attention_strips(folded, TileSizes())
        output, lse, entropy = (t.flatten(1, 2) for t in call_function(MapStrips, strips, *tensors))
        if inputs.sink is not None:
            output, lse, entropy = _with_sink(inputs.sink, output, lse, entropy)
        return output.to(inputs.value.dtype), lse, entropy

    def _folded(self, inputs: Inputs) -> FoldedProblem:
        """The problem in plain torch, in float32, without the sink."""
        spec, heads = self.spec, inputs.key.shape[1]
        bias = group_bias(inputs.bias, heads) if self.bias_kind == BIAS_TENSOR else None
        query, key, value = (t.float() for t in zero_unseen(spec, inputs.query, inputs.key, inputs.value, bias))
        if inputs.vector is None:
            query = query * (self.scale if inputs.scale is None else inputs.scale.reshape(-1, 1, 1))
        shared: tuple[Tensor, ...] = () if inputs.vector is None else (inputs.vector,)
        if spec.pointwise is not None:
            shared += split_tables(spec.pointwise, inputs.tables)
        if self.bias_kind in (BIAS_ALIBI, BIAS_RELATIVE) and inputs.bias is not None:
            shared += (inputs.bias,)
        return FoldedProblem(query.unflatten(1, (heads, query.shape[1] // heads)), key, value, bias, shared, spec)

    def batched(self, size: int) -> tuple[Engine, int]:
        spec, mask = self.spec, self.block_mask
        if mask.lead[0] > 1:
            mask.wait()
            mask = BlockMask(mask.n, mask.m, mask.lo, mask.hi, mask.mask_bits, mask.lead, mask.inner * size, narrow=mask.narrow)
        spec = replace(spec, inner=spec.inner * size, period=spec.period * size, copies=spec.copies * size)
        return replace(self, spec=spec, block_mask=mask, shortcuts=None), 1

    def kernel_args(self, x: Inputs) -> KernelArgs:
        """The problem as kernels take it."""
        from .arguments import KernelArgs

        query, key = x.query, x.key
        if x.vector is not None:  # the kernel reads one hidden unit of all rows at a time
            query, key = query.mT.contiguous().mT, key.mT.contiguous().mT
        negates = self._negates_query(x)
        return KernelArgs(
            -query if negates else query,
            key,
            x.value,
            self.block_mask,
            -self.scale if negates else self.scale,
            None if x.scale is None else x.scale.detach().expand(query.shape[1]).contiguous(),
            self.spec.softcap,
            self.bias_kind,
            self._bias_args(x.bias),
            dropout_args(self.spec, query),
            None if x.sink is None else x.sink.detach().contiguous(),
            None if x.vector is None else x.vector.detach().contiguous(),
            self._function(x),
            None if negates else self.shortcuts,
        )

    def _function(self, x: Inputs) -> PointwiseKernel | None:
        bound, tables = self.spec.pointwise, None if x.tables is None else _aligned(x.tables.detach())
        return None if bound is None else PointwiseKernel(bound, tables, self.spec.copies, x.query.device)

    def _negates_query(self, x: Inputs) -> bool:
        """Kernels take a positive scale, so a negative one goes into the queries."""
        return x.scale is None and x.vector is None and self.scale < 0

    def _bias_args(self, bias: Tensor | None) -> BiasArgs:
        if bias is None:
            return BiasArgs()
        bias = bias.detach()
        if self.bias_kind == BIAS_TENSOR:
            strides = (0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
            return BiasArgs(bias, *strides)
        bias = bias.contiguous()
        head = 0 if bias.shape[0] == 1 else bias.stride(0)
        reach = bias.shape[-1] // 2 if self.bias_kind == BIAS_RELATIVE else 0
        return BiasArgs(bias, 0, head, 0, 0, self.bias_offset, reach)

    def _jvp(self, x: Inputs, w: Derivatives) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        from . import launch

        args = self.kernel_args(x._replace(sink=None))
        rows, tangents = launch.jvp(args, self._tangents(x, args, w), self.observed)
        if x.sink is None:
            return rows, tangents
        d_sink = torch.zeros_like(x.sink) if w.sink is None else w.sink
        results, moved = jvp_of(_with_sink, (x.sink, *rows[:3]), (d_sink, *tangents))
        log_row_sum = add_sink(x.sink, *rows[1:])[3]
        sunk = Rows(results[0], results[1], results[2], rows.max_logit, log_row_sum)
        return sunk, (moved[0], moved[1], moved[2])

    def _tangents(self, x: Inputs, args: KernelArgs, w: Derivatives) -> Tangents:
        """The tangents as kernels take them."""
        from .arguments import Tangents

        query = -w.query if w.query is not None and self._negates_query(x) else w.query
        query, key, value = (t if t is None else _readable(t) for t in (query, w.key, w.value))
        scales = None if w.scale is None else w.scale.detach().expand(args.heads).contiguous()
        return Tangents(query, key, value, scales, self._bias_args(w.bias))

    def _vjp(self, x: Inputs, rows: Rows, g: MaybeTensors, needed: Needed) -> Derivatives:
        from . import launch

        args = self.kernel_args(x)
        given, d_sink = _backward_rows(args, x.sink, rows, g)
        wants_query = needed.query or needed.scale or needed.vector
        found = launch.backward(args, given, wants_query, needed.key or needed.value)
        dq, d_scale = found.dq, None
        if dq is not None:
            if args.scales is not None and x.scale is not None:
                products = torch.where(dq == 0, 0.0, dq * args.query)  # a query without visible keys may be NaN
                d_scale = products.sum((0, 2, 3)).sum_to_size(x.scale.shape)
                dq = dq * args.scales[:, None, None]
            dq = (-dq if self._negates_query(x) else dq).to(x.query.dtype)
        d_bias = None
        if needed.bias and x.bias is not None:
            d_bias = launch.bias_gradient(args, given, tuple(x.bias.shape)).to(x.bias.dtype)
        dk = None if found.dk is None else found.dk.to(x.key.dtype)
        d_tables = self._table_gradient(x, args, given, rows, g) if needed.tables else None
        grads = Derivatives(dq, dk, found.dv, d_bias, d_scale, d_sink, found.vector, d_tables)
        return Derivatives(*(t if need else None for t, need in zip(grads, needed, strict=True)))

    def _table_gradient(self, x: Inputs, args: KernelArgs, given: BackwardRows, rows: Rows, g: MaybeTensors) -> Tensor | None:
        """The gradient of the tables: sums along rows, keys and diagonals by kernels, all else by a pass of `chunked`."""
        from . import launch

        function = args.pointwise
        if function is None or x.tables is None:
            return None
        if any(load.along is None for load in function.loads):
            return self._table_gradient_in_strips(x, rows, g)
        total = torch.zeros_like(x.tables)
        for load in function.loads:
            total += function.scattered(load, launch.table_gradient(args, given, load), (args.n, args.m))
        return total

    def _table_gradient_in_strips(self, x: Inputs, rows: Rows, g: MaybeTensors) -> Tensor | None:
        folded = self._folded(x)
        share = 0.0 if x.sink is None else _share_of_sink(x.sink, rows.lse)
        entropy = torch.zeros_like(rows.lse) if rows.entropy is None else rows.entropy + share
        groups = folded.query.shape[1:3]
        wide = Rows(*(t.unflatten(1, groups).float() for t in rows._replace(entropy=entropy)))
        cotangents = tuple(None if t is None else t.unflatten(1, groups).float() for t in g)
        tables, count = self.spec.tables, len(folded.shared)
        needs = (False,) * 4 + tuple(tables.start <= at < tables.stop for at in range(count))
        found = strips_vjp(folded, TileSizes(), needs, wide, cotangents)[4:][tables]
        return flat_tables([t for t in found if t is not None])

    def _double_backward(
        self, x: Inputs, rows: Rows, d_rows: MaybeTensors, g: MaybeTensors, w: Derivatives, dg: MaybeTensors, needed: Needed
    ) -> Derivatives:
        from . import launch

        args = self.kernel_args(x)
        given, _ = _backward_rows(args, None, rows, g)
        dO_dot, g_lse_dot, g_H_dot = dg
        dO_dot = None if dO_dot is None else _readable(dO_dot)
        moving = _double_backward_rows(args, given, rows, d_rows, g, (dO_dot, g_lse_dot, g_H_dot))
        needs = (needed.query, needed.key, needed.value)
        found = launch.double_backward(args, self._tangents(x, args, w), given.dO, dO_dot, moving, needs)
        dq = -found.dq if found.dq is not None and self._negates_query(x) else found.dq
        return Derivatives(dq, found.dk, found.dv)


class TorchScaleEngine(TritonEngine):
    """The same function with scales and sinks in plain torch, so that its double backward needs none of either."""

    def formula(self, x: MaybeTensors) -> tuple[Tensor, ...]:
        inputs = _inputs(x)
        query, scale = inputs.query, self.scale
        if inputs.scale is not None:
            query, scale = (query.float() * inputs.scale.reshape(-1, 1, 1)).to(query.dtype), 1.0
        engine = TritonEngine(**{**vars(self), "scale": scale, "observed": True})
        output, lse, entropy = attend(engine, inputs._replace(query=query, scale=None, sink=None))[:3]
        return (output, lse, entropy) if inputs.sink is None else _with_sink(inputs.sink, output, lse, entropy)


def _inputs(x: MaybeTensors) -> Inputs:
    query, key, value, *others = x
    if query is None or key is None or value is None:
        raise RuntimeError("a problem has queries, keys and values")
    return Inputs(query, key, value, *others)


def _aligned_rows(rows: Rows) -> Rows:
    """The statistics as kernels read them, row after row; vmap may have changed their strides."""
    return Rows(_aligned_address(rows.output), *(t if t is None else _aligned(t) for t in rows[1:]))


def _aligned(x: Tensor) -> Tensor:
    """A contiguous tensor whose address is a multiple of 16, which launches that are started again take for granted."""
    return _aligned_address(x if x.is_contiguous() else x.contiguous())


def _aligned_address(x: Tensor) -> Tensor:
    return x.clone() if x.data_ptr() & 15 else x


def _readable(x: Tensor) -> Tensor:
    """A tensor that kernels can read: no broadcast dimension, unit stride in the last."""
    return x if 0 not in x.stride() and x.stride(-1) == 1 else x.contiguous()


def _with_sink(sink: Tensor, output: Tensor, lse: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Let the sink take its share of the rows, by differentiable operations."""
    left, lse, entropy, _ = add_sink(sink, lse, entropy, lse.detach(), torch.zeros_like(lse))
    return (output * left.exp()[..., None]).to(output.dtype), lse, entropy


def dropout_args(spec: Spec, query: Tensor) -> DropoutArgs:
    """Dropout as kernels take it."""
    if not spec.dropout:
        return DropoutArgs()
    from .portable.dropout_keys import Origin, dropout_keys  # here, since most processes never need it

    L, H, N, _ = query.shape
    keys = dropout_keys(spec.seed, (L, H, N), Origin(*spec.origin, *spec.corner, spec.copies), query.device)
    return DropoutArgs(keys, keep_threshold(spec.dropout), 1.0 / (1.0 - spec.dropout))


def _backward_rows(
    args: KernelArgs, sink: Tensor | None, rows: Rows, g: MaybeTensors
) -> tuple[BackwardRows, Tensor | None]:
    """What the backward kernels need of every row, and the cotangent of the sink, which depends on the rows only."""
    from . import launch
    from .arguments import BackwardRows

    dO, g_lse, g_H = (None if t is None else t.detach() for t in g)
    dO = torch.zeros_like(rows.output) if dO is None else _readable(dO)
    g_lse = None if g_lse is None else torch.where(rows.lse > -torch.inf, g_lse, 0.0).contiguous()
    g_H = None if g_H is None else _aligned(g_H)
    delta, lse, empty = launch.backward_preprocess(args, rows, dO, g_lse)
    mean, d_sink = None, None
    share = None if sink is None else _share_of_sink(sink.detach(), rows.lse)
    if g_H is not None:
        above = rows.log_row_sum if args.exact else torch.zeros_like(rows.log_row_sum)
        mean = above - rows.entropy if share is None else above - rows.entropy - share
    if share is not None:
        slope = -delta if g_H is None else g_H * (1 - share - rows.entropy) - delta
        d_sink = (share * slope).sum((0, 2))
    return BackwardRows(dO, rows.max_logit if args.exact else lse, rows.log_row_sum, delta, g_H, mean, empty), d_sink


def _share_of_sink(sink: Tensor, lse: Tensor) -> Tensor:
    """The weight of the sink in each row; 0 in a row of nothing but a sink of −inf, whose lse is −inf too."""
    return torch.where(lse > -torch.inf, (sink[:, None] - lse).exp(), 0.0)


def _double_backward_rows(
    args: KernelArgs, given: BackwardRows, rows: Rows, d_rows: MaybeTensors, g: MaybeTensors, dg: MaybeTensors
) -> DoubleBackwardRows:
    """What the double-backward kernels need of every row."""
    from .arguments import DoubleBackwardRows

    O_dot, lse_dot, H_dot = d_rows
    dO_dot, g_lse_dot, g_H_dot = dg
    g_H = g[2]
    if O_dot is None or lse_dot is None or H_dot is None:
        raise RuntimeError("a double backward needs the tangents of the rows")
    delta_dot = (given.dO.float() * O_dot).sum(-1)
    if dO_dot is not None:
        delta_dot += (dO_dot.float() * rows.output).sum(-1)
    if g_lse_dot is not None:
        delta_dot -= torch.where(rows.lse > -torch.inf, g_lse_dot, 0.0)
    made = DoubleBackwardRows(given.row_max, given.log_row_sum, given.delta, delta_dot.contiguous(), lse_dot.contiguous())
    if g_H is None and g_H_dot is None:
        return made
    zeros = torch.zeros_like(made.lse_dot)
    g_H, g_H_dot = (zeros if t is None else t.contiguous() for t in (g_H, g_H_dot))
    mean = (rows.log_row_sum if args.exact else zeros) - rows.entropy
    return made._replace(g_entropy=g_H, g_entropy_dot=g_H_dot, mean=mean, mean_dot=(lse_dot - H_dot).contiguous())

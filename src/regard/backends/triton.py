"""`triton`: our own GPU kernels, with the statistics of the weights at the speed of a fused kernel.

This file turns a problem into an engine and the tensors that it takes. The kernels are in `regard.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..autograd.engine import attend, attend_eagerly
from ..biases import Alibi, Bias, Relative
from ..chunked import statistics
from ..compat.torch import (
    forward_mode_is_active,
    is_capturing,
    may_need_grad,
    outside_transforms,
    transforms_are_active,
    without_autocast,
)
from ..compat.triton import INTERPRETED
from ..core.dropout import draw_seed, drawn_in_graph
from ..core.folded import group_bias
from ..core.nonfinite import zero_unseen
from ..core.problem import Problem
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.versions import Versions
from ..kernels.arguments import BIAS_ALIBI, BIAS_NONE, BIAS_RELATIVE, BIAS_TENSOR
from ..kernels.block_mask import BlockMask, block_mask, most_bytes, traceable
from ..kernels.engine import Inputs, TritonEngine
from ..kernels.launch_cache import Shortcuts
from ..masks import Mask
from ..masks.dense import Dense
from ..scores.additive import Additive
from .base import Backend, Prepared

if TYPE_CHECKING:
    from ..kernels.arguments import KernelArgs

__all__ = ["Triton"]

_INSTALLED = find_spec("triton") is not None
_WIDEST = 256  # dims that a tile can hold
_MOST_BITS = 2**32  # bytes that the bits of a mask may take
_COARSE = 64  # pairs per cell from which the map has a kernel
_MOST = 128  # keys per row that the kernel for `top` keeps


class Triton(Backend):
    """Kernels of our own, with the statistics of the weights at the speed of a fused kernel."""

    name: ClassVar[str] = "triton"
    about: ClassVar[str] = "our own GPU kernels"

    def refuses(self, p: Problem) -> list[str]:
        if not _INSTALLED:
            return ["triton is not installed: pip install 'regard[triton]'"]
        reasons = []
        if not (p.query.is_cuda or (p.query.is_cpu and INTERPRETED)):
            reasons.append(f"the tensors are on {p.device.type}; it needs a GPU")
        if p.dtype == torch.float64:
            reasons.append("its arithmetic is float32; float64 is asked for")
        if not (p.query.numel() and p.key.numel() and p.value.numel()):
            reasons.append("nothing is there to compute")
        if torch.compiler.is_compiling():
            reasons += _about_tracing()
        return reasons + _about_sizes(p) + _about_parts(p)

    def run(self, p: Problem) -> Rows:
        rows = _traced(p) if torch.compiler.is_compiling() else _eager(p)
        output = p.shaped(rows.output.to(p.dtype))
        return Rows(output, *map(p.shaped, rows[1:])) if p.observed else Rows(output)

    def prepare(self, p: Problem) -> Prepared | None:
        if INTERPRETED or not p.plain_scale or p.bias is not None or p.dropout:
            return None
        shortcuts = Shortcuts()
        records = may_need_grad(*p.tensors)
        engine, _ = _engine(p, _block_mask(p), shortcuts)
        constant, observed, heads = p.mask is None or p.mask.constant, p.observed, p.query.shape[1]
        fixed, engine_for = engine if constant else None, _engine_for(engine, p)
        del engine  # which holds the tensors of the mask

        def run(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, sink: Tensor | None) -> Any:
            mine = engine_for(mask) if fixed is None else fixed
            x = query, key, value, None, None, None if sink is None else sink.float().expand(heads), None
            if records:
                rows = attend_eagerly(mine, x)  # what is remembered has no transform and no tangent
                return rows if observed else rows.output
            if observed:
                return mine.forward(x)
            return (mine.forward_stacked(x) or mine.forward(x))[0]

        return run

    def received(self, p: Problem, rows: Rows) -> Tensor:
        from ..kernels.launch import received

        return p.shaped(received(*_late_pass(p, rows)))

    def pooled(self, p: Problem, rows: Rows, height: int, width: int) -> Tensor:
        from ..kernels.launch import pooled

        if p.rows * p.keys < _COARSE * height * width:
            return statistics.pooled(p, rows, height, width, self.tile_sizes)
        w, row_max, log_row_sum = _late_pass(p, rows)
        return p.shaped(pooled(w, row_max, log_row_sum, height, width))

    def top(self, p: Problem, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
        from ..kernels.launch import top

        if k > _MOST:
            return statistics.top(p, rows, k, self.tile_sizes)
        w, row_max, log_row_sum = _late_pass(p, rows)
        logits, index = top(w, k)
        weights = (logits - row_max[..., None] - log_row_sum[..., None]).exp().masked_fill(index < 0, 0.0)
        return p.shaped(weights.to(p.dtype)), p.shaped(index)

    def moments(self, p: Problem, rows: Rows) -> tuple[Tensor, Tensor]:
        from ..kernels.launch import moments

        health, distance = moments(*_late_pass(p, rows))
        return p.shaped(health), p.shaped(distance)

    def survey(self, p: Problem, rows: Rows, height: int, width: int) -> statistics.Survey:
        from ..kernels.survey import survey

        w, row_max, log_row_sum = _late_pass(p, rows)
        found = survey(w, row_max, log_row_sum, _of_rows(rows.entropy, w.rows), height, width)
        return found if len(p.lead) == 2 else statistics.Survey(*(p.shaped(x) for x in found if x is not None))

    def visible(self, p: Problem) -> Tensor:
        if p.bias is not None:
            return super().visible(p)
        shape = (p.query.shape[0], p.query.shape[1], p.rows)
        if p.mask is None:
            return p.shaped(torch.full(shape, p.keys, device=p.device))
        count = p.mask.visible(torch.arange(p.rows, device=p.device), p.rows, p.keys)
        if count.dim() == 3 and count.shape[0] > 1:
            count = count.repeat_interleave(shape[0] // count.shape[0], 0)
        return p.shaped(count.expand(shape).contiguous())


def _about_sizes(p: Problem) -> list[str]:
    reasons = []
    width = p.query.shape[-1]
    if isinstance(p.score, Additive):
        width = p.score.hidden
    elif p.score is not None:
        width = p.score.width(width, p.key.shape[-1])
    if max(width, p.value.shape[-1]) > _WIDEST:
        reasons.append(f"a dim is {max(width, p.value.shape[-1])}; its tiles hold up to {_WIDEST}")
    bits = 0 if p.mask is None or isinstance(p.mask, Dense) else most_bytes(p.mask, p.rows, p.keys)
    if p.mask is not None and bits > _MOST_BITS and not _interval(p.mask, p):
        size = "too many" if torch.compiler.is_compiling() else f"{bits:,}"  # a symbol has no digits
        reasons.append(f"the mask is no interval, and its bits may take {size} bytes")
    return reasons


def _interval(mask: Mask, p: Problem) -> bool:
    if traceable(mask) or torch.compiler.is_compiling():  # which cannot read the mask
        return traceable(mask)
    return mask.span(torch.arange(p.rows, device=p.device), p.rows, p.keys).exact


def _about_parts(p: Problem) -> list[str]:
    reasons = []
    if p.score is not None and p.score.pairwise and not isinstance(p.score, Additive):
        reasons.append(f"it has no kernel for the score {type(p.score).__name__}")
    if isinstance(p.bias, Bias) and not isinstance(p.bias, Alibi | Relative):
        reasons.append(f"it has no kernel for the bias {type(p.bias).__name__}")
    if p.dropout and not torch.compiler.is_compiling() and is_capturing():
        reasons.append("a captured graph would drop the same weights at every replay")
    return reasons


def _about_tracing() -> list[str]:
    if forward_mode_is_active() or transforms_are_active():
        return ["under torch.compile it is an operator, which has no rules for forward mode and torch.func"]
    return []


@without_autocast
def _eager(p: Problem) -> Rows:
    with outside_transforms():  # a block mask is cached, so it must not hold wrapped tensors
        mask = _block_mask(p)
    engine, inputs = _engine(p, mask)
    return attend(engine, inputs)


def _block_mask(p: Problem) -> BlockMask:
    return block_mask(p.mask, p.rows, p.keys, p.device, p.items_per_mask)


def _engine_for(engine: TritonEngine, p: Problem) -> Callable[[Mask | None], TritonEngine]:
    """The same engine for other masks; nothing keeps the tensors of a mask alive."""
    spec = replace(engine.spec, mask=None, read=None)
    engine = replace(engine, spec=spec, block_mask=BlockMask(spec.n, spec.m))
    n, m, device, items = p.rows, p.keys, p.device, p.items_per_mask

    def made(mask: Mask | None) -> TritonEngine:
        mine = object.__new__(Spec)
        mine.__dict__.update(spec.__dict__, mask=mask, read=None if mask is None else Versions(mask.sources))
        twin = object.__new__(TritonEngine)
        twin.__dict__.update(engine.__dict__, spec=mine, block_mask=block_mask(mask, n, m, device, items))
        return twin

    return made


def _traced(p: Problem) -> Rows:
    """Under torch.compile: the score in the graph, and the passes as operators, which build the block mask."""
    from ..kernels import custom_ops

    p = custom_ops.encodable(p)
    engine, inputs = _engine(p, None)
    unread = replace(engine.spec, read=None)
    return custom_ops.attend(replace(engine, spec=unread, block_mask=None), inputs)  # type: ignore[arg-type]


def _engine(p: Problem, mask: BlockMask | None, shortcuts: Shortcuts | None = None) -> tuple[TritonEngine, Inputs]:
    """Fold the score, and split the problem into an engine and its inputs."""
    seed: int | Tensor = 0
    if p.dropout:
        seed = drawn_in_graph(p.device) if torch.compiler.is_compiling() else draw_seed(p.who)
    query, key, scale, vector = _folded(p)
    if INTERPRETED and p.dtype == torch.bfloat16:  # Triton's interpreter cannot multiply it
        query, key = query.float(), key.float()
    kind, offset, table = BIAS_NONE, 0, None
    if isinstance(p.bias, Tensor):
        kind, table = BIAS_TENSOR, p.bias
    elif isinstance(p.bias, Alibi | Relative):
        kind = BIAS_ALIBI if isinstance(p.bias, Alibi) else BIAS_RELATIVE
        offset = p.keys - p.rows if p.bias.offset is None else p.bias.offset
        table = p.bias.tensors[0].float()
        table = table[None] if kind == BIAS_RELATIVE and table.dim() == 1 else table
    spec = Spec.of(p, seed)
    if vector is not None:
        spec = replace(spec, pair=Additive.pair, cost=query.shape[-1], paired=1)
    number = 1.0 if isinstance(scale, Tensor) else float(scale)
    mask = BlockMask(p.rows, p.keys) if mask is None else mask
    engine = TritonEngine(spec, mask, kind, offset, number, p.observed, shortcuts)
    scales = scale.float().reshape(-1) if isinstance(scale, Tensor) else None
    sink = None if p.sink is None else p.sink.float()
    # A folded score leaves float32 queries and keys; then the values are multiplied in float32 too.
    value = p.value.to(query.dtype) if vector is None or INTERPRETED else p.value
    return engine, Inputs(query, key, value, table, scales, sink, vector)


def _folded(p: Problem) -> tuple[Tensor, Tensor, float | Tensor, Tensor | None]:
    """Queries and keys with the score folded in, the scale of their products, and the additive score's vector."""
    query, key, scale = p.query, p.key, p.scale
    if p.score is None:
        return query, key, scale, None
    factor = p.score.factor(query.new_empty(0, query.shape[-1], dtype=torch.float32))
    if factor is not None:
        return query, key, factor, None
    # A hidden NaN must not pass through the score, whose derivative would spread it.
    if torch.compiler.is_compiling():
        from ..kernels import custom_ops

        query, key = custom_ops.zero_unseen(p)[:2]
    else:
        bias = group_bias(p.bias if isinstance(p.bias, Tensor) else None, key.shape[1])
        query, key, _ = zero_unseen(Spec.of(p), query, key, p.value, bias)
    query, key, shared = p.score.prepare(query.float(), key.float())
    return query, key, 1.0, shared[0] if isinstance(p.score, Additive) else None


def _late_pass(p: Problem, rows: Rows) -> tuple[KernelArgs, Tensor, Tensor]:
    """The problem without its graph, with the row max and the log of the row sum, for a pass after the forward."""
    args = _plain_args(p)
    if args is None:
        with torch.no_grad():
            engine, inputs = _engine(p._replace(dropout=0.0), _block_mask(p))
            args = engine.kernel_args(inputs)
    row_max, log_row_sum = (_of_rows(t, args.rows) for t in (rows.max_logit, rows.log_row_sum))
    return args, row_max, log_row_sum


def _plain_args(p: Problem) -> KernelArgs | None:
    """What a late pass over products times a positive number takes; a sink is in the statistics."""
    from ..kernels.arguments import KernelArgs

    if INTERPRETED or p.score is not None or p.bias is not None or isinstance(p.scale, Tensor) or p.scale < 0:
        return None
    return KernelArgs(p.query, p.key, p.value, _block_mask(p), float(p.scale), softcap=p.softcap)


def _of_rows(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A statistic of rows (L, H, N) as late passes read it: contiguous, at an address that remembered launches take."""
    x = x.detach() if x.requires_grad else x
    x = x if x.shape == shape and x.is_contiguous() else x.reshape(shape).contiguous()
    return x.clone() if x.data_ptr() & 15 else x

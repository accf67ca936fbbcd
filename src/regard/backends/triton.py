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
from ..chunked.divergence import divergence_in_strips
from ..chunked.stacked_survey import StackedSurvey
from ..chunked.token_repeats import TokenLabels, TokenRepeats
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
from ..core.options import BothLse, Heads, Kind
from ..core.problem import Problem
from ..core.rows import Rows, StackedRows
from ..core.spec import Spec
from ..core.versions import Versions
from ..errors import MaskError
from ..kernels.arguments import BIAS_ALIBI, BIAS_NONE, BIAS_RELATIVE, BIAS_TENSOR
from ..kernels.attend_by_lists import (
    attend_by_lists,
    has_lists,
    received_by_lists,
    refusals_of_lists,
    top_by_lists,
)
from ..kernels.block_lists import NONE
from ..kernels.block_mask import BlockMask, block_mask, most_bytes, on_device, traceable
from ..kernels.divergence import FusedDivergence, FusedSide, PairTensors, fused_divergence, log2_lse
from ..kernels.engine import Inputs, TritonEngine
from ..kernels.known_form import form_of
from ..kernels.launch_cache import Shortcuts
from ..kernels.pointwise import flat_tables
from ..kernels.pointwise_source import unsupported
from ..kernels.portable.configs import notes
from ..masks import Mask
from ..masks.chosen import lists_keys
from ..masks.dense import Dense
from ..scores.additive import Additive
from ..scores.pointwise import Pointwise
from .base import Backend, Prepared, PreparedSurvey

if TYPE_CHECKING:
    from ..kernels.arguments import KernelArgs

__all__ = ["Triton"]

_INSTALLED = find_spec("triton") is not None
_WIDEST = 576, 512  # dims of keys and of values that kernels take …
_WIDEST_WHOLE = 256  # … with a function of the scores, or an additive one, whose tiles hold sums of all hidden units
_MOST_BITS = 2**32  # bytes that the bits of a mask may take
_COARSE = 64  # pairs per cell from which the map has a kernel
_MOST = 128  # keys per row that the kernel for `top` keeps
_MOST_SURVEYS = 8  # sizes of maps for which the surveys of a remembered call are prepared


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
        if has_lists(p):
            return reasons + _about_sizes(p, listed=True) + _about_parts(p) + refusals_of_lists(p)
        return reasons + _about_sizes(p) + _about_parts(p)

    def run(self, p: Problem) -> Rows:
        if has_lists(p):
            return attend_by_lists(p)
        rows = _traced(p) if torch.compiler.is_compiling() else _eager(p)
        output = p.shaped(rows.output.to(p.dtype))
        return Rows(output, *map(p.shaped, rows[1:])) if p.observed else Rows(output)

    def prepare(self, p: Problem) -> Prepared | None:
        if INTERPRETED or isinstance(p.scale, Tensor) or isinstance(p.bias, Tensor) or p.dropout or lists_keys(p.mask):
            return None
        form = form_of(p)
        if p.score is not None and form is None:
            return None
        bias = p.bias if form is None or form.bias is None else form.bias
        shortcuts = Shortcuts() if bias is None else None  # which know no bias
        records = may_need_grad(*p.tensors)
        engine, _ = _engine(p, _block_mask(p), shortcuts)
        constant, observed, heads = p.mask is None or p.mask.constant, p.observed, p.query.shape[1]
        engine_for = _engine_for(engine, p)
        fixed = engine_for(p.mask, None) if constant and bias is None else None
        del engine, form, bias  # which hold tensors

        def run(
            query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, sink: Tensor | None, bias: Bias | None
        ) -> Any:
            mine = engine_for(mask, bias) if fixed is None else fixed
            sunk = None if sink is None else sink.float().expand(heads)
            if not records and shortcuts is not None and (short := shortcuts.forward) is not None:
                found = short(query, key, value, sunk, mine.block_mask, False)
                if found is not None:
                    return StackedRows(*found) if observed else found[0]
            table = None if bias is None else _table(bias)
            x = query, key, value, table, None, sunk, None, None
            rows = attend_eagerly(mine, x) if records else mine.forward(x)  # there is no transform and no tangent
            return rows if observed else rows.output

        return run

    def prepare_survey(self, p: Problem) -> PreparedSurvey | None:
        from ..kernels.survey import survey_shortcut

        shortcuts, (n, m, device, items) = Shortcuts(), (p.rows, p.keys, p.device, p.items_per_mask)

        def run(p: Problem, rows: StackedRows, height: int, width: int) -> StackedSurvey | None:
            short = shortcuts.surveys.get((height, width))
            if short is None:
                args = _plain_args(p)
                short = None if args is None else survey_shortcut(args, height, width)
                if short is None:  # after the first survey there is one
                    return None
                if len(shortcuts.surveys) >= _MOST_SURVEYS:
                    shortcuts.surveys.clear()
                shortcuts.surveys[height, width] = short
            found: StackedSurvey | None = short(
                p.query, p.key, rows.statistics, block_mask(p.mask, n, m, device, items)
            )
            return found

        return run

    def detail(self, p: Problem) -> str:
        form = form_of(p)
        known = () if form is None else (f"the function of the scores is {form}",)
        return "; ".join((self.about, *known, *notes(p.device)))

    def received(self, p: Problem, rows: Rows) -> Tensor:
        from ..kernels.launch import received

        if has_lists(p):
            return received_by_lists(p, rows)
        return p.shaped(received(*_late_pass(p, rows)))

    def pooled(self, p: Problem, rows: Rows, height: int, width: int) -> Tensor:
        from ..kernels.launch import pooled

        if p.rows * p.keys < _COARSE * height * width or has_lists(p):
            return statistics.pooled(p, rows, height, width, self.tile_sizes)
        w, row_max, log_row_sum = _late_pass(p, rows)
        return p.shaped(pooled(w, row_max, log_row_sum, height, width))

    def top(self, p: Problem, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
        from ..kernels.launch import top

        if k > _MOST:
            return statistics.top(p, rows, k, self.tile_sizes)
        if has_lists(p):
            return top_by_lists(p, rows, k)
        w, row_max, log_row_sum = _late_pass(p, rows)
        logits, index = top(w, k)
        weights = (logits - row_max[..., None] - log_row_sum[..., None]).exp().masked_fill(index < 0, 0.0)
        return p.shaped(weights.to(p.dtype)), p.shaped(index)

    def moments(self, p: Problem, rows: Rows) -> tuple[Tensor, Tensor]:
        from ..kernels.launch import moments

        if has_lists(p):
            return super().moments(p, rows)
        health, distance = moments(*_late_pass(p, rows))
        return p.shaped(health), p.shaped(distance)

    def survey(self, p: Problem, rows: Rows, height: int, width: int) -> statistics.Survey:
        from ..kernels.survey import survey

        if has_lists(p):
            return super().survey(p, rows, height, width)
        w, row_max, log_row_sum = _late_pass(p, rows)
        found = survey(w, row_max, log_row_sum, _of_rows(rows.entropy, w.rows), height, width)
        return found if len(p.lead) == 2 else statistics.Survey(*(p.shaped(x) for x in found[:-1] if x is not None))

    def survey_with_repeats(
        self, p: Problem, rows: Rows, tokens: TokenLabels
    ) -> tuple[statistics.Survey, TokenRepeats]:
        from ..kernels.token_repeats import token_repeats

        if has_lists(p):
            return super().survey_with_repeats(p, rows, tokens)
        found = token_repeats(*_late_pass(p, rows), tokens)
        return self.survey(p, rows, 1, 1), TokenRepeats(*(p.shaped(x) for x in found))

    @without_autocast
    def divergence(
        self, first: Problem, second: Problem, kind: Kind, heads: Heads, epsilon: float | None, lse: BothLse
    ) -> Tensor | None:
        a, b = (p._replace(value=p.key) for p in (first, second))
        if self.refuses(a) or self.refuses(b):
            return None
        return _fused_divergence(a, b, kind, heads, epsilon, lse)

    def visible(self, p: Problem) -> Tensor:
        if p.bias is not None or isinstance(p.score, Pointwise) or has_lists(p):
            return super().visible(p)
        shape = (p.query.shape[0], p.query.shape[1], p.rows)
        if p.mask is None:
            return p.shaped(torch.full(shape, p.keys, device=p.device))
        count = p.mask.visible(torch.arange(p.rows, device=p.device), p.rows, p.keys)
        if count.dim() == 3 and count.shape[0] > 1:
            count = count.repeat_interleave(shape[0] // count.shape[0], 0)
        return p.shaped(count.expand(shape).contiguous())


def _fused_divergence(
    first: Problem, second: Problem, kind: Kind, heads: Heads, epsilon: float | None, lse: BothLse
) -> Tensor | None:
    """The divergence by kernels, (B, H, N) or (B, 1, N); None where one of the sides has no kernel."""
    p, r = (second, first) if kind == "reverse" else (first, second)
    if forward_mode_is_active() or transforms_are_active() or not _comparable(p, r, heads):
        return None
    same = p.mask is r.mask or (
        p.mask is not None and r.mask is not None and p.mask.constant and r.mask.constant and p.mask == r.mask
    )
    count = None if epsilon is None else _outcomes(p, r, same)
    if epsilon is not None and count is None:
        return None
    lse_p, lse_r = lse[::-1] if kind == "reverse" else lse
    (a, q_p, k_p), (b, q_r, k_r) = _fused_side(p, lse_p), _fused_side(r, lse_r)
    listed = same or a.block_mask.kind == b.block_mask.kind == NONE
    formula = _formula_of(p, r, a.scale, b.scale, "js" if kind == "js" else "kl", heads, epsilon)
    plan = FusedDivergence(a, b, kind == "js", heads == "mean", listed, epsilon, count, formula)
    sink_p, sink_r = (None if x.sink is None else x.sink.float() for x in (p, r))
    return fused_divergence(plan, PairTensors(q_p, k_p, sink_p, q_r, k_r, sink_r))


def _formula_of(
    p: Problem, r: Problem, scale_p: float, scale_r: float, kind: Kind, heads: Heads, epsilon: float | None
) -> Callable[[PairTensors], Tensor]:
    """The divergence in strips of plain torch, as a function of the tensors that kernels take."""
    none = p.query.new_empty(0)  # the function must not keep the tensors of a call
    bare_p = p._replace(query=none, key=none, value=none, score=None, scale=scale_p, sink=None, dropout=0.0)
    bare_r = r._replace(query=none, key=none, value=none, score=None, scale=scale_r, sink=None, dropout=0.0)

    def formula(x: PairTensors) -> Tensor:
        wide = torch.float32 if x.q_p.is_cuda else torch.float64
        q_p, k_p, q_r, k_r = (t.to(wide) for t in (x.q_p, x.k_p, x.q_r, x.k_r))
        first = bare_p._replace(query=q_p, key=k_p, value=k_p[..., :0], sink=x.sink_p)
        second = bare_r._replace(query=q_r, key=k_r, value=k_r[..., :0], sink=x.sink_r)
        return divergence_in_strips(first, second, kind, heads, epsilon).float()

    return formula


def _comparable(p: Problem, r: Problem, heads: Heads) -> bool:
    """Whether there is a kernel for this divergence, if there is one for each of its sides."""
    if heads == "pairs" or any(x.bias is not None or has_lists(x) for x in (p, r)):
        return False
    if any(isinstance(x.score, Additive | Pointwise) for x in (p, r)):
        return False
    if max(p.query.shape[-1], r.query.shape[-1]) > _WIDEST_WHOLE:
        return False
    by_head = any(x.mask is not None and x.mask.lead[1] > 1 for x in (p, r))
    return heads is None or not (by_head or p.sink is not None or r.sink is not None)


def _outcomes(p: Problem, r: Problem, same: bool) -> Tensor | None:
    """How many keys, and sinks, one of the sides sees in each row, (B, H, N) or less; None if masks have no union."""
    sunk = p.sink is not None or r.sink is not None
    if p.mask is None or r.mask is None:
        return torch.full((1, 1, 1), p.keys + sunk, device=p.device)
    if p.items_per_mask != r.items_per_mask:
        return None
    try:
        mask = p.mask if same else p.mask | r.mask
    except MaskError:
        return None
    mask = mask if all(x.device == p.device for x in mask.tensors) else mask.to(p.device)
    count = mask.visible(torch.arange(p.rows, device=p.device), p.rows, p.keys)
    if count.dim() == 3 and count.shape[0] > 1:
        count = count.repeat_interleave(p.query.shape[0] // count.shape[0], 0)
    return (count + sunk).clamp(min=1)


def _fused_side(p: Problem, lse: Tensor | None) -> tuple[FusedSide, Tensor, Tensor]:
    """A side with a positive scale, and its queries and keys with the score folded in."""
    query, key, scale, _ = _folded(p)
    if isinstance(scale, Tensor):
        query, key, scale = query.float() * scale.float().reshape(-1, 1, 1), key.float(), 1.0
    elif scale <= 0:
        query, scale = (-query, -scale) if scale else (query * scale, 1.0)
    if INTERPRETED and query.dtype == torch.bfloat16:  # Triton's interpreter cannot multiply it
        query, key = query.float(), key.float()
    return FusedSide(scale, p.softcap, _block_mask(p), log2_lse(lse, query)), query, key


def _about_sizes(p: Problem, listed: bool = False) -> list[str]:
    reasons = []
    width = p.query.shape[-1]
    base = p.score.base if isinstance(p.score, Pointwise) else p.score
    if isinstance(base, Additive):
        width = base.hidden
    elif p.score is not None:
        width = p.score.width(width, p.key.shape[-1])
    changed = isinstance(p.score, Pointwise)
    most = (_WIDEST_WHOLE, _WIDEST_WHOLE) if listed or changed or isinstance(base, Additive) else _WIDEST
    for what, dim, limit in zip(("keys", "values"), (width, p.value.shape[-1]), most, strict=True):
        if dim > limit:
            why = " with a function of the scores" if changed else ""
            reasons.append(f"the dim of {what} is {dim}; its tiles hold up to {limit}{why}")
    bits = 0 if p.mask is None or listed or isinstance(p.mask, Dense) else most_bytes(p.mask, p.rows, p.keys)
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
    base = p.score.base if isinstance(p.score, Pointwise) else p.score
    if base is not None and base.pairwise and not isinstance(base, Additive):
        reasons.append(f"it has no kernel for the score {type(base).__name__}")
    if isinstance(p.score, Pointwise) and not torch.compiler.is_compiling():
        names = unsupported(p.score.traced(torch.float32))
        reasons += [f"its kernels have no {name}, which the function of the score calls" for name in names]
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


def _engine_for(engine: TritonEngine, p: Problem) -> Callable[[Mask | None, Bias | None], TritonEngine]:
    """The same engine for other masks and biases; nothing keeps the tensors of these alive."""
    spec = replace(engine.spec, mask=None, read=None, bias=None)
    engine = replace(engine, spec=spec, block_mask=BlockMask(spec.n, spec.m))
    n, m, device, items = p.rows, p.keys, p.device, p.items_per_mask

    def made(mask: Mask | None, bias: Bias | None) -> TritonEngine:
        mask = None if mask is None else on_device(mask, device)
        read = None if mask is None else Versions(mask.sources)
        mine = object.__new__(Spec)
        mine.__dict__.update(spec.__dict__, mask=mask, bias=bias, read=read)
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
    form = form_of(p)
    if form is not None and isinstance(p.score, Pointwise):
        p = p._replace(score=p.score.base, softcap=form.softcap, bias=p.bias if form.bias is None else form.bias)
    seed: int | Tensor = 0
    if p.dropout:
        seed = drawn_in_graph(p.device) if torch.compiler.is_compiling() else draw_seed(p.who)
    query, key, scale, vector = _folded(p)
    bound, tables = p.score.read(torch.float32) if isinstance(p.score, Pointwise) else (None, ())
    if INTERPRETED and p.dtype == torch.bfloat16:  # Triton's interpreter cannot multiply it
        query, key = query.float(), key.float()
    kind, offset, table = BIAS_NONE, 0, None
    if isinstance(p.bias, Tensor):
        kind, table = BIAS_TENSOR, p.bias
    elif isinstance(p.bias, Alibi | Relative):
        kind = BIAS_ALIBI if isinstance(p.bias, Alibi) else BIAS_RELATIVE
        offset = p.keys - p.rows if p.bias.offset is None else p.bias.offset
        table = _table(p.bias)
    spec = Spec.of(p, seed)
    if vector is not None:
        spec = replace(spec, pair=Additive.pair, cost=query.shape[-1], paired=1)
    if bound is not None:
        spec = spec.with_function(bound, spec.paired + bound.differentiable)
    number = 1.0 if isinstance(scale, Tensor) else float(scale)
    mask = BlockMask(p.rows, p.keys) if mask is None else mask
    engine = TritonEngine(spec, mask, kind, offset, number, p.observed, shortcuts)
    scales = scale.float().reshape(-1) if isinstance(scale, Tensor) else None
    sink = None if p.sink is None else p.sink.float()
    # A folded score leaves float32 queries and keys; then the values are multiplied in float32 too.
    value = p.value.to(query.dtype) if vector is None or INTERPRETED else p.value
    return engine, Inputs(query, key, value, table, scales, sink, vector, flat_tables(tables))


def _table(bias: Bias) -> Tensor:
    """The slopes or the table of a structured bias, as kernels read them."""
    table = bias.tensors[0].float()
    return table[None] if isinstance(bias, Relative) and table.dim() == 1 else table


def _folded(p: Problem) -> tuple[Tensor, Tensor, float | Tensor, Tensor | None]:
    """Queries and keys with the score folded in, the scale of their products, and the additive score's vector."""
    query, key, scale = p.query, p.key, p.scale
    if p.score is None:
        return query, key, scale, None
    score = p.score.base if isinstance(p.score, Pointwise) else p.score
    factor = score.factor(query.new_empty(0, query.shape[-1], dtype=torch.float32))
    if factor is not None:
        return query, key, factor, None
    # A hidden NaN must not pass through the score, whose derivative would spread it.
    if torch.compiler.is_compiling():
        from ..kernels import custom_ops

        query, key = custom_ops.zero_unseen(p)[:2]
    else:
        bias = group_bias(p.bias if isinstance(p.bias, Tensor) else None, key.shape[1])
        query, key, _ = zero_unseen(Spec.of(p), query, key, p.value, bias)
    query, key, shared = score.prepare(query.float(), key.float())
    return query, key, 1.0, shared[0] if isinstance(score, Additive) else None


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

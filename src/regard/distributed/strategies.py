"""From a call to this rank's rows: by ring attention, or by exchanging sequence for heads."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..autograd.engine import MaybeTensors
from ..backends import Backend, Chunked, Triton
from ..biases import Bias, Relative
from ..compat.torch import no_autocast
from ..core.folded import unfold
from ..core.problem import Problem
from ..core.rows import Rows
from ..errors import ArgumentError, BackendError
from ..kernels.engine import Inputs
from .blocks import ChunkedBlockAttention
from .call import GroupCall, kernel_refusals
from .collectives import replicate
from .layout import tokens_per_rank
from .local_inputs import ReplicatedInputs, fold_scale, logit_scale, zero_unseen_everywhere
from .ring import RingAttention, ring_attention
from .traffic import TokenBytes, heads_bytes, ring_bytes
from .triton_blocks import TritonBlockAttention, bias_kind
from .ulysses import attend_by_heads, heads_refusal

__all__ = ["attend", "chunked_blocks"]


def attend(call: GroupCall) -> tuple[Problem, Rows]:
    """Attend; also return this rank's part of the problem, with what no rank may see zeroed."""
    with no_autocast(call.local.device):
        attend_by = attend_by_heads if choose_strategy(call) == "heads" else attend_by_ring
        p = _local_problem(call)
        return p, attend_by(call, p, replicated_inputs(call))


def choose_strategy(call: GroupCall) -> str:
    """The strategy of a call: "heads" if the heads divide evenly and the ring would send more, otherwise "ring"."""
    if call.strategy == "ring":
        return "ring"
    reason = heads_refusal(call)
    if call.strategy == "heads":
        if reason is not None:
            raise ArgumentError(f"{call.local.who}: strategy='heads' is not possible: {reason}. strategy='ring' is.")
        return "heads"
    if reason is not None or isinstance(call.bias, Tensor) or call.local_mask_rows is not None:
        return "ring"
    if not _ring_accepts_backend(call):
        return "heads"
    p, plan = call.local, call.plan
    (batch, heads, _, _), (_, kv_heads, _, dim) = p.query.shape, p.key.shape
    per_token = TokenBytes.of(batch, heads, kv_heads, dim, p.value.shape[3], p.dtype, p.observed)
    by_heads = heads_bytes(tokens_per_rank(plan.rows), tokens_per_rank(plan.keys), per_token)
    return "heads" if max(by_heads) < max(ring_bytes(plan, per_token)) else "ring"


def _ring_accepts_backend(call: GroupCall) -> bool:
    return call.backend in ("auto", "chunked", "triton") or isinstance(call.backend, Chunked | Triton)


def replicated_inputs(call: GroupCall) -> ReplicatedInputs:
    """The inputs that are the same on all ranks; their gradients are summed over the ranks."""
    p = call.local
    bias = call.bias if isinstance(call.bias, Bias) else None
    named = {} if p.score is None else dict(p.score.named_parameters())
    given = [t for t in (p.scale, p.sink) if isinstance(t, Tensor)]
    tables = () if bias is None else bias.tensors
    replicated = iter(replicate(call.ranks, [*given, *tables, *named.values()]))
    return ReplicatedInputs(
        scale=next(replicated) if isinstance(p.scale, Tensor) else p.scale,
        sink=None if p.sink is None else next(replicated),
        tables=tuple(next(replicated) for _ in tables),
        parameters={name: next(replicated) for name in named},
        centre=call.centre,
    )


def _local_problem(call: GroupCall) -> Problem:
    """This rank's part of the problem; if a NaN or inf could leak, what no rank may see is zeroed."""
    if call.finite:
        return call.local
    return zero_unseen_everywhere(call.local, call.ranks, call.plan, call.spec, call.local_mask_rows, call.grouped_bias)


def attend_by_ring(call: GroupCall, p: Problem, replicated: ReplicatedInputs) -> Rows:
    """Let keys and values go round."""
    if not _ring_accepts_backend(call):
        name = call.backend.name if isinstance(call.backend, Backend) else call.backend
        raise BackendError(
            f"{p.who}: the ring computes blocks with 'chunked' or 'triton'. Got backend={name!r}; 'auto' takes the one "
            f"that fits, and strategy='heads' accepts every backend."
        )
    by_kernels = _blocks_by_kernels(call)
    blocks, x = triton_blocks(call, p, replicated) if by_kernels else chunked_blocks(call, p, replicated)
    rows = ring_attention(RingAttention(call.ranks, call.plan, blocks), x)
    if by_kernels:
        rows = Rows(*(t.unflatten(1, (p.key.shape[1], call.groups)) for t in rows))
    return unfold(p._replace(sink=replicated.sink), rows)


def _blocks_by_kernels(call: GroupCall) -> bool:
    """Whether our kernels compute the blocks; raise if they are requested and refuse."""
    reasons = kernel_refusals(call.local, call.bias, call.backend)
    if reasons and (call.backend == "triton" or isinstance(call.backend, Triton)):
        raise BackendError(
            f"{call.local.who}: the backend 'triton' refuses: {'; '.join(reasons)}. backend='auto' takes one that "
            f"accepts."
        )
    return not reasons


def triton_blocks(
    call: GroupCall, p: Problem, replicated: ReplicatedInputs
) -> tuple[TritonBlockAttention, MaybeTensors]:
    """The blocks of a call as our kernels compute them, and their inputs."""
    scale, spec, vector = logit_scale(p, replicated), call.spec, None
    query, key = p.query, p.key
    if scale is None:
        query, key, shared = fold_scale(p, replicated)
        if p.score is not None and p.score.pairwise:
            (vector,) = shared
            spec = replace(spec, pair=p.score.pair, cost=query.shape[-1], paired=1)
    table: Tensor | None = call.bias if isinstance(call.bias, Tensor) else None
    if replicated.tables:
        table = replicated.tables[0].float()
        table = table[None] if isinstance(call.bias, Relative) and table.dim() == 1 else table
    per_head = scale.float().reshape(-1) if isinstance(scale, Tensor) else None
    number = float(scale) if isinstance(scale, float | int) else 1.0
    blocks = TritonBlockAttention(spec, call.local_mask_rows, bias_kind(call.bias), number, p.observed, p.device)
    return blocks, Inputs(query, key, p.value, table, per_head, None, vector)


def chunked_blocks(
    call: GroupCall, p: Problem, replicated: ReplicatedInputs | None = None
) -> tuple[ChunkedBlockAttention, MaybeTensors]:
    """The blocks of a call in plain torch, and their inputs."""
    replicated = replicated_inputs(call) if replicated is None else replicated
    query, key, shared = fold_scale(p, replicated)
    spec = call.spec
    if p.score is not None and p.score.pairwise:
        spec = replace(spec, pair=p.score.pair, cost=p.score.cost, paired=len(shared))
    shared += tuple(t.to(p.exact_dtype) for t in replicated.tables)
    heads = p.key.shape[1]
    x = (query.unflatten(1, (heads, call.groups)), key, p.value, call.grouped_bias, *shared)
    return ChunkedBlockAttention(spec, call.local_mask_rows, call.tile_sizes, p.observed), x

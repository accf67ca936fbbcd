"""From a call that all ranks agree on to this rank's rows: by the ring, or by an exchange of sequence for heads."""

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
from .blocks import Strips
from .call import Asked, against_kernels
from .collectives import replicated
from .layout import counted
from .local_inputs import Lent, factor, folded, without_unseen
from .ring import Ring, attended
from .traffic import Widths, heads_bytes, ring_bytes
from .triton_blocks import Tiles, bias_kind
from .ulysses import by_heads, cannot

__all__ = ["attend", "strips_of"]


def attend(asked: Asked) -> tuple[Problem, Rows]:
    """Compute what is asked; and give this rank's part of the problem without what nobody may see."""
    with no_autocast(asked.mine.device):
        way = by_heads if strategy(asked) == "heads" else by_ring
        p = seen_only(asked)
        return p, way(asked, p, lend(asked))


def strategy(asked: Asked) -> str:
    """Which way is taken: that of the heads if they divide and the ring would send more, else the ring."""
    if asked.strategy == "ring":
        return "ring"
    reason = cannot(asked)
    if asked.strategy == "heads":
        if reason is not None:
            raise ArgumentError(f"{asked.mine.who}: strategy='heads' does not go here: {reason}. strategy='ring' does.")
        return "heads"
    if reason is not None or isinstance(asked.bias, Tensor) or asked.mask_rows is not None:
        return "ring"
    if not _ringable(asked):
        return "heads"
    p = asked.mine
    (batch, heads, _, _), (_, shared, _, dim), found = p.query.shape, p.key.shape, asked.routes
    w = Widths.of(batch, heads, shared, dim, p.value.shape[3], p.dtype, p.observed)
    swap, ring = heads_bytes(counted(found.rows), counted(found.keys), w), ring_bytes(found, w)
    return "heads" if max(swap) < max(ring) else "ring"


def _ringable(asked: Asked) -> bool:
    return asked.backend in ("auto", "chunked", "triton") or isinstance(asked.backend, Chunked | Triton)


def lend(asked: Asked) -> Lent:
    """What all ranks have alike: its gradients are added up over them."""
    p = asked.mine
    bias = asked.bias if isinstance(asked.bias, Bias) else None
    named = {} if p.score is None else dict(p.score.named_parameters())
    given = [t for t in (p.scale, p.sink) if isinstance(t, Tensor)]
    tables = () if bias is None else bias.tensors
    back = iter(replicated(asked.ranks, [*given, *tables, *named.values()]))
    return Lent(
        next(back) if isinstance(p.scale, Tensor) else p.scale,
        None if p.sink is None else next(back),
        tuple(next(back) for _ in tables),
        {name: next(back) for name in named},
    )


def seen_only(asked: Asked) -> Problem:
    """This rank's part of the problem; if a NaN or inf is about, without what nobody may see."""
    if asked.finite:
        return asked.mine
    return without_unseen(asked.mine, asked.ranks, asked.routes, asked.spec, asked.mask_rows, asked.table)


def by_ring(asked: Asked, p: Problem, lent: Lent) -> Rows:
    """Let keys and values go round."""
    if not _ringable(asked):
        name = asked.backend.name if isinstance(asked.backend, Backend) else asked.backend
        raise BackendError(
            f"{p.who}: the ring computes blocks by 'chunked' or 'triton'. Got backend={name!r}; 'auto' takes what "
            f"there is, and strategy='heads' takes every backend."
        )
    blocks, x = tiles_of(asked, p, lent) if _by_kernels(asked) else strips_of(asked, p, lent)
    rows = attended(Ring(asked.ranks, asked.routes, blocks), x)
    if isinstance(blocks, Tiles):
        rows = Rows(*(t.unflatten(1, (p.key.shape[1], asked.groups)) for t in rows))
    return unfold(p._replace(sink=lent.sink), rows)


def _by_kernels(asked: Asked) -> bool:
    """Whether blocks are computed by our kernels; raise if they are asked for and refuse."""
    reasons = against_kernels(asked.mine, asked.bias, asked.backend)
    if reasons and (asked.backend == "triton" or isinstance(asked.backend, Triton)):
        raise BackendError(
            f"{asked.mine.who}: the backend 'triton' refuses: {'; '.join(reasons)}. backend='auto' takes one that "
            f"accepts."
        )
    return not reasons


def tiles_of(asked: Asked, p: Problem, lent: Lent) -> tuple[Tiles, MaybeTensors]:
    """How our kernels compute the blocks of a call, and its inputs."""
    times, spec, vector = factor(p, lent), asked.spec, None
    query, key = p.query, p.key
    if times is None:
        query, key, shared = folded(p, lent)
        if p.score is not None and p.score.pairwise:
            (vector,) = shared
            spec = replace(spec, pair=p.score.pair, cost=query.shape[-1], paired=1)
    table: Tensor | None = asked.bias if isinstance(asked.bias, Tensor) else None
    if lent.tables:
        table = lent.tables[0].float()
        table = table[None] if isinstance(asked.bias, Relative) and table.dim() == 1 else table
    scales = times.float().reshape(-1) if isinstance(times, Tensor) else None
    number = float(times) if isinstance(times, float | int) else 1.0
    blocks = Tiles(spec, asked.mask_rows, bias_kind(asked.bias), number, p.observed, p.device)
    return blocks, Inputs(query, key, p.value, table, scales, None, vector)


def strips_of(asked: Asked, p: Problem, lent: Lent | None = None) -> tuple[Strips, MaybeTensors]:
    """How strips of plain torch compute the blocks of a call, and its inputs."""
    lent = lend(asked) if lent is None else lent
    query, key, shared = folded(p, lent)
    spec = asked.spec
    if p.score is not None and p.score.pairwise:
        spec = replace(spec, pair=p.score.pair, cost=p.score.cost, paired=len(shared))
    shared += tuple(t.to(p.exact_dtype) for t in lent.tables)
    heads = p.key.shape[1]
    x = (query.unflatten(1, (heads, asked.groups)), key, p.value, asked.table, *shared)
    return Strips(spec, asked.mask_rows, asked.tile_sizes, p.observed), x

"""Ring attention: keys and values go round, and every rank attends to those that its rows may see.

The next ranges are in transit while the current ones are computed. In the backward pass keys and values go round once
more; what a rank computes for the keys of another is sent to their owner, which adds it up in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import FIELDS, WITH_GRAD, MaybeTensors, Needs, required
from ..compat.torch import call_function, without_autocast
from ..core.rows import Rows
from ..errors import ArgumentError
from ..softmax import lowest
from .blocks import Block, BlockAttention
from .layout import TokenRange
from .ranks import Ranks, Receive, Send, Transfer
from .ring_plan import RingPlan

__all__ = ["ReduceToOwner", "RingAttention", "RingStep", "empty_rows", "merge_partials", "ring_attention", "ring_steps"]


class RingStep(NamedTuple):
    """The key ranges that a rank attends to in one step, with their parts of the tensors that go round."""

    step: int
    ranges: list[tuple[TokenRange, list[Tensor]]]


def ring_steps(ranks: Ranks, plan: RingPlan, tensors: Sequence[Tensor]) -> Iterator[RingStep]:
    """Let tensors (…, keys of this rank, dim) go round; yield each step's ranges while the next are in transit."""
    rank = ranks.rank
    own = {keys: [t.narrow(-2, keys.local_start, keys.size) for t in tensors] for keys in plan.keys[rank]}
    here = own
    for step in range(plan.count):
        transfer = _start_step(ranks, plan, step + 1, own, here, tensors) if step + 1 < plan.count else None
        yield RingStep(step, [(keys, here[keys]) for keys in plan.keys_at(rank, step)])
        if transfer is not None:
            parts = iter(transfer.wait())
            here = {keys: [next(parts) for _ in tensors] for _, keys in plan.receives(rank, step + 1)}


def _start_step(
    ranks: Ranks,
    plan: RingPlan,
    step: int,
    own: dict[TokenRange, list[Tensor]],
    here: dict[TokenRange, list[Tensor]],
    tensors: Sequence[Tensor],
) -> Transfer:
    sends = [Send(to, t) for to, keys in plan.sends(ranks.rank, step) for t in (own.get(keys) or here[keys])]
    receives = [
        Receive(source, (*t.shape[:-2], keys.size, t.shape[-1]), t.dtype)
        for source, keys in plan.receives(ranks.rank, step)
        for t in tensors
    ]
    return ranks.send_receive(sends, receives, tensors[0].device)


class ReduceToOwner:
    """Sums (…, keys of this rank, dim) over what all ranks compute for its keys, in the order of the steps."""

    def __init__(self, ranks: Ranks, plan: RingPlan, sums: Sequence[Tensor]) -> None:
        self._ranks, self._plan, self._sums = ranks, plan, sums
        self._transit: tuple[int, Transfer] | None = None

    def send(self, step: int, partials: dict[TokenRange, list[Tensor]]) -> None:
        """Send a step's partial sums to their owners, and add what others sent to this rank one step earlier."""
        ranks, plan = self._ranks, self._plan
        self.finish()
        if step == 0:
            self._add(partials)
            return
        sends = [Send(keys.owner, t) for keys in plan.keys_at(ranks.rank, step) for t in partials[keys]]
        other = (ranks.rank + step) % plan.count
        receives = [
            Receive(other, (*t.shape[:-2], keys.size, t.shape[-1]), t.dtype)
            for keys in plan.keys_at(other, step)
            for t in self._sums
        ]
        self._transit = step, ranks.send_receive(sends, receives, self._sums[0].device)

    def finish(self) -> None:
        """Wait for what is in transit, and add it."""
        if self._transit is None:
            return
        step, transfer = self._transit
        self._transit = None
        parts = iter(transfer.wait())
        other = (self._ranks.rank + step) % self._plan.count
        self._add({keys: [next(parts) for _ in self._sums] for keys in self._plan.keys_at(other, step)})

    def _add(self, partials: dict[TokenRange, list[Tensor]]) -> None:
        for keys, parts in partials.items():
            for total, part in zip(self._sums, parts, strict=True):
                total.narrow(-2, keys.local_start, keys.size).add_(part)


@dataclass(frozen=True, eq=False)
class RingAttention:
    """Attention of this rank's rows to the keys of all ranks, as passes that record no graph."""

    ranks: Ranks
    plan: RingPlan
    blocks: BlockAttention

    @without_autocast
    def forward(self, x: MaybeTensors) -> Rows:
        """The forward pass."""
        merged: dict[TokenRange, Rows] = {}
        for _, ranges in ring_steps(self.ranks, self.plan, [*map(required, x[1:3])]):
            for keys, kv in ranges:
                for block in self._blocks_of(keys):
                    partial = self.blocks.forward(x, block, kv)
                    merged[block.rows] = merge_partials(merged.get(block.rows), partial, self.blocks.observed)
        return _join_rows(x, self.plan.rows[self.ranks.rank], merged)

    @without_autocast
    def vjp(self, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> list[Tensor | None]:
        """The cotangents of the inputs that need one, for the cotangents g of output, lse and entropy."""
        self.blocks.spec.check_unchanged()  # before anything is sent
        dtype = rows.lse.dtype
        grads = [
            None if t is None or not need else torch.zeros(t.shape, dtype=dtype, device=t.device)
            for t, need in zip(x, needs, strict=True)
        ]
        _, need_key, need_value, *_ = needs
        reduction = ReduceToOwner(self.ranks, self.plan, [t for t in grads[1:3] if t is not None])
        for step, ranges in ring_steps(self.ranks, self.plan, [*map(required, x[1:3])]):
            partials: dict[TokenRange, list[Tensor]] = {}
            for keys, kv in ranges:
                partials[keys] = self._vjp_of_keys(x, rows, g, needs, keys, kv, grads)
            if need_key or need_value:
                reduction.send(step, partials)
        reduction.finish()
        return [None if d is None or t is None else d.to(t.dtype) for d, t in zip(grads, x, strict=True)]

    def _vjp_of_keys(
        self,
        x: MaybeTensors,
        rows: Rows,
        g: MaybeTensors,
        needs: Needs,
        keys: TokenRange,
        kv: list[Tensor],
        grads: list[Tensor | None],
    ) -> list[Tensor]:
        """Add the gradients that one range of keys gives to this rank's inputs; return those of the range itself."""
        d_query, _, _, d_bias, *d_shared = grads
        d_kv: list[Tensor] = []
        for block in self._blocks_of(keys):
            block_rows = Rows(*(_rows_of(t, block.rows, at) for at, t in enumerate(rows)))
            block_g = tuple(None if t is None else _rows_of(t, block.rows, at) for at, t in enumerate(g))
            query, key, value, bias, *shared = self.blocks.vjp(x, block_rows, block_g, needs, block, kv)
            if d_query is not None and query is not None:
                d_query.narrow(-2, block.rows.local_start, block.rows.size).add_(query)
            if (d_block_bias := self.blocks.bias(d_bias, block)) is not None and bias is not None:
                d_block_bias.add_(bias)
            for total, part in zip(d_shared, shared, strict=True):
                if total is not None and part is not None:
                    total.add_(part)
            parts = [t.to(rows.lse.dtype) for t in (key, value) if t is not None]
            d_kv = parts if not d_kv else [a.add_(b) for a, b in zip(d_kv, parts, strict=True)]
        return d_kv

    def _blocks_of(self, keys: TokenRange) -> list[Block]:
        """The blocks of this rank's rows with a range of keys."""
        states = self.plan.blocks
        mine = self.plan.rows[self.ranks.rank]
        return [Block(rows, keys, states[rows, keys]) for rows in mine if (rows, keys) in states]


def empty_rows(output: Tensor) -> Rows:
    """Rows that attend to no key, for an output of this shape."""
    zero = output.new_zeros(output.shape[:-1])
    empty = torch.full_like(zero, -torch.inf)
    return Rows(torch.zeros_like(output), lse=empty, entropy=zero, max_logit=empty, log_row_sum=zero)


def merge_partials(a: Rows | None, b: Rows, observed: bool) -> Rows:
    """The rows for the keys of both.

    A set of keys has the mass exp(lse); its share of the total weights its output and its mean logit. With X the logits
    minus the row max, entropy = ln Σ exp X − E[X].
    """
    if a is None:
        return b
    max_logit = torch.maximum(a.max_logit, b.max_logit)
    row_max = max_logit.clamp(min=lowest(max_logit.dtype))
    # Clamped, because the shift is multiplied by a share that may be 0.
    shifts = [(x.max_logit - row_max).clamp_(min=lowest(max_logit.dtype)) for x in (a, b)]
    masses = [(x.max_logit - row_max + x.log_row_sum).exp_() for x in (a, b)]
    total = masses[0] + masses[1]
    empty = total == 0
    total = total.masked_fill_(empty, 1.0)
    shares = [mass.div_(total) for mass in masses]
    log_row_sum = total.log()
    output = a.output.mul(shares[0][..., None]).addcmul_(b.output, shares[1][..., None])
    entropy = a.entropy
    if observed:
        means = [x.log_row_sum - x.entropy + shift for x, shift in zip((a, b), shifts, strict=True)]
        entropy = log_row_sum - (shares[0] * means[0] + shares[1] * means[1])
        entropy = entropy.masked_fill_(empty, 0.0)
    return Rows(output, (row_max + log_row_sum).masked_fill_(empty, -torch.inf), entropy, max_logit, log_row_sum)


def ring_attention(ring: RingAttention, x: MaybeTensors) -> Rows:
    """Attend, and record a graph if an input needs one."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        return Rows(*call_function(_RingFunction, ring, *x))
    return ring.forward(x)


class _RingFunction(torch.autograd.Function):
    """x -> rows, with first derivatives."""

    @staticmethod
    def forward(ctx: Any, ring: RingAttention, *x: Tensor | None) -> Rows:
        rows = ring.forward(x)
        ctx.ring, ctx.needs = ring, ctx.needs_input_grad[1:]  # as of now, when they are the same on all ranks
        ctx.mark_non_differentiable(*rows[WITH_GRAD:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*x, *rows)
        return rows

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, rows = saved[:-FIELDS], Rows(*saved[-FIELDS:])
        with torch.no_grad():
            grads = ctx.ring.vjp(x, rows, g[:WITH_GRAD], ctx.needs)
        if torch.is_grad_enabled():
            grads = list(call_function(_FirstDerivativesOnly, ctx.ring.ranks.who, len(grads), *grads, *x, *g))
        return None, *grads


class _FirstDerivativesOnly(torch.autograd.Function):
    """Return the gradients unchanged, and raise if their own gradients are requested."""

    @staticmethod
    def forward(ctx: Any, who: str, count: int, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.who = who
        return tuple(None if t is None else t.view_as(t) for t in given[:count])

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        raise ArgumentError(
            f"{ctx.who}: it has first derivatives only. For second derivatives gather the sequence on one rank, with "
            f"regard.distributed.gather, and call regard.attention."
        )


def _rows_of(t: Tensor, rows: TokenRange, field: int) -> Tensor:
    """The rows of a range, of a field of Rows: the output, which comes first, or a statistic."""
    return t.narrow(-1 if field else -2, rows.local_start, rows.size)


def _join_rows(x: MaybeTensors, mine: Sequence[TokenRange], merged: dict[TokenRange, Rows]) -> Rows:
    """Join the row ranges of a rank; ranges that attend to no key are empty rows."""
    query, value = required(x[0]), required(x[2])
    blank = [query.new_empty(*query.shape[:-2], rows.size, value.shape[-1]) for rows in mine]
    parts = [merged[rows] if rows in merged else empty_rows(empty) for rows, empty in zip(mine, blank, strict=True)]
    if not parts:
        return empty_rows(query.new_empty(*query.shape[:-1], value.shape[-1]))
    fields = zip(*parts, strict=True)
    return Rows(*(torch.cat(of_field, -1 if field else -2) for field, of_field in enumerate(fields)))

"""The observation of one call over a group: this rank's rows at once, the rest when all ranks ask for it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..autograd.engine import required
from ..chunked.tile_ops import RowStats
from ..core.problem import Problem
from ..core.rows import Rows
from ..core.versions import Versions
from ..errors import ArgumentError, ChangedError
from . import statistics
from .call import GroupCall
from .ranks import RankInfo, Ranks
from .statistics import ObservedCall, RowMoments
from .strategies import chunked_blocks

__all__ = ["GroupObservation"]


class GroupObservation:
    """One call of attention over a group that you can see through.

    `output`, `lse`, `entropy` (differentiable), `max_logit`, `perplexity`, `visible`, `gradient_health` and `distance`
    cover this rank's rows, `received` this rank's keys, `map` all rows and keys; `top` gives positions among all keys.
    `received`, `gradient_health`, `distance`, `map` and `top` send keys round: all ranks must ask for them, in the same
    order.
    """

    output: Tensor
    lse: Tensor
    entropy: Tensor
    max_logit: Tensor

    def __init__(self, call: GroupCall, problem: Problem, rows: Rows) -> None:
        if any(t is None for t in rows):
            raise RuntimeError("an observed call has statistics")
        self.output, self.lse, self.entropy, self.max_logit, self._log_row_sum = rows
        self._call, self._problem = call, problem
        self._versions = Versions(self._tensors_read)

    def __repr__(self) -> str:
        call = self._call
        return (
            f"GroupObservation(heads {tuple(call.local.lead)}, {call.local.rows} of {call.total_rows} queries, "
            f"{call.local.keys} of {call.total_keys} keys, rank {call.ranks.rank} of {call.ranks.count})"
        )

    @property
    def perplexity(self) -> Tensor:
        """exp(entropy): how many keys each row effectively attends to, (…, Hq, n)."""
        return self.entropy.exp()

    @cached_property
    def visible(self) -> Tensor:
        """How many keys of all ranks each row may attend to, (…, Hq, n)."""
        self._check_unchanged("visible")
        return self._problem.shaped(statistics.visible(self._observed_call))

    @cached_property
    def received(self) -> Tensor:
        """Σ over the queries of all ranks of the weight that each key of this rank receives, (…, Hq, m)."""
        self._agree("received")
        return self._problem.shaped(statistics.received(self._observed_call))

    @property
    def gradient_health(self) -> Tensor:
        """Σ p(1 − p), the trace of the softmax Jacobian: 0 where the softmax is saturated, (…, Hq, n)."""
        return self._moments.gradient_health

    @property
    def distance(self) -> Tensor:
        """Σ p·|i + M − N − j|: how far from its own position each row looks, the ends aligned, (…, Hq, n)."""
        return self._moments.distance

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their positions among all keys, each (…, Hq, n, k).

        Ties go to the lowest position; if fewer keys are visible, the weight is 0 and the position −1.
        """
        self._agree("top", k=k)
        P, positions = statistics.top(self._observed_call, k)
        return self._problem.shaped(P.to(self._problem.dtype)), self._problem.shaped(positions)

    def map(self, height: int, width: int) -> Tensor:
        """The mean weight per cell of a grid over all N × M pairs, (…, Hq, height, width), the same on all ranks."""
        self._agree("map", height=height, width=width)
        return self._problem.shaped(statistics.pooled(self._observed_call, height, width))

    def weights(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: no rank holds the weights."""
        raise ArgumentError(
            f"{self._call.ranks.who}: over a group no rank holds weights or scores. top(k), map(height, width) and "
            f"received summarize them; or gather the sequence with regard.distributed.gather, and observe it."
        )

    scores = weights

    @cached_property
    def _moments(self) -> RowMoments:
        self._agree("gradient_health")
        return RowMoments(*map(self._problem.shaped, statistics.moments(self._observed_call)))

    @cached_property
    def _observed_call(self) -> ObservedCall:
        call = self._call
        with torch.no_grad():
            blocks, x = chunked_blocks(call, self._problem)
        shape = required(x[0]).shape[:-1]
        row_max, log_row_sum = (t.detach().reshape(shape) for t in (self.max_logit, self._log_row_sum))
        return ObservedCall(call.ranks, call.plan, blocks, x, RowStats.at(row_max, log_row_sum))

    def _agree(self, member: str, **given: int) -> None:
        """Check on all ranks that they ask for the same member, with valid arguments."""
        ranks = self._call.ranks
        here = Ranks(f"{ranks.who}().{member}", ranks.group, ranks.rank, ranks.count)
        limits = {"height": self._call.total_rows, "width": self._call.total_keys}

        def prepare() -> tuple[RankInfo, None]:
            self._check_unchanged(member)
            for name, size in given.items():
                _check_size(member, name, size, limits.get(name))
            return RankInfo((), {name: str(size) for name, size in given.items()}), None

        here.agree(prepare)

    def _check_unchanged(self, member: str) -> None:
        if self._versions.differ_from(self._tensors_read):
            raise ChangedError(
                f"{member}: an input of observe was changed in place, or replaced, after the call, so its weights "
                f"cannot be computed again. Ask for {member} before the change, or observe again."
            )

    @property
    def _tensors_read(self) -> list[Tensor]:
        """What later passes read: every tensor of the call except the values."""
        call = self._call
        query, key, _, *others = call.local.tensors
        tensors = [query, key, *others, *(() if call.mask is None else call.mask.sources)]
        if isinstance(call.bias, Tensor):
            return [*tensors, call.bias]
        return tensors if call.bias is None else [*tensors, *call.bias.tensors]


def _check_size(member: str, name: str, size: object, limit: int | None) -> None:
    top = " on" if limit is None else f" to {limit}, so that no cell is empty"
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or (limit is not None and size > limit):
        raise ArgumentError(f"{member}: {name} must be a whole number from 1{top}. Got {size!r}.")

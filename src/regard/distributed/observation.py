"""What the weights of one call over a group say: of this rank's rows at once, the rest when all ranks ask."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..chunked.tile_ops import RowStats
from ..core.problem import Problem
from ..core.rows import Rows
from ..errors import ArgumentError, ChangedError
from .call import Asked
from .ranks import Ranks, Told
from .statistics import Looking, moments, pooled, received, strongest, visible
from .strategies import strips_of

__all__ = ["GroupObservation"]


class GroupObservation:
    """One call of attention over a group that you can see through.

    `output`, `lse`, `entropy` (differentiable), `max_logit`, `perplexity`, `visible`, `gradient_health` and `distance`
    are of this rank's rows, `received` of this rank's keys, `map` of all rows and keys; `top` tells places among all
    keys. `received`, `gradient_health`, `distance`, `map` and `top` send keys round: all ranks ask, in the same order.
    """

    output: Tensor
    lse: Tensor
    entropy: Tensor
    max_logit: Tensor

    def __init__(self, asked: Asked, problem: Problem, found: Rows) -> None:
        output, lse, entropy, max_logit, log_row_sum = found
        if lse is None or entropy is None or max_logit is None or log_row_sum is None:
            raise RuntimeError("an observed call has statistics")
        self.output, self.lse, self.entropy, self.max_logit, self._log_row_sum = (
            output,
            lse,
            entropy,
            max_logit,
            log_row_sum,
        )
        self._asked, self._problem = asked, problem
        self._versions = [(t, _version(t)) for t in self._read]

    def __repr__(self) -> str:
        a = self._asked
        return (
            f"GroupObservation(heads {tuple(a.mine.lead)}, {a.mine.rows} of {a.rows} queries, "
            f"{a.mine.keys} of {a.keys} keys, rank {a.ranks.rank} of {a.ranks.count})"
        )

    @property
    def perplexity(self) -> Tensor:
        """exp(entropy): how many keys each row effectively attends, (…, Hq, n)."""
        return self.entropy.exp()

    @cached_property
    def visible(self) -> Tensor:
        """How many keys of all ranks each row may attend, (…, Hq, n)."""
        self._check("visible")
        return self._shaped(visible(self._looking))

    @cached_property
    def received(self) -> Tensor:
        """Σ over the queries of all ranks of the weight that each key of this rank receives, (…, Hq, m)."""
        self._agree("received")
        return self._shaped(received(self._looking))

    @property
    def gradient_health(self) -> Tensor:
        """Σ p(1 − p), the trace of the softmax Jacobian: 0 where the softmax is saturated, (…, Hq, n)."""
        return self._moments[0]

    @property
    def distance(self) -> Tensor:
        """Σ p·|i + M − N − j|: how far from its own place each row looks, the ends aligned, (…, Hq, n)."""
        return self._moments[1]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their places among all keys, each (…, Hq, n, k).

        Ties go to the lowest place; where fewer keys are visible, the weight is 0 and the place −1.
        """
        self._agree("top", k=k)
        share, where = strongest(self._looking, k)
        return self._shaped(share.to(self._problem.dtype)), self._shaped(where)

    def map(self, height: int, width: int) -> Tensor:
        """The mean weight in each cell of a grid over all N × M pairs, (…, Hq, height, width), alike on all ranks."""
        self._agree("map", height=height, width=width)
        return self._shaped(pooled(self._looking, height, width))

    def weights(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: no rank holds the weights."""
        raise ArgumentError(
            f"{self._asked.ranks.who}: over a group no rank holds weights or scores. top(k), map(height, width) and "
            f"received say what is in them; or gather the sequence with regard.distributed.gather, and observe it."
        )

    scores = weights

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        self._agree("gradient_health")
        health, distance = moments(self._looking)
        return self._shaped(health), self._shaped(distance)

    @cached_property
    def _looking(self) -> Looking:
        p, asked = self._problem, self._asked
        with torch.no_grad():
            blocks, x = strips_of(asked, p)
        query = x[0]
        if query is None:
            raise RuntimeError("a rank has queries")
        rows = (t.detach().reshape(query.shape[:-1]) for t in (self.max_logit, self._log_row_sum))
        return Looking(asked.ranks, asked.routes, blocks, x, RowStats.at(*rows))

    def _shaped(self, x: Tensor) -> Tensor:
        return self._problem.shaped(x)

    def _agree(self, member: str, **given: int) -> None:
        """See to it that all ranks ask for the same, and may."""
        ranks = self._asked.ranks
        here = Ranks(f"{ranks.who}().{member}", ranks.group, ranks.rank, ranks.count)
        limits = {"height": self._asked.rows, "width": self._asked.keys}

        def told() -> tuple[Told, None]:
            self._check(member)
            for name, size in given.items():
                _whole(member, name, size, limits.get(name))
            return Told((), {name: str(size) for name, size in given.items()}), None

        here.agree(told)

    def _check(self, member: str) -> None:
        now = self._read
        if any(t is not then or _version(t) != version for t, (then, version) in zip(now, self._versions, strict=True)):
            raise ChangedError(
                f"{member}: an input of observe was changed in place, or replaced, since; its weights are no longer "
                f"there to see. Ask for {member} before the change, or observe again."
            )

    @property
    def _read(self) -> list[Tensor]:
        """What late passes read: every tensor of the call but the values."""
        asked = self._asked
        query, key, _, *others = asked.mine.tensors
        found = [query, key, *others, *(() if asked.mask is None else asked.mask.tensors)]
        if isinstance(asked.bias, Tensor):
            return [*found, asked.bias]
        return found if asked.bias is None else [*found, *asked.bias.tensors]


def _whole(member: str, name: str, size: object, limit: int | None) -> None:
    top = "" if limit is None else f" to {limit}, so that no cell is empty"
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or (limit is not None and size > limit):
        raise ArgumentError(f"{member}: {name} must be a whole number from 1{top or ' on'}. Got {size!r}.")


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else int(x._version)

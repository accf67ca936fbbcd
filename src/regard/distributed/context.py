"""A context in which regard.attention and regard.observe take parts of a sequence that the ranks of a group hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core.contexts import ACTIVE, ShardedContext
from ..core.problem import Problem
from ..core.rows import Rows
from ..errors import ArgumentError
from .call import Asked, Place, ask
from .layout import pieces
from .observation import GroupObservation
from .ranks import Group, Ranks, Told
from .strategies import attend

__all__ = ["Over", "over", "place"]


class Over(ShardedContext):
    """Calls over the ranks of a place."""

    def __init__(self, where: Place) -> None:
        self._place = where

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        answer = self._untraced if torch.compiler.is_compiling() else self._answer
        return answer("distributed.attention", query, key, value, **given)[2].output

    def observe(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> GroupObservation:
        answer = self._untraced if torch.compiler.is_compiling() else self._answer
        return GroupObservation(*answer("distributed.observe", query, key, value, observed=True, **given))

    @torch._disable_dynamo  # type: ignore[attr-defined]  # it imports the compiler, so only what is compiled asks it
    def _untraced(self, who: str, *tensors: Tensor, **given: Any) -> tuple[Asked, Problem, Rows]:
        return self._answer(who, *tensors, **given)

    def _answer(self, who: str, *tensors: Tensor, **given: Any) -> tuple[Asked, Problem, Rows]:
        query, key, value = tensors
        asked = ask(who, self._place, query, key, value, **given)
        return asked, *attend(asked)

    def token_positions(self, count: int, device: torch.device) -> Tensor:
        who, layout = "distributed.over", self._place.layout
        ranks = Ranks.of(who, self._place.group)
        agreed, _ = ranks.agree(lambda: (Told((count,), {"layout": layout}), None))
        held = pieces(who, "tokens", [size for (size,) in agreed.sizes], layout)[ranks.rank]
        found = [torch.arange(piece.start, piece.stop, device=device) for piece in held]
        return torch.cat(found or [torch.arange(0, device=device)])


def place(who: str, group: Group | None, mesh: DeviceMesh | None, layout: str, strategy: str) -> Place:
    """Where a call spreads, from a call's arguments."""
    if group is not None and mesh is not None:
        raise ArgumentError(f"{who}: group and mesh exclude each other: both name the ranks. Leave one out.")
    return Place(mesh if group is None else group, layout, strategy)


@contextmanager
def over(
    group: Group | None = None,
    *,
    mesh: DeviceMesh | None = None,
    layout: str = "contiguous",
    strategy: str = "auto",
) -> Iterator[None]:
    """Let regard.attention and regard.observe, and modules built on them, take parts of a sequence as `attention` does.

    Rotary positions of `regard.nn.MultiheadAttention` are then those in the whole sequence. A backward pass that
    computes activations again (checkpointing) must run inside the context too.

    >>> import torch, regard
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> x = torch.randn(2, 8, 4)
    >>> with over(layout="zigzag"):
    ...     mine = regard.distributed.shard(x, layout="zigzag")
    ...     output = regard.attention(mine, mine, mine)
    >>> torch.allclose(regard.distributed.gather(output, layout="zigzag"), regard.attention(x, x, x), atol=1e-6)
    True
    >>> torch.distributed.destroy_process_group()
    """
    who = "distributed.over"
    where = place(who, group, mesh, layout, strategy)
    where.check(who)
    Ranks.of(who, where.group)
    here = Over(where)
    ACTIVE.append(here)
    try:
        yield
    finally:
        ACTIVE.remove(here)

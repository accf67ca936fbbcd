"""A context in which regard.attention and regard.observe take this rank's part of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..compat.torch import not_traced
from ..core.contexts import ACTIVE, ShardedContext
from ..core.problem import Problem
from ..core.rows import Rows
from ..errors import ArgumentError
from .call import GroupCall, ParallelConfig, prepare_call
from .layout import sharding_of
from .observation import GroupObservation
from .ranks import Group, RankInfo, Ranks
from .strategies import attend

__all__ = ["GroupContext", "over", "parallel_config"]


class _Result(NamedTuple):
    call: GroupCall
    problem: Problem
    rows: Rows


class GroupContext(ShardedContext):
    """Runs calls over the ranks of a group."""

    def __init__(self, config: ParallelConfig) -> None:
        self._config = config

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        run = self._run_untraced if torch.compiler.is_compiling() else self._run
        return run("distributed.attention", query, key, value, **given).rows.output

    def observe(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> GroupObservation:
        run = self._run_untraced if torch.compiler.is_compiling() else self._run
        return GroupObservation(*run("distributed.observe", query, key, value, observed=True, **given))

    @not_traced
    def _run_untraced(self, who: str, *tensors: Tensor, **given: Any) -> _Result:
        return self._run(who, *tensors, **given)

    def _run(self, who: str, *tensors: Tensor, **given: Any) -> _Result:
        query, key, value = tensors
        call = prepare_call(who, self._config, query, key, value, **given)
        return _Result(call, *attend(call))

    def token_positions(self, count: int, device: torch.device) -> Tensor:
        who, layout = "distributed.over", self._config.layout
        ranks = Ranks.of(who, self._config.group)
        info, _ = ranks.agree(lambda: (RankInfo((count,), {"layout": layout}), None))
        mine = sharding_of(who, "tokens", [size for (size,) in info.sizes], layout)[ranks.rank]
        found = [torch.arange(tokens.start, tokens.stop, device=device) for tokens in mine]
        return torch.cat(found or [torch.arange(0, device=device)])


def parallel_config(
    who: str, group: Group | None, mesh: DeviceMesh | None, layout: str, strategy: str
) -> ParallelConfig:
    """The configuration that the arguments of a call describe."""
    if group is not None and mesh is not None:
        raise ArgumentError(f"{who}: group and mesh exclude each other: both name the ranks. Leave one out.")
    return ParallelConfig(mesh if group is None else group, layout, strategy)


@contextmanager
def over(
    group: Group | None = None,
    *,
    mesh: DeviceMesh | None = None,
    layout: str = "contiguous",
    strategy: str = "auto",
) -> Iterator[None]:
    """Let regard.attention and regard.observe, and modules built on them, take parts of a sequence as `attention` does.

    Rotary positions of `regard.nn.MultiheadAttention` are then positions in the whole sequence. A backward pass that
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
    config = parallel_config(who, group, mesh, layout, strategy)
    config.check(who)
    Ranks.of(who, config.group)
    context = GroupContext(config)
    ACTIVE.append(context)
    try:
        yield
    finally:
        ACTIVE.remove(context)

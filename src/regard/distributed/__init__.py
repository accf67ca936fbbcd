"""Attention over several devices, on torch.distributed: each rank holds a part of the sequence."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..backends import Backend
from ..biases import Bias
from ..masks import Mask
from ..scores import Score
from .context import GroupContext, over, parallel_config
from .layout import gather, positions, shard
from .observation import GroupObservation
from .ranks import Group
from .schedule import schedule, tokens_to_hide
from .traffic import traffic

__all__ = [
    "GroupObservation",
    "attention",
    "gather",
    "observe",
    "over",
    "positions",
    "schedule",
    "shard",
    "tokens_to_hide",
    "traffic",
]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    score: Score | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | Backend = "auto",
    group: Group | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "contiguous",
    strategy: str = "auto",
) -> Tensor:
    """Attend over a sequence that is split over the ranks; each rank gets the rows of its own queries.

    The arguments are those of `regard.attention`, for this rank's tokens: query (…, Hq, n, D), key (…, Hk, m, D), value
    (…, Hk, m, Dv). A mask object and a structured bias refer to the whole sequence; a mask or bias that is a tensor has
    this rank's rows and all keys, (…, Hq, n, M). Every gradient is that of the sum of all ranks' losses; what is the
    same on all ranks (scale, sink, a score's parameters, a structured bias's table) gets it on each of them. The
    backward pass communicates too: all ranks run it, or none. First derivatives only.

    - `group` or `mesh`: the ranks, all of them by default; `layout`: "contiguous" or "zigzag", as `shard` cuts;
    - `strategy`: "ring" sends keys and values round, "heads" exchanges sequence for heads; "auto" takes the one that
      sends less.

    >>> import torch, regard
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> q = torch.randn(2, 8, 4)
    >>> whole = regard.attention(q, q, q, mask=regard.causal())
    >>> torch.allclose(attention(q, q, q, mask=regard.causal()), whole, atol=1e-5)
    True
    >>> torch.distributed.destroy_process_group()
    """
    given = {"mask": mask, "bias": bias, "score": score, "scale": scale, "softcap": softcap, "sink": sink}
    config = parallel_config("distributed.attention", group, mesh, layout, strategy)
    return GroupContext(config).attention(query, key, value, **given, dropout=dropout, backend=backend)


def observe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    score: Score | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | Backend = "auto",
    group: Group | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "contiguous",
    strategy: str = "auto",
) -> GroupObservation:
    """Attend over a group and observe the weights: the arguments of `attention`, the members of an Observation.

    >>> import torch
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> seen = observe(*torch.zeros(3, 1, 6, 4).unbind())
    >>> seen.perplexity, seen.map(1, 2)
    (tensor([[6., 6., 6., 6., 6., 6.]]), tensor([[[0.1667, 0.1667]]]))
    >>> torch.distributed.destroy_process_group()
    """
    given = {"mask": mask, "bias": bias, "score": score, "scale": scale, "softcap": softcap, "sink": sink}
    config = parallel_config("distributed.observe", group, mesh, layout, strategy)
    return GroupContext(config).observe(query, key, value, **given, dropout=dropout, backend=backend)

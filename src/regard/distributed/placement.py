"""How a query that is a DTensor is spread, and this rank's part of every other argument."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..biases import Bias
from ..core.dropout import draw_seed
from ..errors import ArgumentError, DtypeError, ShapeError
from ..masks import Mask
from .call import Place
from .layout import CONTIGUOUS, cut
from .ranks import Ranks
from .slices import share_of_bias

__all__ = ["Where", "where"]


@dataclass(frozen=True)
class Where:
    """How a query (…, Hq, N, D) is spread over a mesh; keys and values are spread likewise."""

    who: str
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @property
    def sequence(self) -> int | None:
        """The dimension of the mesh over which the sequence is spread."""
        return self._over(-2)

    def share(self, dim: int) -> slice:
        """What this rank holds of a dimension of the query, counted from its end."""
        over = self._over(dim)
        if over is None or -dim > len(self.shape):
            return slice(None)
        held = cut(self.shape[dim], self.mesh.size(over), CONTIGUOUS)[self.mesh.get_local_rank(over)]
        return slice(held[0].start, held[0].stop)

    @property
    def items(self) -> slice:
        """The batch items of this rank."""
        return self.share(-len(self.shape)) if len(self.shape) > 2 else slice(None)

    @property
    def heads(self) -> slice:
        """The heads of this rank."""
        return self.share(-3) if len(self.shape) > 3 else slice(None)

    def ranks_of(self, dim: int) -> int:
        """How many ranks share a dimension."""
        over = self._over(dim)
        return 1 if over is None else self.mesh.size(over)

    def _over(self, dim: int) -> int | None:
        at = [d for d, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim + len(self.shape)]
        return at[0] if at else None

    def place(self, dropout: float, strategy: str = "auto") -> Place:
        """Where a call spreads: over the ranks that share the sequence, with one seed on the whole mesh."""
        if self.sequence is None:
            raise RuntimeError("the sequence is not spread")
        return Place(
            self.mesh.get_group(self.sequence), CONTIGUOUS, strategy, self.seed() if dropout else None, self.origin
        )

    def seed(self) -> int:
        """Draw the seed of dropout; the mesh's first rank's counts."""
        seed = torch.tensor(draw_seed(self.who))
        for dim in range(self.mesh.ndim):
            seed = Ranks.of(self.who, self.mesh.get_group(dim)).everyones(seed)[0]
        return int(seed)

    @property
    def origin(self) -> tuple[int, int]:
        """The batch item and the head at which this rank's begin."""
        inner = self.shape[1:-3].numel() if len(self.shape) > 4 else 1
        return (self.items.start or 0) * inner, self.heads.start or 0

    def dressed(self, x: Tensor, *tail: int, gathered: bool = False) -> Tensor:
        """A result of this rank as its part of a whole (…, Hq, *tail); what is gathered is alike along the sequence."""
        shape = torch.Size((*self.shape[:-2], *tail))
        steps = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
        placements = [Replicate() if gathered and at == self.sequence else p for at, p in enumerate(self.placements)]
        found: Tensor = DTensor.from_local(
            x.contiguous(), self.mesh, placements, run_check=False, shape=shape, stride=tuple(steps)
        )
        return found

    def tensor(self, x: Tensor) -> Tensor:
        """This rank's part of a mask or bias that broadcasts to (…, Hq, N, M)."""
        if isinstance(x, DTensor):
            return self._redistributed(x)
        for dim in range(-x.dim(), -1):
            if x.shape[dim] != 1 and (share := self.share(dim)) != slice(None):
                x = x.narrow(dim, share.start, share.stop - share.start)
        return x

    def _redistributed(self, x: DTensor) -> Tensor:
        placements: list[Placement] = []
        back: list[Placement] = []
        for p in self.placements:
            dim = p.dim - len(self.shape) + x.dim() if isinstance(p, Shard) else -1
            if 0 <= dim < x.dim() - 1 and x.shape[dim] != 1:
                placements.append(Shard(dim))
                back.append(Shard(dim))
            else:
                placements.append(Replicate())
                back.append(Partial() if isinstance(p, Shard) else Replicate())
        found: Tensor = x.redistribute(x.device_mesh, placements).to_local(grad_placements=back)
        return found

    def vector(self, x: Any) -> Any:
        """This rank's part of what has one value for all heads, or one a head."""
        if isinstance(x, DTensor):
            alike = [Replicate()] * self.mesh.ndim
            back = [
                Partial() if isinstance(p, Shard) and at != self.sequence else Replicate()
                for at, p in enumerate(self.placements)
            ]
            x = x.redistribute(x.device_mesh, alike).to_local(grad_placements=back)
        return x[self.heads] if isinstance(x, Tensor) and x.numel() > 1 else x

    def given(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, for this rank's part of batch and heads, and of the rows where they are tensors."""
        found = dict(arguments)
        mask, bias = found["mask"], found["bias"]
        rank, items, heads = len(self.shape), self.items, self.heads
        if isinstance(mask, Mask) and (items, heads) != (slice(None), slice(None)):
            sizes = self.shape[0] if rank > 2 else 1, self.shape[-3] if rank > 3 else 1
            found["mask"] = mask.bind(*sizes, rank < 4).restrict(items, heads)
        elif isinstance(mask, Tensor):
            found["mask"] = self.tensor(mask)
        if isinstance(bias, Tensor):
            found["bias"] = self.tensor(bias)
        elif isinstance(bias, Bias) and heads != slice(None):
            found["bias"] = share_of_bias(bias, bias.tensors[0], heads)
            if found["bias"] is None:
                raise ArgumentError(f"{self.who}: no share of the heads can be taken of {bias!r}. Give a tensor.")
        return found | {name: self.vector(found[name]) for name in ("scale", "sink")}


def where(who: str, query: Tensor, key: Tensor, value: Tensor) -> Where:
    """Read how queries, keys and values are spread, or raise if not alike, or in a way that has no meaning here."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, DTensor):
            raise DtypeError(f"{who}: query, key and value must all be DTensors, or none. {name} is not one.")
    if not isinstance(query, DTensor) or not isinstance(key, DTensor) or not isinstance(value, DTensor):
        raise RuntimeError("they were all DTensors")
    got = f"Got {query.placements}, {key.placements}, {value.placements}"
    if not query.device_mesh == key.device_mesh == value.device_mesh or not query.dim() == key.dim() == value.dim():
        raise ShapeError(f"{who}: query, key and value must be on one mesh, and of one rank. {got}.")
    remedy = "spread them with .redistribute(placements=…)"
    if not query.placements == key.placements == value.placements:
        raise ArgumentError(f"{who}: query, key and value must be spread alike. {got}; {remedy}.")
    dims = [p.dim for p in query.placements if type(p) is Shard]
    if len(dims) + sum(isinstance(p, Replicate) for p in query.placements) < len(query.placements):
        raise ArgumentError(f"{who}: DTensors must be sharded or replicated. {got}; {remedy}.")
    if len(set(dims)) < len(dims) or query.dim() - 1 in dims:
        raise ArgumentError(
            f"{who}: batch, heads and length may be sharded, each over one mesh dimension. {got}; {remedy}."
        )
    found = Where(who, query.device_mesh, tuple(query.placements), query.shape)
    if found.heads != slice(None) and (query.shape[-3] % (size := found.ranks_of(-3)) or key.shape[-3] % size):
        raise ShapeError(
            f"{who}: {query.shape[-3]} heads of queries and {key.shape[-3]} of keys must both divide by the {size} "
            f"ranks that share them; {remedy}."
        )
    return found

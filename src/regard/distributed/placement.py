"""How a query that is a DTensor is placed on a mesh, and this rank's part of every other argument."""

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
from .call import ParallelConfig, read_causal_bias
from .layout import CONTIGUOUS, split_sequence
from .ranks import Ranks
from .slices import slice_bias_heads

__all__ = ["QueryPlacement", "read_placement"]

_EVERYTHING = slice(None)


@dataclass(frozen=True)
class QueryPlacement:
    """How a query (…, Hq, N, D) is placed on a mesh; keys and values have the same placement."""

    who: str
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @property
    def sequence(self) -> int | None:
        """The mesh dimension that shards the sequence."""
        return self._mesh_dim(-2)

    @property
    def items(self) -> slice:
        """The batch items of this rank."""
        return self.local_slice(-len(self.shape)) if len(self.shape) > 2 else _EVERYTHING

    @property
    def heads(self) -> slice:
        """The heads of this rank."""
        return self.local_slice(-3) if len(self.shape) > 3 else _EVERYTHING

    @property
    def origin(self) -> tuple[int, int]:
        """The first batch item and the first head of this rank."""
        inner = self.shape[1:-3].numel() if len(self.shape) > 4 else 1
        return (self.items.start or 0) * inner, self.heads.start or 0

    def local_slice(self, dim: int) -> slice:
        """This rank's slice of a dimension of the query, counted from its end."""
        mesh_dim = self._mesh_dim(dim)
        if mesh_dim is None or -dim > len(self.shape):
            return _EVERYTHING
        ranges = split_sequence(self.shape[dim], self.mesh.size(mesh_dim), CONTIGUOUS)
        (mine,) = ranges[self.mesh.get_local_rank(mesh_dim)]
        return slice(mine.start, mine.stop)

    def ranks_along(self, dim: int) -> int:
        """How many ranks share a dimension of the query."""
        mesh_dim = self._mesh_dim(dim)
        return 1 if mesh_dim is None else self.mesh.size(mesh_dim)

    def _mesh_dim(self, dim: int) -> int | None:
        at = [d for d, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim + len(self.shape)]
        return at[0] if at else None

    def config(self, dropout: float) -> ParallelConfig:
        """The configuration of a call over the ranks that share the sequence, with one seed on the whole mesh."""
        if self.sequence is None:
            raise RuntimeError("the sequence is not sharded")
        group = self.mesh.get_group(self.sequence)
        return ParallelConfig(group, CONTIGUOUS, seed=self.draw_seed() if dropout else None, origin=self.origin)

    def draw_seed(self) -> int:
        """Draw the seed of dropout: that of the mesh's first rank, on all ranks."""
        seed = torch.tensor(draw_seed(self.who), device="cpu")
        for dim in range(self.mesh.ndim):
            seed = Ranks.of(self.who, self.mesh.get_group(dim)).all_gather(seed)[0]
        return int(seed)

    def to_dtensor(self, x: Tensor, *tail: int, gathered: bool = False) -> Tensor:
        """This rank's result as its part of a DTensor (…, Hq, *tail); a gathered result is replicated on `sequence`."""
        shape = torch.Size((*self.shape[:-2], *tail))
        strides = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
        placements = [Replicate() if gathered and at == self.sequence else p for at, p in enumerate(self.placements)]
        whole: Tensor = DTensor.from_local(
            x.contiguous(), self.mesh, placements, run_check=False, shape=shape, stride=tuple(strides)
        )
        return whole

    def local_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call for this rank's batch items and heads, and, if they are tensors, for its rows."""
        found = dict(arguments)
        mask, bias = found["mask"], found["bias"] = read_causal_bias(found["mask"], found["bias"])
        dims, items, heads = len(self.shape), self.items, self.heads
        if isinstance(mask, Mask) and (items, heads) != (_EVERYTHING, _EVERYTHING):
            sizes = self.shape[0] if dims > 2 else 1, self.shape[-3] if dims > 3 else 1
            found["mask"] = mask.bind(*sizes, dims < 4).restrict(items, heads)
        elif isinstance(mask, Tensor):
            found["mask"] = self._local_tensor(mask)
        if isinstance(bias, Tensor):
            found["bias"] = self._local_tensor(bias)
        elif isinstance(bias, Bias) and heads != _EVERYTHING:
            found["bias"] = slice_bias_heads(bias, bias.tensors[0], heads)
            if found["bias"] is None:
                raise ArgumentError(f"{self.who}: the heads of {bias!r} cannot be sliced. Give a tensor.")
        return found | {name: self._local_per_head(found[name]) for name in ("scale", "sink")}

    def _local_tensor(self, x: Tensor) -> Tensor:
        """This rank's part of a mask or bias that broadcasts to (…, Hq, N, M)."""
        if isinstance(x, DTensor):
            return self._redistribute(x)
        for dim in range(-x.dim(), -1):
            if x.shape[dim] != 1 and (mine := self.local_slice(dim)) != _EVERYTHING:
                x = x.narrow(dim, mine.start, mine.stop - mine.start)
        return x

    def _redistribute(self, x: DTensor) -> Tensor:
        placements: list[Placement] = []
        grad_placements: list[Placement] = []
        for p in self.placements:
            dim = p.dim - len(self.shape) + x.dim() if isinstance(p, Shard) else -1
            if 0 <= dim < x.dim() - 1 and x.shape[dim] != 1:
                placements.append(Shard(dim))
                grad_placements.append(Shard(dim))
            else:
                placements.append(Replicate())
                grad_placements.append(Partial() if isinstance(p, Shard) else Replicate())
        local: Tensor = x.redistribute(x.device_mesh, placements).to_local(grad_placements=grad_placements)
        return local

    def _local_per_head(self, x: Any) -> Any:
        """This rank's part of an argument that has one value for all heads, or one per head."""
        if isinstance(x, DTensor):
            replicated = [Replicate()] * self.mesh.ndim
            grad_placements = [
                Partial() if isinstance(p, Shard) and at != self.sequence else Replicate()
                for at, p in enumerate(self.placements)
            ]
            x = x.redistribute(x.device_mesh, replicated).to_local(grad_placements=grad_placements)
        return x[self.heads] if isinstance(x, Tensor) and x.numel() > 1 else x


def read_placement(who: str, query: Tensor, key: Tensor, value: Tensor) -> QueryPlacement:
    """Read how queries, keys and values are placed; raise if they differ, or if attention cannot use the placement."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, DTensor):
            raise DtypeError(f"{who}: query, key and value must all be DTensors, or none. {name} is not one.")
    if not isinstance(query, DTensor) or not isinstance(key, DTensor) or not isinstance(value, DTensor):
        raise RuntimeError("they are all DTensors")
    got = f"Got {query.placements}, {key.placements}, {value.placements}"
    if not query.device_mesh == key.device_mesh == value.device_mesh or not query.dim() == key.dim() == value.dim():
        raise ShapeError(f"{who}: query, key and value must be on one mesh, and of one rank. {got}.")
    remedy = "change it with .redistribute(placements=…)"
    if not query.placements == key.placements == value.placements:
        raise ArgumentError(f"{who}: query, key and value must have the same placements. {got}; {remedy}.")
    dims = [p.dim for p in query.placements if type(p) is Shard]
    if len(dims) + sum(isinstance(p, Replicate) for p in query.placements) < len(query.placements):
        raise ArgumentError(f"{who}: DTensors must be sharded or replicated. {got}; {remedy}.")
    if len(set(dims)) < len(dims) or query.dim() - 1 in dims:
        raise ArgumentError(
            f"{who}: batch, heads and length may be sharded, each over one mesh dimension. {got}; {remedy}."
        )
    placement = QueryPlacement(who, query.device_mesh, tuple(query.placements), query.shape)
    count = placement.ranks_along(-3)
    if placement.heads != _EVERYTHING and (query.shape[-3] % count or key.shape[-3] % count):
        raise ShapeError(
            f"{who}: {query.shape[-3]} query heads and {key.shape[-3]} key heads must both be divisible by the {count} "
            f"ranks that share them; {remedy}."
        )
    return placement

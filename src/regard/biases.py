"""Structured biases: added to the logits, computed from a few parameters, and never materialised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from regard.errors import DtypeError, ShapeError
from regard.softmax import arithmetic_dtype

__all__ = ["Alibi", "Bias", "Relative", "alibi", "relative"]


class Bias(ABC):
    """A bias (heads, N, M) defined by a few parameters; a tile is a pure function of them and of the indices."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameters, through which gradients flow."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """How many heads have a bias of their own; 1 if all heads share one."""

    @abstractmethod
    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        """Give the bias (heads, len(i), len(j)) of rows `i` and keys `j` of n × m, from parameters as in `tensors`."""

    def pairs(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        """Give the bias (heads, …) of rows `i` (…, 1) with keys `j` (…, c), which broadcast together."""
        i, j = torch.broadcast_tensors(i, j)
        lines = zip(i.reshape(-1, i.shape[-1])[:, :1], j.reshape(-1, j.shape[-1]), strict=True)
        found = [self.tile(tensors, row, keys, n, m)[:, 0] for row, keys in lines]
        whole: Tensor = torch.stack(found, 1).unflatten(1, i.shape[:-1])
        return whole

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """Give the same bias with its parameters on `device`."""

    def misfit(self, n: int, m: int) -> str | None:
        """Say why this bias does not fit n rows and m keys, or None if it does."""
        return None

    def dense(self, n: int, m: int) -> Tensor:
        """Give the whole bias (heads, n, m)."""
        device = self.tensors[0].device
        return self.tile(self.tensors, torch.arange(n, device=device), torch.arange(m, device=device), n, m)


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Bias):
    """Linear in the distance: −slope · |i + offset − j|, one slope per head."""

    slopes: Tensor
    offset: int | None = None

    def __post_init__(self) -> None:
        _check_parameter("alibi", "slopes", self.slopes)
        _check_offset("alibi", self.offset)
        if self.slopes.ndim != 1 or self.slopes.numel() == 0:
            raise ShapeError(
                f"alibi: slopes must have one value per head, (heads,); got shape {tuple(self.slopes.shape)}. "
                "regard.positions.alibi_slopes(heads) gives the usual ones."
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,)

    @property
    def heads(self) -> int:
        return self.slopes.shape[0]

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        return self.pairs(tensors, i[:, None], j, n, m)

    def pairs(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        (slopes,) = tensors
        dtype = arithmetic_dtype(slopes.dtype)
        nearness = -_distance(i, j, n, m, self.offset).abs()
        return slopes.to(dtype).reshape(-1, *(1,) * nearness.dim()) * nearness.to(dtype)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, slopes=self.slopes.to(device))

    def __repr__(self) -> str:
        return f"alibi(slopes of {self.heads} heads{_offset_text(self.offset)})"


@dataclass(frozen=True, eq=False, repr=False)
class Relative(Bias):
    """Looked up by distance: table[clamp(j − i − offset, −R, R) + R], one table for all heads or one per head."""

    table: Tensor
    offset: int | None = None

    def __post_init__(self) -> None:
        _check_parameter("relative", "table", self.table)
        _check_offset("relative", self.offset)
        if self.table.ndim not in (1, 2) or self.table.shape[-1] % 2 == 0 or self.table.shape[0] == 0:
            raise ShapeError(
                "relative: table must be (2R+1,) or (heads, 2R+1), an odd number of columns for the distances −R … R; "
                f"got shape {tuple(self.table.shape)}."
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    @property
    def heads(self) -> int:
        return 1 if self.table.ndim == 1 else self.table.shape[0]

    @property
    def reach(self) -> int:
        """R, the largest distance with an entry of its own; larger distances share that entry."""
        return self.table.shape[-1] // 2

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        return self.pairs(tensors, i[:, None], j, n, m)

    def pairs(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        (table,) = tensors
        column = _distance(i, j, n, m, self.offset).clamp(-self.reach, self.reach) + self.reach
        table = table.to(arithmetic_dtype(table.dtype))
        return table[None, column] if table.ndim == 1 else table[:, column]

    def to(self, device: torch.device | str) -> Self:
        return replace(self, table=self.table.to(device))

    def __repr__(self) -> str:
        return f"relative(table of {self.heads} heads, reach {self.reach}{_offset_text(self.offset)})"


def alibi(slopes: Tensor, offset: int | None = None) -> Alibi:
    """Lower each logit by slope · |i + offset − j|; `offset=None` aligns the ends (M − N).

    >>> alibi(torch.tensor([0.5])).dense(2, 3)
    tensor([[[-0.5000,  0.0000, -0.5000],
             [-1.0000, -0.5000,  0.0000]]])
    """
    return Alibi(slopes, offset)


def relative(table: Tensor, offset: int | None = None) -> Relative:
    """Add table[clamp(j − i − offset, −R, R) + R] to each logit; `offset=None` aligns the ends (M − N).

    >>> relative(torch.tensor([-1.0, 0.0, 1.0])).dense(2, 3)
    tensor([[[-1.,  0.,  1.],
             [-1., -1.,  0.]]])
    """
    return Relative(table, offset)


def _distance(i: Tensor, j: Tensor, n: int, m: int, offset: int | None) -> Tensor:
    """How far each key `j` is ahead of its row `i`."""
    return j - (i + (m - n if offset is None else offset))


def _offset_text(offset: int | None) -> str:
    return "" if offset is None else f", offset={offset}"


def _check_parameter(name: str, what: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise DtypeError(f"{name}: {what} must be a tensor; got {type(value).__name__}. Wrap it with torch.tensor(…).")
    if not value.is_floating_point():
        raise DtypeError(f"{name}: {what} must be of a floating dtype; got {value.dtype}. Convert it with .float().")


def _check_offset(name: str, offset: object) -> None:
    if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int)):
        raise DtypeError(f"{name}: offset must be an int, or None to align the ends; got {type(offset).__name__}.")

"""What may be changed in the heads of a layer: their output, the pairs they see, and the weight that keys get.

Each intervention changes one posed call: its mask, its bias, or its output. None of them writes out n × m numbers,
unless the model itself gave such a bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..biases import Bias
from ..core.problem import Problem
from ..core.validation import pose
from ..errors import ArgumentError, ShapeError
from ..masks import Mask, dense
from ..observation import Change, Index, as_index

__all__ = ["Ablation", "Cut", "Intervention", "Pattern", "Scaling"]


@dataclass(frozen=True, eq=False)
class Intervention(ABC):
    """A change of some heads of a layer; `heads=None` means all of them."""

    layer: str | int
    heads: tuple[int, ...] | None
    verb: ClassVar[str]

    def change(self, p: Problem) -> Change:
        """The changed call."""
        most = p.query.shape[1]
        if wrong := [head for head in self.heads or () if not -most <= head < most]:
            raise ArgumentError(
                f"edit.{self.verb}: the layer {self.layer!r} has {most} heads, 0 to {most - 1}. Got {wrong[0]}."
            )
        return self._change(p, torch.tensor([head % most for head in self.heads or range(most)], device="cpu"))

    @abstractmethod
    def _change(self, p: Problem, heads: Tensor) -> Change:
        """The changed call, with the numbers of the heads."""


@dataclass(frozen=True, eq=False)
class Ablation(Intervention):
    """The output of the heads moves towards their mean, or towards 0: mean + factor · (output − mean)."""

    mean: Tensor | bool = False
    factor: float | Tensor = 0.0
    verb: ClassVar[str] = "ablate"

    def _change(self, p: Problem, heads: Tensor) -> Change:
        return Change(p, (lambda output: self._ablated(output, heads.to(output.device), headless=len(p.lead) < 2),))

    def _ablated(self, output: Tensor, heads: Tensor, headless: bool) -> Tensor:
        output = output.unsqueeze(-3) if headless else output
        some = output.index_select(-3, heads)  # (…, heads, N, Dv)
        towards = self._towards(some)
        if isinstance(self.factor, Tensor):
            factor = self.factor.to(some.device, some.dtype)
            if factor.dim() and factor.shape != heads.shape:
                raise ShapeError(
                    f"edit.ablate: factor must be a number, or one per ablated head, ({len(heads)},). "
                    f"Got shape {tuple(factor.shape)}."
                )
            left = towards + factor.reshape(-1, 1, 1) * (some - towards)
        else:
            left = towards + self.factor * (some - towards) if self.factor else towards
        changed = output.index_copy(-3, heads, left.expand_as(some).to(output.dtype))
        return changed.squeeze(-3) if headless else changed

    def _towards(self, some: Tensor) -> Tensor:
        """What an ablated head gives, broadcastable to (…, heads, N, Dv)."""
        if isinstance(self.mean, Tensor):
            mean = self.mean.to(some.device, some.dtype)
            if tuple(mean.shape) not in ((some.shape[-1],), (some.shape[-3], some.shape[-1])):
                raise ShapeError(
                    f"edit.ablate: mean must be one vector per ablated head, {(some.shape[-3], some.shape[-1])}, or "
                    f"one for all, {(some.shape[-1],)}. Got shape {tuple(mean.shape)}."
                )
            return mean.unsqueeze(-2)
        if not self.mean:
            return torch.zeros((), dtype=some.dtype, device=some.device)
        rest = tuple(at for at in range(some.dim()) if at - some.dim() not in (-3, -1))
        return some.mean(rest, keepdim=True)


@dataclass(frozen=True, eq=False)
class Cut(Intervention):
    """The queries of the heads no longer see the keys."""

    queries: Index = None
    keys: Index = None
    verb: ClassVar[str] = "cut"
    _memory: dict[object, Mask] = field(default_factory=dict, repr=False)

    def _change(self, p: Problem, heads: Tensor) -> Change:
        place = (p.query.shape[1], p.rows, p.keys, p.device)
        if place not in self._memory or torch.is_inference_mode_enabled():
            self._memory.clear()  # it keeps the blocks of one size
            self._memory[place] = ~_pairs(p, heads, self.queries, self.keys, f"edit.{self.verb}")
        return Change(p._replace(mask=_both(p.mask, self._memory[place])))


@dataclass(frozen=True, eq=False)
class Scaling(Intervention):
    """The weights that the queries give to the keys are multiplied by `factor` before each row is normalised."""

    queries: Index = None
    keys: Index = None
    factor: float | Tensor = 1.0
    verb: ClassVar[str] = "scale"

    def _change(self, p: Problem, heads: Tensor) -> Change:
        who = f"edit.{self.verb}"
        heads, keys = heads.to(p.device), as_index(self.keys, p.keys, who, "keys", p.device)
        factor = torch.as_tensor(self.factor, dtype=p.exact_dtype, device=p.device)
        try:
            factor = factor.expand(len(heads), len(keys))
        except RuntimeError:
            raise ShapeError(
                f"{who}: factor must be a number, or broadcast to (heads, keys), {(len(heads), len(keys))}. "
                f"Got shape {tuple(factor.shape)}."
            ) from None
        logs = torch.zeros(p.query.shape[1], p.keys, dtype=p.exact_dtype, device=p.device)
        logs = logs.index_put((heads[:, None], keys[None, :]), factor.log())
        if self.queries is None:
            return Change(_with_bias(p, logs[None, :, None, :]))
        rows = torch.zeros(p.rows, dtype=torch.bool, device=p.device)
        rows[as_index(self.queries, p.rows, who, "queries", p.device)] = True
        return Change(_with_bias(p, KeyLogs(logs, rows)))


@dataclass(frozen=True, eq=False)
class Pattern(Intervention):
    """The heads see only the pairs that a mask allows, of those that they saw before."""

    mask: Mask | Tensor | None = None
    verb: ClassVar[str] = "pattern"

    def _change(self, p: Problem, heads: Tensor) -> Change:
        mask = pose(p.query, p.key, p.value, mask=self.mask, who=f"edit.{self.verb}").mask
        if mask is None:
            return Change(p)
        if self.heads is not None:
            mask = mask | ~_pairs(p, heads, None, None, f"edit.{self.verb}")
        return Change(p._replace(mask=_both(p.mask, mask)))


@dataclass(frozen=True, eq=False)
class KeyLogs(Bias):
    """A bias per head and key, (heads, M), for some rows only."""

    logs: Tensor
    rows: Tensor  # (N,), bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.logs,)

    @property
    def heads(self) -> int:
        return self.logs.shape[0]

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        (logs,) = tensors
        return torch.where(self.rows[i][:, None], logs[:, j][:, None, :], 0.0)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, logs=self.logs.to(device), rows=self.rows.to(device))


@dataclass(frozen=True, eq=False)
class BiasSum(Bias):
    """Two biases, added."""

    first: Bias
    second: Bias

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.first.tensors + self.second.tensors

    @property
    def heads(self) -> int:
        return max(self.first.heads, self.second.heads)

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        cut = len(self.first.tensors)
        return self.first.tile(tensors[:cut], i, j, n, m) + self.second.tile(tensors[cut:], i, j, n, m)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, first=self.first.to(device), second=self.second.to(device))

    def misfit(self, n: int, m: int) -> str | None:
        return self.first.misfit(n, m) or self.second.misfit(n, m)


def _pairs(p: Problem, heads: Tensor, queries: Index, keys: Index, who: str) -> Mask:
    """The pairs of these queries and keys in these heads: two vectors per head, not a matrix."""
    rows = torch.zeros(1, p.query.shape[1], 1 if queries is None else p.rows, 1, dtype=torch.bool, device=p.device)
    chosen: Tensor | slice = slice(None) if queries is None else as_index(queries, p.rows, who, "queries", p.device)
    every = heads.to(p.device)
    if isinstance(chosen, Tensor):
        rows[0, every[:, None], chosen[None, :]] = True
    else:
        rows[0, every] = True
    if keys is None:
        return dense(rows)
    columns = torch.zeros(1, 1, 1, p.keys, dtype=torch.bool, device=p.device)
    columns[..., as_index(keys, p.keys, who, "keys", p.device)] = True
    return dense(rows) & dense(columns)


def _both(mask: Mask | None, other: Mask) -> Mask:
    return other if mask is None else mask & other


def _with_bias(p: Problem, added: Tensor | KeyLogs) -> Problem:
    """Add a bias to the problem's own; one that only hides becomes a mask, so that no matrix per head is made."""
    if isinstance(p.bias, Tensor) and not p.bias.requires_grad:
        hides = torch.isneginf(p.bias)
        if bool((hides | (p.bias == 0)).all()):
            p = p._replace(mask=_both(p.mask, dense(~hides)), bias=None)
    if p.bias is None:
        return p._replace(bias=added)
    if isinstance(p.bias, Tensor):
        if isinstance(added, KeyLogs):
            added = added.dense(p.rows, p.keys)[None]
        return p._replace(bias=p.bias.to(added.dtype) + added)
    if isinstance(added, Tensor):
        added = KeyLogs(added[0, :, 0], torch.ones(p.rows, dtype=torch.bool, device=p.device))
    return p._replace(bias=BiasSum(p.bias, added))

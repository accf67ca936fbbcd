"""The counts and sums of one layer: whole numbers, so that they are the same whatever is added first."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError
from .device_copies import to_device, to_host
from .pieces import CLASSES
from .row_values import RowValues
from .scales import BINS, LENGTH_EDGES, SCALES
from .sequences import Buckets

__all__ = ["BUCKETS", "WEIGHT_UNIT", "BatchColumns", "LayerTally", "TokenColumns", "TokenOrder"]

BUCKETS = {"position": len(LENGTH_EDGES), "length": len(LENGTH_EDGES), "class": len(CLASSES)}
"""By what the sums are kept apart, and in how many buckets each."""

_ROWS_AT_ONCE = 1 << 15  # sums of so many whole numbers below 2^37 are exact in float64
_LARGEST = 2.0**36  # in units; a logit beyond is summed as this
WEIGHT_UNIT = 2.0**-30
_MOST = 1 << 62


@cache
def _units(device: torch.device) -> Tensor:
    """How many units each statistic is summed in per 1, (statistics, 1, 1)."""
    scales = torch.tensor([1.0 / scale.unit for scale in SCALES], dtype=torch.float64, device="cpu")
    return scales[:, None, None].to(device)


class TokenOrder(NamedTuple):
    """How the tokens of a batch are sorted, on the device."""

    order: Tensor  # of the rows that count
    ends: Tensor  # the last of each token in that order
    columns: Tensor  # of each token


class TokenColumns:
    """The tokens that occurred, each with a column in the tables of what tokens receive."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, dtype=np.int64)  # in the order of their columns
        self.counts = np.zeros(0, dtype=np.int64)
        self._sorted = np.zeros(0, dtype=np.int64)  # the ids
        self._columns = np.zeros(0, dtype=np.int64)  # of the sorted ids

    def add(self, ids: np.ndarray) -> np.ndarray:
        """Count the tokens of a batch, and return the column of each."""
        unique, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
        at = np.searchsorted(self._sorted, unique)
        known = np.zeros(len(unique), dtype=bool)
        if len(self._sorted):
            known = self._sorted[at.clip(max=len(self._sorted) - 1)] == unique
        new = unique[~known]
        self._sorted = np.insert(self._sorted, at[~known], new)
        self._columns = np.insert(self._columns, at[~known], np.arange(len(self.ids), len(self.ids) + len(new)))
        self.ids = np.concatenate((self.ids, new))
        self.counts = np.pad(self.counts, (0, len(new)))
        columns = self._columns[np.searchsorted(self._sorted, unique)]
        self.counts[columns] += counts
        found: np.ndarray = columns[place.reshape(ids.shape)]
        return found

    @classmethod
    def stored(cls, ids: np.ndarray, counts: np.ndarray) -> TokenColumns:
        """The columns as they were read back."""
        found = cls()
        found.ids, found.counts = ids.astype(np.int64), counts.astype(np.int64)
        found._columns = np.argsort(found.ids, kind="stable")
        found._sorted = found.ids[found._columns]
        return found


class BatchColumns:
    """The columns of the tokens of a batch, on the device in either form."""

    def __init__(self, columns: np.ndarray, rows: np.ndarray, size: int, device: torch.device) -> None:
        self._columns, self._rows, self._size, self._device = columns, rows, size, device

    @cached_property
    def order(self) -> TokenOrder:
        """The rows that count, sorted by their tokens."""
        unique, counts = np.unique(self._columns, return_counts=True)
        found = np.argsort(self._columns, kind="stable"), counts.cumsum() - 1, unique
        return TokenOrder(*(to_device(x, self._device) for x in found))

    @cached_property
    def of_each(self) -> Tensor:
        """The column of every row of the batch, int64; 0 for padding."""
        found = np.zeros(self._size, dtype=np.int64)
        found[self._rows] = self._columns
        return to_device(found, self._device)


@dataclass
class LayerTally:
    """Whole numbers of one layer with H heads, on its device until they are read."""

    heads: int
    device: torch.device
    parts: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(SCALES), self.heads)
        if self.parts:
            return

        def zeros(*more: int) -> Tensor:
            return torch.zeros(*shape, *more, dtype=torch.int64, device=self.device)

        self.parts = {"histogram": zeros(2 * BINS), "undefined": zeros()}
        for name, size in BUCKETS.items():
            self.parts[f"{name}_sum"], self.parts[f"{name}_count"] = zeros(size), zeros(size)
        self.parts["smallest"] = torch.full(shape, torch.inf, dtype=torch.float64, device=self.device)
        self.parts["largest"] = torch.full(shape, -torch.inf, dtype=torch.float64, device=self.device)
        for name in ("received", "active"):
            self.parts[name] = torch.zeros(self.heads, 0, dtype=torch.int64, device=self.device)

    def add(self, found: RowValues, buckets: Buckets) -> None:
        """Add the rows of a call."""
        for part in range(0, found.values.shape[-1], _ROWS_AT_ONCE):
            rows = slice(part, part + _ROWS_AT_ONCE)
            self._add_rows(found.values[..., rows], buckets, rows)

    def _add_rows(self, values: Tensor, buckets: Buckets, rows: slice) -> None:
        defined = values.isfinite()
        self.parts["undefined"] += values.isnan().sum(-1)
        whole = torch.where(defined, values, 0.0).double().mul_(_units(values.device)).round_()
        whole.clamp_(-_LARGEST, _LARGEST)
        columns = buckets.onehot[rows]  # [R, columns]
        sums = (whole.flatten(0, 1) @ columns).view(*values.shape[:2], -1).long()
        counts = (defined.flatten(0, 1).to(columns.dtype) @ columns).view(*values.shape[:2], -1).long()
        start = 0
        for name, at in buckets.kinds:
            end = start + len(at)
            self.parts[f"{name}_sum"].index_add_(2, at, sums[..., start:end])
            self.parts[f"{name}_count"].index_add_(2, at, counts[..., start:end])
            start = end
        self._add_histogram(values, defined)
        lowest = torch.where(defined, values, torch.inf).amin(-1).double()
        highest = torch.where(defined, values, -torch.inf).amax(-1).double()
        self.parts["smallest"] = torch.minimum(self.parts["smallest"], lowest)
        self.parts["largest"] = torch.maximum(self.parts["largest"], highest)

    def _add_histogram(self, values: Tensor, defined: Tensor) -> None:
        """Count each value in its bin. What is not defined goes to bins beyond, spread so that few threads collide."""
        count = values.shape[-1]
        spread = torch.arange(count, device=values.device) % BINS + BINS
        bins = torch.stack([scale.bins(values[at]) for at, scale in enumerate(SCALES)])
        bins = torch.where(defined, bins, spread).flatten(0, 1)  # [statistics · H, R]
        flat = self.parts["histogram"].view(-1, 2 * BINS)
        index = bins + torch.arange(len(bins), device=bins.device)[:, None] * (2 * BINS)
        if values.is_cpu:
            flat += torch.bincount(index.view(-1), minlength=flat.numel()).view_as(flat)
            return
        index = index.t().reshape(-1)  # neighbouring threads then count for different heads
        one = torch.ones((), dtype=flat.dtype, device=flat.device)
        flat.view(-1).scatter_add_(0, index, one.expand_as(index))

    def add_tokens(self, found: RowValues, tokens: TokenOrder, width: int) -> None:
        """Add what each token receives as a key, and how active the head is where it is the query.

        Sums of whole numbers are exact in float64, and so the sums of equal tokens are differences of running sums.
        """
        for name, values in (("received", found.received), ("active", found.active)):
            table = self.token_table(name, width)
            if values.shape[1] == 0:
                continue
            finite = torch.where(values.isfinite(), values, 0.0).double()
            whole = finite.mul_(1.0 / WEIGHT_UNIT).round_().index_select(1, tokens.order)
            running = whole.cumsum(1).index_select(1, tokens.ends).long()
            running[:, 1:] -= running[:, :-1].clone()
            table.index_add_(1, tokens.columns, running)

    def token_table(self, name: str, width: int) -> Tensor:
        """The table of what tokens receive, or where they are active, with at least so many columns."""
        table = self.parts[name]
        if table.shape[1] < width:
            grown = max(width, 2 * table.shape[1])
            self.parts[name] = table = torch.nn.functional.pad(table, (0, grown - table.shape[1]))
        return table

    def read(self, order: np.ndarray) -> dict[str, np.ndarray]:
        """Everything, on the host: (statistics, H, …), and (H, tokens) with their columns in this order."""
        columns = to_device(order, self.device)
        found = dict(self.parts)
        for name in ("received", "active"):
            x = found[name]
            found[name] = torch.nn.functional.pad(x, (0, max(0, len(order) - x.shape[1]))).index_select(1, columns)
        sums = [torch.stack(x.aminmax()) for x in found.values() if x.dtype == torch.int64 and x.numel()]
        if any(abs(x) > _MOST for x in torch.cat(sums).tolist()):
            raise ArgumentError("census: a sum exceeds 62 bits. Take several censuses of fewer tokens each.")
        found["histogram"] = found["histogram"][..., :BINS]
        return dict(zip(found, to_host(list(found.values())), strict=True))

    @classmethod
    def stored(cls, parts: dict[str, np.ndarray], device: torch.device) -> LayerTally:
        """The tally as it was read."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(x)).to(device) for name, x in parts.items()}
        tensors["histogram"] = torch.nn.functional.pad(tensors["histogram"], (0, BINS))
        return cls(tensors["undefined"].shape[1], device, tensors)

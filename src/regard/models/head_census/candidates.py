"""The rows of a batch that may become exemplars, and the keys that they attend to."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.problem import Problem
from ...observation import Observation
from .device_copies import to_device
from .exemplars import AFTER, AROUND, BEFORE, KEYS, ExemplarKeys, ExemplarSet
from .kernel_rows import products_by_kernel

__all__ = ["BatchPlaces", "Places", "best_rows", "fill_keys", "ranked", "strongest_keys"]

_NUMBERS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}
_LOW = 0xFFFFFFFF
_BLOCK = 16  # rows whose weights are computed together


def best_rows(scores: Tensor, count: int, rows: Tensor | None) -> Tensor:
    """The rows with the largest scores (behaviours, H, R), ties to the first: ranks (behaviours, H, count).

    A rank holds the bits of a score and its row, so that no two are equal and the order never depends on the device.
    `rows` are the flat indices of these rows in the batch, None if they are all.
    """
    rows = torch.arange(scores.shape[-1], device=scores.device) if rows is None else rows
    bits = (scores + 0.0).contiguous().view(torch.int32).to(torch.int64)
    ranks = torch.where(scores >= 0, bits * 2**32 + (_LOW - rows), -1)
    return ranks.topk(min(count, scores.shape[-1]), -1).values


def ranked(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scores and rows of ranks; −inf and 0 where there is none."""
    bits = (ranks >> 32).astype(np.int32)
    none = ranks < 0
    score = np.where(none, -np.inf, bits.view(np.float32).astype(np.float64))
    return score, np.where(none, 0, _LOW - (ranks & _LOW))


class Places(NamedTuple):
    """Where the rows of some heads are: (chosen,) each."""

    heads: np.ndarray
    items: np.ndarray
    rows: np.ndarray
    on_device: Tensor  # the same three, (3, chosen)

    def part(self, chosen: slice) -> Places:
        """Some of them."""
        return Places(self.heads[chosen], self.items[chosen], self.rows[chosen], self.on_device[:, chosen])


@torch.no_grad()
def strongest_keys(seen: Observation, at: Places, by_kernels: bool) -> tuple[Tensor, Tensor]:
    """The strongest keys of some rows of some heads, and their weights: (chosen, KEYS) each, on the device."""
    p = seen.problem_for("census")
    batch, heads = (1, 1) if p.mask is None else p.mask.lead
    plain = p.bias is None and p.plain_scale and batch in (1, p.query.shape[0])
    weights = partial(_weights_by_row, by_kernels=by_kernels) if plain else _weights_by_blocks
    count = min(KEYS, p.keys)
    numbers = p.keys * (max(1 if by_kernels else p.query.shape[-1], batch * heads) if plain else 1)  # of a row
    size = max(1, _NUMBERS_AT_ONCE.get(p.device.type, 1 << 24) // numbers)
    found = []
    for start in range(0, len(at.rows), size):
        found.append(weights(seen, p, at.part(slice(start, start + size))).topk(count, -1))
    values, index = found[0]
    if len(found) > 1:
        values, index = torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])
    index = torch.where(values > 0, index, -1)
    if count < KEYS:
        values = torch.nn.functional.pad(values, (0, KEYS - count))
        index = torch.nn.functional.pad(index, (0, KEYS - count), value=-1)
    return values, index


def _weights_by_row(seen: Observation, p: Problem, at: Places, by_kernels: bool) -> Tensor:
    """The weights of single rows (chosen, M), where a logit is a product times a number."""
    heads, items, rows = at.on_device
    S = (products_by_kernel if by_kernels else _products)(p.query, p.key, at.on_device) * float(p.scale)  # [C, M]
    if p.softcap is not None:
        S = p.softcap * torch.tanh(S / p.softcap)
    if p.mask is not None:
        keys = torch.arange(p.keys, device=p.device)
        shown = p.mask.allows(rows[:, None], keys[None, :], p.rows, p.keys)
        if shown.dim() > 2:  # (batch items, heads, chosen, M), 1 where all share one
            item, head = (at * (size > 1) for at, size in zip((items, heads), shown.shape, strict=False))
            shown = shown[item, head, torch.arange(len(rows), device=p.device)]
        S = torch.where(shown, S, -torch.inf)
    lse = seen.lse[items, heads, rows].float()
    return (S - lse[:, None]).exp().nan_to_num(0.0)


def _products(query: Tensor, key: Tensor, at: Tensor) -> Tensor:
    """The products of single rows with all their keys. A matrix product's bits would depend on how many rows it has."""
    heads, items, rows = at
    K = key[items, heads // (query.shape[1] // key.shape[1])]  # [C, M, D]
    return (K * query[items, heads, rows].float()[:, None]).sum(-1)


def _weights_by_blocks(seen: Observation, p: Problem, at: Places) -> Tensor:
    """The same for any call: from the weights of whole blocks of rows in all heads and items.

    The bits of a product depend on how many rows it has, so a block is computed whole, whichever rows are wanted.
    """
    found = seen.lse.new_zeros(len(at.rows), p.keys)
    for block in np.unique(at.rows // _BLOCK):
        mine = np.flatnonzero(at.rows // _BLOCK == block)
        first = int(block) * _BLOCK
        W = seen.weights(rows=slice(first, first + _BLOCK))  # [items, H, rows, M]
        items, heads, rows = (to_device(x[mine], p.device) for x in (at.items, at.heads, at.rows - first))
        found[to_device(mine, p.device)] = W[items, heads, rows].to(found.dtype)
    return found.nan_to_num(0.0)


class BatchPlaces:
    """Where the rows of a batch are in the corpus."""

    def __init__(
        self,
        tokens: np.ndarray | None,  # (items, N)
        contexts: np.ndarray | None,  # (items, N)
        length: int,
        documents: np.ndarray,  # (items,)
        starts: np.ndarray,
        source: int,
    ) -> None:
        self._tokens, self._contexts, self._length = tokens, contexts, length
        self._documents, self._starts, self._source = documents, starts, source

    def contexts(self, flat: np.ndarray) -> np.ndarray:
        """A number per row that is the same for rows with the same last tokens; rows are flat indices in the batch."""
        item = flat // self._length
        found: np.ndarray = flat + (item << 40) if self._contexts is None else self._contexts.reshape(-1)[flat]
        return found

    def candidates(self, score: np.ndarray, flat: np.ndarray) -> ExemplarKeys:
        """Rows as exemplars without their keys, from flat indices in the batch."""
        item, place = flat // self._length, flat % self._length
        context = self.contexts(flat)
        source = np.full(flat.shape, self._source, dtype=np.int64)
        return ExemplarKeys(score, source, self._documents[item], self._starts[item], place, context)

    def item(self, flat: np.ndarray) -> np.ndarray:
        """The batch item of rows."""
        items: np.ndarray = flat // self._length
        return items

    def around(self, items: np.ndarray, places: np.ndarray, before: int, after: int) -> np.ndarray:
        """The token ids around some places (…): int32 (…, before + 1 + after), −1 beyond the ends."""
        steps = np.arange(-before, after + 1)
        at = places[..., None] + steps
        if self._tokens is None:
            return np.full(at.shape, -1, dtype=np.int32)
        inside = (at >= 0) & (at < self._tokens.shape[1]) & (places[..., None] >= 0)
        ids = self._tokens[items[..., None], at.clip(0, self._tokens.shape[1] - 1)]
        return np.where(inside, ids, -1).astype(np.int32)


def fill_keys(
    chosen: ExemplarSet,
    at: tuple[np.ndarray, ...],
    items: np.ndarray,
    keys: np.ndarray,
    weights: np.ndarray,
    b: BatchPlaces,
) -> None:
    """Give the exemplars at some places their tokens, and the keys that they attend to."""
    rows = chosen.row[at]
    chosen.tokens[at] = b.around(items, rows, BEFORE, AFTER)
    chosen.keys[at] = keys.astype(np.int32)
    chosen.weights[at] = weights.astype(np.float32)
    chosen.key_tokens[at] = b.around(np.broadcast_to(items[:, None], keys.shape), keys, AROUND, AROUND)

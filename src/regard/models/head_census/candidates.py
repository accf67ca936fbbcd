"""The rows of a batch that may become exemplars, and the keys that they attend to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...observation import Observation
from .device_copies import to_device
from .exemplars import AFTER, AROUND, BEFORE, KEYS, ExemplarKeys, ExemplarSet
from .kernel_rows import products_by_kernel

__all__ = ["BatchPlaces", "Places", "Wanted", "best_rows", "fill_keys", "products", "ranked", "strongest_keys"]

_NUMBERS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 24}
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


class Wanted(NamedTuple):
    """A call, and the rows of it whose keys are wanted."""

    seen: Observation
    at: Places
    by_kernels: bool  # whether our kernels run on its device


class _Form(NamedTuple):
    """What calls have in common whose weights are computed together."""

    alone: int | None  # the identity of a call whose weights are those of whole blocks of rows
    by_kernels: bool
    rows: int
    keys: int
    dim: int
    scale: float
    softcap: float | None
    mask: object  # itself, or its identity if it has tensors

    @classmethod
    def of(cls, wanted: Wanted) -> _Form:
        p = wanted.seen.problem_for("census")
        batch = 1 if p.mask is None else p.mask.lead[0]
        plain = p.bias is None and p.plain_scale and batch in (1, p.query.shape[0])
        mask = p.mask if p.mask is None or p.mask.constant else id(p.mask)
        scale = float(p.scale) if plain else 1.0
        dim = p.query.shape[-1]
        return cls(None if plain else id(wanted.seen), wanted.by_kernels, p.rows, p.keys, dim, scale, p.softcap, mask)


@torch.no_grad()
def strongest_keys(wanted: Sequence[Wanted]) -> tuple[Tensor, Tensor]:
    """The strongest keys of some rows of some heads, and their weights: (chosen, KEYS) each, on the device."""
    found = []
    for form, some in groupby(wanted, _Form.of):
        count = min(KEYS, form.keys)
        weights = _weights_by_row if form.alone is None else _weights_by_blocks
        for portion in _portions(list(some), form):
            values, index = weights(portion).topk(count, -1)
            index = torch.where(values > 0, index, -1)
            if count < KEYS:
                values = torch.nn.functional.pad(values, (0, KEYS - count))
                index = torch.nn.functional.pad(index, (0, KEYS - count), value=-1)
            found.append((values, index))
    if len(found) == 1:
        return found[0]
    return torch.cat([values for values, _ in found]), torch.cat([index for _, index in found])


def _portions(wanted: list[Wanted], form: _Form) -> Iterator[list[Wanted]]:
    """The rows of calls of one form, as many at once as have room in memory."""
    p = wanted[0].seen.problem_for("census")
    batch, heads = (1, 1) if p.mask is None else p.mask.lead
    numbers = p.keys * (max(1 if form.by_kernels else p.query.shape[-1], batch * heads) if form.alone is None else 1)
    size = max(1, _NUMBERS_AT_ONCE.get(p.device.type, 1 << 24) // numbers)
    portion, room = list[Wanted](), size
    for one in wanted:
        start, end = 0, len(one.at.rows)
        while start < end:
            stop = min(end, start + room)
            portion.append(one._replace(at=one.at.part(slice(start, stop))))
            start, room = stop, room - (stop - start)
            if not room:
                yield portion
                portion, room = [], size
    if portion:
        yield portion


def _weights_by_row(wanted: list[Wanted]) -> Tensor:
    """The weights of single rows of calls of one form (chosen, M), where a logit is a product times a number."""
    p = wanted[0].seen.problem_for("census")
    places = [one.at.on_device for one in wanted]
    heads, items, rows = places[0] if len(places) == 1 else torch.cat(places, 1)
    calls = [(one.seen, one.at.on_device) for one in wanted]
    S, lse = (products_by_kernel if wanted[0].by_kernels else products)(calls)
    S = S * float(p.scale)  # [C, M]
    if p.softcap is not None:
        S = p.softcap * torch.tanh(S / p.softcap)
    if p.mask is not None:
        keys = torch.arange(p.keys, device=p.device)
        shown = p.mask.allows(rows[:, None], keys[None, :], p.rows, p.keys)
        if shown.dim() > 2:  # (batch items, heads, chosen, M), 1 where all share one
            item, head = (at * (size > 1) for at, size in zip((items, heads), shown.shape, strict=False))
            shown = shown[item, head, torch.arange(len(rows), device=p.device)]
        S = torch.where(shown, S, -torch.inf)
    return (S - lse[:, None]).exp().nan_to_num(0.0)


def products(calls: Sequence[tuple[Observation, Tensor]]) -> tuple[Tensor, Tensor]:
    """The products of single rows with all their keys (chosen, M), and their lse (chosen,).

    Rows are heads, items and rows (3, chosen) of each call. A matrix product's bits would depend on how many there are.
    """
    found = []
    for seen, (heads, items, rows) in calls:
        p = seen.problem_for("census")
        K = p.key[items, heads // (p.query.shape[1] // p.key.shape[1])]  # [C, M, D]
        S = (K * p.query[items, heads, rows].float()[:, None]).sum(-1)
        found.append((S, seen.lse[items, heads, rows].float()))
    return found[0] if len(found) == 1 else (torch.cat([S for S, _ in found]), torch.cat([lse for _, lse in found]))


def _weights_by_blocks(wanted: list[Wanted]) -> Tensor:
    """The same for any call: from the weights of whole blocks of rows in all heads and items.

    The bits of a product depend on how many rows it has, so a block is computed whole, whichever rows are wanted.
    """
    if len(wanted) > 1:
        return torch.cat([_weights_by_blocks([one]) for one in wanted])
    seen, at = wanted[0].seen, wanted[0].at
    p = seen.problem_for("census")
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

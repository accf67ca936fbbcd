"""Attention written out for every pair, in plain torch: what random problems are held against.

Nothing here calls the library. Tensors are (B0, B1, H, N, …): two batch dimensions, heads, rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Biases", "Dense", "Masks", "attend", "logits"]


class Dense(NamedTuple):
    output: Tensor
    lse: Tensor
    entropy: Tensor
    max_logit: Tensor
    weights: Tensor


def attend(S: Tensor, value: Tensor, allowed: Tensor, sink: Tensor | None, kept: Tensor | None) -> Dense:
    """Softmax of the logits S (…, H, N, M) over the allowed pairs and the sink (H,), and the average of the values."""
    allowed = (allowed & (S.detach() > -torch.inf)).expand(S.shape)
    extra = torch.full((), -torch.inf).to(S) if sink is None else sink[:, None, None]
    some = torch.isfinite(extra).expand(*S.shape[:-1], 1)
    seen = torch.cat((allowed, some), -1)
    X = torch.cat((S, extra.expand(*S.shape[:-1], 1)), -1)  # one more column, so that none is no special case
    X = torch.where(seen, X, 0.0)
    level = X.detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    level = torch.where(seen.any(-1, keepdim=True), level, 0.0)
    E = torch.where(seen, torch.where(seen, X - level, 0.0).exp(), 0.0)
    total = E.sum(-1, keepdim=True)
    empty = total == 0
    log_total = torch.where(empty, 1.0, total).log() + level
    lse = torch.where(empty, -torch.inf, log_total).squeeze(-1)
    P = (E / torch.where(empty, 1.0, total))[..., :-1]
    entropy = -(P * torch.where(allowed, X[..., :-1] - log_total, 0.0)).sum(-1)
    top = torch.cat((S.detach().masked_fill(~allowed, -torch.inf), torch.full_like(level, -torch.inf)), -1).amax(-1)
    return Dense((P if kept is None else P * kept) @ value, lse, entropy, top, P)


def logits(kind: str | None, parameters: Mapping[str, Tensor], query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """The score of every pair, with `parameters` named as in the module; `scale` is () or (H,)."""
    if kind == "Additive":
        hidden = (query @ parameters["query_weight"].mT)[..., :, None, :]
        return (hidden + (key @ parameters["key_weight"].mT)[..., None, :, :]).tanh() @ parameters["vector"]
    if kind == "Bilinear":
        return query @ parameters["weight"] @ key.mT
    if kind == "Gaussian":
        square = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
        return -square / (2 * (2 * parameters["log_bandwidth"]).exp())
    if kind == "Cosine":
        query, key = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30) for x in (query, key))
        return query @ key.mT / parameters["log_temperature"].exp()
    if kind == "Temperature":
        return query @ key.mT / (2.0 * parameters["log_ratio"].exp()).reshape(-1, 1, 1)
    if kind == "Scaled":
        scale = parameters["scale"]
    return query @ key.mT * scale.reshape(-1, 1, 1)


Offset = int | Sequence[int] | None


def _per_item(x: int | Sequence[int]) -> int | Tensor:
    return x if isinstance(x, int) else torch.tensor(x, dtype=torch.int64).reshape(-1, 1, 1, 1)


class Masks:
    """The names of regard's masks, each as its table of allowed pairs: bool, broadcastable to (B0, H, N, M)."""

    def __init__(self, batch: int, heads: int, n: int, m: int, headless: bool) -> None:
        self.n, self.m, self.headless = n, m, headless
        self.b, self.h = torch.arange(batch).reshape(-1, 1, 1, 1), torch.arange(heads).reshape(-1, 1, 1)
        self.i, self.j = torch.arange(n)[:, None], torch.arange(m)

    def _at(self, offset: Offset) -> Tensor:
        return self.i + (self.m - self.n if offset is None else _per_item(offset))

    def everything(self) -> Tensor:
        return torch.ones(self.n, self.m, dtype=torch.bool)

    def causal(self, offset: Offset = None) -> Tensor:
        return self.j <= self._at(offset)

    def window(self, left: int | None, right: int | None, offset: Offset = None) -> Tensor:
        ahead = self.j - self._at(offset)
        return (ahead >= (-(10**9) if left is None else -left)) & (ahead <= (10**9 if right is None else right))

    def padding(self, lengths: Sequence[int] | None = None, keep: Tensor | None = None) -> Tensor:
        if keep is not None:
            return keep[:, None, None] if keep.dim() == 2 else keep
        return self.j < _per_item([] if lengths is None else lengths)

    def documents(self, query_ids: Tensor, key_ids: Tensor | None = None) -> Tensor:
        key_ids = query_ids if key_ids is None else key_ids
        same = query_ids[..., :, None] == key_ids[..., None, :]
        return same[:, None] if same.dim() == 3 else same

    def packed(self, lengths: Sequence[int]) -> Tensor:
        ids = torch.tensor([at for at, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)
        return self.documents(ids)

    def blocks(self, size: int, offset: Offset = None) -> Tensor:
        return self._at(offset).div(size, rounding_mode="floor") == self.j // size

    def prefix(self, length: int | Sequence[int]) -> Tensor:
        return self.j < _per_item(length)

    def strided(self, step: int, offset: Offset = None) -> Tensor:
        return (self._at(offset) - self.j).remainder(step) == 0

    def global_tokens(self, indices: Sequence[int], offset: Offset = None) -> Tensor:
        tokens, at = torch.tensor(indices, dtype=torch.int64), self._at(offset)
        return (at[..., None] == tokens).any(-1) | (self.j[:, None] == tokens).any(-1)

    def dense(self, allowed: Tensor) -> Tensor:
        return allowed[:, None] if self.headless and allowed.dim() == 3 else allowed

    def predicate(self, f: Callable[..., Tensor]) -> Tensor:
        return f(self.b, self.h, self.i, self.j)


class Biases:
    """The names of regard's biases, each as its table (H or 1, N, M)."""

    def __init__(self, n: int, m: int) -> None:
        self.n, self.m = n, m

    def _ahead(self, offset: int | None) -> Tensor:
        at = torch.arange(self.n)[:, None] + (self.m - self.n if offset is None else offset)
        return torch.arange(self.m) - at

    def alibi(self, slopes: Tensor, offset: int | None = None) -> Tensor:
        return -slopes[:, None, None] * self._ahead(offset).abs()

    def relative(self, table: Tensor, offset: int | None = None) -> Tensor:
        reach = table.shape[-1] // 2
        return table.reshape(-1, table.shape[-1])[:, self._ahead(offset).clamp(-reach, reach) + reach]

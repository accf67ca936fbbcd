"""Masks whose rows have lists of keys, for a problem of one size."""

from __future__ import annotations

import torch
from torch import Tensor

import regard
from regard.masks import Mask

__all__ = ["MASKS", "B", "D", "H", "K", "M", "N", "drawn", "lists"]

B, H, K, N, M, D = 2, 4, 2, 11, 17, 6


def lists(*shape: int, below: int = M) -> Tensor:
    return torch.randint(-1, below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


MASKS: dict[str, Mask] = {
    "one list per row": regard.chosen(lists(N, 6)),
    "by query head": regard.chosen(lists(B, H, N, 6)),
    "by key head": regard.chosen(lists(B, K, N, 6)),
    "blocks": regard.chosen(lists(B, 1, N, 2, below=5), size=4) & regard.causal(),
    "several rows, the last list short": regard.chosen(lists(B, K, 3, 3, below=5), size=4, rows=4),
    "beside masks": regard.padding([15, 4]) & regard.chosen(lists(B, 1, N, 7)) & regard.causal(),
    "beside a mask by head": regard.chosen(lists(H, N, 6)) & regard.dense(drawn(B, H, N, M) > -0.5),
    "both of two": regard.chosen(lists(B, 1, N, 6)) & regard.chosen(lists(H, N, 9)),
    "either of two": regard.chosen(lists(B, 1, N, 4)) | regard.chosen(lists(N, 4)) & regard.causal(),
}

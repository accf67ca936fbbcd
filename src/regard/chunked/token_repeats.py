"""The weight of each row on earlier copies of its token, and on what followed them, by one pass over tiles."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.rows import Rows
from ..core.tiling import ROW, Tile, TileSizes
from .gathered_statistics import GatheredTiles
from .statistics import Survey, survey
from .tile_ops import Workspace

__all__ = ["RepeatSums", "TokenLabels", "TokenRepeats", "TokenRuns", "survey_with_repeats"]


class TokenRepeats(NamedTuple):
    """Sums of the weights of each row, (…, Hq, N) each."""

    duplicate: Tensor  # on earlier positions with the same token
    induction: Tensor  # on earlier positions that follow the same token


class TokenRuns(NamedTuple):
    """Positions in the order of their tokens, where the copies of a token follow one another: int32 (L, N) each."""

    order: Tensor  # the position at each place of that order
    begin: Tensor  # the place of the first copy of its token


class TokenLabels:
    """Token ids (L, N), of any integer dtype, as they are compared in all calls that read them.

    Key j counts for row i if j is before i, and the token of j, or the one that precedes it, is the token of i.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens.to(torch.int32).contiguous()

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape

    @cached_property
    def preceding(self) -> Tensor:
        """The token before each key; −1 before the first.

        >>> TokenLabels(torch.tensor([[5, 7, 5]])).preceding.tolist()
        [[-1, 5, 7]]
        """
        first = torch.full_like(self.tokens[:, :1], -1)
        return torch.cat((first, self.tokens[:, :-1]), 1)

    @cached_property
    def runs(self) -> TokenRuns:
        """The positions by token.

        >>> [x.tolist() for x in TokenLabels(torch.tensor([[5, 7, 5, 2]])).runs]
        [[[3, 0, 2, 1]], [[0, 1, 1, 3]]]
        """
        ordered, order = self.tokens.sort(dim=1, stable=True)
        return TokenRuns(order.int(), torch.searchsorted(ordered, ordered, out_int32=True))


class RepeatSums:
    """The sums over the tiles of a survey."""

    def __init__(self, p: Problem, tokens: TokenLabels) -> None:
        self._labels = tokens.tokens, tokens.preceding
        self._position = torch.arange(p.rows, device=p.device)
        shape = p.query.shape[0], p.key.shape[1], p.query.shape[1] // p.key.shape[1], p.rows
        self._sums = tuple(torch.zeros(shape, dtype=p.exact_dtype, device=p.device) for _ in self._labels)

    def add(self, tile: Tile, P: Tensor, workspace: Workspace) -> None:
        """Add the weights P (l, k, g, r, c) of a tile."""
        if tile.cols.start >= tile.rows.stop:
            return
        earlier = self._position[tile.cols] < self._position[tile.rows, None]  # [r, c]
        own = self._labels[0][tile.batch, tile.rows, None]  # [l, r, 1]
        for label, total in zip(self._labels, self._sums, strict=True):
            same = (own == label[tile.batch, None, tile.cols]) & earlier  # [l, r, c]
            product = torch.mul(P, same[:, None, None].to(P.dtype), out=workspace.like("seen", P))
            ROW.part(total, tile).add_(product.sum(-1))

    def add_gathered(self, tiles: GatheredTiles) -> None:
        """Add the weights of a tile with gathered keys."""
        item, i, j = tiles.at.item, tiles.i, tiles.j
        for label, total in zip(self._labels, self._sums, strict=True):
            part = tiles.of_rows(total)
            part += torch.where((self._labels[0][item][i] == label[item][j]) & (j < i), tiles.values, 0.0).sum(-1)

    def total(self, p: Problem) -> TokenRepeats:
        """The sums over all tiles."""
        return TokenRepeats(*(p.shaped(total.flatten(1, 2)) for total in self._sums))


def survey_with_repeats(
    p: Problem, rows: Rows, tokens: TokenLabels, tile_sizes: TileSizes
) -> tuple[Survey, TokenRepeats]:
    """A survey with a map of one cell, and the weights on repeats of the tokens of (L, N), from one pass."""
    sums = RepeatSums(p, tokens)
    found = survey(p, rows, 1, 1, tile_sizes, (sums,))
    return found, sums.total(p)

"""Global tokens: a few tokens that see every token and are seen by every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from regard.masks.arguments import Integers, integers
from regard.masks.base import Mask, Span
from regard.masks.index import Index, indices
from regard.masks.span import interval
from regard.masks.tiles import tile_states

__all__ = ["GlobalTokens", "global_tokens"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    """Row i sees key j if i or j is among the indices."""

    indices: Tensor

    factory: ClassVar[str] = "global_tokens"

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        tokens = self.indices.to(i.device)
        return torch.isin(i, tokens) | torch.isin(j, tokens)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        tokens = self._tokens(i.device)
        keys = tokens[(tokens >= 0) & (tokens < m)].tolist()
        lo, hi = (keys[0], keys[-1] + 1) if keys else (0, 0)
        everywhere = torch.isin(i, tokens)
        exact = len(keys) == hi - lo or bool(everywhere.all())
        return interval(i, m, torch.where(everywhere, 0, lo), torch.where(everywhere, m, hi), exact)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        tokens = self._tokens(rows.device)
        in_rows = torch.searchsorted(tokens, rows).diff()[:, None]
        in_cols = torch.searchsorted(tokens, cols).diff()[None, :]
        full = (in_rows == rows.diff()[:, None]) | (in_cols == cols.diff())
        return tile_states((in_rows + in_cols) > 0, full)

    def _tokens(self, device: torch.device) -> Tensor:
        """The indices, sorted and without duplicates."""
        return self.indices.to(device).unique()  # type: ignore[no-any-return]


def global_tokens(indices: Integers) -> Mask:
    """Let the tokens at `indices` see all keys and be seen by all rows; indices beyond the sequence are ignored.

    >>> from regard.masks import window
    >>> print((window(1, 1) | global_tokens([0])).picture(6, 6))
    ██████
    ███···
    ████··
    █·███·
    █··███
    █···██
    """
    return GlobalTokens(integers("global_tokens", "indices", indices, least=0))

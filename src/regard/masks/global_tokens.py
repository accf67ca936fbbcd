"""Global tokens: a few tokens that see every token and are seen by every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from regard.masks.arguments import Integers, integers, offset_like
from regard.masks.base import Mask, Span
from regard.masks.index import Index, diagonal_offset, indices
from regard.masks.span import interval
from regard.masks.tiles import tile_states

__all__ = ["GlobalTokens", "global_tokens"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    """Row i sees key j if i + offset or j is among the indices."""

    indices: Tensor
    offset: int | Tensor | None = None

    factory: ClassVar[str] = "global_tokens"
    items: ClassVar[dict[str, int]] = {"offset": 0}

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        tokens = self.indices.to(i.device)
        return torch.isin(i + diagonal_offset(self.offset, i, n, m), tokens) | torch.isin(j, tokens)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        tokens = self._tokens(i.device)
        keys = tokens[(tokens >= 0) & (tokens < m)].tolist()
        lo, hi = (keys[0], keys[-1] + 1) if keys else (0, 0)
        everywhere = torch.isin(i + diagonal_offset(self.offset, i, n, m), tokens)
        exact = len(keys) == hi - lo or bool(everywhere.all())
        return interval(i, m, torch.where(everywhere, 0, lo), torch.where(everywhere, m, hi), exact)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        if isinstance(self.offset, Tensor):
            return super().cover(rows, cols, n, m)
        tokens = self._tokens(rows.device)
        at = rows + (m - n if self.offset is None else self.offset)
        in_rows = torch.searchsorted(tokens, at).diff()[:, None]
        in_cols = torch.searchsorted(tokens, cols).diff()[None, :]
        full = (in_rows == rows.diff()[:, None]) | (in_cols == cols.diff())
        return tile_states((in_rows + in_cols) > 0, full)

    def _tokens(self, device: torch.device) -> Tensor:
        """The indices, sorted and without duplicates."""
        return self.indices.to(device).unique()  # type: ignore[no-any-return]


def global_tokens(indices: Integers, offset: int | Tensor | Sequence[int] | None = None) -> Mask:
    """Let the tokens at `indices` see all keys and be seen by all rows; indices beyond the sequence are ignored.

    Indices are those of keys, and row i is at key i + offset; `None` aligns the ends.

    >>> from regard.masks import window
    >>> print((window(1, 1) | global_tokens([0])).picture(6, 6))
    ██████
    ███···
    ████··
    █·███·
    █··███
    █···██
    """
    return GlobalTokens(integers("global_tokens", "indices", indices, least=0), offset_like("global_tokens", offset))

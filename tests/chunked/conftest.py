"""Tiles of a size that suits short problems."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from regard.chunked import tile_batches


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles so small that a short problem has all kinds of them."""
    monkeypatch.setattr(tile_batches, "WIDTH", 64)
    monkeypatch.setattr(tile_batches, "KEY_BLOCK", 16)
    monkeypatch.setattr(tile_batches, "SHORTEST_FULL_RUN", 32)
    monkeypatch.setattr(tile_batches, "LOGITS", 2**12)
    tile_batches._remembered.cache_clear()
    yield
    tile_batches._remembered.cache_clear()

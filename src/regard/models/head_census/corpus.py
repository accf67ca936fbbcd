"""A corpus as batches of a model: long texts are cut into windows that overlap, and windows are batched by length.

The batches depend on the texts and the settings alone. So a census may be interrupted after any batch, or be spread
over many machines by taking each n-th group of batches, and the same numbers come out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...errors import ArgumentError
from .codec import Codec
from .sequences import Batch
from .texts import Document, Texts

__all__ = ["Corpus"]

_POOL = 1 << 18  # characters of texts whose windows are sorted by length together


class _Window(NamedTuple):
    """A part of a text that the model reads at once."""

    document: Document
    start: int  # its first token in the document
    ids: list[int]  # with special tokens
    counted: range  # its rows that no other window counts


@dataclass(frozen=True)
class Corpus:
    """Texts for a model with its tokenizer; iterating gives batches."""

    texts: Texts
    codec: Codec
    length: int  # tokens per window, with special tokens
    overlap: int  # tokens of a window that the one before has counted
    batch_tokens: int  # per batch, with padding
    most: int | None = None  # tokens to count at all

    def __post_init__(self) -> None:
        room = self.length - len(self.codec.prefix) - len(self.codec.suffix)
        if self.length < 1 or room < 1:
            raise ArgumentError(
                f"census: length must leave room for a token besides the special ones. Got {self.length}."
            )
        if self.codec.most is not None and self.length > self.codec.most:
            raise ArgumentError(
                f"census: length must be at most {self.codec.most:,}, for which the model has positions. "
                f"Got {self.length:,}."
            )
        if not 0 <= self.overlap < room:
            raise ArgumentError(
                f"census: overlap must be from 0 to {room - 1}, less than a window. Got {self.overlap}."
            )

    @property
    def settings(self) -> dict[str, int | None]:
        """What the batches depend on besides the texts."""
        return {
            "length": self.length,
            "overlap": self.overlap,
            "batch_tokens": self.batch_tokens,
            "max_tokens": self.most,
        }

    @property
    def source(self) -> int:
        """A number for these texts and settings."""
        facts = json.dumps([self.texts.fingerprint(), self.settings])
        return int(hashlib.sha256(facts.encode()).hexdigest()[:15], 16)

    def groups(self, shard: tuple[int, int]) -> Iterator[tuple[list[Batch], int]]:
        """The batches of each pool of texts that belongs to a shard, and the position in the texts after it."""
        counted = 0
        for at, pool in enumerate(self._pools()):
            whole = at % shard[1] == shard[0] or self.most is not None
            windows = [window for document in pool for window in self._windows(document)] if whole else []
            if self.most is not None:
                windows, counted = _limited(windows, counted, self.most)
            mine = windows if at % shard[1] == shard[0] else []
            yield list(self._batches(mine)), pool[-1].position
            if self.most is not None and counted >= self.most:
                return

    def _pools(self) -> Iterator[list[Document]]:
        """Texts, about a quarter of a million characters at a time."""
        pool: list[Document] = []
        size = 0
        for document in self.texts:
            pool.append(document)
            size += len(document.text)
            if size >= _POOL:
                yield pool
                pool, size = [], 0
        if pool:
            yield pool

    def _windows(self, document: Document) -> Iterator[_Window]:
        """The windows of a text. Each token is counted once: where windows overlap, the earlier one counts."""
        c = self.codec
        ids = c.encode(document.text)
        room = self.length - len(c.prefix) - len(c.suffix)
        start = 0
        while ids:
            part = ids[start : start + room]
            last = start + room >= len(ids)
            whole = [*c.prefix, *part, *c.suffix]
            first = 0 if start == 0 else len(c.prefix) + self.overlap
            yield _Window(document, start, whole, range(first, len(whole) if last else len(whole) - len(c.suffix)))
            if last:
                return
            start += room - self.overlap

    def _batches(self, windows: list[_Window]) -> Iterator[Batch]:
        """Windows of similar length together, at most `batch_tokens` tokens with padding."""
        batch: list[_Window] = []
        for window in sorted(windows, key=lambda one: (len(one.ids), one.document.number, one.start)):
            if batch and len(window.ids) * (len(batch) + 1) > self.batch_tokens:
                yield self._batch(batch)
                batch = []
            batch.append(window)
        if batch:
            yield self._batch(batch)

    def _batch(self, windows: list[_Window]) -> Batch:
        width = max(len(window.ids) for window in windows)
        ids = torch.full((len(windows), width), self.codec.padding, device="cpu")
        mask, counted = torch.zeros(2, len(windows), width, dtype=torch.bool, device="cpu").unbind()
        for at, window in enumerate(windows):
            ids[at, : len(window.ids)] = torch.tensor(window.ids, device="cpu")
            mask[at, : len(window.ids)] = True
            counted[at, window.counted.start : window.counted.stop] = True
        return Batch(
            named=self.codec.inputs(ids, mask),
            tokens=ids,
            counted=counted,
            lengths=mask.sum(1),
            documents=[window.document.number for window in windows],
            starts=[window.start for window in windows],
            names=[window.document.name for window in windows],
        )


def _limited(windows: list[_Window], before: int, most: int) -> tuple[list[_Window], int]:
    """The first windows, until so many tokens are counted; the last may go a little beyond."""
    found = []
    for window in windows:
        if before >= most:
            break
        found.append(window)
        before += len(window.counted)
    return found, before

"""What a census knows about the tokens of one batch: which rows count, where they stand, and what kind they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...chunked.token_repeats import TokenLabels
from ...errors import ArgumentError, DtypeError
from .device_copies import to_device
from .pieces import CLASSES, Pieces
from .scales import edge_buckets

__all__ = ["Batch", "Buckets", "CallRows", "Sequences", "earlier_copies", "read_batch"]

_MASKS = ("attention_mask", "mask", "key_padding_mask", "src_key_padding_mask")


@dataclass(frozen=True)
class Batch:
    """One call of the model, and what is known about its tokens."""

    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    tokens: Tensor | None = None  # (items, N), on any device
    counted: Tensor | None = None  # bool (items, N): rows that are not padding, and are not counted elsewhere
    lengths: Tensor | None = None  # (items,), on the host: tokens that are not padding
    documents: Sequence[int] | None = None  # the number of each item's document
    starts: Sequence[int] | None = None  # where the item begins in its document, in tokens
    names: Sequence[str] = ()  # of the documents
    skipped: bool = False  # another shard counts it


def read_batch(given: object) -> Batch:
    """A batch from whatever a model takes: a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(given, Batch):
        return given
    if isinstance(given, Tensor):
        return _with_tokens(Batch((given,)))
    if isinstance(given, Mapping):
        return _with_tokens(Batch(named=dict(given)))
    if isinstance(given, list | tuple):
        return _with_tokens(Batch(tuple(given)))
    raise DtypeError(
        f"census: a batch must be what the model takes: a tensor, a tuple of arguments, or a mapping of named ones. "
        f"Got {type(given).__name__}."
    )


def _with_tokens(batch: Batch) -> Batch:
    """The batch with its token ids, and with padding marked if a mask says where it is."""
    tokens = next(_ids(batch), None)
    if tokens is None:
        return batch
    mask = next((batch.named[name] for name in _MASKS if isinstance(batch.named.get(name), Tensor)), None)
    counted = None
    if mask is not None and mask.shape == tokens.shape:
        padded = next(name for name in _MASKS if batch.named.get(name) is mask).endswith("padding_mask")
        counted = ((mask == 0) if padded else (mask != 0)).cpu()
    lengths = torch.full((len(tokens),), tokens.shape[1], device="cpu") if counted is None else counted.sum(1)
    return Batch(batch.args, batch.named, tokens, counted, lengths)


def _ids(batch: Batch) -> Iterator[Tensor]:
    """The integer tensors with 2 dimensions that may be the token ids, the likeliest first."""
    others = [x for name, x in batch.named.items() if not any(word in name for word in ("mask", "position", "type"))]
    for x in (batch.named.get("input_ids"), *batch.args, *others):
        if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim() == 2:
            yield x.detach()


@dataclass(frozen=True)
class Buckets:
    """A column of ones and zeros per bucket that occurs in a batch: sums by bucket are one product."""

    kinds: tuple[tuple[str, Tensor], ...]  # what is bucketed, and the buckets that occur, on the device
    onehot: Tensor  # float64 (rows, columns), on the device

    @classmethod
    def of(cls, by: Mapping[str, Tensor], device: torch.device) -> Buckets:
        kinds, columns = [], []
        for name, bucket in by.items():
            used, place = bucket.unique(return_inverse=True)
            kinds.append((name, to_device(used, device)))
            columns.append(to_device(place, device)[:, None] == torch.arange(len(used), device=device))
        return cls(tuple(kinds), torch.cat(columns, 1).double())


class CallRows:
    """The rows that count in calls of one shape: (items, rows) of them, some of which are tokens of the batch."""

    def __init__(self, sequences: Sequences, items: int, rows: int) -> None:
        batch, device = sequences.batch, sequences.device
        self.items, self.length = items, rows
        self.fits = sequences.tokens is not None and tuple(sequences.tokens.shape) == (items, rows)
        counted = batch.counted if self.fits else None
        every = torch.arange(items * rows, device="cpu")
        self.rows = every if counted is None else every[counted.reshape(-1)]  # flat indices, on the host
        self.whole = len(self.rows) == items * rows
        self.counted = None if counted is None or self.whole else to_device(counted, device)
        self.chosen = None if self.whole else to_device(self.rows, device)
        self._sequences = sequences

    @cached_property
    def copies(self) -> tuple[Tensor, Tensor] | None:
        """As in `earlier_copies`, on the device."""
        return earlier_copies(self._sequences.device_tokens) if self.fits else None

    @cached_property
    def buckets(self) -> Buckets:
        """The buckets of the rows that count, for sums by a product."""
        return Buckets.of(self._bucketed(), self._sequences.device)

    @cached_property
    def bucket_of_each(self) -> Tensor:
        """The bucket of each row by position, length and class: int32 (3, items · rows), on the device; 0 if none."""
        buckets = torch.stack([x.int() for x in self._bucketed().values()])
        found = buckets
        if not self.whole:
            found = torch.zeros(len(buckets), self.items * self.length, dtype=torch.int32, device="cpu")
            found[:, self.rows] = buckets
        return to_device(found, self._sequences.device)

    def _bucketed(self) -> dict[str, Tensor]:
        sequences = self._sequences
        rows, lengths = self.rows, sequences.batch.lengths
        by = {"position": edge_buckets(torch.arange(self.length, device="cpu"))[rows % self.length]}
        if self.fits and sequences.tokens is not None and lengths is not None:
            by["length"] = edge_buckets(lengths.cpu().long())[rows // self.length]
            by["class"] = torch.from_numpy(sequences.pieces.classes(sequences.tokens.reshape(-1)[rows].numpy()))
        else:
            by["length"] = edge_buckets(torch.full_like(rows, self.length))
            by["class"] = torch.full_like(rows, CLASSES.index("unknown"))
        return by


class Sequences:
    """The tokens of a batch, on the host and on a device, and the rows of its calls that count."""

    def __init__(self, batch: Batch, pieces: Pieces, device: torch.device) -> None:
        self.batch, self.device, self.pieces = batch, device, pieces
        self.tokens = None if batch.tokens is None else batch.tokens.cpu().long()  # (items, N)
        if self.tokens is not None and self.tokens.numel() and int(self.tokens.min()) < 0:
            raise ArgumentError("census: token ids must not be negative; some batch has one below 0.")
        self.device_tokens = None if batch.tokens is None else to_device(batch.tokens, device)
        self.token_labels = None if self.device_tokens is None else TokenLabels(self.device_tokens)
        self._of: dict[tuple[int, int], CallRows] = {}

    def call_rows(self, items: int, rows: int) -> CallRows:
        """What is known about the rows of calls of this shape."""
        if (items, rows) not in self._of:
            self._of[items, rows] = CallRows(self, items, rows)
        return self._of[items, rows]


def earlier_copies(tokens: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """How far back the nearest key of each row is (items, N): a copy of its token, and what followed one; 0 if none.

    The token that follows a copy must itself be before the row, so that a copy right before it does not count.

    >>> [x.tolist() for x in earlier_copies(torch.tensor([[5, 5, 7, 5]]))]
    [[[0, 1, 0, 2]], [[0, 0, 0, 1]]]
    """
    if tokens is None:
        return None
    order = tokens.argsort(dim=1, stable=True)
    ordered = tokens.gather(1, order)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    backs = []
    for step in (1, 2):  # the last copy, and the one before
        same = torch.zeros_like(ordered, dtype=torch.bool)
        same[:, step:] = ordered[:, step:] == ordered[:, :-step]
        place = torch.full_like(order, -1)
        place[:, step:] = torch.where(same[:, step:], order[:, :-step], -1)
        backs.append(torch.full_like(order, -1).scatter_(1, order, place))
    last, second = backs
    copy = torch.where(last >= 0, positions - last, 0)
    prior = torch.where(last < positions - 1, last, second)
    return copy, torch.where(prior >= 0, positions - prior - 1, 0)

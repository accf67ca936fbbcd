"""Exemplars: per head and behaviour the best rows of the corpus, one per context, with what they attend to.

A set of exemplars is the best few of distinct contexts, by score and then by place. The best of a union are among the
best of its parts, so sets can be merged in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from .row_values import BEHAVIOURS, SAMPLE

__all__ = [
    "AFTER",
    "AROUND",
    "BEFORE",
    "KEYS",
    "SAMPLE_AT",
    "ExemplarKeys",
    "ExemplarSet",
    "ExemplarTable",
    "context_hashes",
    "row_hashes",
]

KEYS = 6  # the strongest keys of a row that are kept
BEFORE, AFTER = 24, 6  # tokens around the row that are kept
AROUND = 3  # tokens on each side of a strong key
_CONTEXT = 4  # rows whose last tokens are the same share a context
_EMPTY = -np.inf


@dataclass
class ExemplarKeys:
    """What decides between exemplars, (…, places) each. A score of −inf marks an empty place."""

    score: np.ndarray  # float64
    source: np.ndarray  # int64: the corpus
    document: np.ndarray  # int64
    start: np.ndarray  # int64: where the window begins in its document
    row: np.ndarray  # int64: the position in the window
    context: np.ndarray  # int64: a hash of the last tokens

    def parts(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each array by its name."""
        for one in fields(self):
            yield one.name, getattr(self, one.name)


@dataclass
class ExemplarSet(ExemplarKeys):
    """Exemplars with what they attend to: (H, behaviours, kept, …)."""

    tokens: np.ndarray  # int32 (…, BEFORE + 1 + AFTER): the ids around the row; −1 beyond the ends
    keys: np.ndarray  # int32 (…, KEYS): the positions of the strongest keys; −1 if there are fewer
    weights: np.ndarray  # float32 (…, KEYS)
    key_tokens: np.ndarray  # int32 (…, KEYS, 2 · AROUND + 1): the ids around each of them

    @classmethod
    def empty(cls, *lead: int) -> ExemplarSet:
        """Empty places of this shape."""
        whole = {name: np.zeros(lead, dtype=np.int64) for name in ("source", "document", "start", "row", "context")}
        return cls(
            score=np.full(lead, _EMPTY),
            **whole,
            tokens=np.full((*lead, BEFORE + 1 + AFTER), -1, dtype=np.int32),
            keys=np.full((*lead, KEYS), -1, dtype=np.int32),
            weights=np.zeros((*lead, KEYS), dtype=np.float32),
            key_tokens=np.full((*lead, KEYS, 2 * AROUND + 1), -1, dtype=np.int32),
        )

    @classmethod
    def of_heads(cls, heads: int, kept: int) -> ExemplarSet:
        """Room for so many exemplars per head and behaviour."""
        return cls.empty(heads, len(BEHAVIOURS), kept)

    @property
    def kept(self) -> int:
        return int(self.score.shape[-1])

    def worst(self) -> np.ndarray:
        """The lowest score that is kept, (H, behaviours); −inf while there is room."""
        worst: np.ndarray = self.score.min(-1)
        return worst

    def choose(self, other: ExemplarKeys) -> np.ndarray:
        """Which of both, (…, kept): an index into this one's places followed by the other's; −1 for none."""
        score, source, document, start, row, context = (
            np.concatenate((part, getattr(other, name)), -1) for name, part in _keys_of(self).parts()
        )
        order = np.argsort(-score, axis=-1, kind="stable")
        ordered = np.take_along_axis(score, order, -1)
        tied = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] > _EMPTY)).any(-1)
        if tied.any():
            order[tied] = np.lexsort(tuple(x[tied] for x in (row, start, document, source, -score)), axis=-1)
        contexts = np.take_along_axis(context, order, -1)
        same = contexts[..., :, None] == contexts[..., None, :]
        places = np.arange(order.shape[-1])
        again = (same & (places[None, :] < places[:, None])).any(-1)
        good = (ordered > _EMPTY) & ~again
        first = np.argsort(~good, axis=-1, kind="stable")[..., : self.kept]
        return np.where(np.take_along_axis(good, first, -1), np.take_along_axis(order, first, -1), -1)

    def taken(self, other: ExemplarKeys, chosen: np.ndarray) -> ExemplarSet:
        """The exemplars that `choose` named. From keys alone come places without tokens, to be filled later."""
        found = dict(ExemplarSet.empty(*chosen.shape).parts())
        lead = np.indices(chosen.shape, sparse=True)[:-1]
        for name, mine in self.parts():
            theirs = getattr(other, name, None)
            both = mine if theirs is None else np.concatenate((mine, theirs), chosen.ndim - 1)
            missing = (chosen < 0) | (chosen >= both.shape[chosen.ndim - 1])
            taken = both[(*lead, np.where(missing, 0, chosen))]
            taken[missing] = found[name][missing]
            found[name] = taken
        return ExemplarSet(**found)

    def merged(self, other: ExemplarSet) -> ExemplarSet:
        """The best of both."""
        return self.taken(other, self.choose(other))


class ExemplarTable:
    """The exemplars of all layers as one set, so that those of a batch compete at once; a layer's are a view of it."""

    def __init__(self, kept: int, layers: Mapping[str, ExemplarSet] | None = None) -> None:
        self.every = ExemplarSet.of_heads(0, kept)
        self.places: dict[str, slice] = {}  # where the heads of each layer are in the table
        for name, one in (layers or {}).items():
            self._append(name, one)

    def __getitem__(self, name: str) -> ExemplarSet:
        return ExemplarSet(**{key: x[self.places[name]] for key, x in self.every.parts()})

    def heads(self, name: str, count: int) -> np.ndarray:
        """Where the heads of a layer are in the table; a layer that is new gets places."""
        if name not in self.places:
            self._append(name, ExemplarSet.of_heads(count, self.every.kept))
        return np.arange(self.places[name].start, self.places[name].stop)

    def _append(self, name: str, one: ExemplarSet) -> None:
        start = len(self.every.score)
        self.every = ExemplarSet(**{key: np.concatenate((x, getattr(one, key))) for key, x in self.every.parts()})
        self.places[name] = slice(start, start + len(one.score))


def _keys_of(one: ExemplarKeys) -> ExemplarKeys:
    return ExemplarKeys(*(getattr(one, each.name) for each in fields(ExemplarKeys)))


def context_hashes(tokens: np.ndarray) -> np.ndarray:
    """A number per position of (items, N) that is the same where the last few tokens are the same, int64.

    >>> a, b = context_hashes(np.array([[9, 1, 2, 3, 4], [7, 1, 2, 3, 4]]))
    >>> bool(a[4] == b[4]), bool(a[3] == b[3])
    (True, False)
    """
    total = np.zeros(tokens.shape, dtype=np.uint64)
    for back in range(_CONTEXT):
        shifted = np.full(tokens.shape, -1, dtype=np.int64)
        shifted[:, back:] = tokens[:, : tokens.shape[1] - back]
        total = _mixed(total + _mixed((shifted + 2).astype(np.uint64) + np.uint64(back << 40)))
    return total.view(np.int64)


def row_hashes(source: int, documents: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A random number from 0 to 1 for each place of each document, the same whenever it is asked for.

    >>> row_hashes(1, np.array([3]), np.array([4])) == row_hashes(1, np.array([3]), np.array([4]))
    array([ True])
    """
    seed = _mixed(np.array([source & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    mixed = _mixed(_mixed(documents.astype(np.uint64) + seed) + places.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


SAMPLE_AT = list(BEHAVIOURS).index(SAMPLE)

"""Maps of many heads, computed on demand: tiles one at a time, the coarse levels in the background."""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from regard.errors import ArgumentError, DtypeError, RegardError, ShapeError
from regard.observation import Observation
from regard.report.atlas_head import size_of
from regard.report.atlas_heads import HeadList, search_tokens
from regard.report.pyramid import SIDE, Pyramid, levels

__all__ = ["TOKENS_PER_BLOCK", "Atlas", "AtlasLayer", "State"]

TOKENS_PER_BLOCK = 1024
"""Tokens per response."""
_MAX_TILES = 512  # cached: 128 MiB
_MAX_MAP_BYTES = 2**30  # of all cached maps; the latest is always kept


@dataclass(frozen=True)
class AtlasLayer:
    """One layer: its observation, and the texts of its tokens along both axes of the map."""

    name: str
    observation: Observation
    queries: Sequence[str]
    keys: Sequence[str]
    item: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.observation, Observation):
            raise DtypeError(
                f"AtlasLayer: observation must come from regard.observe. Got {_type_name(self.observation)}."
            )
        items, _, rows, keys = size_of(self.observation)
        for side, tokens, size in (("queries", self.queries, rows), ("keys", self.keys, keys)):
            if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
                raise DtypeError(
                    f"AtlasLayer: {side} must be a list of strings, one per token. Got {_type_name(tokens)}."
                )
            if len(tokens) != size:
                raise ShapeError(
                    f"AtlasLayer: {side} must have one string per token: {size} {side} were observed in {self.name!r}. "
                    f"Got {len(tokens)}."
                )
        if not 0 <= self.item < items:
            raise ArgumentError(f"AtlasLayer: item must be a whole number from 0 to {items - 1}. Got {self.item!r}.")

    @property
    def heads(self) -> int:
        """How many heads it has."""
        return size_of(self.observation)[1]


@dataclass(frozen=True)
class State:
    """Progress on the coarse levels of a map: the share of the work done, the rows known so far, and any error."""

    progress: float
    known: int
    trouble: str = ""


class Atlas:
    """Attention maps of any length to pan and zoom; `regard.report.atlas.serve` shows them in a browser.

    The page shows `note`, if there is one, beside the title.

    >>> import torch, regard
    >>> x = torch.zeros(1, 3, 8)
    >>> words = ["a", "small", "map"]
    >>> atlas = Atlas("an example", [AtlasLayer("layer 0", regard.observe(x, x, x), words, words)])
    >>> atlas.meta()["layers"]
    [{'name': 'layer 0', 'heads': 1, 'queries': 3, 'keys': 3, 'base': 4, 'top': 0}]
    >>> len(atlas.tile(0, 0, 0, 0, 0))  # nine weights in float32
    36
    """

    def __init__(
        self, title: str, layers: Sequence[AtlasLayer] = (), note: str = "", *, expected: int | None = None
    ) -> None:
        if not (layers or expected is not None) or not all(isinstance(layer, AtlasLayer) for layer in layers):
            raise ArgumentError(f"Atlas: layers must be a list of at least one AtlasLayer. Got {layers!r}.")
        self.title, self.layers, self.note = str(title), list(layers), str(note)
        self.expected = expected  # how many layers there will be; None when no more are added
        self.heads = HeadList()  # what is known of each head, beside its map
        if expected is None:
            self.heads.conclude([])
        self.report: Callable[[], str] | None = None  # renders a report on the same model and text, if there is one
        self._maps: OrderedDict[tuple[int, int], Pyramid] = OrderedDict()  # least recently used first
        self._tiles: OrderedDict[tuple[int, ...], bytes] = OrderedDict()
        self._errors: dict[tuple[int, int], str] = {}
        self._waiting = 0  # requests that wait for a tile
        self._changed = threading.Condition()  # guards all of this state
        self._compute_lock = threading.Lock()  # held while computing
        self._worker: threading.Thread | None = None
        self._closed = False

    def add(self, layer: AtlasLayer) -> None:
        """Add a layer to an atlas that was made with `expected`; it may be served meanwhile."""
        if self.expected is None:
            raise ArgumentError("Atlas: this atlas is complete. Create it with expected= to add layers later.")
        with self._changed:
            self.layers.append(layer)
            self.expected = max(self.expected, len(self.layers))

    def complete(self) -> None:
        """Say that no more layers are added."""
        self.expected = None

    def meta(self) -> dict[str, Any]:
        """What the page needs before its first request."""
        layers = []
        expected = self.expected  # before the layers: None means that all of them are listed
        for layer in list(self.layers):
            rows, keys = len(layer.queries), len(layer.keys)
            base, top = levels(rows, keys)
            layers.append(
                {"name": layer.name, "heads": layer.heads, "queries": rows, "keys": keys, "base": base, "top": top}
            )
        sizes = {"side": SIDE, "tokens": TOKENS_PER_BLOCK}
        return {"title": self.title, "note": self.note, **sizes, "layers": layers, "expected": expected}

    def known_heads(self) -> dict[str, Any]:
        """A small map, statistics and findings of each head, as far as they are known."""
        return {"report": self.report is not None, **self.heads.as_json([layer.name for layer in list(self.layers)])}

    def search(self, layer: int, side: str, wanted: str) -> list[int]:
        """The tokens of a layer, along `side`, at which the text `wanted` begins."""
        self._check(layer, 0)
        return search_tokens(self.layers[layer].queries if side == "queries" else self.layers[layer].keys, wanted)

    def tokens(self, layer: int, side: str, block: int) -> list[str]:
        """The texts of up to 1,024 tokens from 1024·block on, along `side`: "queries" or "keys"."""
        self._check(layer, 0)
        every = self.layers[layer].queries if side == "queries" else self.layers[layer].keys
        if not 0 <= block * TOKENS_PER_BLOCK < len(every):
            raise ArgumentError(f"tokens: block must be from 0 to {(len(every) - 1) // TOKENS_PER_BLOCK}. Got {block}.")
        return list(every[block * TOKENS_PER_BLOCK : (block + 1) * TOKENS_PER_BLOCK])

    def tile(
        self, layer: int, head: int, level: int, row: int, col: int, wanted: Callable[[], bool] = lambda: True
    ) -> bytes:
        """The mean weights of a tile: float32, little-endian, row by row; NaN where not known yet.

        Returns b"" if the tile is no longer `wanted` once it can be computed, or if the atlas was closed.
        """
        self._check(layer, head)
        key = (layer, head, level, row, col)
        if (cached := self._cached_tile(key)) is not None:
            return cached
        if level >= levels(len(self.layers[layer].queries), len(self.layers[layer].keys))[0]:
            return _tile_bytes(self._map(layer, head), level, row, col)
        with self._exclusive():
            if self._closed or not wanted():
                return b""
            if (cached := self._cached_tile(key)) is not None:
                return cached
            found = _tile_bytes(self._map(layer, head), level, row, col)
        with self._changed:
            self._tiles[key] = found
            while len(self._tiles) > _MAX_TILES:
                self._tiles.popitem(last=False)
        return found

    def state(self, layer: int, head: int) -> State:
        """Progress on the coarse levels of a map; the first call starts computing them in the background."""
        self._check(layer, head)
        pyramid = self._map(layer, head)
        with self._changed:
            trouble = self._errors.get((layer, head), "")
            if pyramid.progress < 1.0 and self._worker is None and not self._closed:
                self._worker = threading.Thread(target=self._compute_coarse_levels, name="regard-atlas", daemon=True)
                self._worker.start()
                atexit.register(self.close)  # Python must not exit while a block is being computed
            self._changed.notify_all()
        return State(pyramid.progress, pyramid.known, trouble)

    def close(self) -> None:
        """Stop computing, after the block or tile in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()
        with self._compute_lock:
            atexit.unregister(self.close)

    def _check(self, layer: int, head: int) -> None:
        if not self.layers:
            raise ArgumentError("atlas: no layer is known yet.")
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(f"atlas: layer must be from 0 to {len(self.layers) - 1}. Got {layer}.")
        heads = self.layers[layer].heads
        if not 0 <= head < heads:
            raise ArgumentError(f"atlas: head must be from 0 to {heads - 1} in layer {layer}. Got {head}.")

    def _cached_tile(self, key: tuple[int, ...]) -> bytes | None:
        with self._changed:
            if key in self._tiles:
                self._tiles.move_to_end(key)
            return self._tiles.get(key)

    def _map(self, layer: int, head: int) -> Pyramid:
        """The map of a head, from the cache or new; the least recently used maps are evicted."""
        with self._changed:
            if (layer, head) not in self._maps:
                self._maps[layer, head] = Pyramid(self.layers[layer].observation, self.layers[layer].item, head)
            self._maps.move_to_end((layer, head))
            while len(self._maps) > 1 and sum(map.bytes for map in self._maps.values()) > _MAX_MAP_BYTES:
                self._maps.popitem(last=False)
            return self._maps[layer, head]

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the compute lock; the coarse levels wait."""
        with self._changed:
            self._waiting += 1
        try:
            with self._compute_lock:
                yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def _compute_coarse_levels(self) -> None:
        """Compute the coarse levels of all cached maps, the most recently used first."""
        while (work := self._next_work()) is not None:
            key, pyramid = work
            try:
                pyramid.advance(self._yield_to_tiles)
            except _ClosedError:
                return
            except (RegardError, RuntimeError, MemoryError) as error:
                with self._changed:
                    self._errors[key] = str(error)

    def _next_work(self) -> tuple[tuple[int, int], Pyramid] | None:
        with self._changed:
            while not self._closed:
                for key in reversed(self._maps):
                    if self._maps[key].progress < 1.0 and key not in self._errors:
                        return key, self._maps[key]
                self._changed.wait()
        return None

    def _yield_to_tiles(self) -> None:
        """Wait until no request waits for a tile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._waiting)
            if self._closed:
                raise _ClosedError


class _ClosedError(Exception):
    """The atlas was closed."""


def _tile_bytes(pyramid: Pyramid, level: int, row: int, col: int) -> bytes:
    return pyramid.tile(level, row, col).numpy().astype("<f4").tobytes()


def _type_name(x: object) -> str:
    return type(x).__name__

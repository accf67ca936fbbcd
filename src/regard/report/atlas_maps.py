"""Maps of many heads, each drawn when somebody looks: tiles one at a time, the coarse levels meanwhile."""

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
from regard.report.pyramid import SIDE, Pyramid, levels

__all__ = ["TOKENS", "Atlas", "AtlasLayer", "State"]

TOKENS = 1024
"""Tokens that are given together."""
_TILES = 512  # kept: 128 MiB
_MEMORY = 2**30  # bytes of maps kept beside the one that is looked at


@dataclass(frozen=True)
class AtlasLayer:
    """One layer: what was observed of it, and the texts of its tokens along both sides of the map."""

    name: str
    observation: Observation
    queries: Sequence[str]
    keys: Sequence[str]
    item: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.observation, Observation):
            raise DtypeError(f"AtlasLayer: observation must come from regard.observe. Got {_kind(self.observation)}.")
        items, _, rows, keys = size_of(self.observation)
        for side, tokens, size in (("queries", self.queries, rows), ("keys", self.keys, keys)):
            if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
                raise DtypeError(f"AtlasLayer: {side} must be a list of texts, one a token. Got {_kind(tokens)}.")
            if len(tokens) != size:
                raise ShapeError(
                    f"AtlasLayer: {side} must have one text for each of the {size} {side} observed in {self.name!r}. "
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
    """How far the coarse levels of a map are: the share of the work, the rows that are known, and what went wrong."""

    progress: float
    known: int
    trouble: str = ""


class Atlas:
    """Attention maps of any length to pan and zoom over; `regard.report.atlas.serve` shows them in a browser.

    >>> import torch, regard
    >>> x = torch.zeros(1, 3, 8)
    >>> words = ["a", "small", "map"]
    >>> atlas = Atlas("an example", [AtlasLayer("layer 0", regard.observe(x, x, x), words, words)])
    >>> atlas.meta()["layers"]
    [{'name': 'layer 0', 'heads': 1, 'queries': 3, 'keys': 3, 'base': 4, 'top': 0}]
    >>> len(atlas.tile(0, 0, 0, 0, 0))  # nine weights in float32
    36
    """

    def __init__(self, title: str, layers: Sequence[AtlasLayer]) -> None:
        if not layers or not all(isinstance(layer, AtlasLayer) for layer in layers):
            raise ArgumentError(f"Atlas: layers must be AtlasLayers, at least one. Got {layers!r}.")
        self.title, self.layers = str(title), list(layers)
        self._maps: OrderedDict[tuple[int, int], Pyramid] = OrderedDict()  # the one looked at last at the end
        self._tiles: OrderedDict[tuple[int, ...], bytes] = OrderedDict()
        self._troubles: dict[tuple[int, int], str] = {}
        self._waiting = 0  # tiles that somebody waits for
        self._change = threading.Condition()  # guards all of these
        self._turn = threading.Lock()  # who holds it computes
        self._drawer: threading.Thread | None = None
        self._closed = False

    def meta(self) -> dict[str, Any]:
        """What a page needs to know before it asks for anything."""
        layers = []
        for layer in self.layers:
            rows, keys = len(layer.queries), len(layer.keys)
            base, top = levels(rows, keys)
            layers.append(
                {"name": layer.name, "heads": layer.heads, "queries": rows, "keys": keys, "base": base, "top": top}
            )
        return {"title": self.title, "side": SIDE, "tokens": TOKENS, "layers": layers}

    def tokens(self, layer: int, side: str, block: int) -> list[str]:
        """The texts of 1,024 tokens from 1024·block on, of the `side` "queries" or "keys"."""
        self._check(layer, 0)
        every = self.layers[layer].queries if side == "queries" else self.layers[layer].keys
        if not 0 <= block * TOKENS < len(every):
            raise ArgumentError(f"tokens: block must be from 0 to {(len(every) - 1) // TOKENS}. Got {block}.")
        return list(every[block * TOKENS : (block + 1) * TOKENS])

    def tile(
        self, layer: int, head: int, level: int, row: int, col: int, wanted: Callable[[], bool] = lambda: True
    ) -> bytes:
        """The mean weights of a tile, float32 in little-endian rows; NaN is not yet known.

        Nothing comes back if it is no longer `wanted` when its turn comes, or if the atlas was closed.
        """
        self._check(layer, head)
        key = (layer, head, level, row, col)
        if (kept := self._kept(key)) is not None:
            return kept
        if level >= levels(len(self.layers[layer].queries), len(self.layers[layer].keys))[0]:
            return _bytes(self._map(layer, head), level, row, col)
        with self._my_turn():
            if self._closed or not wanted():
                return b""
            if (kept := self._kept(key)) is not None:
                return kept
            found = _bytes(self._map(layer, head), level, row, col)
        with self._change:
            self._tiles[key] = found
            while len(self._tiles) > _TILES:
                self._tiles.popitem(last=False)
        return found

    def state(self, layer: int, head: int) -> State:
        """How far the coarse levels of a map are; to ask is to want them, and they are computed meanwhile."""
        self._check(layer, head)
        pyramid = self._map(layer, head)
        with self._change:
            trouble = self._troubles.get((layer, head), "")
            if pyramid.progress < 1.0 and self._drawer is None and not self._closed:
                self._drawer = threading.Thread(target=self._draw, name="regard-atlas", daemon=True)
                self._drawer.start()
                atexit.register(self.close)  # Python must not end in the midst of a block
            self._change.notify_all()
        return State(pyramid.progress, pyramid.known, trouble)

    def close(self) -> None:
        """Stop computing; what is under way is waited for, a block or a tile."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._drawer is not None:
            self._drawer.join()
        with self._turn:
            atexit.unregister(self.close)

    def _check(self, layer: int, head: int) -> None:
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(f"atlas: layer must be from 0 to {len(self.layers) - 1}. Got {layer}.")
        heads = self.layers[layer].heads
        if not 0 <= head < heads:
            raise ArgumentError(f"atlas: head must be from 0 to {heads - 1} in layer {layer}. Got {head}.")

    def _kept(self, key: tuple[int, ...]) -> bytes | None:
        with self._change:
            if key in self._tiles:
                self._tiles.move_to_end(key)
            return self._tiles.get(key)

    def _map(self, layer: int, head: int) -> Pyramid:
        """The map of a head, made if need be; the one that nobody looked at for longest makes room."""
        with self._change:
            if (layer, head) not in self._maps:
                self._maps[layer, head] = Pyramid(self.layers[layer].observation, self.layers[layer].item, head)
            self._maps.move_to_end((layer, head))
            while len(self._maps) > 1 and sum(map.bytes for map in self._maps.values()) > _MEMORY:
                self._maps.popitem(last=False)
            return self._maps[layer, head]

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        """Compute alone; the coarse levels wait."""
        with self._change:
            self._waiting += 1
        try:
            with self._turn:
                yield
        finally:
            with self._change:
                self._waiting -= 1
                self._change.notify_all()

    def _draw(self) -> None:
        """Compute the coarse levels of the map looked at last, until all that are kept are known."""
        while (work := self._next_work()) is not None:
            key, pyramid = work
            try:
                pyramid.advance(self._breathe)
            except _ClosedError:
                return
            except (RegardError, RuntimeError, MemoryError) as error:
                with self._change:
                    self._troubles[key] = str(error)

    def _next_work(self) -> tuple[tuple[int, int], Pyramid] | None:
        with self._change:
            while not self._closed:
                for key in reversed(self._maps):
                    if self._maps[key].progress < 1.0 and key not in self._troubles:
                        return key, self._maps[key]
                self._change.wait()
        return None

    def _breathe(self) -> None:
        """Let those go first who wait for a tile."""
        with self._change:
            self._change.wait_for(lambda: self._closed or not self._waiting)
            if self._closed:
                raise _ClosedError


class _ClosedError(Exception):
    """Nobody wants the coarse levels any more."""


def _bytes(pyramid: Pyramid, level: int, row: int, col: int) -> bytes:
    return pyramid.tile(level, row, col).numpy().astype("<f4").tobytes()


def _kind(x: object) -> str:
    return type(x).__name__

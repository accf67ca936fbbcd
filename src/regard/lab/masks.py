"""Every mask: its picture, its density, and the time that it saves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends import Chunked
from ..functional import attention
from ..masks import (
    Mask,
    blocks,
    causal,
    chosen,
    dense,
    documents,
    everything,
    global_tokens,
    packed,
    padding,
    predicate,
    prefix,
    strided,
    window,
)
from ..masks.base import HIDDEN
from .base import Figure, Progress, Row, Study, canvas, counted
from .complexity import one_thread

__all__ = ["MaskSavings", "gallery"]

_BLOCK = 128  # keys per tile in `chunked`
_SPARSE = 1 / 4  # masks that leave at most this share of the tiles must meet the time bound
_PICTURE = 32  # tokens in a picture


@dataclass(frozen=True)
class MaskSavings(Study):
    """A gallery of masks over `length` tokens, each timed against the pass without a mask."""

    name: ClassVar[str] = "masks"
    brief: ClassVar[str] = "Masks save time only where they hide whole tiles"
    claim: ClassVar[str] = (
        "A mask saves the time of the pairs it hides if they fill whole tiles of the matrix: these are never computed. "
        "Scattered hidden pairs are computed with their tile and save nothing, and neither does a pass that writes "
        "−inf into the whole matrix."
    )
    test: ClassVar[str] = (
        "The density of each mask equals the share of pairs counted one by one; and each mask that leaves at most a "
        "quarter of the tiles takes at most two thirds of the time of the full pass. Time is CPU time on one thread, "
        "the shorter of two alternating runs, so that other load on the machine favours neither side."
    )
    caption: ClassVar[str] = (
        "Each square is a mask over 32 tokens (rows attend to columns), filled where a pair is visible, with the share "
        "of visible pairs below. Right: time against that share. On the line, hidden pairs cost nothing; masks far "
        "above it hide scattered pairs."
    )
    least: ClassVar[dict[str, float]] = {"length": 8}

    length: int = 3072
    dim: int = 64
    heads: int = 4  # share the mask, so that computing a tile outweighs finding it
    chunk: int = 256  # rows per tile in `chunked`
    rounds: int = 2
    backend: str = "chunked"  # "reference" computes the whole matrix

    def measure(self, progress: Progress) -> list[Row]:
        """Count the pairs and tiles of each mask, and time it and the full pass in alternation."""
        n = self.length
        q, k, v = torch.randn(3, 1, self.heads, n, self.dim).unbind()
        backend = Chunked(self.chunk) if self.backend == "chunked" else self.backend
        rows: list[Row] = []
        for name, mask in counted(gallery(n).items(), progress):
            with one_thread():
                masked, full = _best_times(
                    partial(attention, q, k, v, mask=mask, backend=backend),
                    partial(attention, q, k, v, backend=backend),
                    self.rounds,
                )
            rows.append(
                {
                    "mask": name,
                    "density": mask.density(n, n),
                    "counted": mask.dense(n, n).sum().item() / n**2,
                    "tiles left": self._tiles_left(mask),
                    "time / full": masked / full,
                }
            )
        return rows

    def _tiles_left(self, mask: Mask) -> float:
        """The share of tiles in which some pair is visible."""
        n = self.length
        return mask.cover(_edges(n, self.chunk), _edges(n, _BLOCK), n, n).ne(HIDDEN).double().mean().item()

    def holds(self, rows: list[Row]) -> bool:
        """The counts agree, and masks that leave few tiles are fast."""
        counted = all(math.isclose(row["density"], row["counted"], rel_tol=1e-9) for row in rows)
        sparse = [row for row in rows if row["tiles left"] <= _SPARSE]
        return counted and bool(sparse) and all(row["time / full"] <= 2 / 3 for row in sparse)

    def draw(self, rows: list[Row]) -> Figure:
        """The gallery, and the times."""
        figure, axis = canvas(11.5, 5.2)
        axis.remove()
        halves: Any = figure.subfigures(1, 2, width_ratios=[3, 2])
        left, right = halves
        squares = left.subplots(4, 4).flatten()
        pictures = gallery(_PICTURE)
        for square, row in zip(squares, rows, strict=True):
            seen = pictures[row["mask"]].dense(_PICTURE, _PICTURE).reshape(_PICTURE, _PICTURE)
            square.imshow(seen.numpy(), cmap="Blues", vmin=-0.25, vmax=1.35, interpolation="nearest")
            square.set(xticks=[], yticks=[])
            square.set_title(row["mask"], fontsize=8.5)
            square.set_xlabel(f"{row['density']:.1%}", fontsize=8.5)
        plot = right.subplots()
        plot.spines[["top", "right"]].set_visible(False)
        plot.grid(alpha=0.25)
        plot.plot([0, 1], [0, 1], "--", color="0.5", label="time = share of pairs")
        few = [row for row in rows if row["tiles left"] <= _SPARSE]
        many = [row for row in rows if row["tiles left"] > _SPARSE]
        for series, marker, label in ((few, "o", "at most a quarter of the tiles left"), (many, "s", "more")):
            plot.plot([row["density"] for row in series], [row["time / full"] for row in series], marker, label=label)
        for row in rows:
            if row["time / full"] > row["density"] + 0.8:
                at = (row["density"], row["time / full"])
                plot.annotate(row["mask"], at, xytext=(6, 4), textcoords="offset points", fontsize=8)
        plot.set(xlabel="share of pairs that are visible", ylabel="time / time of the full pass", ylim=(0, None))
        plot.legend(frameon=False, fontsize="small", loc="lower right")
        return figure


def gallery(n: int) -> dict[str, Mask]:
    """Every mask of `regard.masks`, and three compositions, over n tokens (a multiple of 16).

    >>> print(gallery(16)["window, both sides"].picture(4, 4))
    ██··
    ███·
    ·███
    ··██
    """
    near, ids = max(1, n // 32), torch.arange(n) * 8 // n
    lengths = [n // 2, n // 4, n // 8, n // 8]
    scattered = torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < 0.3
    return {
        "everything": everything(),
        "causal": causal(),
        "padding": padding([n * 5 // 8]),
        "prefix": prefix(n // 4),
        "causal | prefix": causal() | prefix(n // 4),
        "window": window(2 * near),
        "window, both sides": window(near, right=near),
        "window | global": window(near, right=near) | global_tokens([0]),
        "blocks": blocks(n // 8),
        "documents": documents(ids.roll(n // 16)),
        "packed": packed(lengths),
        "packed & causal": packed(lengths) & causal(),
        "strided": strided(4),
        "predicate": predicate(_checkerboard),
        "dense, at random": dense(scattered),
        "chosen": chosen(torch.tensor([[0, 2], [1, -1], [2, 0], [3, 1]]), size=n // 4, rows=n // 4),
    }


def _checkerboard(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i // 2 + j // 2 + 0 * (batch + head)) % 2 == 0


def _edges(n: int, step: int) -> Tensor:
    return torch.tensor([*range(0, n, step), n])


def _best_times(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The shortest CPU time of each of two functions, which run in alternation."""
    best = [math.inf, math.inf]
    for _ in range(rounds):
        for place, work in enumerate((first, second)):
            start = time.thread_time()
            work()
            best[place] = min(best[place], time.thread_time() - start)
    return best[0], best[1]

"""How the softmax is taken block by block, and what that spares: memory, and bytes moved."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..backends import Chunked
from ..functional import attention
from ..softmax import Partial, finish, merge, online, partial, stable
from .base import Row, Study, Tell, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MACHINES", "Online", "peak_bytes"]

MACHINES = {"H200": (989e12, 4.8e12), "A100 80 GB": (312e12, 2.039e12)}
"""FLOP/s in bfloat16 and bytes/s of device memory, as the maker's data sheets state them."""

_WAYS = ("matrix", "chunked", "fused")
_READS = ("for each block of queries", "once")
_MiB = 2**20


@dataclass(frozen=True)
class Online(Study):
    """The running state of a row, the peak memory of three ways to attend, and the bytes that a tiled pass asks for."""

    name: ClassVar[str] = "online"
    claim: ClassVar[str] = (
        "With a running maximum, denominator and numerator, keys can be folded in block by block and forgotten, and "
        "the result is that of the whole softmax. So exact attention takes memory linear in the length, not quadratic; "
        "and since a tiled pass reads K and V once for each block of queries, not once, the number of rows in such a "
        "block decides whether memory or arithmetic is what it waits for."
    )
    test: ClassVar[str] = (
        "Block by block and whole differ by less than 1e-12 in float64, for every length. Over the longer half of the "
        "lengths, the measured peak grows with a power of n above 1.8 for the matrix and below 1.2 for chunked and "
        "for the way that is claimed linear. The bytes counted are those of the claimed reads, exactly; the matrix "
        "stays below the machine's ridge, and the tiled pass crosses it within a factor of 2 of ridge · bytes / 2 rows."
    )
    caption: ClassVar[str] = (
        "Left: one row, block by block: whenever the maximum rises, what was summed before is scaled down. Middle: "
        "measured peak of memory above the inputs. Right: FLOP for each byte that is asked of device memory, in "
        "bfloat16; above a machine's ridge arithmetic is the bound, below it memory (caches, which neighbouring blocks "
        "share, lift a real kernel above its line)."
    )
    fewest: ClassVar[dict[str, int]] = {"lengths": 2}
    among: ClassVar[dict[str, Collection[str]]] = {"machine": MACHINES, "linear": _WAYS, "reads": _READS}

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    dim: int = 64
    block: int = 256  # keys that are folded in together
    chunk: int = 128  # rows that `chunked` has in flight
    rows: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512, 1024)  # in a block of queries
    keys: int = 8192  # that the tiled pass reads
    machine: str = "H200"
    rescaled: bool = True  # whether what was summed is scaled down when the maximum rises
    linear: str = "fused"  # the way whose memory is claimed to be linear
    reads: str = "for each block of queries"  # how often K and V are read; or "once"

    def measure(self, tell: Tell) -> list[Row]:
        """Trace a row, compare and weigh every length, and count the bytes of every block size."""
        found = self._traced()
        for step, n in enumerate(self.lengths):
            found.append({"n": n, "off from whole": self._difference(n), **self._peaks(n)})
            tell(0.7 * (step + 1) / len(self.lengths))
        for step, rows in enumerate(self.rows):
            found.append(self._moved(rows))
            tell(0.7 + 0.3 * (step + 1) / len(self.rows))
        return found

    def _traced(self) -> list[Row]:
        """One row over eight blocks of keys whose logits tend to grow, so that the maximum rises."""
        logits = torch.randn(1, 64, dtype=torch.float64) + torch.linspace(0, 4, 64, dtype=torch.float64)
        values = torch.randn(64, 1, dtype=torch.float64)
        found: list[Row] = []
        state: Partial | None = None
        for number, (s, v) in enumerate(zip(logits.split(8, -1), values.split(8), strict=True), 1):
            block = partial(s, v)
            before, state = state, block if state is None else self._merged(state, block)
            found.append(
                {
                    "block": number,
                    "its max": block.max.item(),
                    "running max": state.max.item(),
                    "past scaled by": 1.0 if before is None else math.exp(before.max.item() - state.max.item()),
                    "denominator": state.denominator.item(),
                    "numerator": state.numerator.item(),
                    "output so far": finish(state).output.item(),
                }
            )
        return found

    def _merged(self, a: Partial, b: Partial) -> Partial:
        if self.rescaled:
            return merge(a, b)
        return Partial(torch.maximum(a.max, b.max), a.denominator + b.denominator, a.numerator + b.numerator)

    def _difference(self, n: int) -> float:
        """How far block by block is from the whole, at most."""
        q, k, v = torch.randn(3, n, self.dim, dtype=torch.float64).unbind()
        logits = q[:64] @ k.T / math.sqrt(self.dim)
        blocks = list(zip(logits.split(self.block, -1), v.split(self.block), strict=True))
        if self.rescaled:
            folded = online(blocks)
        else:
            state = partial(*blocks[0])
            for block in blocks[1:]:
                state = self._merged(state, partial(*block))
            folded = finish(state).output
        return (folded - stable(logits) @ v).abs().max().item()

    def _peaks(self, n: int) -> Row:
        q, k, v = torch.randn(3, 1, 1, n, self.dim).unbind()
        ways: dict[str, Any] = dict(zip(_WAYS, ("reference", Chunked(self.chunk), "sdpa"), strict=True))
        return {
            f"{way}, MiB": peak_bytes(functools.partial(attention, q, k, v, backend=backend)) / _MiB
            for way, backend in ways.items()
        }

    def _moved(self, rows: int) -> Row:
        """What a tiled pass over four blocks of queries asks of device memory, and the pass over the matrix."""
        d, m, blocks = self.dim, self.keys, 4
        q = torch.randn(blocks * rows, d, dtype=torch.bfloat16)
        k, v = torch.randn(2, m, d, dtype=torch.bfloat16).unbind()
        tiled = _Traffic()
        _tiled(q, k, v, rows, self.block, tiled)
        times = 1 if self.reads == "once" else blocks
        matrix = _Traffic()
        _whole(q[:rows], k, v, matrix)
        flop = 4 * m * d * rows  # of a block: two for each pair and dimension, in the scores and in the output
        return {
            "query rows": rows,
            "moved, MiB": tiled.bytes / _MiB,
            "as claimed, MiB": q.element_size() * (2 * q.numel() + times * 2 * k.numel()) / _MiB,
            "tiled, FLOP/byte": blocks * flop / tiled.bytes,
            "matrix, FLOP/byte": flop / matrix.bytes,
            "tiled waits for": "arithmetic" if blocks * flop / tiled.bytes >= self.ridge else "memory",
        }

    @property
    def ridge(self) -> float:
        """How many FLOP the machine does in the time in which it moves a byte."""
        flops, bandwidth = MACHINES[self.machine]
        return flops / bandwidth

    def holds(self, rows: list[Row]) -> bool:
        """Equal, linear, and bound by what was claimed."""
        lengths, moved = [row for row in rows if "n" in row], [row for row in rows if "query rows" in row]
        power = {way: _power(lengths, f"{way}, MiB") for way in ("matrix", "chunked", "fused")}
        equal = all(row["off from whole"] < 1e-12 for row in lengths)
        linear = power["matrix"] > 1.8 and power["chunked"] < 1.2 and power[self.linear] < 1.2
        as_claimed = all(row["moved, MiB"] == row["as claimed, MiB"] for row in moved)
        below = all(row["matrix, FLOP/byte"] < self.ridge for row in moved)
        return equal and linear and as_claimed and below and self._crosses(moved)

    def _crosses(self, moved: list[Row]) -> bool:
        expected = self.ridge * torch.bfloat16.itemsize / 2
        return all(
            (row["tiled waits for"] == "arithmetic") == (row["query rows"] > expected)
            for row in moved
            if not 0.5 < row["query rows"] / expected < 2
        )

    def draw(self, rows: list[Row]) -> Figure:
        """The state of a row, the memory and the intensity."""
        figure, (left, middle, right) = canvas(11.5, 3.8, columns=3)
        trace = [row for row in rows if "block" in row]
        blocks = [row["block"] for row in trace]
        left.step(blocks, [row["running max"] for row in trace], where="mid", label="running max")
        left.plot(blocks, [row["its max"] for row in trace], "o", color="C0", alpha=0.5, label="max of the block")
        left.plot(blocks, [row["denominator"] for row in trace], "s-", color="C1", label="denominator")
        left.plot(blocks, [row["output so far"] for row in trace], "^-", color="C2", label="output so far")
        left.set(xlabel="block of keys")
        lengths = [row for row in rows if "n" in row]
        for way, marker in (("matrix", "o"), ("chunked", "s"), ("fused", "^")):
            label = f"{way}: n^{_power(lengths, f'{way}, MiB'):.1f}"
            middle.loglog(
                [row["n"] for row in lengths], [row[f"{way}, MiB"] for row in lengths], marker=marker, label=label
            )
        middle.set(xlabel="n", ylabel="peak memory, MiB", xticks=[row["n"] for row in lengths])
        middle.xaxis.set_major_formatter("{x:.0f}")
        middle.minorticks_off()
        moved = [row for row in rows if "query rows" in row]
        for way, marker in (("matrix", "o"), ("tiled", "s")):
            counts = [row[f"{way}, FLOP/byte"] for row in moved]
            color = {"matrix": "C0", "tiled": "C1"}[way]
            right.loglog([row["query rows"] for row in moved], counts, marker=marker, color=color, label=way)
        for machine, (flops, bandwidth) in MACHINES.items():
            style = "--" if machine == self.machine else ":"
            right.axhline(flops / bandwidth, color="0.5", linestyle=style, label=f"ridge of {machine}")
        right.set(xlabel="rows in a block of queries", ylabel="FLOP / byte")
        for axis in (left, middle, right):
            axis.legend(frameon=False, fontsize="small")
        return figure


class _Traffic:
    """Device memory that counts the bytes asked of it."""

    def __init__(self) -> None:
        self.bytes = 0

    def load(self, x: Tensor) -> Tensor:
        self.bytes += x.numel() * x.element_size()
        return x.float()

    def store(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        self.bytes += x.numel() * dtype.itemsize
        return x.to(dtype)


def _tiled(q: Tensor, k: Tensor, v: Tensor, rows: int, block: int, traffic: _Traffic) -> Tensor:
    """Attend as a tiled kernel does: a block of queries stays, all of K and V pass by, the output is written once."""
    outputs = []
    for part in q.split(rows):
        own = traffic.load(part) / math.sqrt(q.shape[-1])
        tiles = zip(k.split(block), v.split(block), strict=True)
        folded = online((own @ traffic.load(keys).T, traffic.load(values)) for keys, values in tiles)
        outputs.append(traffic.store(folded, q.dtype))
    return torch.cat(outputs)


def _whole(q: Tensor, k: Tensor, v: Tensor, traffic: _Traffic) -> Tensor:
    """Attend in three passes with the matrix in device memory: scores, softmax, weighted sum."""
    scores = traffic.store(traffic.load(q) @ traffic.load(k).T / math.sqrt(q.shape[-1]), q.dtype)
    weights = traffic.store(stable(traffic.load(scores)), q.dtype)
    return traffic.store(traffic.load(weights) @ traffic.load(v), q.dtype)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that torch's CPU allocator has out during `work`, above what it had before, in bytes.

    >>> peak_bytes(lambda: torch.zeros(1000) + torch.zeros(1000))
    12000
    """
    with _quietly(), torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        work()
    if profile.kineto_results is None:
        raise RuntimeError("the profiler gave no result")
    changes = [(event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.nbytes()]
    out = peak = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        out += change
        peak = max(peak, out)
    return peak


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the profiler from announcing itself: it reads how much to say when it first runs."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "6")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _power(rows: list[Row], column: str) -> float:
    """The power of n with which a column grows over the longer half of the lengths."""
    start = rows[min(len(rows) // 2, len(rows) - 2)]
    return math.log(rows[-1][column] / start[column]) / math.log(rows[-1]["n"] / start["n"])

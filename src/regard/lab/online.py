"""The online softmax, block by block, and what it saves: memory, and bytes moved."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends import Chunked
from ..functional import attention
from ..softmax import Partial, finish, merge, online, partial, stable
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["MACHINES", "Online", "peak_bytes"]

MACHINES = {"H200": (989e12, 4.8e12), "A100 80 GB": (312e12, 2.039e12)}
"""FLOP/s in bfloat16 and bytes/s of device memory, from the vendor's data sheets."""

_WAYS = ("matrix", "chunked", "fused")
_READS = ("for each block of queries", "once")
_MiB = 2**20


@dataclass(frozen=True)
class Online(Study):
    """The running state of a row, the peak memory of three implementations, and the bytes that a tiled pass loads."""

    name: ClassVar[str] = "online"
    brief: ClassVar[str] = "Softmax block by block: exact attention, linear memory"
    claim: ClassVar[str] = (
        "With a running maximum, denominator and numerator, the softmax can be computed block by block over the keys, "
        "with the same result, and no block has to be kept. So exact attention takes memory linear in the length, not "
        "quadratic; and since a tiled pass reads K and V once per block of queries, the number of rows in a block "
        "decides whether it is bound by memory or by arithmetic."
    )
    test: ClassVar[str] = (
        "The online and the full softmax differ by less than 1e-12 in float64, for every length. Over the longer half "
        "of the lengths, the measured peak grows as a power of n above 1.8 for the matrix and below 1.2 for chunked "
        "and for the implementation claimed to be linear. The bytes counted equal those of the claimed reads exactly; "
        "the matrix stays below the machine's ridge, and the tiled pass crosses it within a factor of 2 of ridge · "
        "bytes / 2 rows."
    )
    caption: ClassVar[str] = (
        "Left: one row, block by block: whenever the maximum rises, the sums so far are rescaled. Middle: measured "
        "peak memory beyond the inputs. Right: FLOP per byte loaded from device memory, in bfloat16; above a machine's "
        "ridge a pass is bound by arithmetic, below it by memory (caches shared by neighbouring blocks lift a real "
        "kernel above its line)."
    )
    fewest: ClassVar[dict[str, int]] = {"lengths": 2}
    among: ClassVar[dict[str, Collection[str]]] = {"machine": MACHINES, "linear": _WAYS, "reads": _READS}

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    dim: int = 64
    block: int = 256  # keys per block
    chunk: int = 128  # rows that `chunked` computes at a time
    rows: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512, 1024)  # in a block of queries
    keys: int = 8192  # in the tiled pass
    machine: str = "H200"
    rescaled: bool = True  # whether the sums are rescaled when the maximum rises
    linear: str = "fused"  # the implementation whose memory is claimed to be linear
    reads: str = "for each block of queries"  # how often K and V are read; or "once"

    def measure(self, progress: Progress) -> list[Row]:
        """Trace a row, compare results and memory at every length, and count the bytes for every block size."""
        found = self._trace()
        for n in counted(self.lengths, progress, stop=0.7):
            found.append({"n": n, "off from whole": self._difference(n), **self._peaks(n)})
        return found + [self._traffic_row(rows) for rows in counted(self.rows, progress, start=0.7)]

    def _trace(self) -> list[Row]:
        """The state of one row over eight blocks of keys with growing logits, so that the maximum rises."""
        logits = torch.randn(1, 64, dtype=torch.float64) + torch.linspace(0, 4, 64, dtype=torch.float64)
        values = torch.randn(64, 1, dtype=torch.float64)
        found: list[Row] = []
        state: Partial | None = None
        for number, (s, v) in enumerate(zip(logits.split(8, -1), values.split(8), strict=True), 1):
            block = partial(s, v)
            before, state = state, block if state is None else self._merge(state, block)
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

    def _merge(self, a: Partial, b: Partial) -> Partial:
        if self.rescaled:
            return merge(a, b)
        return Partial(torch.maximum(a.max, b.max), a.denominator + b.denominator, a.numerator + b.numerator)

    def _difference(self, n: int) -> float:
        """The largest difference between the online and the full softmax."""
        q, k, v = torch.randn(3, n, self.dim, dtype=torch.float64).unbind()
        logits = q[:64] @ k.T / math.sqrt(self.dim)
        blocks = list(zip(logits.split(self.block, -1), v.split(self.block), strict=True))
        if self.rescaled:
            folded = online(blocks)
        else:
            state = partial(*blocks[0])
            for block in blocks[1:]:
                state = self._merge(state, partial(*block))
            folded = finish(state).output
        return (folded - stable(logits) @ v).abs().max().item()

    def _peaks(self, n: int) -> Row:
        q, k, v = torch.randn(3, 1, 1, n, self.dim).unbind()
        ways: dict[str, Any] = dict(zip(_WAYS, ("reference", Chunked(self.chunk), "sdpa"), strict=True))
        return {
            f"{way}, MiB": peak_bytes(functools.partial(attention, q, k, v, backend=backend)) / _MiB
            for way, backend in ways.items()
        }

    def _traffic_row(self, rows: int) -> Row:
        """The device memory traffic of a tiled pass over four blocks of queries, and of the pass over the matrix."""
        d, m, blocks = self.dim, self.keys, 4
        q = torch.randn(blocks * rows, d, dtype=torch.bfloat16)
        k, v = torch.randn(2, m, d, dtype=torch.bfloat16).unbind()
        tiled = _Traffic()
        _attend_tiled(q, k, v, rows, self.block, tiled)
        times = 1 if self.reads == "once" else blocks
        matrix = _Traffic()
        _attend_with_matrix(q[:rows], k, v, matrix)
        flop = 4 * m * d * rows  # per block: two per pair and dimension, for the scores and for the output
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
        """How many FLOP the machine does in the time it takes to move a byte."""
        flops, bandwidth = MACHINES[self.machine]
        return flops / bandwidth

    def holds(self, rows: list[Row]) -> bool:
        """Results equal, memory linear, and the bound as claimed."""
        lengths, moved = [row for row in rows if "n" in row], [row for row in rows if "query rows" in row]
        power = {way: _growth_exponent(lengths, f"{way}, MiB") for way in ("matrix", "chunked", "fused")}
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
        """The state of a row, the peak memory, and the arithmetic intensity."""
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
            label = f"{way}: n^{_growth_exponent(lengths, f'{way}, MiB'):.1f}"
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
    """Device memory that counts the bytes loaded and stored."""

    def __init__(self) -> None:
        self.bytes = 0

    def load(self, x: Tensor) -> Tensor:
        self.bytes += x.numel() * x.element_size()
        return x.float()

    def store(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        self.bytes += x.numel() * dtype.itemsize
        return x.to(dtype)


def _attend_tiled(q: Tensor, k: Tensor, v: Tensor, rows: int, block: int, traffic: _Traffic) -> Tensor:
    """Attend as a tiled kernel does: per block of queries, load all of K and V, and store the output once."""
    outputs = []
    for part in q.split(rows):
        own = traffic.load(part) / math.sqrt(q.shape[-1])
        tiles = zip(k.split(block), v.split(block), strict=True)
        folded = online((own @ traffic.load(keys).T, traffic.load(values)) for keys, values in tiles)
        outputs.append(traffic.store(folded, q.dtype))
    return torch.cat(outputs)


def _attend_with_matrix(q: Tensor, k: Tensor, v: Tensor, traffic: _Traffic) -> Tensor:
    """Attend in three passes with the matrix in device memory: scores, softmax, weighted sum."""
    scores = traffic.store(traffic.load(q) @ traffic.load(k).T / math.sqrt(q.shape[-1]), q.dtype)
    weights = traffic.store(stable(traffic.load(scores)), q.dtype)
    return traffic.store(traffic.load(weights) @ traffic.load(v), q.dtype)


def peak_bytes(work: Callable[[], object]) -> int:
    """The peak memory that torch's CPU allocator hands out during `work`, above what it held before, in bytes.

    >>> peak_bytes(lambda: torch.zeros(1000) + torch.zeros(1000))
    12000
    """
    with _quiet_profiler(), torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        work()
    if profile.kineto_results is None:
        raise RuntimeError("the profiler returned no result")
    changes = [(event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.nbytes()]
    out = peak = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        out += change
        peak = max(peak, out)
    return peak


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Silence the profiler: it reads its log level when it first runs."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "6")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _growth_exponent(rows: list[Row], column: str) -> float:
    """The exponent p with which a column grows as n^p, over the longer half of the lengths."""
    start = rows[min(len(rows) // 2, len(rows) - 2)]
    return math.log(rows[-1][column] / start[column]) / math.log(rows[-1]["n"] / start["n"])

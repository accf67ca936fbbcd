"""What attention over many devices costs: work and bytes of every rank, and a simulated schedule that shows who waits.

The schedule does what `ring` and `heads` do, step by step, in times that follow from devices and links.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..masks import Mask
from ..softmax import arithmetic_dtype
from .cost_model import Move, Work
from .layout import check, counted, pieces, sizes
from .ring_plan import routes
from .traffic import Widths

__all__ = ["H200", "Device", "Links", "Schedule", "Span", "schedule", "tokens_to_hide"]

_COLUMNS, _DRAWN = 64, 8  # of a drawing: columns, and ranks


@dataclass(frozen=True)
class Device:
    """How fast a rank computes: the peak in FLOP/s, and the share of it that attention reaches."""

    name: str
    peak: float
    forward: float
    backward: float

    def speed(self, backward: bool) -> float:
        """FLOP/s of one pass."""
        return self.peak * (self.backward if backward else self.forward)


H200 = Device("H200", 989e12, forward=0.52, backward=0.40)
"""Dense bfloat16; of the peak, less than our kernels reach at head dim 128 and 16,384 tokens (`bench/results`)."""


@dataclass(frozen=True)
class Links:
    """Bytes a second, each way, of a rank: to ranks of its own node, and to all others."""

    inside: float = 450e9
    across: float = 50e9
    node: int = 8

    def near(self, a: int, b: int) -> bool:
        """Whether two ranks are in one node."""
        return a // self.node == b // self.node

    def speed(self, a: int, b: int) -> float:
        """Bytes a second from one rank to another."""
        return self.inside if self.near(a, b) else self.across


class Span(NamedTuple):
    """Something that a rank does from one second to another."""

    start: float
    stop: float


@dataclass(frozen=True)
class Schedule:
    """What every rank does, and when; `print` draws it."""

    title: str
    computes: tuple[tuple[Span, ...], ...]
    """For each rank, when it computes."""
    sends: tuple[tuple[Span, ...], ...]
    """For each rank, when something that it sends is on its way."""
    flops: tuple[float, ...]
    """Floating-point operations of each rank."""
    bytes: tuple[int, ...]
    """Bytes that each rank sends."""
    memory: tuple[int, ...]
    """Bytes of each rank's tensors: inputs, results, and what is on its way."""
    without_traffic: float
    """Seconds that it would take if bytes travelled in no time."""

    @property
    def time(self) -> float:
        """Seconds until the last rank is done."""
        return max((span.stop for some in (*self.computes, *self.sends) for span in some), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds that the traffic adds: 0 where the computing hides it."""
        return max(self.time - self.without_traffic, 0.0)

    @property
    def busy(self) -> float:
        """The share of the time that the ranks compute, on average."""
        spent = sum(span.stop - span.start for some in self.computes for span in some)
        return spent / (len(self.computes) * self.time) if self.time else 1.0

    def __str__(self) -> str:
        work, sent, kept = max(self.flops) / 1e12, max(self.bytes) / 1e9, max(self.memory) / 1e9
        lines = [
            self.title,
            f"a rank computes at most {_number(work)} TFLOP, sends {_number(sent)} GB, holds {_number(kept)} GB",
            f"{_seconds(self.time)}, {_seconds(self.exposed)} of it due to traffic; ranks compute {self.busy:.0%}",
            "",
        ]
        for rank in range(min(len(self.computes), _DRAWN)):
            lines.append(f"rank {rank:<2} computes {_drawn(self.computes[rank], self.time, ' ▌█')}".rstrip())
            lines.append(f"        sends    {_drawn(self.sends[rank], self.time, ' -=')}".rstrip())
        if len(self.computes) > _DRAWN:
            lines.append(f"… and {len(self.computes) - _DRAWN} more")
        return "\n".join(lines)


def schedule(
    length: int,
    ranks: int,
    *,
    batch: int = 1,
    heads: int = 32,
    kv_heads: int | None = None,
    dim: int = 128,
    value_dim: int | None = None,
    mask: Mask | None = None,
    layout: str = "contiguous",
    strategy: str = "ring",
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    device: Device = H200,
    links: Links | None = None,
) -> Schedule:
    """Simulate one pass of attention, forward or backward, over a sequence that `shard` has cut.

    >>> import regard
    >>> found = schedule(1_000_000, 8, kv_heads=8, mask=regard.causal(), layout="zigzag")
    >>> round(found.time, 1), round(found.busy, 2)
    (2.0, 1.0)
    """
    who = "schedule"
    check(who, layout)
    kv_heads, value_dim, links = kv_heads or heads, value_dim or dim, links or Links()
    _positive(who, length=length, ranks=ranks, batch=batch, heads=heads, kv_heads=kv_heads, dim=dim)
    if strategy not in ("ring", "heads"):
        raise ArgumentError(f"{who}: strategy must be 'ring' or 'heads'. Got {strategy!r}.")
    if strategy == "heads" and (heads % ranks or kv_heads % ranks):
        raise ArgumentError(f"{who}: {heads} and {kv_heads} heads do not both divide by {ranks} ranks.")
    held = pieces(who, "tokens", sizes(length, ranks, layout), layout)
    found = routes(held, held, mask, length, length)
    a_pair = 2 * batch * heads * (3 * dim + 2 * value_dim if backward else dim + value_dim)
    w = Widths.of(batch, heads, kv_heads, dim, value_dim, dtype)
    exact = batch * heads * arithmetic_dtype(dtype).itemsize
    work = Work(found, mask, length, a_pair, w, dim * exact, 4 * exact, backward)
    simulate = _ring if strategy == "ring" else _heads
    speed = device.speed(backward)
    computes, sends = simulate(work, speed, links)
    free, _ = simulate(work, speed, replace(links, inside=float("inf"), across=float("inf")))
    how = f"{strategy}, {layout}" if strategy == "ring" else strategy
    pass_ = "backward" if backward else "forward"
    return Schedule(
        f"{length:,} tokens over {ranks} × {device.name}, {how}, {pass_}, mask={mask}",
        tuple(map(tuple, computes)),
        tuple(map(tuple, sends)),
        tuple(work.flops(strategy)),
        tuple(work.bytes(strategy)),
        tuple(work.memory(strategy)),
        max((span.stop for some in free for span in some), default=0.0),
    )


def tokens_to_hide(
    *,
    heads: int = 32,
    kv_heads: int | None = None,
    dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    backward: bool = False,
    device: Device = H200,
    bandwidth: float = 450e9,
) -> float:
    """Say how many tokens a rank must hold for the ring to hide its traffic: then a step computes as long as it sends.

    A step's work grows with the square of the tokens and its bytes with the tokens, so that any link will do for long
    enough sequences. Causal is meant in the zigzag layout: a step has half of its pairs, and in some a rank sends three
    of the pieces of which it holds two.

    >>> round(tokens_to_hide()), round(tokens_to_hide(kv_heads=8, causal=True, bandwidth=50e9))
    (1143, 7714)
    """
    kv_heads, value_dim = kv_heads or heads, value_dim or dim
    a_pair = 2 * heads * (3 * dim + 2 * value_dim if backward else dim + value_dim) / (2 if causal else 1)
    w = Widths.of(1, heads, kv_heads, dim, value_dim, dtype)
    a_token = (w.key + w.value) * (1.5 if causal else 1) + (w.back if backward else 0)
    return a_token * device.speed(backward) / (a_pair * bandwidth)


@dataclass
class _Wires:
    """The links of all ranks: what leaves together shares them, and what leaves later waits until that is through."""

    links: Links
    free: dict[tuple[int, bool, bool], float] = field(default_factory=dict)  # rank, near, whether it goes out
    spans: dict[int, list[Span]] = field(default_factory=dict)

    def carry(self, moves: Iterable[Move], ready: list[float]) -> list[float]:
        """Send what may leave once both ends are ready; give when each rank has sent and received all of it."""
        ends = [(self._ends(source, to), size) for source, to, size in moves]
        loads: dict[tuple[int, bool, bool], int] = {}
        for pair, size in ends:
            for end in pair:
                loads[end] = loads.get(end, 0) + size
        done, through = list(ready), dict(self.free)
        for (out, into), _ in ends:
            source, to = out[0], into[0]
            start = max(ready[source], ready[to], self.free.get(out, 0.0), self.free.get(into, 0.0))
            stop = start + max(loads[out], loads[into]) / self.links.speed(source, to)
            self.spans.setdefault(source, []).append(Span(start, stop))
            for rank, end in ((source, out), (to, into)):
                done[rank], through[end] = max(done[rank], stop), max(through.get(end, 0.0), stop)
        self.free.update(through)
        return done

    def _ends(self, source: int, to: int) -> tuple[tuple[int, bool, bool], tuple[int, bool, bool]]:
        near = self.links.near(source, to)
        return (source, near, True), (to, near, False)


Lanes = list[list[Span]]


def _ring(work: Work, speed: float, links: Links) -> tuple[Lanes, Lanes]:
    """At each step a rank computes with what is there, while what it looks at next is on its way."""
    count = work.ranks
    out, back = _Wires(links), _Wires(links)
    out.free = back.free  # they share the links
    begins, settled = [0.0] * count, [0.0] * count
    computes: Lanes = [[] for _ in range(count)]
    for step in range(count):
        arrived = out.carry(work.out(step + 1), begins) if step + 1 < count else begins
        ends = [begin + work.step(rank, step) / speed for rank, begin in enumerate(begins)]
        for rank, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            computes[rank].append(Span(begin, end))
        told = [max(pair) for pair in zip(ends, settled, strict=True)]  # what was sent home before has arrived
        settled = back.carry(work.home(step), told)
        begins = [max(pair) for pair in zip(told, arrived, strict=True)]
    sends = [sorted(out.spans.get(rank, []) + back.spans.get(rank, [])) for rank in range(count)]
    return computes, sends


def _heads(work: Work, speed: float, links: Links) -> tuple[Lanes, Lanes]:
    """Everything goes to the rank of its heads, is computed there, and goes back: nothing overlaps."""
    count, w = work.ranks, work.widths
    tokens = counted(work.routes.rows)
    there = [w.output] * count if work.backward else [w.query + w.key + w.value] * count
    back = [w.query + w.key + w.value] * count if work.backward else [w.output] * count
    wires = _Wires(links)
    moves = [(a, b) for a in range(count) for b in range(count) if a != b]
    met = [max(wires.carry(((a, b, tokens[a] * there[a] // count) for a, b in moves), [0.0] * count))] * count
    ends = [start + flops / speed for start, flops in zip(met, work.flops("heads"), strict=True)]
    wires.carry(((a, b, tokens[b] * back[a] // count) for a, b in moves), [max(ends)] * count)
    return [[Span(*pair)] for pair in zip(met, ends, strict=True)], [wires.spans.get(r, []) for r in range(count)]


def _drawn(spans: Iterable[Span], time: float, levels: str) -> str:
    """A line of columns, by how much of each something is done: nothing, less than half, more."""
    share = [0.0] * _COLUMNS
    scale = _COLUMNS / time if time else 0.0
    for start, stop in spans:
        for column in range(int(start * scale), min(int(stop * scale) + 1, _COLUMNS)):
            share[column] += max(min(stop * scale, column + 1) - max(start * scale, column), 0.0)
    return "".join(levels[(part > 1e-6) + (part >= 0.5)] for part in share)


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _seconds(time: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if time >= size:
            return f"{time / size:.3g} {unit}"
    return "0 s" if time == 0 else f"{time / 1e-9:.3g} ns"


def _positive(who: str, **given: int) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{who}: {name} must be a whole number above 0. Got {value!r}.")

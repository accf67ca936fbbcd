"""What attention over many devices costs: work and bytes of every rank, and a simulated schedule that shows who waits.

The simulation follows the strategies "ring" and "heads" step by step, with times that follow from devices and links.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..masks import Mask
from ..softmax import arithmetic_dtype
from .cost_model import CostModel, Message
from .layout import check_layout, shard_sizes, sharding_of, tokens_per_rank
from .ring_plan import plan_ring
from .traffic import TokenBytes

__all__ = ["H200", "Device", "Links", "Schedule", "Span", "schedule", "tokens_to_hide"]

_COLUMNS, _DRAWN_RANKS = 64, 8  # of a drawing


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
"""Dense bfloat16; the shares are below what our kernels reach at head dim 128 and 16,384 tokens (`bench/results`)."""


@dataclass(frozen=True)
class Links:
    """Bytes per second, each way, between a rank and the ranks of its own node, and between it and all others."""

    inside: float = 450e9
    across: float = 50e9
    node: int = 8

    def near(self, a: int, b: int) -> bool:
        """Whether two ranks are in one node."""
        return a // self.node == b // self.node

    def speed(self, a: int, b: int) -> float:
        """Bytes per second from one rank to another."""
        return self.inside if self.near(a, b) else self.across


class Span(NamedTuple):
    """When a rank does something, in seconds."""

    start: float
    stop: float


@dataclass(frozen=True)
class Schedule:
    """What every rank does, and when; `print` draws it."""

    title: str
    computes: tuple[tuple[Span, ...], ...]
    """For each rank, when it computes."""
    sends: tuple[tuple[Span, ...], ...]
    """For each rank, when something that it sends is in transit."""
    flops: tuple[float, ...]
    """Floating-point operations of each rank."""
    bytes: tuple[int, ...]
    """Bytes that each rank sends."""
    memory: tuple[int, ...]
    """Bytes of each rank's tensors: inputs, results, and what is in transit."""
    without_traffic: float
    """Seconds that it would take with infinitely fast links."""

    @property
    def time(self) -> float:
        """Seconds until the last rank is done."""
        return max((span.stop for spans in (*self.computes, *self.sends) for span in spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds that the traffic adds: 0 if the computation hides it."""
        return max(self.time - self.without_traffic, 0.0)

    @property
    def busy(self) -> float:
        """The share of the time that the ranks compute, on average."""
        spent = sum(span.stop - span.start for spans in self.computes for span in spans)
        return spent / (len(self.computes) * self.time) if self.time else 1.0

    def __str__(self) -> str:
        work, sent, held = max(self.flops) / 1e12, max(self.bytes) / 1e9, max(self.memory) / 1e9
        lines = [
            self.title,
            f"a rank computes at most {_number(work)} TFLOP, sends {_number(sent)} GB, holds {_number(held)} GB",
            f"{_seconds(self.time)}, {_seconds(self.exposed)} of it due to traffic; ranks compute {self.busy:.0%}",
            "",
        ]
        for rank in range(min(len(self.computes), _DRAWN_RANKS)):
            lines.append(f"rank {rank:<2} computes {_draw(self.computes[rank], self.time, ' ▌█')}".rstrip())
            lines.append(f"        sends    {_draw(self.sends[rank], self.time, ' -=')}".rstrip())
        if len(self.computes) > _DRAWN_RANKS:
            lines.append(f"… and {len(self.computes) - _DRAWN_RANKS} more")
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
    check_layout(who, layout)
    kv_heads, value_dim, links = kv_heads or heads, value_dim or dim, links or Links()
    _check_positive(who, length=length, ranks=ranks, batch=batch, heads=heads, kv_heads=kv_heads, dim=dim)
    if strategy not in ("ring", "heads"):
        raise ArgumentError(f"{who}: strategy must be 'ring' or 'heads'. Got {strategy!r}.")
    if strategy == "heads" and (heads % ranks or kv_heads % ranks):
        raise ArgumentError(f"{who}: {heads} and {kv_heads} heads are not both divisible by {ranks} ranks.")
    sharding = sharding_of(who, "tokens", shard_sizes(length, ranks, layout), layout)
    exact = batch * heads * arithmetic_dtype(dtype).itemsize
    model = CostModel(
        plan=plan_ring(sharding, sharding, mask, length, length),
        mask=mask,
        length=length,
        flops_per_pair=2 * batch * heads * (3 * dim + 2 * value_dim if backward else dim + value_dim),
        per_token=TokenBytes.of(batch, heads, kv_heads, dim, value_dim, dtype),
        query_gradient=dim * exact,
        statistics=4 * exact,
        backward=backward,
    )
    simulate = _simulate_ring if strategy == "ring" else _simulate_heads
    speed = device.speed(backward)
    computes, sends = simulate(model, speed, links)
    unhindered, _ = simulate(model, speed, replace(links, inside=float("inf"), across=float("inf")))
    how = f"{strategy}, {layout}" if strategy == "ring" else strategy
    pass_ = "backward" if backward else "forward"
    return Schedule(
        title=f"{length:,} tokens over {ranks} × {device.name}, {how}, {pass_}, mask={mask}",
        computes=tuple(map(tuple, computes)),
        sends=tuple(map(tuple, sends)),
        flops=tuple(model.flops(strategy)),
        bytes=tuple(model.bytes(strategy)),
        memory=tuple(model.memory(strategy)),
        without_traffic=max((span.stop for spans in unhindered for span in spans), default=0.0),
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

    A step's work grows with the square of the tokens and its bytes with the tokens, so any link will do if the sequence
    is long enough. `causal` assumes the zigzag layout: a step has half of the pairs, and in some steps a rank that
    holds two ranges sends three.

    >>> round(tokens_to_hide()), round(tokens_to_hide(kv_heads=8, causal=True, bandwidth=50e9))
    (1143, 7714)
    """
    kv_heads, value_dim = kv_heads or heads, value_dim or dim
    flops_per_pair = 2 * heads * (3 * dim + 2 * value_dim if backward else dim + value_dim) / (2 if causal else 1)
    w = TokenBytes.of(1, heads, kv_heads, dim, value_dim, dtype)
    bytes_per_token = (w.key + w.value) * (1.5 if causal else 1) + (w.kv_gradients if backward else 0)
    return bytes_per_token * device.speed(backward) / (flops_per_pair * bandwidth)


class _Port(NamedTuple):
    """One end of a link."""

    rank: int
    near: bool  # whether it leads to ranks of the same node
    outgoing: bool


@dataclass
class _Network:
    """The links of all ranks: messages that leave together share them, and later ones wait until these are through."""

    links: Links
    free_at: dict[_Port, float] = field(default_factory=dict)
    sends: dict[int, list[Span]] = field(default_factory=dict)

    def carry(self, messages: Iterable[Message], ready: list[float]) -> list[float]:
        """Send messages once both ends are ready; return when each rank has sent and received all of its messages."""
        routed = [(*self._ports(message), message.size) for message in messages]
        loads: dict[_Port, int] = {}
        for outgoing, incoming, size in routed:
            for port in (outgoing, incoming):
                loads[port] = loads.get(port, 0) + size
        done, free_at = list(ready), dict(self.free_at)
        for outgoing, incoming, _ in routed:
            source, target = outgoing.rank, incoming.rank
            start = max(ready[source], ready[target], self.free_at.get(outgoing, 0.0), self.free_at.get(incoming, 0.0))
            stop = start + max(loads[outgoing], loads[incoming]) / self.links.speed(source, target)
            self.sends.setdefault(source, []).append(Span(start, stop))
            for port in (outgoing, incoming):
                done[port.rank], free_at[port] = max(done[port.rank], stop), max(free_at.get(port, 0.0), stop)
        self.free_at.update(free_at)
        return done

    def _ports(self, message: Message) -> tuple[_Port, _Port]:
        near = self.links.near(message.source, message.target)
        return _Port(message.source, near, outgoing=True), _Port(message.target, near, outgoing=False)


Lanes = list[list[Span]]


def _simulate_ring(model: CostModel, speed: float, links: Links) -> tuple[Lanes, Lanes]:
    """In each step a rank computes with the keys it has, while those for the next step are in transit."""
    count = model.ranks
    key_network, gradient_network = _Network(links), _Network(links)
    key_network.free_at = gradient_network.free_at  # they share the links
    begins, gradients_arrived = [0.0] * count, [0.0] * count
    computes: Lanes = [[] for _ in range(count)]
    for step in range(count):
        keys_arrived = key_network.carry(model.key_messages(step + 1), begins) if step + 1 < count else begins
        ends = [begin + model.step_flops(rank, step) / speed for rank, begin in enumerate(begins)]
        for rank, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            computes[rank].append(Span(begin, end))
        # The gradients of the step before must have arrived.
        done = [max(times) for times in zip(ends, gradients_arrived, strict=True)]
        gradients_arrived = gradient_network.carry(model.gradient_messages(step), done)
        begins = [max(times) for times in zip(done, keys_arrived, strict=True)]
    sends = [sorted(key_network.sends.get(rank, []) + gradient_network.sends.get(rank, [])) for rank in range(count)]
    return computes, sends


def _simulate_heads(model: CostModel, speed: float, links: Links) -> tuple[Lanes, Lanes]:
    """Everything is sent to the ranks of its heads, computed there, and sent back: nothing overlaps."""
    count, w = model.ranks, model.per_token
    tokens = tokens_per_rank(model.plan.rows)
    inputs, outputs = w.query + w.key + w.value, w.output
    there, back = (outputs, inputs) if model.backward else (inputs, outputs)
    network = _Network(links)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    arrived = max(network.carry((Message(a, b, tokens[a] * there // count) for a, b in pairs), [0.0] * count))
    ends = [arrived + flops / speed for flops in model.flops("heads")]
    network.carry((Message(a, b, tokens[b] * back // count) for a, b in pairs), [max(ends)] * count)
    return [[Span(arrived, end)] for end in ends], [network.sends.get(rank, []) for rank in range(count)]


def _draw(spans: Iterable[Span], time: float, levels: str) -> str:
    """A line of columns: for each, whether the spans cover nothing, less than half, or more of it."""
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


def _check_positive(who: str, **given: int) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{who}: {name} must be a whole number above 0. Got {value!r}.")

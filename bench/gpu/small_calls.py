"""How long does a small call keep the host, beside torch's function and compiled FlexAttention?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from _device import DEVICE, Row, at_most, each, over, random, report, start, verdict, wall
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard

SHAPE = (2, 16, 512, 64)
LEFT, CAP = 128, 30.0
CALLS, TURNS = 50, 15  # calls in one measurement, and how often each peer has its turn
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    q, k, v = (random(*SHAPE) for _ in range(3))
    lengths = torch.tensor([500, 300], device=DEVICE)
    masked, padded = regard.window(LEFT), regard.padding(lengths)
    flex = torch.compile(flex_attention)
    window = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j <= LEFT), None, None, 512, 512, device=DEVICE)
    padding = create_block_mask(lambda b, h, i, j: j < lengths[b], 2, None, 512, 512, device=DEVICE)
    sink = torch.zeros(16, device=DEVICE)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return CAP * torch.tanh(score / CAP)

    def ours(**options: object) -> Call:
        return lambda q, k, v: regard.attention(q, k, v, **options)

    def seen(**options: object) -> Call:
        return lambda q, k, v: regard.observe(q, k, v, **options).output

    cases: dict[str, tuple[Mapping[str, Call], float, float]] = {
        "plain": ({"regard": ours(), "torch": F.scaled_dot_product_attention}, 1.3, 1.5),
        f"window {LEFT}": (
            {"regard": ours(mask=masked), "FlexAttention": lambda q, k, v: flex(q, k, v, block_mask=window)},
            1.0,
            0.8,
        ),
        "padding": (
            {"regard": ours(mask=padded), "FlexAttention": lambda q, k, v: flex(q, k, v, block_mask=padding)},
            1.0,
            0.8,
        ),
        f"window {LEFT} and softcap": (
            {
                "regard": ours(mask=masked, softcap=CAP),
                "FlexAttention": lambda q, k, v: flex(q, k, v, capped, block_mask=window),
            },
            1.0,
            0.8,
        ),
        f"window {LEFT}, observed / not": (
            {"regard": seen(mask=masked), "not observed": ours(mask=masked)},
            1.15,
            1.15,
        ),
        f"window {LEFT} and sink": ({"regard": ours(mask=masked, sink=sink)}, 0.0, 0.0),
    }
    rows = each({name: lambda name=name: row(name, (q, k, v), *cases[name]) for name in cases})
    note = (
        f"Wall-clock µs per call, {CALLS} calls after one another and then a wait for the device, peers in turns: the "
        f"median of {TURNS}. bf16, (batch, heads, tokens, dim) {SHAPE}, so the host decides. Masks are kept."
    )
    report("small_calls", "Small calls: µs of wall-clock time per call", rows, note)


def row(name: str, x: tuple[Tensor, ...], calls: Mapping[str, Call], most: float, most_both: float) -> Row:
    forward = in_turns({peer: lambda call=call: call(*x) for peer, call in calls.items()})
    both = in_turns({peer: with_backward(call, x) for peer, call in calls.items()})
    (ours, *peers) = calls
    peer = peers[0] if peers else None
    ratios = [over(ms[ours], ms[peer]) if peer else None for ms in (forward, both)]
    return {
        "case": name,
        "peer": peer,
        "regard": forward[ours],
        "the peer": forward[peer] if peer else None,
        "ratio": ratios[0],
        "with backward": both[ours],
        "the peer's": both[peer] if peer else None,
        "its ratio": ratios[1],
        "must": f"≤ {most} and {most_both}" if peer else None,
        "holds": verdict({"forward": at_most(ratios[0], most), "with backward": at_most(ratios[1], most_both)})
        if peer
        else None,
    }


def with_backward(call: Call, x: tuple[Tensor, ...]) -> Callable[[], object]:
    leaves = [t.clone().requires_grad_() for t in x]
    upstream = torch.randn_like(x[0])
    return lambda: torch.autograd.grad(call(*leaves), leaves, upstream)


def in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median µs of one call."""

    def many(call: Callable[[], object]) -> None:
        for _ in range(CALLS):
            call()

    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-3, TURNS):
        for name, call in calls.items():
            _, ms = wall(lambda call=call: many(call))
            if turn >= 0:
                taken[name].append(ms * 1e3 / CALLS)
    return {name: statistics.median(found) for name, found in taken.items()}


if __name__ == "__main__":
    start(main)

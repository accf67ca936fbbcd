"""How soon does a first call give a result where no kernel is compiled yet, and how soon does the next option?"""

from __future__ import annotations

import json
from functools import partial
from typing import NamedTuple

import torch
from _device import (
    Peer,
    Row,
    at_most,
    attempt,
    in_a_new_process,
    over,
    random,
    report,
    start,
    verdict,
    wall,
)
from _peers import flex
from torch import Tensor

import regard

HEADS, N, LEFT, CAP = 16, 4096, 1000, 30.0
DIMS = (64, 128)
# Of FlexAttention's first call in the same run, at most: our first call, and one with one more option. That is 3.5 and
# 2 s where FlexAttention takes 3.7. Hosts differ by a factor of two, so milliseconds alone say little.
MUST = (0.95, 0.54)
PEERS = ("regard", "FlexAttention")


class Times(NamedTuple):
    """Milliseconds to the output and the gradients of a first call, and of one with a softcap after it."""

    first: float
    option: float


def main() -> None:
    for peer in PEERS:  # the first process of each writes its bytecode
        attempt(peer, partial(in_a_new_process, call(peer, DIMS[0])))
    rows = [row for d in DIMS for row in table(d)]
    note = (
        "Wall-clock milliseconds of a forward and a backward pass, from the call until the device is done, in a new "
        "process with empty caches of compiled kernels, whose tensors are on the device before, and with the bytecode "
        f"of all modules, as after an installation. bf16, one item, {HEADS} heads, n {N:,}, a window of {LEFT:,} keys. "
        "The softcap follows in the same process. FlexAttention is compiled, and its block mask is part of its first "
        "call. All of it is work of the host, and hosts differ by a factor of two: the bounds are shares of "
        "FlexAttention's first call in the same run."
    )
    report("first_calls", "First calls: milliseconds", rows, note)


def call(peer: str, d: int) -> str:
    return f"first_calls.milliseconds({peer!r}, {d})"


def table(d: int) -> list[Row]:
    """A row for the first call, and one for the option."""
    lines = [attempt(call(peer, d), partial(in_a_new_process, call(peer, d))) for peer in PEERS]
    times = [None if line is None else Times(*json.loads(line)) for line in lines]
    rows = []
    for at, case in enumerate((f"a window, d{d}", f"then a softcap, d{d}")):
        ours, flexes = (None if x is None else x[at] for x in times)
        share = over(ours, None if times[1] is None else times[1].first)
        rows.append(
            {
                "case": case,
                "regard": ours,
                "FlexAttention": flexes,
                "Flex / regard": over(flexes, ours),
                "regard / Flex's first": share,
                "must": f"≤ {MUST[at]}",
                "holds": verdict({"share": at_most(share, MUST[at])}),
            }
        )
    return rows


def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (i - j <= LEFT)


def capped(score: Tensor, *_: Tensor) -> Tensor:
    return CAP * torch.tanh(score / CAP)


def milliseconds(peer: str, d: int) -> None:
    """Print the milliseconds of a first call and of one with an option."""
    x = [random(1, HEADS, N, d, grad=True) for _ in range(3)]
    g, times = random(1, HEADS, N, d), []
    for cap in (None, CAP):
        if peer == "regard":
            call = Peer(lambda cap=cap: regard.attention(*x, mask=regard.window(LEFT), softcap=cap))
        else:
            call = flex(*x, before, score=capped if cap else None)
        _, ms = wall(lambda call=call: torch.autograd.grad(call(), x, g))
        times.append(ms)
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    start(main)

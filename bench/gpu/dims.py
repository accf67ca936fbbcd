"""How fast are head dims other than 64, 128 and 256: 96, DeepSeek's 192 with values of 128, and 512?"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from _device import (
    Bars,
    Peer,
    Row,
    at_least,
    attempt,
    each,
    measured,
    over,
    random,
    report,
    start,
    verdict,
    with_same_bits,
)
from _peers import flash4, torchs
from torch import Tensor
from torch.nn.attention import SDPBackend

import regard

N = 8192
KERNELS = ("regard", "regard, entropy", "FA4", "cuDNN", "memory-efficient")
TIMES = 100


class Shape(NamedTuple):
    """Dims and heads of queries and keys, the dim of values, and how fast ours must be, forward and backward."""

    dim: int
    values: int
    heads: int
    kv_heads: int
    peer: str
    must: tuple[float, float | None]


SHAPES = {
    "d96": Shape(96, 96, 16, 16, "FA4", (0.9, 0.9)),
    "d192/128": Shape(192, 128, 16, 16, "FA4", (0.9, 0.9)),
    "d128, 32 heads over 8": Shape(128, 128, 32, 8, "FA4", (1.0, 0.95)),
    "d256": Shape(256, 256, 8, 8, "cuDNN", (1.0, 1.0)),
    "d512": Shape(512, 512, 8, 8, "memory-efficient", (2.0, 3.0)),
    "d576/512": Shape(576, 512, 16, 1, "memory-efficient", (1.0, None)),
}


def main() -> None:
    rows = each(CASES)
    note = (
        f"Milliseconds, causal, n {N:,}, bf16, one item; medians by CUDA events, kernels taken in turns. "
        "`regard` returns lse and max logit with the output, `regard, entropy` (`observe`) the entropy too. "
        "`apart` is the largest difference between outputs, or between the queries' gradients. "
        f"`same bits`: how many of {TIMES} further backward passes gave all gradients with the bits of the first. "
        "Must: so many times the speed of the peer that is named, and a backward with the same bits each time."
    )
    report("dims", "Other head dims, causal: milliseconds", rows, note, Bars(KERNELS, "ms", log=True))


def row(name: str, backward: bool) -> Row:
    shape = SHAPES[name]
    q = random(1, shape.heads, N, shape.dim, grad=backward)
    k = random(1, shape.kv_heads, N, shape.dim, grad=backward)
    v = random(1, shape.kv_heads, N, shape.values, grad=backward)
    calls = peers(q, k, v)
    if backward:
        dO = random(1, shape.heads, N, shape.values)
        calls = {peer: slopes(f"{name}, {peer}", call, (q, k, v), dO) for peer, call in calls.items()}
    ms, apart = measured(f"{name}, {'backward' if backward else 'forward'}", calls)
    must, ratio = shape.must[backward], over(ms[shape.peer], ms["regard"])
    same = with_same_bits(name, {"regard": calls["regard"]}, TIMES)["regard"] if backward else None
    bits = {"bits": at_least(same, TIMES)} if backward else {}
    return {
        "case": f"{name}, {'backward' if backward else 'forward'}",
        **ms,
        "FA4 / regard": over(ms["FA4"], ms["regard"]),
        "cuDNN / regard": over(ms["cuDNN"], ms["regard"]),
        "apart": apart,
        "same bits": same,
        "must": None if must is None else f"≥ {must} × {shape.peer}",
        "holds": None if must is None else verdict({"speed": at_least(ratio, must)} | bits),
    }


def peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Peer | None]:
    shared = q.shape[1] != k.shape[1]
    each_head = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) if shared else x for x in (k, v)]
    wide = max(q.shape[3], v.shape[3]) > 256
    return {
        "regard": Peer(lambda: regard.attention(q, k, v, mask=regard.causal(), backend="triton")),
        "regard, entropy": None
        if q.requires_grad
        else Peer(lambda: regard.observe(q, k, v, mask=regard.causal(), backend="triton")),
        "FA4": None if wide else flash4(q, k, v, True),
        "cuDNN": None if wide else torchs(q, k, v, SDPBackend.CUDNN_ATTENTION, is_causal=True, enable_gqa=shared),
        "memory-efficient": torchs(q, *each_head, SDPBackend.EFFICIENT_ATTENTION, is_causal=True),
    }


def slopes(what: str, forward: Peer | None, leaves: tuple[Tensor, ...], dO: Tensor) -> Peer | None:
    """The backward of a forward that ran once."""
    output = None if forward is None else attempt(f"{what}, forward", forward)
    if not isinstance(output, Tensor):
        return None
    slope = torch.empty_like(output).copy_(dO)
    return Peer(lambda: torch.autograd.grad(output, leaves, slope, retain_graph=True))


CASES = {
    f"{name}, {'backward' if backward else 'forward'}": partial(row, name, backward)
    for name, shape in SHAPES.items()
    for backward in (False, True)
    if not backward or shape.must[1] is not None
}

if __name__ == "__main__":
    start(main, CASES)

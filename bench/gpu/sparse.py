"""Are windows, sinks and documents as fast as FlashAttention-4's, and what does a mask made for each call cost?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _device import DEVICE, Peer, Row, at_most, attempt, each, measured, over, random, report, start, verdict
from _peers import flash4_functions
from torch import Tensor

import regard

TOKENS, HEADS, D = 16384, 16, 128
DOCUMENTS = 8
MUST, NEW = 1.1, 1.15  # times FlashAttention-4's time, and times that of a mask that is kept
Call = Callable[[Tensor, Tensor, Tensor], Any]


def main() -> None:
    rows = each({name: partial(row, name) for name in CASES}) + each({name: partial(new, name) for name in MASKS})
    note = (
        f"Milliseconds of the device; medians by CUDA events, peers in turns. bf16, {TOKENS:,} tokens, {HEADS} heads "
        f"of {D}; {DOCUMENTS} documents of equal length. All tensors are (batch, tokens, heads, dim) in memory, as "
        f"FlashAttention-4 takes them. Must: forward, and with the backward, "
        f"≤ {MUST} × FlashAttention-4; with a mask made anew for each call, "
        f"from tensors on the device, ≤ {NEW} × the same mask kept."
    )
    report("sparse", "Windows, sinks and documents: milliseconds", rows, note)


def masks() -> dict[str, Callable[[], regard.Mask]]:
    """How to make each mask, from tensors that are there."""
    each_has = torch.full((DOCUMENTS,), TOKENS // DOCUMENTS, device=DEVICE)
    ends, ids = cu_seqlens(), torch.arange(DOCUMENTS, device=DEVICE).repeat_interleave(TOKENS // DOCUMENTS)
    used, listed = each_has[:1] * (DOCUMENTS - 1), each_has.tolist()
    return {
        "packed(lengths)": lambda: regard.packed(each_has) & regard.causal(),
        "packed(cu_seqlens=…)": lambda: regard.packed(cu_seqlens=ends) & regard.causal(),
        "padding(lengths)": lambda: regard.padding(used) & regard.causal(),
        "documents(ids)": lambda: regard.documents(ids) & regard.causal(),
        "packed(list)": lambda: regard.packed(listed) & regard.causal(),
    }


MASKS = ("packed(lengths)", "packed(cu_seqlens=…)", "padding(lengths)", "documents(ids)", "packed(list)")


def cu_seqlens() -> Tensor:
    return torch.arange(0, TOKENS + 1, TOKENS // DOCUMENTS, device=DEVICE, dtype=torch.int32)


def ours(**options: object) -> Call:
    return lambda q, k, v: regard.attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def windowed(left: int, **options: object) -> Call:
    return lambda q, k, v: flash4_functions().flash_attn_func(q, k, v, causal=True, window_size=(left, 0), **options)[0]


def by_documents() -> Call:
    longest, ends = TOKENS // DOCUMENTS, cu_seqlens()
    given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda q, k, v: flash4_functions().flash_attn_varlen_func(q[0], k[0], v[0], causal=True, **given)[0][None]


def sinking() -> tuple[Call, Call]:
    sink = torch.zeros(HEADS, device=DEVICE)
    return ours(mask=regard.window(127), sink=sink), windowed(127, learnable_sink=sink.bfloat16())


CASES: dict[str, Callable[[], tuple[Call, Call]]] = {
    "window 128 and sink": sinking,
    "window 1024": lambda: (ours(mask=regard.window(1023)), windowed(1023)),
    "packed documents": lambda: (ours(mask=masks()["packed(lengths)"]()), by_documents()),
    "documents": lambda: (ours(mask=masks()["documents(ids)"]()), by_documents()),
}


def inputs(grad: bool = False) -> list[Tensor]:
    return [random(1, TOKENS, HEADS, D, grad=grad) for _ in range(3)]


def row(name: str) -> Row:
    calls = dict(zip(("regard", "FlashAttention-4"), CASES[name](), strict=True))
    if flash4_functions() is None:
        calls.pop("FlashAttention-4")
    x, leaves, upstream = inputs(), inputs(grad=True), random(1, TOKENS, HEADS, D)
    forward, apart = measured(f"{name}, forward", {peer: Peer(partial(call, *x)) for peer, call in calls.items()})
    slopes = {peer: backward(f"{name}, {peer}", call, leaves, upstream) for peer, call in calls.items()}
    back, _ = measured(f"{name}, backward", slopes)
    peer = "FlashAttention-4"
    ratio = over(forward["regard"], forward.get(peer))
    both = over(added(forward["regard"], back["regard"]), added(forward.get(peer), back.get(peer)))
    return {
        "case": name,
        "regard": forward["regard"],
        "the peer": forward.get(peer),
        "ratio": ratio,
        "backward": back["regard"],
        "the peer's": back.get(peer),
        "its ratio": over(back["regard"], back.get(peer)),
        "apart": apart,
        "must": f"≤ {MUST}",
        "holds": verdict({"forward": at_most(ratio, MUST), "both": at_most(both, MUST)}),
    }


def added(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def backward(what: str, call: Call, leaves: list[Tensor], upstream: Tensor) -> Peer | None:
    output = attempt(what, partial(call, *leaves))
    if output is None:
        return None
    return Peer(lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True))


def new(name: str) -> Row:
    make, x, leaves, upstream = masks()[name], inputs(), inputs(grad=True), random(1, TOKENS, HEADS, D)
    kept = ours(mask=make())
    calls = {"anew": lambda q, k, v: ours(mask=make())(q, k, v), "kept": kept}
    forward, _ = measured(name, {how: Peer(partial(call, *x)) for how, call in calls.items()})
    both = {
        how: Peer(lambda call=call: torch.autograd.grad(call(*leaves), leaves, upstream)) for how, call in calls.items()
    }
    back, _ = measured(f"{name}, with backward", both)
    ratio, with_backward = over(forward["anew"], forward["kept"]), over(back["anew"], back["kept"])
    on_device = "list" not in name
    return {
        "case": f"{name} & causal(), anew / kept",
        "regard": forward["anew"],
        "the peer": forward["kept"],
        "ratio": ratio,
        "backward": back["anew"],
        "the peer's": back["kept"],
        "its ratio": with_backward,
        "apart": None,
        "must": f"≤ {NEW}" if on_device else None,
        "holds": verdict({"forward": at_most(ratio, NEW), "both": at_most(with_backward, NEW)}) if on_device else None,
    }


if __name__ == "__main__":
    start(main)

"""How fast is the additive score without its n × n × hidden numbers, and how close to the time of the tanh alone?"""

from __future__ import annotations

import torch
from _device import (
    DEVICE,
    Bars,
    Peer,
    Row,
    at_least,
    clock,
    in_a_graph,
    measured,
    over,
    peak,
    random,
    report,
    start,
    verdict,
)
from torch import Tensor

import regard

HEADS, N, D, HIDDEN = 8, 1024, 64, 64
TANHS = 16  # per clock and multiprocessor
NAMES = ("regard", "compile", "eager")


def formula(q: Tensor, k: Tensor, v: Tensor, W1: Tensor, W2: Tensor, w: Tensor) -> Tensor:
    """softmax(wᵀ tanh(W₁q + W₂k)) v, as it is written."""
    S = torch.tanh((q @ W1.mT)[..., :, None, :] + (k @ W2.mT)[..., None, :, :]) @ w
    return S.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def main() -> None:
    q, k, v = (random(1, HEADS, N, D, grad=True) for _ in range(3))
    score = regard.scores.Additive(D, D, HIDDEN).to(DEVICE, torch.bfloat16)
    leaves = (q, k, v, score.query_weight, score.key_weight, score.vector)
    compiled = torch.compile(formula, dynamic=False)
    forwards = {
        "regard": lambda: regard.attention(q, k, v, score=score, backend="triton"),
        "compile": lambda: compiled(*leaves),
        "eager": lambda: formula(*leaves),
    }
    dO = torch.randn_like(v)
    both = {name: Peer(lambda f=f: torch.autograd.grad(f(), leaves, dO)) for name, f in forwards.items()}
    calls = {name: Peer(f) for name, f in forwards.items()}
    with torch.no_grad():
        forward = row("forward", calls, floor())
    rows = [forward, row("forward + backward", both, None)]
    with torch.no_grad():
        graphs = in_a_graph("forward", {name: calls[name] for name in ("compile", "regard")})
    forward |= {f"{name} in a graph, ms": ms for name, ms in graphs.items()}
    note = (
        "Milliseconds, medians by CUDA events, taken in turns; memory is the peak above the inputs. A captured graph "
        f"excludes the host's work per call. The floor is the forward's {HEADS * N * N * HIDDEN:,} tanh at "
        f"{TANHS} per clock on each multiprocessor. Must: the forward ≥ 2 × faster than torch.compile."
    )
    question = f"Additive score, hidden {HIDDEN}, n {N:,}, {HEADS} heads, d {D}, bf16"
    report("additive", question, rows, note, Bars([f"{name}, ms" for name in NAMES], "ms", log=True))


def floor() -> float:
    """Milliseconds that the tanh units need."""
    units = torch.cuda.get_device_properties(0).multi_processor_count
    return HEADS * N * N * HIDDEN / (TANHS * units * clock()) * 1e3


def row(case: str, calls: dict[str, Peer], least: float | None) -> Row:
    ms, apart = measured(case, calls, rounds=5)
    mib = peak(case, calls)
    faster = over(ms["compile"], ms["regard"])
    return {
        "case": case,
        **{f"{name}, ms": ms[name] for name in NAMES},
        "compile / regard": faster,
        "regard in a graph, ms": None,
        "compile in a graph, ms": None,
        "floor, ms": least,
        "regard / floor": over(ms["regard"], least),
        **{f"{name}, MiB": mib[name] for name in NAMES},
        "apart": apart,
        "must": "≥ 2 × compile" if least is not None else None,
        "holds": verdict({"regard": at_least(faster, 2.0)}) if least is not None else None,
    }


if __name__ == "__main__":
    start(main)

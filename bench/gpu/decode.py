"""How close is decoding one token to the time of reading the keys and values?"""

from __future__ import annotations

import torch
from _device import DEVICE, Bars, Peer, Row, at_most, in_a_graph, measured, over, random, report, start, verdict
from _peers import torchs
from torch.nn.attention import SDPBackend

import regard

BATCH, HEADS, SHARED, KEYS, D = 8, 32, 8, 32768, 128
COPIED = 2**32  # bytes
MOST = 1.15


def main() -> None:
    q = random(BATCH, HEADS, 1, D)
    k, v = (random(BATCH, SHARED, KEYS, D) for _ in range(2))
    here, there = (torch.empty(COPIED, device=DEVICE, dtype=torch.uint8).random_() for _ in range(2))
    calls = {
        "regard": Peer(lambda: regard.attention(q, k, v, backend="triton")),
        "regard, entropy": Peer(lambda: regard.observe(q, k, v, backend="triton")),
        "flash": torchs(q, k, v, SDPBackend.FLASH_ATTENTION, enable_gqa=True),
        "cuDNN": torchs(q, k, v, SDPBackend.CUDNN_ATTENTION, enable_gqa=True),
    }
    ms, apart = measured("decode", calls | {"copy": Peer(lambda: there.copy_(here))}, rounds=5)
    copying = over(2 * COPIED, ms["copy"])  # bytes per millisecond, read and written
    floor = over((k.numel() + v.numel()) * k.element_size(), copying)
    graphs = in_a_graph("decode", dict(reversed(calls.items())))
    rows: list[Row] = [row(name, ms[name], graphs[name], floor, apart) for name in calls]
    rows.append(row("memory floor", floor, None, floor, None))
    tera = "unknown" if copying is None else f"{copying / 1e9:.2f}"
    note = (
        f"Medians by CUDA events, kernels taken in turns. The floor is the bytes of keys and values at {tera} TB/s, "
        f"the rate at which a copy of {COPIED / 2**30:.0f} GiB on the device reads and writes in the same run. A "
        f"captured graph excludes the host's work per call. `apart` is the largest difference between the outputs. "
        f"Must: regard ≤ {MOST} × the floor."
    )
    question = f"One query, {HEADS}/{SHARED} heads, batch {BATCH}, {KEYS:,} keys, d {D}, bf16"
    report("decode", question, rows, note, Bars(("ms", "in a graph, ms"), "ms"))


def row(kernel: str, ms: float | None, graph: float | None, floor: float | None, apart: float | None) -> Row:
    ratio = over(ms, floor)
    ours = kernel == "regard"
    return {
        "kernel": kernel,
        "ms": ms,
        "in a graph, ms": graph,
        "ms / floor": ratio,
        "in a graph / floor": over(graph, floor),
        "apart": apart if ours else None,
        "must": f"≤ {MOST}" if ours else None,
        "holds": verdict({"regard": at_most(ratio, MOST)}) if ours else None,
    }


if __name__ == "__main__":
    start(main)

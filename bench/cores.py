"""Does a CPU with many cores help, and do results keep their bits whatever the number of threads?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from _harness import Row, ratio, report
from torch import Tensor

import regard

SHAPE = (1, 8, 4096, 64)
N, WINDOW, DOCUMENTS = 32768, 256, 32
OBSERVE, SHARE = 1.6, 0.04  # at most, with all cores: of torch's time, and of the full pass
_LONG = {"window": regard.window(WINDOW), "documents": regard.packed([N // DOCUMENTS] * DOCUMENTS)}


def main() -> None:
    torch.manual_seed(0)
    most = torch.get_num_threads()
    short, long = torch.randn(3, *SHAPE).unbind(), torch.randn(3, 1, 1, N, 64).unbind()
    rows: list[Row] = []
    first: tuple[Tensor, ...] | None = None
    for threads in sorted({1, 2, 4, 8, most}):
        if threads > most:
            continue
        torch.set_num_threads(threads)
        seen = regard.observe(*short)
        bits = seen.output, seen.lse, seen.entropy, masked(long, "window")
        first = first or bits
        same = all(map(torch.equal, bits, first))
        observed, ms = ratio(
            {"observe": lambda: regard.observe(*short), "torch": lambda: F.scaled_dot_product_attention(*short)}, 7
        )
        shares: dict[str, float] = {}
        for name in _LONG if threads == most else ():  # one thread takes a minute for full passes
            calls = {"masked": lambda name=name: masked(long, name), "full": lambda: masked(long, None)}
            shares[name], _ = ratio(calls, 5)
        holds = same and (threads < most or (observed <= OBSERVE and shares["window"] <= SHARE))
        rows.append(
            {
                "threads": threads,
                "torch, ms": ms["torch"] * 1e3,
                "observe, ms": ms["observe"] * 1e3,
                "observe / torch": observed,
                "window / full": shares.get("window"),
                "documents / full": shares.get("documents"),
                "same bits": "yes" if same else "no",
                "holds": "yes" if holds else "no",
            }
        )
    note = (
        f"`observe` beside torch's plain call at {SHAPE}. A window of {WINDOW} keys and {DOCUMENTS} documents over "
        f"{N:,} tokens of one head, beside the full pass of `chunked`. float32; medians over rounds, calls in turns. "
        f"Must, with all cores: `observe` ≤ {OBSERVE} × torch's call, the window ≤ {SHARE} of the full pass; and the "
        "same bits with every number of threads."
    )
    report("cores", "One thread and many: observe, windows and documents", rows, note)


def masked(x: tuple[Tensor, ...], name: str | None) -> Tensor:
    return regard.attention(*x, mask=None if name is None else _LONG[name], backend="chunked")


if __name__ == "__main__":
    main()

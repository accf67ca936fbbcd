"""Compose masks and write your own: draw them, count the visible pairs, and measure the time they save.

Many long-context models use a sliding window with a few global tokens. The last mask is a new one, defined by its own
class: each row sees the keys at distances that are powers of two, so any two tokens are a few hops apart.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import regard
from regard.masks.index import Index, indices

TOKENS, HEADS, DIM, DRAWN = 4096, 2, 64, 24


@dataclass(frozen=True, eq=False, repr=False)
class Powers(regard.Mask):
    """Row i sees itself and the keys 1, 2, 4, 8, … positions before it; `allows` is all that a mask needs."""

    factory: ClassVar[str] = "powers"

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        back = i + (m - n) - j
        return (back >= 0) & (back & (back - 1) == 0)


MASKS = {
    "causal": regard.causal(),
    "a window of 256": regard.window(256),
    "the window and four global tokens": regard.causal() & (regard.window(256) | regard.global_tokens([0, 1, 2, 3])),
    "four documents, causal": regard.packed([TOKENS // 4] * 4) & regard.causal(),
    "powers of two": Powers(),
}


def seconds(mask: regard.Mask | None, q: Tensor) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        regard.attention(q, q, q, mask=mask, backend="chunked")
        best = min(best, time.perf_counter() - start)
    return best


def right(mask: regard.Mask) -> bool:
    """Whether attention with the mask equals the textbook formula with a boolean tensor."""
    q, k, v = torch.randn(3, HEADS, 96, DIM, dtype=torch.float64).unbind()
    hidden = ~mask.dense(96, 96)
    weights = (q @ k.mT / DIM**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.allclose(regard.attention(q, k, v, mask=mask), weights @ v)


@torch.no_grad()
def main() -> int:
    torch.manual_seed(0)
    small = regard.causal() & (regard.window(3) | regard.global_tokens([0, 1]))
    ours = Powers()
    print(f"{small}\n{small.picture(DRAWN, DRAWN)}\n\n{ours}\n{ours.picture(DRAWN, DRAWN)}\n")
    q = torch.randn(1, HEADS, TOKENS, DIM)
    full = seconds(None, q)
    print(f"{TOKENS:,} tokens{'':24}  visible    time / full pass")
    for name, mask in MASKS.items():
        print(f"{name:35} {mask.density(TOKENS, TOKENS):8.2%}   {seconds(mask, q) / full:5.2f}")
    agree = all(
        right(mask) for mask in (small, ours, ~ours, ours | regard.blocks(8), regard.packed([40, 56]) & regard.causal())
    )
    print(f"each equals the formula with a boolean tensor: {agree}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

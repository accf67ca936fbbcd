"""How fast is our backward, which gives the same bits every time, against FlashAttention-4, FlexAttention and torch?"""

from __future__ import annotations

from functools import partial

import torch
from _device import Bars, Peer, Row, at_least, attempt, each, measured, over, report, start, verdict, with_same_bits
from _peers import HIDDEN, NARROW, SHAPES, TOKENS, Plain, peers, plain

KERNELS = ("regard", "FA4", "FlexAttention", "Flex, FLASH", "cuDNN", "flash")
ALWAYS = ("regard", "FA4")  # whose bits are compared
MUST = {"FA4": 0.95, "FlexAttention": 1.15}  # of their speed, up to 128 dims
MUST_WIDE = {"cuDNN": 1.0}  # above
TIMES = 100


def main() -> None:
    rows = each(CASES)
    note = (
        "TFLOP/s for 2.5 times the forward's work, the backward alone, medians by CUDA events, kernels taken in turns. "
        "`Flex, FLASH` is FlexAttention by FA4's kernels. "
        "`apart` is the largest difference between the queries' gradients. "
        f"`same bits`: how many of {TIMES} further passes gave all gradients with the bits of the first. "
        "Must: so many times the speed of the peers that are named, and the same bits each time."
    )
    question = f"Backward, bf16, {TOKENS:,} tokens, hidden {HIDDEN:,}: TFLOP/s"
    report("backward", question, rows, note, Bars(KERNELS, "TFLOP/s"))


def row(shape: str) -> Row:
    x = plain(shape, grad=True)
    forwards = peers(x)
    dO = torch.randn_like(x.value)
    calls = {name: slopes(x, name, forwards[name], dO) for name in KERNELS}
    ms, apart = measured(x.name, calls)
    same = with_same_bits(x.name, {name: calls[name] for name in ALWAYS}, TIMES)
    speed = {name: x.tflops(ms[name], 2.5) for name in KERNELS}
    ratios = {name: over(speed["regard"], speed[name]) for name in ("FlexAttention", "cuDNN", "FA4")}
    musts = MUST if x.query.shape[3] <= NARROW else MUST_WIDE
    checks = {name: at_least(ratios[name], bound) for name, bound in musts.items()}
    return {
        "case": x.name,
        **speed,
        **{f"regard / {name}": ratio for name, ratio in ratios.items()},
        "apart": apart,
        **{f"{name}, same bits": number for name, number in same.items()},
        "must": ", ".join(f"≥ {bound} × {name}" for name, bound in musts.items()),
        "holds": verdict(checks | {"bits": at_least(same["regard"], TIMES)}),
    }


def slopes(x: Plain, name: str, forward: Peer | None, dO: torch.Tensor) -> Peer | None:
    """The backward of a forward that ran once."""
    output = None if forward is None else attempt(f"{x.name}, forward of {name}", forward)
    if not isinstance(output, torch.Tensor):
        return None
    slope = torch.empty_like(output).copy_(dO)  # in the output's own layout, so that no peer pays for a copy
    return Peer(lambda: torch.autograd.grad(output, (x.query, x.key, x.value), slope, retain_graph=True))


CASES = {name: partial(row, name) for name in SHAPES}

if __name__ == "__main__":
    start(main, CASES)

"""How fast is our backward, which gives the same bits every time, against FlexAttention's and torch's?"""

from __future__ import annotations

from functools import partial

import torch
from _device import Bars, Peer, Row, at_least, attempt, each, measured, over, report, start, verdict
from _peers import HIDDEN, NARROW, SHAPES, TOKENS, Plain, peers, plain

KERNELS = ("regard", "FA4", "FlexAttention", "Flex, FLASH", "cuDNN", "flash")
MUST = 1.15  # of FlexAttention's speed


def main() -> None:
    rows = each(CASES)
    note = (
        "TFLOP/s for 2.5 times the forward's work, the backward alone, medians by CUDA events, kernels taken in turns. "
        "`apart` is the largest difference between the queries' gradients. "
        f"Must: regard ≥ {MUST} × FlexAttention up to d{NARROW}; the aim is to beat cuDNN."
    )
    question = f"Backward, bf16, {TOKENS:,} tokens, hidden {HIDDEN:,}: TFLOP/s"
    report("backward", question, rows, note, Bars(KERNELS, "TFLOP/s"))


def row(shape: str) -> Row:
    x = plain(shape, grad=True)
    forwards = peers(x)
    dO = torch.randn_like(x.value)
    ms, apart = measured(x.name, {name: slopes(x, name, forwards[name], dO) for name in KERNELS})
    speed = {name: x.tflops(ms[name], 2.5) for name in KERNELS}
    ratio = over(speed["regard"], speed["FlexAttention"])
    named = x.query.shape[3] <= NARROW
    return {
        "case": x.name,
        **speed,
        "regard / Flex": ratio,
        "regard / cuDNN": over(speed["regard"], speed["cuDNN"]),
        "regard / FA4": over(speed["regard"], speed["FA4"]),
        "apart": apart,
        "must": f"≥ {MUST} × Flex" if named else None,
        "holds": verdict({"regard": at_least(ratio, MUST)}) if named else None,
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

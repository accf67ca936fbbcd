"""How fast is our forward with statistics of the weights, compared with torch's kernels without them?"""

from __future__ import annotations

from functools import partial

from _device import Bars, Peer, Row, at_least, each, measured, over, report, start, verdict
from _peers import HIDDEN, NARROW, SHAPES, TOKENS, peers, plain

import regard

KERNELS = ("cuDNN", "flash", "FA4", "FlexAttention", "Flex, FLASH", "regard", "regard, entropy", "regard, auto")
LONG = 16384
MUST = {False: (0.97, 0.92), True: (1.02, 0.98)}  # of cuDNN's speed, plain and with entropy; at n16384
AUTO = 0.98  # of the best of torch's kernels


def main() -> None:
    rows = each(CASES)
    note = (
        "TFLOP/s, medians by CUDA events, kernels taken in turns. `Flex, FLASH` is FlexAttention by FA4's kernels. "
        "`regard` returns lse and max logit with the output, "
        "`regard, entropy` (`observe`) the entropy too, `regard, auto` is the plain call. Must: regard ≥ 0.97 × cuDNN, "
        "with entropy ≥ 0.92 × cuDNN; at n16384 ≥ 1.02 and ≥ 0.98; auto ≥ 0.98 × the best of torch's kernels; "
        f"all up to d{NARROW}."
    )
    question = f"Forward, bf16, {TOKENS:,} tokens, hidden {HIDDEN:,}: TFLOP/s"
    report("forward", question, rows, note, Bars(KERNELS, "TFLOP/s"))


def row(shape: str) -> Row:
    x = plain(shape)
    q, k, v = x.query, x.key, x.value
    mask = regard.causal() if x.causal else None
    calls = peers(x)
    calls["regard, entropy"] = Peer(lambda: regard.observe(q, k, v, mask=mask, backend="triton"))
    calls["regard, auto"] = Peer(lambda: regard.attention(q, k, v, mask=mask))
    ms, apart = measured(x.name, calls, rounds=5)
    speed = {name: x.tflops(ms[name]) for name in KERNELS}
    best = max((s for s in (speed["cuDNN"], speed["flash"]) if s is not None), default=None)
    ours, seen = over(speed["regard"], speed["cuDNN"]), over(speed["regard, entropy"], speed["cuDNN"])
    slower = over(ms["regard, entropy"], ms["regard"])
    cost = None if slower is None else 100 * (slower - 1)
    auto = over(speed["regard, auto"], best)
    named = q.shape[3] <= NARROW
    plainly, looking = MUST[q.shape[2] >= LONG]
    checks = {"regard": at_least(ours, plainly), "entropy": at_least(seen, looking), "auto": at_least(auto, AUTO)}
    return {
        "case": x.name,
        **speed,
        "regard / cuDNN": ours,
        "regard / FA4": over(speed["regard"], speed["FA4"]),
        "entropy / cuDNN": seen,
        "entropy costs, %": cost,
        "auto / best": auto,
        "apart": apart,
        "must": f"{plainly}, {looking}, {AUTO}" if named else None,
        "holds": verdict(checks) if named else None,
    }


CASES = {name: partial(row, name) for name in SHAPES}

if __name__ == "__main__":
    start(main, CASES)

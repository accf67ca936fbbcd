"""How fast is our forward with the statistics of the weights against torch's kernels without them?"""

from __future__ import annotations

from functools import partial

from _device import Bars, Peer, Row, at_least, at_most, each, measured, over, report, start, verdict
from _peers import HIDDEN, SHAPES, TOKENS, peers, plain

import regard

KERNELS = ("cuDNN", "flash", "FlexAttention", "regard", "regard, entropy", "regard, auto")


def main() -> None:
    rows = each({name: partial(row, name) for name in SHAPES})
    note = (
        "TFLOP/s, medians by CUDA events, the kernels in turns. `regard` gives lse and max logit with the output, "
        "`regard, entropy` (`observe`) the entropy too, `regard, auto` is the plain call. Must: regard ≥ 0.80 × cuDNN, "
        "with entropy ≥ 0.77 × cuDNN, the entropy's own cost ≤ 7 %, auto ≥ 0.98 × the best of torch's kernels."
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
    checks = {
        "regard": at_least(ours, 0.80),
        "entropy": at_least(seen, 0.77),
        "cost": at_most(cost, 7.0),
        "auto": at_least(auto, 0.98),
    }
    return {
        "case": x.name,
        **speed,
        "regard / cuDNN": ours,
        "entropy / cuDNN": seen,
        "entropy costs, %": cost,
        "auto / best": auto,
        "apart": apart,
        "must": "0.80, 0.77, 7 %, 0.98",
        "holds": verdict(checks),
    }


if __name__ == "__main__":
    start(main)

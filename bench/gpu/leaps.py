"""What do outlier logits cost, for which our Hopper forward has to retry a block of rows?"""

from __future__ import annotations

from functools import partial

from _device import Bars, Peer, Row, each, measured, over, report, start
from _peers import HIDDEN, NARROW, SHAPES, TOKENS, plain, torchs
from torch import Tensor
from torch.nn.attention import SDPBackend

import regard

HEIGHT, AT = 30.0, 0.73  # of the outlier, above all other logits, and its key as a fraction of n
FEW = 1024
LEAPS = {
    "no row": lambda q: q[:, :, :0],
    f"one row in {FEW:,}": lambda q: q[:, :, 7::FEW],
    "one head": lambda q: q[:, :1],
    "every row": lambda q: q,
}


def main() -> None:
    rows = each(CASES)
    note = (
        f"Milliseconds of `observe`; medians by CUDA events, calls taken in turns. In the rows of each column one "
        f"logit is {HEIGHT:g}, the others are about 1 in magnitude. It is at key {AT} n, so with a causal mask the "
        "rows before that do not see it. cuDNN is the plain forward on the tensors of `every row`."
    )
    question = f"Outlier logits, bf16, {TOKENS:,} tokens, hidden {HIDDEN:,}: milliseconds"
    report("leaps", question, rows, note, Bars([*LEAPS, "cuDNN"], "ms"))


def row(shape: str) -> Row:
    x = plain(shape)
    k, v = x.key, x.value
    k[..., 0] = 0
    k[:, :, int(AT * k.shape[2]), 0] = HEIGHT
    queries = {name: leaping(x.query, name) for name in LEAPS}
    mask = regard.causal() if x.causal else None
    calls = {
        name: Peer(lambda q=q: regard.observe(q, k, v, mask=mask, scale=1.0, backend="triton"))
        for name, q in queries.items()
    }
    calls["cuDNN"] = torchs(queries["every row"], k, v, SDPBackend.CUDNN_ATTENTION, is_causal=x.causal, scale=1.0)
    ms, _ = measured(x.name, calls, rounds=5)
    ratios = {f"{name} / no row": over(ms[name], ms["no row"]) for name in list(LEAPS)[1:]}
    return {"case": x.name, **ms, **ratios}


def leaping(query: Tensor, name: str) -> Tensor:
    """Queries whose logits are about 1 in magnitude, except for the outlier in the chosen rows."""
    q = query * query.shape[3] ** -0.5
    q[..., 0] = 0
    LEAPS[name](q)[..., 0] = 1
    return q


CASES = {name: partial(row, name) for name, (d, _, _) in SHAPES.items() if d <= NARROW}

if __name__ == "__main__":
    start(main, CASES)

"""Do hidden blocks cost nothing on the device, and how soon does a new mask give a result?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from _device import (
    DEVICE,
    Bars,
    Peer,
    Row,
    at_least,
    at_most,
    attempt,
    each,
    measured,
    over,
    random,
    report,
    start,
    verdict,
    wall,
)
from _peers import before, flex, torchs
from torch import Tensor
from torch.nn.attention import SDPBackend

import regard

HEADS, D = 16, 128
LONG, WINDOW = 16384, 1024
SHORT, LENGTHS = 4096, (4096, 3000, 2000, 1000)
NEW, WARM = 5, 2  # masks that are timed, after so many warm-up masks of the same kind
SOON = 20.0  # milliseconds
NARROW = 0.33  # milliseconds with the window
COLUMNS = ("regard", "regard, entropy", "FlexAttention", "cuDNN")


def main() -> None:
    rows = each({"window": window, "padding": padding})
    rows += first_results()
    note = (
        f"Milliseconds; medians by CUDA events, kernels taken in turns. Must: with a window at most {NARROW} ms, with "
        "padding faster than FlexAttention. A first result is wall-clock time, from the call of `observe` with a new "
        f"mask object until the device is done: the slowest of {NEW}, after {WARM} others of the same kind, "
        f"n {SHORT}, one sequence of {HEADS} heads. For FlexAttention it is `create_block_mask` and the first call "
        "with a new mask_mod."
    )
    question = f"Masks, bf16, d {D}, {HEADS} heads: milliseconds"
    report("masks", question, rows, note, Bars(COLUMNS, "ms", log=True))


def window() -> Row:
    q, k, v = (random(1, HEADS, LONG, D) for _ in range(3))
    return row(
        f"window {WINDOW} of {LONG:,}",
        ours(q, k, v, regard.window(WINDOW - 1))
        | {"FlexAttention": flex(q, k, v, lambda b, h, i, j: (j <= i) & (i - j < WINDOW))},
        f"≤ {NARROW} ms",
        lambda ms: at_most(ms["regard"], NARROW),
    )


def padding() -> Row:
    q, k, v = (random(len(LENGTHS), HEADS, SHORT, D) for _ in range(3))
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    keep = torch.arange(SHORT, device=DEVICE) < lengths[:, None, None, None]  # (B, 1, 1, M)
    return row(
        f"padding {'/'.join(map(str, LENGTHS))}",
        ours(q, k, v, regard.padding(lengths))
        | {
            "FlexAttention": flex(q, k, v, lambda b, h, i, j: j < lengths[b], batch=len(LENGTHS)),
            "cuDNN": torchs(q, k, v, SDPBackend.CUDNN_ATTENTION, attn_mask=keep),
        },
        "> 1 × Flex",
        lambda ms: at_least(over(ms["FlexAttention"], ms["regard"]), 1.0),
    )


def ours(q: Tensor, k: Tensor, v: Tensor, mask: regard.Mask) -> dict[str, Peer]:
    return {
        "regard": Peer(lambda: regard.attention(q, k, v, mask=mask, backend="triton")),
        "regard, entropy": Peer(lambda: regard.observe(q, k, v, mask=mask, backend="triton")),
    }


def row(case: str, calls: dict[str, Peer], must: str, holds: Callable[[dict[str, float | None]], bool | None]) -> Row:
    ms, apart = measured(case, calls, rounds=5)
    columns = {name: ms.get(name) for name in COLUMNS}
    ratio = over(ms["FlexAttention"], ms["regard"])
    verdicts = {"must": must, "holds": verdict({"regard": holds(ms)})}
    return {"case": case, **columns, "Flex / regard": ratio, "apart": apart, **verdicts}


def first_results() -> Iterator[Row]:
    q, k, v = (random(1, HEADS, SHORT, D) for _ in range(3))
    flexes = attempt("first result, FlexAttention", lambda: first_of_flex(q, k, v))
    for kind, make in kinds().items():
        found = attempt(f"first result, {kind}", lambda make=make: slowest(q, k, v, make))
        yield {
            "case": f"first result, {kind}",
            "regard": None,
            "regard, entropy": found,
            "FlexAttention": flexes if kind == "window" else None,
            "cuDNN": None,
            "Flex / regard": over(flexes, found) if kind == "window" else None,
            "apart": None,
            "must": f"≤ {SOON:.0f} ms",
            "holds": verdict({"regard": at_most(found, SOON)}),
        }


def kinds() -> dict[str, Callable[[int], regard.Mask]]:
    """How to make distinct masks of each kind."""

    def ids(at: int) -> Tensor:
        cuts = torch.rand(SHORT, generator=torch.Generator().manual_seed(at)) < 16 / SHORT
        return cuts.cumsum(0).to(DEVICE)

    return {
        "causal": lambda at: regard.causal(-at - 1),
        "window": lambda at: regard.window(100 + at),
        "documents": lambda at: regard.documents(ids(at)),
        "dense random": lambda at: regard.dense(torch.rand(SHORT, SHORT, device=DEVICE) < 0.5),
        "predicate": lambda at: regard.predicate(lambda batch, head, i, j: (7 * i + (at + 3) * j) % 5 != 0),
    }


def slowest(q: Tensor, k: Tensor, v: Tensor, make: Callable[[int], regard.Mask]) -> float:
    masks = [make(at) for at in range(WARM + NEW)]
    times = [wall(lambda mask=mask: regard.observe(q, k, v, mask=mask, backend="triton"))[1] for mask in masks]
    return max(times[WARM:])


def first_of_flex(q: Tensor, k: Tensor, v: Tensor) -> float:
    """A mask_mod that is new to FlexAttention, after another one at the same shape."""
    flex(q, k, v, before)()
    return wall(flex(q, k, v, lambda b, h, i, j: (j <= i) & (i - j <= 100)))[1]


def known() -> None:
    """One mask of each kind, so that compilation is not part of a first result."""
    q, k, v = (random(1, HEADS, SHORT, D) for _ in range(3))
    for make in kinds().values():
        regard.observe(q, k, v, mask=make(0), backend="triton")


if __name__ == "__main__":
    start(main, {"window": window, "padding": padding, "kinds": known})

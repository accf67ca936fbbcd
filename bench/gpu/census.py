"""What does a census of all heads cost over a million tokens, beside the plain forward pass of a model?"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from _checks import EXACT, stop_unless_close
from _device import DEVICE, Row, at_most, forget_peak, over, peak_above, report, start, verdict, wall
from _llama import Llama, Shape
from torch import Tensor, nn

import regard
from regard.models.interceptor import CallInterceptor

SHAPE = Shape(layers=16, heads=32, kv_heads=8, dim=64, hidden=2048, mlp=8192, words=128_256)  # of Llama 3.2, 1B
SMALL = Shape(layers=2, heads=4, kv_heads=2, dim=16, hidden=64, mlp=128, words=200)
ITEMS, LENGTH, BATCHES = 8, 2048, 61  # about a million tokens, after a first batch
TURNS = 2
MUST = 1.5  # times the plain forward pass
GROWTH = 1.1  # of the peak memory from a quarter of the corpus to the whole


@dataclass(frozen=True)
class Batches:
    """Random words, few of them common and most of them rare, moved to the device batch by batch."""

    given: list[Tensor]

    @staticmethod
    def random(shape: Shape, items: int, length: int, count: int) -> Batches:
        made = torch.Generator().manual_seed(0)
        places = (torch.rand(items, length, generator=made) for _ in range(count))
        return Batches([(shape.words**x).long().clamp(1, shape.words - 1) for x in places])

    def __iter__(self) -> Iterator[Tensor]:
        return (x.to(DEVICE) for x in self.given)

    def part(self, first: int, last: int | None = None) -> Batches:
        return Batches(self.given[first:last])

    @property
    def tokens(self) -> int:
        return sum(x.numel() for x in self.given)


class Matrices:
    """Causal attention with the matrix of weights in memory; what a census says about each head is read off it."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        S = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        P = S.softmax(-1)
        at = torch.arange(n, device=q.device)
        self.layers.append(
            {
                "entropy": torch.special.entr(P).sum(-1),
                "max_logit": S.amax(-1),
                "first_share": P[..., 0],
                "self_share": P.diagonal(dim1=-2, dim2=-1),
                "previous_share": P.diagonal(-1, dim1=-2, dim2=-1),
                "distance": (P * (at[:, None] - at)).sum(-1),
                "concentration": P.square().sum(-1),
            }
        )
        return P @ v


def check(items: int = 3, length: int = 300) -> None:
    """Compare the means of a small census with those of the matrices, in float64."""
    model, batches = Llama(SMALL).eval().to(DEVICE), Batches.random(SMALL, items, length, 2)
    found = regard.models.census(model, batches)
    matrices, exact = Matrices(), copy.deepcopy(model).double()
    for block in exact.blocks:
        block.attend = matrices
    with torch.no_grad():
        for x in batches:
            exact(x)
    for at in range(SMALL.layers):
        calls = matrices.layers[at :: SMALL.layers]  # one for each batch
        true = {name: torch.cat([call[name] for call in calls]).mean((0, 2)) for name in calls[0]}
        heads = found.heads[at * SMALL.heads : (at + 1) * SMALL.heads]
        means = {name: torch.tensor([getattr(head, name).mean for head in heads], device=DEVICE) for name in true}
        stop_unless_close(f"means over {batches.tokens:,} tokens, layer {at}", means, true, EXACT)


@torch.no_grad()
def plain(model: nn.Module, batches: Batches) -> None:
    for x in batches:
        model(x)


@torch.no_grad()
def surveyed(model: nn.Module, batches: Batches) -> None:
    """Every call is observed and surveyed, and nothing is counted."""
    for x in batches:
        with CallInterceptor(model, lambda _, seen: seen.survey(1, 1)):
            model(x)


def census(model: nn.Module, batches: Batches) -> None:
    regard.models.census(model, batches)


WAYS: dict[str, Callable[[nn.Module, Batches], None]] = {"plain": plain, "surveyed": surveyed, "census": census}


def main() -> None:
    check()
    with torch.device(DEVICE):
        model = Llama(SHAPE).eval().to(torch.bfloat16)
    size = sum(x.numel() for x in model.parameters()) / 1e9
    batches = Batches.random(SHAPE, ITEMS, LENGTH, 1 + BATCHES)
    first, corpus = batches.part(0, 1), batches.part(1)
    cold = {way: seconds(f"{way}, the first batch", run, model, first) for way, run in WAYS.items()}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    mib = {}
    for turn in range(TURNS):
        for way in list(WAYS)[:: -1 if turn % 2 else 1]:
            before = forget_peak()
            taken[way].append(seconds(way, WAYS[way], model, corpus))
            mib[way] = peak_above(before)
    before = forget_peak()
    seconds("census of a quarter", census, model, corpus.part(0, len(corpus.given) // 4))
    quarter = peak_above(before)
    rows = [row(way, taken, cold[way], corpus.tokens, mib[way], quarter) for way in WAYS]
    note = (
        f"Seconds of wall-clock time, medians of {TURNS} turns, over {corpus.tokens:,} tokens in batches of {ITEMS} × "
        f"{LENGTH:,}, random weights and words. `surveyed` observes every call and keeps nothing. The first batch is "
        "apart: kernels that are not on disk are compiled then. MiB are the peak above the model. The means of a small "
        "census were compared with matrices in float64 before anything was timed. "
        f"Must: census ≤ {MUST} × plain, in memory that does not grow with the corpus (≤ {GROWTH} × that of a quarter)."
    )
    report(
        "census", f"A census of a Llama of {size:.2f} B parameters, bf16, {SHAPE.layers} layers: seconds", rows, note
    )


def seconds(what: str, run: Callable[[nn.Module, Batches], None], model: nn.Module, batches: Batches) -> float:
    taken = wall(lambda: run(model, batches))[1] / 1e3
    print(f"{what}: {taken:.2f} s, {batches.tokens / taken:,.0f} tokens/s", flush=True)
    return taken


def row(way: str, taken: dict[str, list[float]], cold: float, tokens: int, mib: float, quarter: float) -> Row:
    found, ratio = statistics.median(taken[way]), over(statistics.median(taken[way]), statistics.median(taken["plain"]))
    required = way == "census"
    checks = {"time": at_most(ratio, MUST), "memory": at_most(mib, GROWTH * quarter)}
    return {
        "case": way,
        "seconds": found,
        "tokens/s": tokens / found,
        "/ plain": ratio,
        "the first batch, s": cold,
        "MiB": mib,
        "MiB over a quarter": quarter if required else None,
        "must": f"≤ {MUST} ×, no growth" if required else None,
        "holds": verdict(checks) if required else None,
    }


if __name__ == "__main__":
    start(main)

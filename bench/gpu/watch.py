"""What does it cost to watch a whole model on a GPU, compared with the model alone?"""

from __future__ import annotations

import statistics

import torch
from _device import DEVICE, Row, at_most, each, report, start, verdict, wall
from _llama import Llama, Shape

import regard

SHAPE = Shape(layers=8, heads=16, kv_heads=16, dim=128, hidden=2048, mlp=8192, words=32_000)
LENGTHS = (2048, 16_384)
ROUNDS = 7


@torch.no_grad()
def watched(n: int) -> Row:
    model, ids = Llama(SHAPE).to(DEVICE, torch.bfloat16).eval(), torch.randint(0, SHAPE.words, (1, n), device=DEVICE)
    found: list[regard.models.Seen] = []

    def watch() -> None:
        with regard.watch(model) as seen:
            model(ids)
        found[:] = [seen]

    model(ids), watch()
    _, cold = wall(lambda: found[0].findings())
    ms: dict[str, list[float]] = {"plain": [], "watch": [], "findings": []}
    for _ in range(ROUNDS):
        ms["plain"].append(wall(lambda: model(ids))[1])
        ms["watch"].append(wall(watch)[1])
        ms["findings"].append(wall(lambda: found[0].findings())[1])
    plain, watching, findings = (statistics.median(times) for times in ms.values())
    holds = {"watch": at_most(watching / plain, 2.0), "findings": at_most(max(cold, findings), 200.0)}
    return {
        "tokens": n,
        "plain, ms": plain,
        "watch, ms": watching,
        "watch / plain": watching / plain,
        "findings, ms": findings,
        "the first findings, ms": cold,
        "must": "≤ 2 ×, ≤ 200 ms",
        "holds": verdict(holds),
    }


def main() -> None:
    rows = each({f"{n:,} tokens": lambda n=n: watched(n) for n in LENGTHS})
    note = (
        "Wall-clock medians of 7 rounds in turns. `watch` ends when every call is surveyed; `findings` averages all "
        "heads, applies all rules and reads the results back. Must: twice the time of the model "
        "alone, and 0.2 s for findings."
    )
    report(
        "watch",
        f"Watching a Llama, bf16, {SHAPE.layers} layers, {SHAPE.heads} heads, hidden {SHAPE.hidden:,}",
        rows,
        note,
    )


if __name__ == "__main__":
    start(main, {"compiled": lambda: watched(LENGTHS[0])})

"""What does it cost to observe the weights, compared with the full matrix, and how long can sequences be?"""

from __future__ import annotations

import torch
from _device import (
    Bars,
    Peer,
    Row,
    at_least,
    at_most,
    attempt,
    each,
    forget_peak,
    measured,
    over,
    peak,
    peak_above,
    random,
    report,
    start,
    verdict,
    wall,
)
from torch import Tensor

import regard

SHAPE = (1, 16, 8192, 128)
LONG, WARM, GRID = 1_048_576, 131_072, 1024
GIB = 1024.0  # in MiB
COLUMNS = ("regard, ms", "eager, ms")


def main() -> None:
    rows = each({"observe + received": against_the_matrix})
    rows += [*late(), *long(LONG)]
    note = (
        "The first row is output + entropy + max logit + received; eager is plain torch with the matrix of weights in "
        "float32. Memory is the peak above the inputs. Must: 12 × faster in 1/30 of the memory; and the long sequence "
        "(wall-clock time of one run, peak memory since its start) in less than 4 GiB."
    )
    question = f"Observing the weights, bf16, {SHAPE[1]} heads, n {SHAPE[2]:,}, d {SHAPE[3]}"
    report("observe", question, rows, note, Bars(COLUMNS, "ms", log=True))


def row(case: str, ms: float | None, mib: float | None = None, **others: object) -> Row:
    """A row with what was measured; all rows have the same columns."""
    empty = dict.fromkeys(("eager, ms", "eager / regard", "regard, MiB", "eager, MiB", "MiB, eager / regard", "apart"))
    return {"case": case, "regard, ms": ms, **empty, "must": None, "holds": None} | {"regard, MiB": mib} | others


def eager(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Output, entropy, largest logit and what each key receives, from the full matrix."""
    S = (q @ k.mT).float() * q.shape[-1] ** -0.5
    P = S.softmax(-1)
    return P.to(v.dtype) @ v, torch.special.entr(P).sum(-1), S.amax(-1), P.sum(-2)


def against_the_matrix() -> Row:
    q, k, v = (random(*SHAPE) for _ in range(3))

    def ours() -> tuple[Tensor, ...]:
        seen = regard.observe(q, k, v, backend="triton")
        return seen.output, seen.entropy, seen.max_logit, seen.received

    case = "observe + received"
    calls = {"regard": Peer(ours), "eager": Peer(lambda: eager(q, k, v))}
    ms, apart = measured(case, calls)
    mib = peak(case, calls)
    faster, smaller = over(ms["eager"], ms["regard"]), over(mib["eager"], mib["regard"])
    return row(
        case,
        ms["regard"],
        mib["regard"],
        **{"eager, ms": ms["eager"], "eager / regard": faster, "eager, MiB": mib["eager"]},
        **{"MiB, eager / regard": smaller, "apart": apart, "must": "≥ 12 ×, ≤ 1/30"},
        holds=verdict({"time": at_least(faster, 12.0), "memory": at_least(smaller, 30.0)}),
    )


def late() -> list[Row]:
    q, k, v = (random(*SHAPE) for _ in range(3))
    calls = {"observe": Peer(lambda: regard.observe(q, k, v, backend="triton"))}
    seen = attempt("observe", calls["observe"])
    if isinstance(seen, regard.Observation):

        def fresh(member: str) -> object:
            vars(seen).pop(member, None)
            vars(seen)["_computed_moments"] = None
            return getattr(seen, member)

        calls |= {
            "received": Peer(lambda: fresh("received")),
            "map(64, 64)": Peer(lambda: seen.map(64, 64)),
            "top(8)": Peer(lambda: seen.top(8)),
            "gradient_health": Peer(lambda: fresh("gradient_health")),
        }
    ms, _ = measured("members", calls)
    return [row(name, time) for name, time in ms.items()]


def long(*lengths: int) -> list[Row]:
    """One causal head with many tokens, after a warm-up with fewer."""
    q, k, v = (random(1, 1, max((WARM, *lengths)), SHAPE[3]) for _ in range(3))
    mask = regard.causal()
    rows: list[Row] = []

    def walk(n: int) -> None:
        rows.clear()
        before = forget_peak()

        def add(what: str, ms: float) -> None:
            mib = peak_above(before)
            holds = verdict({"memory": at_most(mib, 4 * GIB)})
            rows.append(row(f"{n:,} tokens, {what}", ms, mib, must="< 4 GiB", holds=holds))
            print(f"{n:,} tokens, {what}: {ms:.0f} ms, {mib:.0f} MiB", flush=True)

        part = (x[:, :, :n] for x in (q, k, v))
        seen, ms = wall(lambda: regard.observe(*part, mask=mask, backend="triton"))
        add("observe", ms)
        add(f"map({GRID}, {GRID})", wall(lambda: seen.map(GRID, GRID))[1])
        add("received", wall(lambda: seen.received)[1])

    for n in (WARM, *lengths):
        rows.clear()
        attempt(f"{n:,} tokens", lambda n=n: walk(n))
    return rows or [row(f"{n:,} tokens", None) for n in lengths]


if __name__ == "__main__":
    start(main, {"observe + received": against_the_matrix, "members": late, "tokens": long})

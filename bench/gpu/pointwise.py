"""Are scores changed by any function as fast as FlexAttention's, and how soon does a new function give a result?"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from _checks import EXACT, ROUNDED, stop_unless_close
from _device import (
    DEVICE,
    Peer,
    Row,
    at_least,
    attempt,
    each,
    in_a_new_process,
    measured,
    over,
    random,
    report,
    start,
    verdict,
    wall,
)
from _peers import before, flex
from torch import Tensor

import regard
from regard.scores import Pointwise

HEADS, N, FAR = 16, 8192, 128
DIMS = (64, 128)
FEW = 512  # tokens where results are checked
MUST = 1.0  # times the speed of FlexAttention
DIRECTIONS = ("forward", "backward")
Mod = Callable[..., Tensor]


class Function(NamedTuple):
    """A function of the scores, and the captured tensors that get a gradient."""

    f: Mod
    learnt: tuple[Tensor, ...] = ()
    flex: tuple[tuple[str, int], ...] = ()  # kernel options of FlexAttention


def alibi() -> Function:
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device=DEVICE) / HEADS)
    return Function(lambda score, b, h, i, j: score - slopes[h] * (i - j).abs())


def softcap() -> Function:
    return Function(lambda score, b, h, i, j: 20.0 * torch.tanh(score / 20.0))


def relative(learnt: bool = False) -> Function:
    table = (0.1 * random(HEADS, 2 * FAR + 1, dtype=torch.float32)).requires_grad_(learnt)
    return Function(
        lambda score, b, h, i, j: score + table[h, (i - j).clamp(-FAR, FAR) + FAR],
        (table,) if learnt else (),
        (("num_stages", 2),),  # with its own three it asks for more shared memory than the chip has
    )


def decay(rate: float = 1e-3) -> Function:
    return Function(lambda score, b, h, i, j: score * torch.exp(-rate * (i - j).abs()))


FUNCTIONS: dict[str, Callable[[], Function]] = {
    "ALiBi": alibi,
    "softcap": softcap,
    "relative table": relative,
    "relative table, learnt": partial(relative, learnt=True),
    "distance decay": decay,
}


def main() -> None:
    for case in CASES.values():
        check(*case)
    rows = each({f"{case}, {way}": partial(row, *CASES[case], way) for case in CASES for way in DIRECTIONS})
    rows += first_results()
    note = (
        f"Milliseconds; medians by CUDA events, peers in turns. bf16, one item, {HEADS} heads, n {N:,}, causal. "
        "FlexAttention is compiled, with its Triton kernels and the same score_mod and mask. `with entropy` has the "
        "entropy's gradient too. A first result is wall-clock time in a new process with empty caches of compiled "
        "kernels and the bytecode of all modules, from the call until the device is done; the block mask of "
        "FlexAttention is part of it. `another function` follows in the same process. Results were compared with "
        "float64 before anything was timed. "
        f"Must: ≥ {MUST:g} × the speed of FlexAttention with entropy on top, and first results sooner."
    )
    report("pointwise", "Functions of the scores, causal: milliseconds", rows, note)


def check(name: str, d: int, n: int = FEW) -> None:
    """Compare outputs, entropies and all gradients with the reference in float64."""
    function = FUNCTIONS[name]()
    given, g = [random(1, HEADS, n, d) for _ in range(3)], random(1, HEADS, n, d)
    found, true = (
        values([x.to(dtype).requires_grad_() for x in given], function, g, backend)
        for dtype, backend in ((given[0].dtype, "triton"), (torch.float64, "reference"))
    )
    exact = ("entropy", "lse")
    stop_unless_close(f"{name}, d{d}", {x: found.pop(x) for x in exact}, true, EXACT)
    stop_unless_close(f"{name}, d{d}", found, true, ROUNDED)


def values(x: list[Tensor], function: Function, g: Tensor, backend: str) -> dict[str, Tensor]:
    seen = regard.observe(*x, mask=regard.causal(), score=Pointwise(function.f), backend=backend)
    total = (seen.output * g.to(seen.output.dtype)).sum() + 0.1 * seen.entropy.sum()
    slopes = torch.autograd.grad(total, [*x, *function.learnt])
    names = ["dq", "dk", "dv", *("dtable" for _ in function.learnt)]
    return {"output": seen.output, "entropy": seen.entropy, "lse": seen.lse, **dict(zip(names, slopes, strict=True))}


def ours(x: list[Tensor], f: Mod, entropy: bool) -> Peer:
    mask, score = regard.causal(), Pointwise(f)
    if entropy:
        return Peer(lambda: regard.observe(*x, mask=mask, score=score, backend="triton"))
    return Peer(lambda: regard.attention(*x, mask=mask, score=score, backend="triton"))


def peers(d: int, function: Function, way: str) -> dict[str, Peer | None]:
    back = way == "backward"
    x = [random(1, HEADS, N, d, grad=back) for _ in range(3)]
    found: dict[str, Peer | None] = {
        "regard": ours(x, function.f, entropy=False),
        "with entropy": ours(x, function.f, entropy=True),
        "FlexAttention": flex(*x, before, score=function.f, **dict(function.flex)),
    }
    if not back:
        return {name: Peer(partial(without_gradients, peer)) for name, peer in found.items() if peer is not None}
    leaves, g = [*x, *function.learnt], random(1, HEADS, N, d)
    return {name: slopes(f"d{d}, forward of {name}", peer, leaves, g) for name, peer in found.items()}


@torch.no_grad()
def without_gradients(call: Peer) -> object:
    return call()


def slopes(what: str, forward: Peer | None, leaves: list[Tensor], g: Tensor) -> Peer | None:
    """The backward of a forward that ran once."""
    result: Any = None if forward is None else attempt(what, forward)
    if result is None:
        return None
    outputs, given = [result], [g]
    if isinstance(result, regard.Observation):
        outputs, given = [result.output, result.entropy], [g, torch.ones_like(result.entropy)]
    return Peer(lambda: torch.autograd.grad(outputs, leaves, given, retain_graph=True))


def row(name: str, d: int, way: str) -> Row:
    ms, apart = measured(f"{name}, d{d}, {way}", peers(d, FUNCTIONS[name](), way))
    flexes = ms["FlexAttention"]
    plain, observed = over(flexes, ms["regard"]), over(flexes, ms["with entropy"])
    return {
        "case": f"{name}, d{d}, {way}",
        **ms,
        "Flex / regard": plain,
        "Flex / with entropy": observed,
        "apart": apart if way == "forward" else None,  # with the entropy's, gradients differ
        "must": f"≥ {MUST:g}",
        "holds": verdict({"plain": at_least(plain, MUST), "with entropy": at_least(observed, MUST)}),
    }


def first_results() -> list[Row]:
    """One row for each of `first_milliseconds`."""
    calls = [f"pointwise.first_milliseconds({peer!r})" for peer in FIRST]
    for call in calls:  # the first process of each writes its bytecode
        attempt(call, partial(in_a_new_process, call))
    lines = [attempt(call, partial(in_a_new_process, call)) for call in calls]
    found = [None if line is None else json.loads(line) for line in lines]
    rows = []
    ways = ("forward", "forward and backward")
    for at, case in enumerate(f"{what}, {way}" for what in ("first result", "another function") for way in ways):
        ours, flexes = (None if ms is None else ms[at] for ms in found)
        ratio = over(flexes, ours)
        rows.append(
            {
                "case": f"{case}, d{DIMS[0]}",
                "regard": ours,
                "with entropy": None,
                "FlexAttention": flexes,
                "Flex / regard": ratio,
                "Flex / with entropy": None,
                "apart": None,
                "must": "> 1",
                "holds": verdict({"sooner": at_least(ratio, 1.0)}),
            }
        )
    return rows


FIRST: dict[str, Callable[[list[Tensor], Function], Peer]] = {
    "regard": lambda x, function: ours(x, function.f, entropy=False),
    "FlexAttention": lambda x, function: flex(*x, before, score=function.f, **dict(function.flex)),
}


def first_milliseconds(peer: str) -> None:
    """Print the milliseconds to the output of a first function and to its gradients, then those of another one."""
    x = [random(1, HEADS, N, DIMS[0], grad=True) for _ in range(3)]
    g, times = random(1, HEADS, N, DIMS[0]), []
    for function in (decay(), relative()):
        output, forward = wall(FIRST[peer](x, function))
        _, backward = wall(lambda output=output: torch.autograd.grad(output, x, g))
        times += [forward, forward + backward]
    print(json.dumps(times), flush=True)


def once(name: str, d: int) -> None:
    """Compile all that a case needs."""
    check(name, d)
    for way in DIRECTIONS:
        for what, peer in peers(d, FUNCTIONS[name](), way).items():
            attempt(f"{name}, d{d}, {way}, {what}", peer or (lambda: None))


CASES = {f"{name}, d{d}": (name, d) for d in DIMS for name in FUNCTIONS if d == DIMS[0] or "learnt" not in name}

if __name__ == "__main__":
    start(main, {case: partial(once, *CASES[case]) for case in CASES})

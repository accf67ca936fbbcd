"""What does the divergence between two attentions cost, beside one `observe` and one backward?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from _checks import EXACT, ROUNDED, stop_unless_close
from _device import DEVICE, Peer, Row, at_most, attempt, each, measured, over, peak, random, report, start, verdict
from torch import Tensor

import regard

HEADS = 16
SHAPES = {f"d{d}, n{n}": (d, n) for d, n in ((64, 8192), (128, 4096))}
FEW, NEAR = 512, 100  # tokens where results are checked, and the window of the mask that differs
MUST = {"forward": 2.2, "backward": 2.5}  # times `observe`, and times its backward
ONE = "observe"
Times = dict[str, float | None]


class Case(NamedTuple):
    """A divergence between the attentions of two pairs (q, k), and who learns from it."""

    kind: str
    heads: str | None = None
    required: bool = True
    both: bool = True  # sides get gradients, or the second alone
    last_heads: int = HEADS  # of the second side
    observed: bool = False  # sides are Observations, which were made before


KINDS = ("kl", "reverse", "js")
CASES = {
    "kl": Case("kl"),
    "reverse": Case("reverse"),
    "js of two Observations": Case("js", observed=True),
    "js": Case("js", required=False),
    "kl, the second side learns": Case("kl", required=False, both=False),
    "kl of means over heads, one head learns": Case("kl", "mean", required=False, both=False, last_heads=1),
}


def main() -> None:
    for d, _ in SHAPES.values():
        check(d)
    rows = [row for found in each({name: partial(table, *SHAPES[name]) for name in SHAPES}) for row in found.values()]
    note = (
        f"Milliseconds; medians by CUDA events, calls in turns. bf16, one item, {HEADS} heads, causal on both sides. "
        "Beside the divergence are one `observe`, and the backward from its output. The backward of a divergence gives "
        "the gradients of both sides' queries and keys unless one is given. MiB above the inputs, of a forward and a "
        "backward. JS reads the lse of both sides. Observations have it, and were made before the clock started. Pairs "
        "(q, k) have not, so `js` takes two passes, with four products and five special functions per pair, where "
        "`observe` has two products and one special function: nothing is required of it. Values "
        "and gradients were compared with matrices in float64 before anything was timed. "
        f"Must: forward ≤ {MUST['forward']} × `observe`, backward ≤ {MUST['backward']} × its backward."
    )
    report("divergence", "The divergence between two attentions: milliseconds", rows, note)


class Weights(NamedTuple):
    """The matrix of weights of one side in float64, and which pairs it shows."""

    values: Tensor
    shown: Tensor

    @staticmethod
    def of(q: Tensor, k: Tensor, shown: Tensor) -> Weights:
        S = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        return Weights(S.masked_fill(~shown, -torch.inf).softmax(-1), shown)

    @property
    def logs(self) -> Tensor:
        """Logarithms of the weights, and 0 where a pair is hidden, so that its gradient is 0 and not NaN."""
        return torch.where(self.shown, self.values, 1.0).log()


def by_matrices(kind: str, p: Weights, r: Weights) -> Tensor:
    """The divergence of each row."""
    if kind == "js":
        middle = Weights((p.values + r.values) / 2, p.shown | r.shown)
        return (kl(p, middle) + kl(r, middle)) / 2
    return kl(r, p) if kind == "reverse" else kl(p, r)


def kl(p: Weights, r: Weights) -> Tensor:
    lost = (p.shown & ~r.shown).any(-1)
    return torch.where(lost, torch.inf, (p.values * (p.logs - r.logs)).sum(-1))


def check(d: int, kinds: tuple[str, ...] = KINDS, n: int = FEW) -> None:
    """Compare values and gradients with those of the matrices; the second mask is the same, or hides more."""
    given = [random(1, 4, n, d) for _ in range(4)]
    at = torch.arange(n, device=DEVICE)
    causal = at[:, None] >= at
    near = causal & (at[:, None] - at <= NEAR)
    for kind in kinds:
        check_kind(f"{kind}, d{d}", kind, given, (regard.causal(), regard.causal()), (causal, causal))
        masks, shown = (regard.causal(), regard.window(NEAR)), (causal, near)
        check_kind(f"{kind}, masks differ, d{d}", kind, given, masks, shown)
        check_kind(f"{kind} of Observations, masks differ, d{d}", kind, given, masks, shown, side=observed)


Side = dict[str, Any] | regard.Observation


def pair(q: Tensor, k: Tensor, mask: regard.Mask) -> Side:
    return {"query": q, "key": k, "mask": mask}


def observed(q: Tensor, k: Tensor, mask: regard.Mask) -> Side:
    return regard.observe(q, k, k, mask=mask, backend="triton")


def check_kind(
    case: str,
    kind: str,
    given: list[Tensor],
    masks: tuple[regard.Mask, ...],
    shown: tuple[Tensor, ...],
    side: Callable[..., Side] = pair,
) -> None:
    x, y = ([t.to(dtype).requires_grad_() for t in given] for dtype in (given[0].dtype, torch.float64))
    a, b = side(*x[:2], masks[0]), side(*x[2:], masks[1])
    found = regard.divergence(a, b, kind)
    true = by_matrices(kind, Weights.of(*y[:2], shown[0]), Weights.of(*y[2:], shown[1]))
    names = ("dq, a", "dk, a", "dq, b", "dk, b")
    slopes, exact = (dict(zip(names, torch.autograd.grad(f.sum(), t), strict=True)) for f, t in ((found, x), (true, y)))
    stop_unless_close(case, {"value": found}, {"value": true}, EXACT)
    stop_unless_close(case, slopes, exact, ROUNDED)


class Call(NamedTuple):
    """A divergence that is ready to be computed."""

    run: Callable[[], Tensor]
    leaves: list[Tensor]

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.run()

    def step(self) -> tuple[Tensor, ...]:
        value = self.run()
        return torch.autograd.grad(value, self.leaves, torch.ones_like(value))

    def backward(self, what: str) -> Peer | None:
        """The backward of a forward that ran once."""
        value = attempt(what, self.run)
        if value is None:
            return None
        g = torch.ones_like(value)
        return Peer(lambda: torch.autograd.grad(value, self.leaves, g, retain_graph=True))


def call(case: Case, d: int, n: int) -> Call:
    mask = regard.causal()
    x = [random(1, heads, n, d, grad=case.both) for heads in (HEADS, HEADS)]
    y = [random(1, heads, n, d, grad=True) for heads in (case.last_heads, case.last_heads)]
    a, b = ((observed if case.observed else pair)(q, k, mask) for q, k in (x, y))
    return Call(lambda: regard.divergence(a, b, case.kind, heads=case.heads), [*x, *y] if case.both else y)


def observing(d: int, n: int) -> Call:
    x = [random(1, HEADS, n, d, grad=True) for _ in range(3)]
    return Call(lambda: regard.observe(*x, mask=regard.causal(), backend="triton").output, x)


def calls(d: int, n: int) -> dict[str, Call]:
    return {ONE: observing(d, n)} | {name: call(case, d, n) for name, case in CASES.items()}


def table(d: int, n: int) -> dict[str, Row]:
    """A row for each divergence."""
    made, shape = calls(d, n), f"d{d}, n{n}"
    ahead, _ = measured(f"{shape}, forward", {name: Peer(one.forward) for name, one in made.items()})
    backs = {name: one.backward(f"{shape}, {name}") for name, one in made.items()}
    back, _ = measured(f"{shape}, backward", backs)
    del backs
    mib = peak(shape, {name: Peer(one.step) for name, one in made.items()})
    return {name: row(f"{name}, {shape}", name, {"forward": ahead, "backward": back}, mib) for name in CASES}


def row(case: str, name: str, ms: dict[str, Times], mib: Times) -> Row:
    ratios = {way: over(found[name], found[ONE]) for way, found in ms.items()}
    required = CASES[name].required
    return {
        "case": case,
        "forward": ms["forward"][name],
        ONE: ms["forward"][ONE],
        f"forward / {ONE}": ratios["forward"],
        "backward": ms["backward"][name],
        "its backward": ms["backward"][ONE],
        "backward / its backward": ratios["backward"],
        "MiB": mib[name],
        f"MiB, {ONE}": mib[ONE],
        "must": f"≤ {MUST['forward']}, ≤ {MUST['backward']}" if required else None,
        "holds": verdict({way: at_most(ratios[way], MUST[way]) for way in MUST}) if required else None,
    }


def once(d: int, n: int, name: str) -> None:
    """Compile all that a case needs."""
    for one in (ONE, name):
        found = calls(d, n)[one]
        found.forward(), found.step()


def ahead() -> dict[str, Callable[[], None]]:
    cases = {f"{shape}, {name}": partial(once, *SHAPES[shape], name) for shape in SHAPES for name in CASES}
    return cases | {
        f"{shape}, check {kind}": partial(check, SHAPES[shape][0], (kind,)) for shape in SHAPES for kind in KINDS
    }


if __name__ == "__main__":
    start(main, ahead())

"""What do tangents and second derivatives cost, relative to the forward and the backward pass?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from _device import Peer, Row, at_least, at_most, each, measured, over, peak, random, report, start, verdict
from torch import Tensor

import regard

HIDDEN, N, ITEMS = 2048, 8192, 2
SHAPES = {f"d{d}, {'causal' if causal else 'full'}": (d, causal) for d in (128, 64) for causal in (False, True)}


def main() -> None:
    rows = each({name: partial(row, name) for name in SHAPES})
    note = (
        "Milliseconds by CUDA events, taken in turns. `tangent` is torch.func.jvp in q, k and v: output and "
        "tangent in one pass, three times the matrix products of the forward. `of q` is the jvp in the queries "
        "alone: twice. `jvp_flash_attention` is that package's output and tangent in one pass, as installed. "
        "`double` is the backward of a backward, `product` a Hessian-vector product by forward over reverse "
        "(forward, backward and their tangents). `dense` is the tangent in plain torch, which "
        "holds the matrix. MiB above the inputs. Must: tangent ≤ 3.3 × forward, and 1.2 × as fast as "
        "jvp_flash_attention; double ≤ 4 × backward."
    )
    report("derivatives", f"Derivatives, bf16, n {N:,}, {ITEMS} × hidden {HIDDEN:,}, backend triton: ms", rows, note)


def row(name: str) -> Row:
    d, causal = SHAPES[name]
    q, k, v, a, b, c, g = (random(ITEMS, HIDDEN // d, N, d) for _ in range(7))
    attend = partial(regard.attention, mask=regard.causal() if causal else None, backend="triton")
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    upstream = g.clone().requires_grad_()
    output = attend(*x)
    first = torch.autograd.grad(output, x, upstream, create_graph=True)
    gradient = torch.func.grad(lambda *t: (attend(*t) * g).sum(), (0, 1, 2))
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: attend(q, k, v),
        "tangent": lambda: torch.func.jvp(attend, (q, k, v), (a, b, c)),
        "jvp_flash_attention": lambda: theirs((q, k, v), (a, b, c), causal),
        "of q": lambda: torch.func.jvp(lambda t: attend(t, k, v), (q,), (a,)),
        "backward": lambda: torch.autograd.grad(output, x, g, retain_graph=True),
        "double": lambda: torch.autograd.grad(first, (*x, upstream), (a, b, c), retain_graph=True),
        "product": lambda: torch.func.jvp(gradient, (q, k, v), (a, b, c))[1],
        "dense": lambda: dense(q, k, v, a, b, c, causal),
    }
    peers = {what: Peer(call) for what, call in calls.items()}
    ms, _ = measured(name, peers)
    memory = peak(name, {what: peers[what] for what in ("tangent", "double", "dense")})
    tangent, double = over(ms["tangent"], ms["forward"]), over(ms["double"], ms["backward"])
    faster = over(ms["jvp_flash_attention"], ms["tangent"])
    return {
        "case": name,
        **ms,
        "tangent / forward": tangent,
        "jvp_flash_attention / tangent": faster,
        "of q / forward": over(ms["of q"], ms["forward"]),
        "double / backward": double,
        **{f"MiB {what}": used for what, used in memory.items()},
        "holds": verdict(
            {"tangent": at_most(tangent, 3.3), "faster": at_least(faster, 1.2), "double": at_most(double, 4.0)}
        ),
    }


def theirs(x: tuple[Tensor, ...], w: tuple[Tensor, ...], causal: bool) -> tuple[Tensor, Tensor]:
    """Output and tangent by jvp_flash_attention."""
    from jvp_flash_attention.jvp_attention import JVPAttn

    return torch.func.jvp(partial(JVPAttn.fwd_dual, causal=causal), x, w)


def dense(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor, causal: bool) -> Tensor:
    """Output and tangent with the matrix in memory, one item at a time."""
    hidden = torch.ones(N, N, dtype=torch.bool, device=q.device).triu(1) if causal else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = q @ k.mT * q.shape[-1] ** -0.5
        return (S if hidden is None else S.masked_fill(hidden, -torch.inf)).softmax(-1) @ v

    moved = [torch.func.jvp(attend, x[:3], x[3:])[1] for x in zip(q, k, v, a, b, c, strict=True)]
    return torch.stack(moved)


if __name__ == "__main__":
    start(main)

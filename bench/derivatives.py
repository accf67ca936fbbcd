"""What do tangents and second derivatives cost on a CPU, relative to the forward and the backward pass?"""

from __future__ import annotations

from functools import partial

import torch
from _harness import Row, report, side_by_side
from torch import Tensor

import regard

SHAPE = (1, 4, 2048, 64)


def main() -> None:
    torch.manual_seed(0)
    rows = [row("full", None), row("causal", regard.causal())]
    note = (
        "Medians of calls taken in turns. `tangent` is torch.func.jvp in q, k and v (the forward included), "
        "`of q` in the queries alone; `double` is the backward of a backward; `product` a Hessian-vector "
        "product by forward over reverse (forward, backward and their tangents). `dense` is the tangent "
        "with the matrix in memory, in plain torch."
    )
    report("derivatives", f"Derivatives at {SHAPE}, float32, backend chunked", rows, note)


def row(name: str, mask: regard.Mask | None) -> Row:
    q, k, v, a, b, c, g = torch.randn(7, *SHAPE).unbind()
    attend = partial(regard.attention, mask=mask, backend="chunked")
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    upstream = g.clone().requires_grad_()
    output = attend(*x)
    first = torch.autograd.grad(output, x, upstream, create_graph=True)
    gradient = torch.func.grad(lambda *t: (attend(*t) * g).sum(), (0, 1, 2))
    hidden = None if mask is None else ~mask.dense(SHAPE[2], SHAPE[2])

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = q @ k.mT * SHAPE[3] ** -0.5
        return (S if hidden is None else S.masked_fill(hidden, -torch.inf)).softmax(-1) @ v

    times = side_by_side(
        {
            "forward": lambda: attend(q, k, v),
            "tangent": lambda: torch.func.jvp(attend, (q, k, v), (a, b, c)),
            "of q": lambda: torch.func.jvp(lambda t: attend(t, k, v), (q,), (a,)),
            "backward": lambda: torch.autograd.grad(output, x, g, retain_graph=True),
            "double": lambda: torch.autograd.grad(first, (*x, upstream), (a, b, c), retain_graph=True),
            "product": lambda: torch.func.jvp(gradient, (q, k, v), (a, b, c)),
            "dense": lambda: torch.func.jvp(dense, (q, k, v), (a, b, c)),
        }
    )
    return {
        "case": name,
        "tangent / forward": times["tangent"] / times["forward"],
        "of q / forward": times["of q"] / times["forward"],
        "dense / tangent": times["dense"] / times["tangent"],
        "double / backward": times["double"] / times["backward"],
        "product / (forward + backward)": times["product"] / (times["forward"] + times["backward"]),
    }


if __name__ == "__main__":
    main()

"""What do the statistics of the weights cost?"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from _harness import Row, ratio, report
from torch import Tensor

import regard

SHAPE = (1, 8, 4096, 64)


def eager(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Output, lse, entropy and largest logit from the full matrix."""
    S = q @ k.mT * q.shape[-1] ** -0.5
    P = S.softmax(-1)
    lse = S.logsumexp(-1)
    return P @ v, lse, -(P * (S - lse[..., None])).sum(-1), S.amax(-1)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *SHAPE).unbind()
    seen = regard.observe(q, k, v)

    def fresh(member: str) -> object:
        return getattr(copy.copy(seen), member)  # which has not been asked for it before

    def observe() -> object:
        return regard.observe(q, k, v)

    cases = [
        ("observe / torch's plain call", observe, lambda: F.scaled_dot_product_attention(q, k, v), "≤", 1.5),
        ("full matrix / observe", lambda: eager(q, k, v), observe, "≥", 5.0),
        ("received / observe", lambda: fresh("received"), observe, "≤", 1.5),
        ("map(256, 256) / observe", lambda: seen.map(256, 256), observe, "≤", 1.5),
        ("top(8) / observe", lambda: seen.top(8), observe, "≤", 1.5),
        ("gradient_health / observe", lambda: fresh("gradient_health"), observe, "≤", 1.5),
    ]
    rows: list[Row] = []
    for name, first, second, sign, bound in cases:
        found, _ = ratio({"a": first, "b": second}, rounds=5)
        holds = found <= bound if sign == "≤" else found >= bound
        rows.append({"case": name, "ratio": found, "bound": f"{sign} {bound}", "holds": "yes" if holds else "no"})
    report("observe", f"Statistics at {SHAPE}, float32", rows)


if __name__ == "__main__":
    main()

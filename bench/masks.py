"""Do hidden blocks cost nothing?"""

from __future__ import annotations

import torch
from _harness import Row, ratio, report

import regard

N = 32768


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, N, 64).unbind()
    cases = [
        ("causal", regard.causal(), 0.60),
        ("window 256", regard.window(256), 1 / 20),
        ("window 256 and one global token", regard.window(256, 256) | regard.global_tokens([0]), 1 / 14),
        ("32 documents", regard.packed([N // 32] * 32), 1 / 10),
    ]
    rows: list[Row] = []
    for name, mask, bound in cases:
        found, _ = ratio(
            {
                "masked": lambda mask=mask: regard.attention(q, k, v, mask=mask, backend="chunked"),
                "full": lambda: regard.attention(q, k, v, backend="chunked"),
            },
            rounds=3,
        )
        density = mask.density(N, N)
        rows.append({"mask": name, "share of pairs": density, "masked / full": found, "bound": bound,
                     "holds": "yes" if found <= bound else "no"})  # fmt: skip
    report("masks", f"Time of chunked with a mask against the full pass, one head, {N:,} tokens, d 64, float32", rows)


if __name__ == "__main__":
    main()

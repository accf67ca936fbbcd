"""Is a plain call as fast as torch's own function, and what does the call itself cost?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from _harness import Row, ratio, report

import regard


def main() -> None:
    torch.manual_seed(0)
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        # Torch's bfloat16 takes minutes on a processor without bfloat16 units: there, fewer tokens and rounds.
        slow = dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        n = 512 if slow else 4096
        q, k, v = torch.randn(3, 1, 8, n, 64).to(dtype).unbind()
        for name, mask in (("full", None), ("causal", regard.causal())):
            found, times = ratio(
                {
                    "regard": lambda q=q, k=k, v=v, mask=mask: regard.attention(q, k, v, mask=mask),
                    "torch": lambda q=q, k=k, v=v, mask=mask: F.scaled_dot_product_attention(
                        q, k, v, is_causal=mask is not None
                    ),
                },
                rounds=2 if slow else 9,
            )
            rows.append(_row(f"{name}, (1, 8, {n}, 64), {str(dtype)[6:]}", found, 1.05, times))
    x = torch.randn(1, 8, 16, 64)
    masks = {"no mask": (None, 1.9), "causal()": (regard.causal(), 3.4), "window(4)": (regard.window(4), 3.4)}
    masks["padding([12])"] = (regard.padding([12]), 3.4)
    for name, (mask, bound) in masks.items():
        found, times = ratio(
            {
                "regard": lambda mask=mask: regard.attention(x, x, x, mask=mask),
                "torch": lambda: F.scaled_dot_product_attention(x, x, x),
            },
            rounds=31,
            inner=200,
        )
        rows.append(_row(f"overhead, {name}, (1, 8, 16, 64)", found, bound, times))
    report("plain", "Time of regard.attention against torch's function", rows)


def _row(case: str, found: float, bound: float, times: dict[str, float]) -> Row:
    return {
        "case": case,
        "regard / torch": found,
        "bound": bound,
        "holds": "yes" if found <= bound else "no",
        "torch, µs": times["torch"] * 1e6,
    }


if __name__ == "__main__":
    main()

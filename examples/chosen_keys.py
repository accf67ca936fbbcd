"""Exact attention to the keys that a cheap score selects, and the weight that the others would have had.

An indexer scores all pairs in 8 dims instead of 64 and names the strongest keys of each row; attention over these keys
is exact. Its lse and that of attention over all keys tell what was missed, 1 − Σp over the selected keys, without
looking at a single weight: the sum of the exponentials of some logits over that of all. The error of the output is at
most twice that, times the largest value.
"""

from __future__ import annotations

import sys

import torch

import regard

TOKENS, DIM, CHEAP = 512, 64, 8
COUNTS = (8, 16, 32, 64)


def main() -> int:
    torch.manual_seed(0)
    # Keys that vary most in a few directions, as those of trained models do; queries look for some of these keys.
    spread = torch.linspace(1.5, -1.5, DIM, dtype=torch.float64).exp()
    key = torch.randn(1, 4, TOKENS, DIM) * spread
    query = key[:, :, torch.randperm(TOKENS)] / spread + 0.5 * torch.randn(1, 4, TOKENS, DIM)
    value = torch.randn(1, 4, TOKENS, DIM, dtype=torch.float64)
    mask = regard.causal()

    whole = regard.observe(query, key, value, mask=mask)
    cheap = regard.observe(query[..., :CHEAP], key[..., :CHEAP], value, mask=mask, scale=DIM**-0.5)

    print("keys per row   missed by the cheap score   by the best choice   largest error of the output   its bound")
    misses, agrees = [], True
    for count in COUNTS:
        selected = cheap.top(count).indices  # (1, 4, TOKENS, count), −1 where a row sees fewer
        seen = regard.observe(query, key, value, mask=regard.chosen(selected))
        missed = 1 - (seen.lse - whole.lse).exp()
        best = 1 - whole.top(count).weights.sum(-1)
        error = (seen.output - whole.output).abs().amax(-1)
        bound = 2 * missed * value.abs().max()
        print(f"{count:12}   {missed.mean():25.4f}   {best.mean():18.4f}   {error.max():27.4f}   {bound.max():9.4f}")
        listed = whole.weights() * regard.chosen(selected).dense(TOKENS, TOKENS)  # the matrix, to check all this
        agrees &= torch.allclose(missed, 1 - listed.sum(-1), atol=1e-10)
        agrees &= bool((error <= bound + 1e-10).all()) and bool((best <= missed + 1e-10).all())
        misses.append(missed.mean().item())
    print(f"the missed weight is that of the matrix, and bounds the error: {agrees}")
    return 0 if agrees and misses == sorted(misses, reverse=True) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Decode token by token with a cache of keys and values, and compare with the full pass over the whole text.

A small causal model with random weights: two layers, eight query heads that share two key and value heads, rotary
positions. What it generates must not depend on how it is run.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn

import regard
from regard.nn import KVCache, MultiheadAttention

VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS = 256, 128, 8, 2, 2
PROMPT, NEW, WINDOW = 128, 96, 48


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = MultiheadAttention(DIM, HEADS, batch_first=True, num_kv_heads=KV_HEADS, rotary=True)
        self.think = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, mask: regard.Mask | None, cache: KVCache | None) -> Tensor:
        y = self.norm(x)
        x = x + self.attend(y, y, y, mask=mask, cache=cache, need_weights=False)[0]
        return x + self.think(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, mask: regard.Mask | None = None, caches: list[KVCache] | None = None) -> Tensor:
        """Return the next-token logits at each token; with caches, `tokens` are only the new ones."""
        x = self.embed(tokens)
        for layer, cache in zip(self.layers, caches or [None] * LAYERS, strict=True):
            x = layer(x, mask, cache)
        return self.head(x)


def decode(model: Model, prompt: Tensor, caches: list[KVCache]) -> tuple[Tensor, Tensor, float]:
    """Generate NEW tokens one by one; return the text, the logits, and the seconds."""
    start = time.perf_counter()
    text, logits = prompt, [model(prompt, caches=caches)]
    for _ in range(NEW):
        token = logits[-1][:, -1:].argmax(-1)
        text = torch.cat([text, token], 1)
        logits.append(model(token, caches=caches))
    return text, torch.cat(logits, 1), time.perf_counter() - start


def decode_without_cache(model: Model, prompt: Tensor, mask: regard.Mask) -> tuple[Tensor, float]:
    """Generate NEW tokens with a full pass for each."""
    start = time.perf_counter()
    text = prompt
    for _ in range(NEW):
        text = torch.cat([text, model(text, mask)[:, -1:].argmax(-1)], 1)
    return text, time.perf_counter() - start


@torch.inference_mode()
def main() -> int:
    torch.manual_seed(0)
    model, prompt = Model().eval(), torch.randint(VOCABULARY, (1, PROMPT))
    right = True
    for name, mask, limits in (
        ("all the past", regard.causal(), {"capacity": PROMPT + NEW}),
        (f"a window of {WINDOW}", regard.window(WINDOW - 1), {"window": WINDOW}),
    ):
        model(prompt, mask)  # the first call imports and allocates
        caches = [KVCache(**limits) for _ in range(LAYERS)]
        text, logits, cached = decode(model, prompt, caches)
        again, full = decode_without_cache(model, prompt, mask)
        difference = (logits - model(text, mask)).abs().max().item()
        same = torch.equal(text, again)
        right = right and same and difference < 1e-4
        print(f"{name}: {PROMPT} tokens read, {NEW} generated")
        print(
            f"  with a cache        {cached:6.2f} s, {sum(c.nbytes for c in caches) / 1024:.0f} KiB held: {caches[0]}"
        )
        print(f"  full pass per token {full:6.2f} s, the same text: {same}")
        print(f"  largest difference of the logits from a single full pass: {difference:.1e}")
    print("decoding equals the full pass" if right else "decoding differs from the full pass")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

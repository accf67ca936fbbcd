"""What does it cost to watch a whole model on a GPU, compared with the model alone?"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from _device import DEVICE, Row, at_most, each, report, start, verdict, wall
from torch import Tensor, nn

import regard

LAYERS, HEADS, HIDDEN, WORDS = 8, 16, 2048, 32_000
LENGTHS = (2048, 16_384)
ROUNDS = 7


class Block(nn.Module):
    """A block of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, 4 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, HIDDEN), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        dim = HIDDEN // HEADS
        rates = 10_000 ** (-torch.arange(0, dim, 2, device=ids.device) / dim)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), rates).repeat(1, 2)
        x = self.words(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x[:, -1:]))


@torch.no_grad()
def watched(n: int) -> Row:
    model, ids = Llama().to(DEVICE, torch.bfloat16).eval(), torch.randint(0, WORDS, (1, n), device=DEVICE)
    found: list[regard.models.Seen] = []

    def watch() -> None:
        with regard.watch(model) as seen:
            model(ids)
        found[:] = [seen]

    model(ids), watch()
    _, cold = wall(lambda: found[0].findings())
    ms: dict[str, list[float]] = {"plain": [], "watch": [], "findings": []}
    for _ in range(ROUNDS):
        ms["plain"].append(wall(lambda: model(ids))[1])
        ms["watch"].append(wall(watch)[1])
        ms["findings"].append(wall(lambda: found[0].findings())[1])
    plain, watching, findings = (statistics.median(times) for times in ms.values())
    holds = {"watch": at_most(watching / plain, 2.0), "findings": at_most(max(cold, findings), 200.0)}
    return {
        "tokens": n,
        "plain, ms": plain,
        "watch, ms": watching,
        "watch / plain": watching / plain,
        "findings, ms": findings,
        "the first findings, ms": cold,
        "must": "≤ 2 ×, ≤ 200 ms",
        "holds": verdict(holds),
    }


def main() -> None:
    rows = each({f"{n:,} tokens": lambda n=n: watched(n) for n in LENGTHS})
    note = (
        "Wall-clock medians of 7 rounds in turns. `watch` ends when every call is surveyed; `findings` averages all "
        "heads, applies all rules and reads the results back. Must: twice the time of the model "
        "alone, and 0.2 s for findings."
    )
    report("watch", f"Watching a Llama, bf16, {LAYERS} layers, {HEADS} heads, hidden {HIDDEN:,}", rows, note)


if __name__ == "__main__":
    start(main, {"compiled": lambda: watched(LENGTHS[0])})

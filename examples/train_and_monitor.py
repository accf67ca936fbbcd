"""Train a tiny GPT and watch its heads learn: the entropy and the largest logit of every head, during training.

The task is to copy: a row of random letters, a bar, and the same letters again. To predict the next letter the model
must find its position in the first half, so its heads have to become sharp: entropy falls and accuracy rises.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.nn import MultiheadAttention

LETTERS, HALF, DIM, HEADS, LAYERS = 16, 12, 64, 4, 2
STEPS, EVERY, BATCH = 80, 10, 32
BAR = LETTERS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = MultiheadAttention(DIM, HEADS, batch_first=True)
        self.think = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attend(y, y, y, mask=regard.causal(), need_weights=False)[0]
        return x + self.think(self.second(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS + 1, DIM), nn.Embedding(2 * HALF, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, LETTERS + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.letters(tokens) + self.places(places))))


def batch() -> Tensor:
    letters = torch.randint(LETTERS, (BATCH, HALF))
    return torch.cat([letters, torch.full((BATCH, 1), BAR), letters], 1)


def loss_and_accuracy(model: GPT, text: Tensor) -> tuple[Tensor, float]:
    logits, wanted = model(text[:, :-1])[:, HALF:], text[:, HALF + 1 :]  # only the second half is predictable
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()), (logits.argmax(-1) == wanted).float().mean().item()


def main() -> int:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    logged: dict[int, dict[str, float]] = defaultdict(dict)

    def log(name: str, value: float, step: int) -> None:
        logged[step][name] = value

    print(f"{'':14}   entropy of each head, layer by layer" + " " * 21 + "largest logit")
    accuracy = 0.0
    with regard.Monitor(model, every=EVERY, log=log):
        for step in range(STEPS + 1):
            loss, accuracy = loss_and_accuracy(model, batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0:
                scalars = logged[max(logged)]
                entropy = " ".join(f"{x:5.2f}" for name, x in scalars.items() if name.endswith("entropy"))
                largest = max(x for name, x in scalars.items() if name.endswith("max_logit"))
                print(f"step {step:3}  {accuracy:4.0%}   {entropy}   {largest:12.1f}")
    first, last = (min(x for n, x in logged[s].items() if n.endswith("entropy")) for s in (min(logged), max(logged)))
    print(
        f"the entropy of the sharpest head fell from {first:.2f} to {last:.2f}, and {accuracy:.0%} are copied correctly"
    )
    return 0 if accuracy > 0.95 and last < first - 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())

"""What does it cost to monitor training?"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _harness import Row, ratio, report
from torch import Tensor, nn

from regard.models.monitor import Monitor

LAYERS, HEADS, DIM, WORDS, BATCH, LENGTH, EVERY = 4, 4, 128, 512, 4, 128, 100


class Block(nn.Module):
    """Attention and an MLP, each after a norm, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def training(every: int | None) -> Callable[[], None]:
    """One training step of a separate model; monitored every so many steps, or not at all."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(WORDS, (BATCH, LENGTH))
    if every is not None:
        Monitor(model, every=every).start()

    def step() -> None:
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()

    return step


def main() -> None:
    torch.set_num_threads(1)  # on a busy machine, threads waiting for one another would cost more than what is measured
    plain, observed, between = training(None), training(1), training(1 << 40)  # only its first step is observed
    between()
    costs, times = ratio({"observed": observed, "plain": plain}, rounds=201)
    idles, _ = ratio({"between": between, "plain": plain}, rounds=201)
    overhead = 100 * ((costs - 1) / EVERY + max(0.0, idles - 1) * (EVERY - 1) / EVERY)
    extra = 1000 * (times["observed"] - times["plain"])
    rows: list[Row] = [
        {"case": "an observed step / a step without a Monitor", "measured": costs, "bound": "", "holds": ""},
        {"case": "a step in between / a step without a Monitor", "measured": idles, "bound": "", "holds": ""},
        {"case": "extra time of an observed step, ms", "measured": extra, "bound": "", "holds": ""},
        {
            "case": f"Monitor(every={EVERY}), in % of training time",
            "measured": overhead,
            "bound": "≤ 3",
            "holds": "yes" if overhead <= 3 else "no",
        },
    ]
    shape = f"{LAYERS} layers, {HEADS} heads, dim {DIM}, batch {BATCH} × {LENGTH} tokens"
    note = "Medians over 201 steps, alternating with steps of a model without a Monitor."
    report("monitor", f"Monitored training: {shape}, float32", rows, note)


if __name__ == "__main__":
    main()

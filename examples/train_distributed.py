"""Train a small model with its sequence split over four processes, and compare with one process, step by step.

Two layers of `regard.nn.MultiheadAttention` learn the letters of this very file. Inside `regard.distributed.over` the
same model takes a part of the sequence: keys and values go round the ring, rotary positions and the causal mask refer
to the whole sequence, and in the zigzag layout all ranks have the same work. The losses must agree to 1e-5.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from regard.distributed import over, shard, traffic
from regard.masks import causal
from regard.nn import MultiheadAttention

RANKS, LAYOUT = 4, "zigzag"
LETTERS, DIM, HEADS, KV_HEADS, LAYERS = 128, 64, 4, 2, 2
BATCH, LENGTH, STEPS = 2, 1023, 12  # a length that the ranks do not divide
ALLOWED = 1e-5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attend = MultiheadAttention(DIM, HEADS, batch_first=True, num_kv_heads=KV_HEADS, rotary=True)
        self.think = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attend(y, y, y, is_causal=True, need_weights=False)[0]
        return x + self.think(x)


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [Layer() for _ in range(LAYERS)]
        super().__init__(nn.Embedding(LETTERS, DIM), *layers, nn.LayerNorm(DIM), nn.Linear(DIM, LETTERS))


def text() -> Tensor:
    """The letters of this file as tokens, (batch, length + 1)."""
    letters = Path(__file__).read_bytes()[: BATCH * (LENGTH + 1)]
    return torch.tensor([letter % LETTERS for letter in letters]).view(BATCH, LENGTH + 1)


def train(spread: bool) -> list[float]:
    """Train for some steps and return each loss: the mean over all tokens of the whole sequence."""
    model = Model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tokens, losses = text(), []
    seen, wanted = tokens[:, :-1], tokens[:, 1:]
    if spread:
        seen, wanted = (shard(x, layout=LAYOUT, dim=1) for x in (seen, wanted))
    for _ in range(STEPS):
        with over(layout=LAYOUT) if spread else nullcontext():
            logits = model(seen)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / (BATCH * LENGTH)
        optimiser.zero_grad()
        loss.backward()
        if spread:  # the weights are the same everywhere: their gradients and the loss are sums over the ranks
            for x in (loss.detach(), *(p.grad for p in model.parameters())):
                dist.all_reduce(x)
        optimiser.step()
        losses.append(loss.item())
    return losses


def work(rank: int, port: int, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    losses = train(spread=True)
    if rank == 0:
        answer.put(losses)
    dist.destroy_process_group()


def main() -> int:
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "forkserver"  # imports torch once for all workers
    mp.set_forkserver_preload(["torch", "regard.distributed", "regard.nn"])
    answer = mp.get_context(start).SimpleQueue()
    workers = mp.start_processes(work, (port, answer), RANKS, join=False, start_method=start)
    alone = train(spread=False)
    while not workers.join():
        pass
    together = answer.get()

    print(f"step   one process   {RANKS} processes   apart")
    for step, (a, b) in enumerate(zip(alone, together, strict=True)):
        print(f"{step:4}   {a:11.6f}   {b:11.6f}   {abs(a - b):.0e}")
    apart = max(abs(a - b) for a, b in zip(alone, together, strict=True))
    how = {"batch": BATCH, "heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM // HEADS, "layout": LAYOUT}
    sent = [max(traffic(LENGTH, RANKS, mask=causal(), backward=back, **how)) for back in (False, True)]
    print(f"\nat most {apart:.0e} apart (allowed: {ALLOWED:.0e}); the loss fell from {alone[0]:.2f} to {alone[-1]:.2f}")
    print(f"a rank sends at most {sent[0]:,} bytes per layer in the forward ring, and {sent[1]:,} in the backward ring")
    return 0 if apart <= ALLOWED and alone[-1] < alone[0] else 1


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())

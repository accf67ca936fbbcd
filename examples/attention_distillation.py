"""Distil attention: a small model learns where to look from a larger one, and so learns its task sooner.

The task is to copy: random letters, a bar, and the same letters again. The hard part is to find the right position in
the first half, and the teacher's heads know how. Two students with narrower heads take the same few steps: one is told
the letters alone, the other is also told the teacher's attention, by the KL divergence between the rows of paired
heads. No matrix of weights is ever held. At the end `seen.diff(…).distances` compares every head of the teacher with
every head of both students.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard

LETTERS, HALF, HEADS, LAYERS, BATCH = 16, 12, 4, 2, 32
TEACHER, STUDENT = 64, 32  # dims: heads of 16 and of 8
LESSONS, STEPS = 100, 60
BAR, RATE = LETTERS, 3e-3


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.think = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.seen: regard.Observation | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.seen = regard.observe(q, k, v, mask=regard.causal())
        x = x + self.out(self.seen.output.transpose(1, 2).flatten(2))
        return x + self.think(self.second(x))


class Copier(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS + 1, dim), nn.Embedding(2 * HALF, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, LETTERS + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.norm(self.blocks(self.letters(tokens) + self.places(places))))


def batch(size: int = BATCH) -> Tensor:
    letters = torch.randint(LETTERS, (size, HALF))
    return torch.cat([letters, torch.full((size, 1), BAR), letters], 1)


def loss_and_accuracy(model: Copier, text: Tensor) -> tuple[Tensor, float]:
    logits, wanted = model(text[:, :-1])[:, HALF:], text[:, HALF + 1 :]  # only the second half is predictable
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()), (logits.argmax(-1) == wanted).float().mean().item()


def apart(teacher: Copier, student: Copier) -> Tensor:
    """KL(teacher ‖ student) between the rows of their last calls, the mean over layers, heads and rows."""
    pairs = zip(teacher.blocks, student.blocks, strict=True)
    return torch.stack([regard.divergence(a.seen, b.seen).mean() for a, b in pairs]).mean()


def trained(model: Copier, steps: int, teacher: Copier | None = None) -> Copier:
    """Train a model to copy, and to attend as its teacher does, if it has one."""
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    for _ in range(steps):
        text = batch()
        loss, _ = loss_and_accuracy(model, text)
        if teacher is not None:
            with torch.no_grad():
                teacher(text[:, :-1])
            loss = loss + apart(teacher, model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main() -> int:
    torch.set_num_threads(1)  # the tensors are too small to share
    torch.manual_seed(0)
    teacher = trained(Copier(TEACHER), LESSONS)
    start = Copier(STUDENT).state_dict()
    found = {}
    exam = batch(256)
    with torch.no_grad(), regard.watch(teacher) as looked:
        _, known = loss_and_accuracy(teacher, exam)
    print(f"the teacher copies {known:.0%} of the letters; chance is {1 / LETTERS:.0%}")
    for name, guide in (("letters alone", None), ("letters and attention", teacher)):
        torch.manual_seed(1)
        student = Copier(STUDENT)
        student.load_state_dict(start)
        trained(student, STEPS, guide)
        with torch.no_grad(), regard.watch(student) as seen:
            _, right = loss_and_accuracy(student, exam)
            teacher(exam[:, :-1])
            distance = apart(teacher, student).item()
        nearest = torch.stack([looked.diff(seen).distances(layer).argmin(0) for layer in looked.layers])
        paired = int(nearest.eq(torch.arange(HEADS)).sum())
        found[name] = right, distance, paired
        print(f"after {STEPS} steps with {name:21} {right:4.0%} right, KL {distance:.2f} nats,", end=" ")
        print(f"{paired} of {LAYERS * HEADS} heads are nearest to the teacher's head of their number")
    (plain, far, _), (guided, near, paired) = found.values()
    return 0 if guided > plain + 0.1 and near < 0.7 * far and paired >= LAYERS * HEADS - 1 else 1


if __name__ == "__main__":
    sys.exit(main())

"""A Llama with random weights, for what whole models cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """The sizes of a Llama."""

    layers: int
    heads: int
    kv_heads: int
    dim: int  # of a head
    hidden: int
    mlp: int
    words: int


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own function."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Block(nn.Module):
    """A block of a Llama."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.dim, self.attend = shape.dim, attend
        own, shared = shape.heads * shape.dim, shape.kv_heads * shape.dim
        self.before_attention, self.before_mlp = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.q, self.k, self.v = (nn.Linear(shape.hidden, size, bias=False) for size in (own, shared, shared))
        self.out = nn.Linear(own, shape.hidden, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama that gives the logits of the next word; its embedding is also its last layer."""

    def __init__(self, shape: Shape, attend: Attend = causal) -> None:
        super().__init__()
        self.dim = shape.dim
        self.words = nn.Embedding(shape.words, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        rates = 10_000 ** (-torch.arange(0, self.dim, 2, device=ids.device) / self.dim)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), rates).repeat(1, 2)
        x = self.words(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x[:, -1:]), self.words.weight)

"""The built-in model: a small causal transformer that you can read in one sitting.

Local and global layers take turns. A local layer has rotary positions and sees the last tokens only, so that its heads
do the same at token 100 and at token 100,000. A global layer sees every earlier token and has no positions: it compares
contents, whatever the distance. Together they hold on texts far longer than the short ones that most of the training
saw (Yang et al. 2025, "Rope to Nope and Back Again").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ArgumentError, DtypeError, ShapeError
from ...masks import causal
from ...masks import window as window_mask
from ...nn import KVCache, MultiheadAttention

__all__ = ["Block", "Model"]


class Block(nn.Module):
    """Attention, then an MLP: each reads the normalised residual stream and adds to it.

    With a `window`, a token attends to itself and the window − 1 tokens before it, with rotary positions; without one,
    to itself and all tokens before it, without positions.
    """

    def __init__(self, dim: int, heads: int, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.mask = causal() if window is None else window_mask(window - 1)
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = MultiheadAttention(dim, heads, bias=False, batch_first=True, rotary=window is not None)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Add the block's output to the residual stream (B, N, dim)."""
        normed = self.attention_norm(x)
        mask = self.mask if cache is None else None  # a cache has its own mask
        x = x + self.attention(normed, normed, normed, need_weights=False, mask=mask, cache=cache)[0]
        added: Tensor = self.mlp(self.mlp_norm(x))
        return x + added

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights for the stream x, (B, heads, N, N)."""
        normed = self.attention_norm(x)
        found: Tensor = self.attention(normed, normed, normed, mask=self.mask, average_attn_weights=False)[1]
        return found


class Model(nn.Module):
    """Predicts the next token: a pre-norm transformer with tied embeddings, whose layers 0, 2, … have a window.

    `trained_length` is the number of tokens in the longest texts of its training, or None before any: on longer texts
    it extrapolates.

    >>> model = Model(vocabulary=50, dim=32, layers=2, heads=4)
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> model(ids).shape, model.weights(ids).shape
    (torch.Size([1, 5, 50]), torch.Size([2, 1, 4, 5, 5]))
    """

    def __init__(
        self, vocabulary: int = 1024, dim: int = 128, layers: int = 4, heads: int = 8, window: int = 128
    ) -> None:
        super().__init__()
        self.trained_length: int | None = None
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, None if layer % 2 else window) for layer in range(layers))
        self.norm = nn.LayerNorm(dim)
        self._reset_parameters(dim, layers)

    def _reset_parameters(self, dim: int, layers: int) -> None:
        """Initialise so that every sum has a variance near 1, with a smaller scale for what adds to the stream."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                added = name.endswith(("out_proj.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=(2 * layers * dim if added else dim) ** -0.5)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """The logits (B, N, vocabulary) of the token after each of `ids` (B, N).

        With `caches`, one per layer and with its window, `ids` continue the cached sequence.
        """
        x = self._embedded(ids)
        for at, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[at])
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def weights(self, ids: Tensor) -> Tensor:
        """The attention weights of every layer, (layers, B, heads, N, N)."""
        x = self._embedded(ids)
        found = []
        for block in self.blocks:
            found.append(block.weights(x))  # type: ignore[operator]
            x = block(x)
        return torch.stack(found)

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int, *, temperature: float = 0.0) -> Tensor:
        """Continue `ids` (B, N) by `count` tokens: (B, N + count).

        Temperature 0 takes the likeliest token; otherwise tokens are sampled with torch's generator.

        >>> model = Model(vocabulary=50, dim=32, layers=2, heads=4)
        >>> model.generate(torch.tensor([[3, 1, 4]]), 5).shape
        torch.Size([1, 8])
        """
        if not count >= 0 or not temperature >= 0:
            raise ArgumentError(
                f"generate: count and temperature must not be negative. Got count={count}, temperature={temperature}."
            )
        self._check(ids)
        if not ids.shape[1]:
            raise ShapeError(
                "generate: there must be at least one token to continue. Got none; start with a line break."
            )
        caches = [KVCache(window=block.window) for block in self.blocks]  # type: ignore[arg-type]
        new = ids
        for _ in range(count):
            logits = self(new, caches)[:, -1]
            if temperature:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                new = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
        return ids

    def _embedded(self, ids: Tensor) -> Tensor:
        self._check(ids)
        embedded: Tensor = self.embedding(ids) * self.embedding.embedding_dim**0.5
        return embedded

    def _check(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise DtypeError(f"Model: ids must be a tensor of integers. Got {kind}; use torch.tensor([tokens]).")
        if ids.dim() != 2:
            raise ShapeError(f"Model: ids must be (batch, length). Got {tuple(ids.shape)}.")
        if ids.is_cpu and ids.numel() and not torch.compiler.is_compiling():
            least, most, size = int(ids.min()), int(ids.max()), self.embedding.num_embeddings
            if least < 0 or most >= size:
                raise ArgumentError(f"Model: ids must be from 0 to {size - 1}. Got {least} to {most}.")

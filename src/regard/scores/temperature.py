"""The dot product divided by a temperature, learned or fixed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.scores.base import Prepared, Score, positive, whole

__all__ = ["Temperature"]


class Temperature(Score):
    """Dot product divided by a positive temperature, one or one per head: q·k / T.

    T starts at `init`, or at √D of the first call if that is None. The parameter is `log_ratio` = ln(T / start), which
    starts at 0 and keeps T positive after any optimiser step.

    >>> import torch
    >>> score = Temperature()
    >>> score(torch.ones(1, 4), torch.ones(2, 4))
    tensor([[2., 2.]], grad_fn=<SqueezeBackward1>)
    >>> score.temperature
    tensor(2., grad_fn=<MulBackward0>)
    """

    def __init__(self, init: float | None = None, heads: int | None = None, learnable: bool = True) -> None:
        super().__init__()
        self.init = None if init is None else positive("Temperature", "init", init)
        self.heads = None if heads is None else whole("Temperature", "heads", heads)
        self.learnable = bool(learnable)
        if self.learnable:
            self.log_ratio = nn.Parameter(torch.empty(() if self.heads is None else (self.heads,)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to `init`, or wait for the first call again."""
        self.start = self.init
        if self.learnable:
            nn.init.zeros_(self.log_ratio)

    @property
    def temperature(self) -> Tensor:
        """T, () or (heads,); NaN before the first call if no `init` was given."""
        start = math.nan if self.start is None else self.start
        if self.learnable:
            return self.log_ratio.exp() * start
        return torch.full(() if self.heads is None else (self.heads,), start, device="cpu")

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        if self.heads not in (None, 1, heads):
            return f"it has one temperature for each of {self.heads} heads, but query has {heads}"
        return super().misfit(query_dim, key_dim, heads)

    def factor(self, query: Tensor) -> float | Tensor | None:
        temperature = self._at(query)
        return 1.0 / temperature

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        temperature = self._at(query)
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(-1, 1, 1)
        return Prepared(query / temperature, key)

    def _at(self, query: Tensor) -> float | Tensor:
        """The temperature for these queries; the first call sets it if no `init` was given."""
        if self.start is None:
            self.start = max(query.shape[-1], 1) ** 0.5
        return self.own(self.log_ratio, query).exp() * self.start if self.learnable else self.start

    # `log_ratio` is relative to `start`, so the state dict holds `start` too, as a tensor.
    def get_extra_state(self) -> Tensor:
        return torch.tensor(math.nan if self.start is None else self.start, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        start = float(state)
        self.start = None if math.isnan(start) else start

    def extra_repr(self) -> str:
        return f"init={self.init}, heads={self.heads}, learnable={self.learnable}"

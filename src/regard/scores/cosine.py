"""The cosine of the angle between query and key, divided by a temperature."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.scores.base import Prepared, Score, positive

__all__ = ["Cosine"]


class Cosine(Score):
    """Cosine divided by a temperature: q·k / (‖q‖ ‖k‖ T); a zero vector has cosine 0 with every other and no gradient.

    A learnable temperature stays positive because `log_temperature` = ln T is learned; 0.07 is a common initial value.

    >>> import torch
    >>> Cosine(temperature=0.5)(torch.tensor([[3.0, 4.0]]), torch.tensor([[30.0, 40.0], [0.0, 0.0]]))
    tensor([[2., 0.]])
    """

    def __init__(self, temperature: float = 1.0, learnable: bool = False) -> None:
        super().__init__()
        self.init = positive("Cosine", "temperature", temperature)
        self.learnable = bool(learnable)
        if self.learnable:
            self.log_temperature = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the temperature to its initial value."""
        if self.learnable:
            nn.init.constant_(self.log_temperature, math.log(self.init))

    @property
    def temperature(self) -> Tensor:
        """T, a single number."""
        return self.log_temperature.exp() if self.learnable else torch.tensor(self.init, device="cpu")

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        temperature = self.own(self.log_temperature, query).exp() if self.learnable else self.init
        return Prepared(_unit(query) / temperature, _unit(key))

    def extra_repr(self) -> str:
        return f"temperature={self.init:g}, learnable={self.learnable}"


def _unit(x: Tensor) -> Tensor:
    if x.shape[-1] == 0:
        return x
    # The direction does not depend on the size, so the size needs no derivative; it keeps squares from overflowing.
    size = x.detach().abs().amax(-1, keepdim=True)
    zero = size == 0
    x = x.masked_fill(zero, 0.0) / size.masked_fill(zero, 1.0)
    square = (x * x).sum(-1, keepdim=True)
    return x * square.masked_fill(zero, 1.0).rsqrt()

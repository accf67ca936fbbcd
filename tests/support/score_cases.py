"""One score of every kind with parameters, for queries and keys of dim 8 in 4 heads."""

from __future__ import annotations

import torch
from torch import nn

from regard.scores import Additive, Balanced, Bilinear, Cosine, Gaussian, Scaled, Temperature

__all__ = ["SCORES"]

SCORES = {
    "balanced": Balanced,
    "scaled": lambda: Scaled(nn.Parameter(torch.rand(4))),
    "temperature": lambda: Temperature(heads=4),
    "cosine": lambda: Cosine(0.1, learnable=True),
    "bilinear": lambda: Bilinear(8, 8),
    "additive": lambda: Additive(8, 8, 5),
    "gaussian": lambda: Gaussian(1.5, learnable=True),
}

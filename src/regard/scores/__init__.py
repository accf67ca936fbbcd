"""Scores: how a query and a key become a logit; one small module per file."""

from regard.scores.additive import Additive
from regard.scores.balanced import Balanced
from regard.scores.base import Prepared, Score
from regard.scores.bilinear import Bilinear
from regard.scores.cosine import Cosine
from regard.scores.gaussian import Gaussian
from regard.scores.pointwise import Pointwise
from regard.scores.scaled import Scaled
from regard.scores.temperature import Temperature

__all__ = [
    "Additive",
    "Balanced",
    "Bilinear",
    "Cosine",
    "Gaussian",
    "Pointwise",
    "Prepared",
    "Scaled",
    "Score",
    "Temperature",
]

"""Who is told of every call of attention: nobody, unless a model is watched."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from .backends import Backend
from .observation import Observation
from .problem import Problem

__all__ = ["WITNESSES", "Witness", "tell"]


class Witness(ABC):
    """One that sees calls: it answers those that are not observed, and is shown those that are."""

    @abstractmethod
    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        """Give the output of a call that did not ask to be observed."""

    @abstractmethod
    def show(self, seen: Observation) -> None:
        """Take note of a call that was observed."""


WITNESSES: list[Witness] = []
"""Those that watch now; the last one answers."""


def tell(seen: Observation) -> None:
    """Show a call to all that watch."""
    for witness in WITNESSES:
        witness.show(seen)

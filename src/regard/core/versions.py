"""Versions: whether tensors still hold what a call read."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_

import torch
from torch import Tensor

from ..compat.torch import versions_of

__all__ = ["Versions"]

_LOST = -2  # no tensor has this version


class Versions:
    """The tensors that a call read, and how often each had been changed in place by then.

    A caller that is `eager` knows that no compiler is at work.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> read = Versions([x])
    >>> read.changed(), x.add_(1).sum().item(), read.changed()
    (False, 2.0, True)
    """

    def __init__(self, tensors: Iterable[Tensor], eager: bool = False) -> None:
        self._tensors, self._eager = list(tensors), eager
        self._then = versions_of(self._tensors) if eager else _versions(self._tensors)

    @property
    def uncounted(self) -> bool:
        """Whether changes of one of them are not counted, as those of a tensor of inference mode."""
        return -1 in self._then

    def changed(self) -> bool:
        """Whether one of them was changed in place since; unknown, and so no, where changes were not counted then."""
        now = versions_of(self._tensors) if self._eager else _versions(self._tensors)
        return now != self._then and any(a not in (-1, b) for a, b in zip(self._then, now, strict=True))

    def differ_from(self, tensors: list[Tensor]) -> bool:
        """Whether these are other tensors, or one was changed in place since."""
        same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        return not same or self.changed()

    def __getstate__(self) -> list[tuple[Tensor, bool]]:
        """For copies, whose tensors start to count anew."""
        now = _versions(self._tensors)
        return [(t, is_now == was) for t, is_now, was in zip(self._tensors, now, self._then, strict=True)]

    def __setstate__(self, state: list[tuple[Tensor, bool]]) -> None:
        self._tensors, self._eager = [t for t, _ in state], False
        now = _versions(self._tensors)
        self._then = [version if same else _LOST for version, (_, same) in zip(now, state, strict=True)]


def _versions(tensors: list[Tensor]) -> list[int]:
    return [-1] * len(tensors) if torch.compiler.is_compiling() else versions_of(tensors)

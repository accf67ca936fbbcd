"""Versions: whether tensors still hold what a call read."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..compat.torch import version_of

__all__ = ["Versions"]

_LOST = -2  # no tensor has this version


class Versions:
    """The tensors that a call read, and how often each had been changed in place by then.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> read = Versions([x])
    >>> read.changed(), x.add_(1).sum().item(), read.changed()
    (False, 2.0, True)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        counted = not torch.compiler.is_compiling()
        self._then = [(t, version_of(t) if counted else -1) for t in tensors]

    @property
    def uncounted(self) -> bool:
        """Whether changes of one of them are not counted, as those of a tensor of inference mode."""
        return any(version == -1 for _, version in self._then)

    def changed(self) -> bool:
        """Whether one of them was changed in place since."""
        return any(_version(t) != version for t, version in self._then)

    def differ_from(self, tensors: list[Tensor]) -> bool:
        """Whether these are other tensors, or one was changed in place since."""
        same = len(tensors) == len(self._then) and all(
            t is then for t, (then, _) in zip(tensors, self._then, strict=True)
        )
        return not same or self.changed()

    def __getstate__(self) -> list[tuple[Tensor, bool]]:
        """For copies, whose tensors start to count anew."""
        return [(t, _version(t) == version) for t, version in self._then]

    def __setstate__(self, state: list[tuple[Tensor, bool]]) -> None:
        self._then = [(t, _version(t) if same else _LOST) for t, same in state]


def _version(x: Tensor) -> int:
    return -1 if torch.compiler.is_compiling() else version_of(x)

"""Who answers an attention call of a watched model: the rules that all watchers and all heard functions share."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar, TypeAlias

from torch import Tensor

from ..core.problem import Problem
from ..errors import RegardError
from ..observation import Watcher, answered, changed, watchers

__all__ = [
    "Listener",
    "Original",
    "is_changed_here",
    "is_suspended",
    "observer",
    "report_miss",
    "respond",
    "respond_or_miss",
    "suspended",
    "unobserved",
]

Original: TypeAlias = Callable[[], Tensor]
"""A call as the model made it; its output is (…, H, N, Dv)."""


class _Suspension(threading.local):
    """Whether this thread computes an intercepted call: what it calls in torch is then not the model's own call.

    All interceptors of a thread share it, since they may be nested.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_SUSPENSION = _Suspension()


def suspended() -> AbstractContextManager[None]:
    """Let torch's functions run in this thread without interception."""
    return _SUSPENSION


def is_suspended() -> bool:
    """Whether torch's functions run in this thread without interception."""
    return _SUSPENSION.depth > 0


class Listener(Watcher):
    """A watcher that also hears the attention functions of other libraries, posed as problems."""

    observes: ClassVar[bool] = False
    """Whether it answers calls, and not only changes them."""
    runs_unchanged: ClassVar[bool] = False
    """Whether each call runs as the model made it, and is observed by a pass of its own."""

    @property
    def changes_here(self) -> bool:
        """Whether it may change a call of the module that is running in this thread."""
        return False

    @abstractmethod
    def respond(self, p: Problem, original: Original, *, beside: bool = False) -> Tensor:
        """Return the output of a call of another library's function."""

    @abstractmethod
    def miss(self, reason: str) -> None:
        """Learn of a call that cannot be posed as a problem, and runs as usual."""


def observer() -> Listener | None:
    """The watcher that answers the calls of this thread: the last one that observes."""
    for one in reversed(watchers()):
        if isinstance(one, Listener) and one.observes:
            return one
    return None


def is_changed_here() -> bool:
    """Whether a watcher of this thread may change a call of the module that is running."""
    return any(isinstance(one, Listener) and one.changes_here for one in watchers())


def respond(p: Problem, original: Original, *, beside: bool = False) -> Tensor:
    """Answer a call of another library's function: as the observer does, or unobserved if there is none.

    With `beside`, the original computes the output, unless somebody changes it, and the call is observed separately.
    """
    answering = observer()
    if answering is not None:
        return answering.respond(p, original, beside=beside)
    with suspended():
        return unobserved(p, original)


def respond_or_miss(posed: Callable[[], Problem], original: Original, *, beside: bool = False) -> Tensor:
    """Answer a call if it can be posed as a problem; one that cannot runs as usual, and is reported."""
    try:
        p = posed()
    except (RegardError, TypeError, ValueError) as error:
        report_miss(str(error))
        with suspended():
            return original()
    return respond(p, original, beside=beside)


def unobserved(p: Problem, original: Original) -> Tensor:
    """The output of a call, as the watchers of this thread change it: by its own function if the problem stays."""
    change = changed(p)
    return change.finished(original()) if change.problem is p else answered(p)


def report_miss(reason: str) -> None:
    """Tell the watchers of this thread of a call that cannot be posed as a problem, and runs as usual."""
    for one in watchers():
        if isinstance(one, Listener):
            one.miss(reason)

"""The errors of regard: one family; each is also a subclass of the built-in error that fits."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackendError",
    "ChangedError",
    "DeviceError",
    "DistributedError",
    "DtypeError",
    "FileError",
    "MaskError",
    "MissingPackageError",
    "RegardError",
    "ShapeError",
]


class RegardError(Exception):
    """The base class of every error of regard."""


class ShapeError(RegardError, ValueError):
    """Ranks, heads, lengths or dims that do not match."""


class ArgumentError(RegardError, ValueError):
    """A value outside its range, or two arguments that exclude each other."""


class MaskError(RegardError, ValueError):
    """An invalid mask, or one that does not fit the problem."""


class DtypeError(RegardError, TypeError):
    """A dtype, or a type of argument, that is not supported."""


class DeviceError(RegardError, ValueError):
    """Tensors on different devices."""


class BackendError(RegardError, RuntimeError):
    """A backend that is unknown, or that refuses the problem with its reasons."""


class ChangedError(RegardError, RuntimeError):
    """An input that was changed in place after the call, and that a later pass would read again."""


class DistributedError(RegardError, RuntimeError):
    """Ranks of a process group that disagree, or that no longer respond."""


class MissingPackageError(RegardError, RuntimeError):
    """An optional package that is not installed."""


class FileError(RegardError, OSError):
    """A file that is missing, incomplete, or of another kind."""

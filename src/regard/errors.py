"""The errors of regard: one family, each also the built-in error that fits."""

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
    """What every error of regard is."""


class ShapeError(RegardError, ValueError):
    """Ranks, heads, lengths or dims that do not go together."""


class ArgumentError(RegardError, ValueError):
    """A value outside its range, or two arguments that exclude each other."""


class MaskError(RegardError, ValueError):
    """A mask that cannot be one, or that does not fit the problem."""


class DtypeError(RegardError, TypeError):
    """An element type, or a type of argument, that has no meaning here."""


class DeviceError(RegardError, ValueError):
    """Tensors that do not live together."""


class BackendError(RegardError, RuntimeError):
    """A backend that is unknown, or that refuses the problem with its reasons."""


class ChangedError(RegardError, RuntimeError):
    """An input that was changed in place after it had been observed."""


class DistributedError(RegardError, RuntimeError):
    """Ranks of a group that disagree, or that no longer answer."""


class MissingPackageError(RegardError, RuntimeError):
    """An optional package that is not installed."""


class FileError(RegardError, OSError):
    """A file that is not there, not whole, or not ours."""

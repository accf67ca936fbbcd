"""When a report was made, and with which versions."""

from __future__ import annotations

import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version

__all__ = ["provenance"]

_PACKAGES = ("regard", "torch", "transformers")


def provenance() -> dict[str, str]:
    """The date, and the versions of the packages that computed what a report shows.

    >>> list(provenance())
    ['date', 'versions']
    """
    return {"date": date.today().isoformat(), "versions": ", ".join(_versions())}


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        if name not in sys.modules:
            continue
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # it runs from a folder that was not installed
            found.append(f"{name} {getattr(sys.modules[name], '__version__', 'unknown')}")
    return found

"""Tables, HTML pages and attention maps, drawn from plain numbers."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["atlas", "example", "look", "page", "tables", "terminal"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

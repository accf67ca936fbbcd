"""Ways to compute attention, by name. A new one is a file here with a `Backend` and a line in `KNOWN`."""

from __future__ import annotations

from .base import Backend
from .chunked import Chunked
from .flash4 import Flash4
from .reference import Reference
from .sdpa import Sdpa
from .triton import Triton

__all__ = ["KNOWN", "Backend", "Chunked", "Flash4", "Fused", "Reference", "Sdpa", "Triton"]

Fused = Triton  # its name before

KNOWN: dict[str, Backend] = {b.name: b for b in (Sdpa(), Flash4(), Triton(), Chunked(), Reference())}

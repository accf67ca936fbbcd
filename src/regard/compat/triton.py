"""Every private or version-dependent symbol of Triton that the package uses."""

from __future__ import annotations

import os

__all__ = ["INTERPRETED"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs its kernels in Python; it reads this once, too

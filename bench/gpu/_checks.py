"""Results are checked before they are timed: a benchmark whose results are wrong stops, and writes nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import Tensor

EXACT = 2e-4  # of numbers that kernels give in float32
ROUNDED = 1.5e-2  # of numbers in bfloat16, or computed from weights in bfloat16


def stop_unless_close(case: str, found: Mapping[str, Tensor], true: Mapping[str, Tensor], limit: float) -> None:
    """Stop unless each result is as close to the one in float64: ‖found − true‖ ≤ limit · ‖true‖."""
    apart = {name: error(x, true[name]) for name, x in found.items()}
    print(f"checked: {case}: " + ", ".join(f"{name} {x:.1e}" for name, x in apart.items()), flush=True)
    wrong = [name for name, x in apart.items() if not x <= limit]  # NaN is wrong too
    if wrong:
        sys.exit(f"{sys.argv[0]}: {case}: {', '.join(wrong)} differ from float64 by more than {limit:g}; not timed.")


def error(found: Tensor, true: Tensor) -> float:
    """The relative norm of the difference, over the entries that are finite; inf if other entries are finite."""
    found, true = found.detach().double(), true.detach().double()
    if found.shape != true.shape or not (found.isfinite() == true.isfinite()).all():
        return float("inf")
    at = true.isfinite()
    return float((found[at] - true[at]).norm() / true[at].norm())

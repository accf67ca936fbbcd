"""How the rows of an experiment read: as tables of one shape each, with rounded numbers and plain words."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from .base import Row

__all__ = ["cell", "is_number", "tables"]

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def tables(rows: list[Row]) -> list[list[Row]]:
    """Rows that follow each other with the same columns, together.

    >>> tables([{"n": 1}, {"n": 2}, {"d": 3}])
    [[{'n': 1}, {'n': 2}], [{'d': 3}]]
    """
    return [list(some) for _, some in groupby(rows, key=list)]


def is_number(value: Any) -> bool:
    """Whether a value is a number, or the want of one; True and False are words."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def cell(value: Any) -> str:
    """A value as it is read: numbers to four digits, nothing at all as a dash.

    >>> [cell(x) for x in (0.123456, 12345.6, 4096, 1.5e-9, True, None, float("inf"), "causal")]
    ['0.1235', '12,346', '4,096', '1.5·10⁻⁹', 'yes', '–', '∞', 'causal']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return _rounded(value)


def _rounded(value: float) -> str:
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-4 or size >= 1e7:
        digits, power = f"{value:.3e}".split("e")
        return f"{_bare(digits)}·10{str(int(power)).translate(_RAISED)}".replace("-", "−")
    decimals = max(0, 3 - math.floor(math.log10(size)))
    return _bare(f"{value:,.{decimals}f}").replace("-", "−")


def _bare(digits: str) -> str:
    """Without zeros at the end of a fraction."""
    return digits.rstrip("0").rstrip(".") if "." in digits else digits

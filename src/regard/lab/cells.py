"""Format the rows of an experiment: tables with the same columns, rounded numbers, plain words."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

__all__ = ["Row", "cell", "is_number", "tables"]

Row = dict[str, Any]

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def tables(rows: list[Row]) -> list[list[Row]]:
    """Group consecutive rows that have the same columns.

    >>> tables([{"n": 1}, {"n": 2}, {"d": 3}])
    [[{'n': 1}, {'n': 2}], [{'d': 3}]]
    """
    return [list(some) for _, some in groupby(rows, key=list)]


def is_number(value: Any) -> bool:
    """Whether a value is a number or None; True and False are shown as words."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def cell(value: Any) -> str:
    """Format a value: numbers to four digits, None and NaN as a dash.

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
        return f"{_strip_zeros(digits)}·10{str(int(power)).translate(_SUPERSCRIPTS)}".replace("-", "−")
    decimals = max(0, 3 - math.floor(math.log10(size)))
    return _strip_zeros(f"{value:,.{decimals}f}").replace("-", "−")


def _strip_zeros(digits: str) -> str:
    """Strip the trailing zeros of a fraction."""
    return digits.rstrip("0").rstrip(".") if "." in digits else digits

"""In which order peers take their turns: what ran before a kernel has warmed the chip for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def balanced(names: Sequence[T]) -> list[list[T]]:
    """Orders of names in which each comes once in every place and behind each other once (Williams's design).

    >>> balanced("abcd")
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'], ['c', 'd', 'b', 'a'], ['d', 'a', 'c', 'b']]

    Of an odd number of names it takes each order backwards too, and all comes twice.
    """
    n = len(names)
    first = [(at + 1) // 2 if at % 2 else -(at // 2) for at in range(n)]
    orders = [[names[(place + shift) % n] for place in first] for shift in range(n)]
    return orders + [order[::-1] for order in orders] if n % 2 and n > 1 else orders

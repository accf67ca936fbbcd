"""The order in which peers take turns: what runs before a kernel affects the chip's temperature and clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def balanced(names: Sequence[T]) -> list[list[T]]:
    """Orders of names in which each is once in every position and once after each other one (Williams's design).

    >>> balanced("abcd")
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'], ['c', 'd', 'b', 'a'], ['d', 'a', 'c', 'b']]

    For an odd number of names each order is also reversed, so everything occurs twice.
    """
    n = len(names)
    first = [(at + 1) // 2 if at % 2 else -(at // 2) for at in range(n)]
    orders = [[names[(place + shift) % n] for place in first] for shift in range(n)]
    return orders + [order[::-1] for order in orders] if n % 2 and n > 1 else orders

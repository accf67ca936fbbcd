"""What the functions of a Hopper kernel share: the constants it is compiled for; of the forward, what a program is given and its rows."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["Given", "Kind", "RowBlock", "kind_of"]


class Kind:
    """Constants by name. It holds no more than these, since Triton's cache does not know its code.

    >>> Kind(BN=128, FAST=True)
    Kind(BN=128, FAST=True)
    """

    def __init__(self, **constants: Any) -> None:
        vars(self).update((name, gl.constexpr(constant)) for name, constant in constants.items())

    def __repr__(self) -> str:
        return f"Kind({', '.join(f'{name}={constant.value}' for name, constant in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


@gluon.constexpr_function
def kind_of(**constants):
    """These constants as one, whose parts are constants too."""
    return Kind(**constants)


class Given(NamedTuple):
    """What every warp of a program of the forward is told."""

    described: Any  # q, k, v, o, each in two chunks
    X: Any  # Q, K, V in shared memory, each in two chunks
    barriers: Any
    out: Any
    strides: Any  # of the output
    scale: Any
    scales: Any
    cap: Any
    sinks: Any
    bias: Any
    where: Any
    drop: Any
    n: Any
    M: Any
    E: Any
    blocks: Any
    owners: Any
    heads: Any
    groups: Any  # heads that share keys
    section: Any
    counter: Any
    plan: Any


class RowBlock(NamedTuple):
    """The rows of a warp group: whose they are, what they meet, and what their logits are made with."""

    i: Any  # [ROWS]
    mine: Any  # the place of their queries
    item: Any
    h: Any
    met_by: Any  # walk_of
    at: Any  # their biases
    keys: Any  # what decides their dropout
    scale: Any
    unit: Any  # scale in log2 units
    spotless: Any  # whether every key is seen by some row

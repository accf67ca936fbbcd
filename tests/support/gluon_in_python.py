"""A kernel's scheduling functions, run in Python on the numbers that the kernel gets; and masks for them."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gluon_interpreter
import regard


class Number(int):
    """A number of a structure, or one that was loaded: what it divides has a type, as in a kernel."""

    def __floordiv__(self, other: int) -> Number:
        return Number(int(self) // int(other))

    def __rfloordiv__(self, other: int) -> Number:
        return Number(int(other) // int(self))

    def to(self, kind: Any) -> int:
        return int(self)


class Pointer(NamedTuple):
    """A place in the memory of a tensor; outside of it nothing can be read."""

    numbers: list[int]
    at: int = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.numbers, self.at + more)


def load(pointer: Pointer, mask: bool = True, other: int = 0) -> Number:
    if not mask:
        return Number(other)
    assert 0 <= pointer.at < len(pointer.numbers)
    return Number(pointer.numbers[pointer.at])


def pointed(parts: Any) -> Any:
    """A structure of tensors and numbers as a kernel gets it."""
    return parts._replace(
        **{
            name: Pointer(x.flatten().tolist()) if isinstance(x, Tensor) else Number(x)
            for name, x in parts._asdict().items()
            if x is not None
        }
    )


def in_python(kernel: Any, **known: Any) -> FunctionType:
    """A function of a kernel and those that it calls, with Python's numbers in place of the chip's."""
    language = SimpleNamespace(
        load=load,
        cdiv=lambda a, b: -(-a // b),
        minimum=min,
        maximum=max,
        where=lambda c, a, b: a if c else b,
        int64=int,
        **known,
    )
    return gluon_interpreter.in_python(kernel, {"gl": language, "tl": language})


def random(*shape: int, share: float = 0.5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share


def far_apart(n: int, m: int) -> Tensor:
    """Pairs of a few blocks; nobody sees the keys between them, and some rows see nothing."""
    rows, keys = (torch.arange(n) // 70)[:, None], (torch.arange(m) // 50)[None, :]
    return (keys % 3 == 0) & (rows % 2 == 0) & ((rows + keys) % 4 < 3)


MASKS = [
    (regard.causal(), 300, 300),
    (regard.causal(offset=[-70, 0, 200]), 300, 333),
    (regard.causal(offset=-130), 300, 300),
    (regard.causal(offset=1000), 200, 300),
    (regard.window(40), 500, 500),
    (regard.window(100, 20, offset=[-200, 150]), 333, 450),
    (regard.window(0, 0, offset=-400), 300, 200),
    (regard.window(None, 5), 257, 129),
    (regard.window(9, offset=700), 300, 500),
    (regard.padding([300, 0, 64, 1]), 130, 300),
    (regard.padding(random(2, 300)), 130, 300),
    (regard.causal() & regard.padding([0, 150]), 300, 300),
    (regard.packed([100, 0, 1, 128, 100]), 329, 329),
    (regard.documents([0] * 90 + [2] * 100 + [1] * 110, [0] * 150 + [1] * 250), 300, 400),
    (regard.blocks(50), 301, 333),
    (regard.blocks(128), 400, 600),
    (regard.prefix(70), 200, 300),
    (regard.prefix([0, 300]) | regard.causal(), 300, 300),
    (regard.strided(7), 200, 300),
    (regard.strided(100) & regard.causal(), 300, 400),
    (regard.window(5) | regard.global_tokens([0, 270]), 300, 300),
    (~regard.window(60, 60), 300, 300),
    (regard.dense(random(4, 100, 300, share=0.001)), 100, 300),
    (regard.dense(random(2, 1, 100, 300, share=0.001)), 100, 300),
    (regard.dense(random(2, 4, 70, 200, share=0.0005)), 70, 200),
    (regard.dense(far_apart(500, 700)), 500, 700),
    (regard.dense(torch.ones(300, 300, dtype=torch.bool)), 300, 300),
    (~regard.everything(), 200, 200),
    (regard.everything(), 1, 1),
    (regard.everything(), 300, 200),
]

"""A digest of a function follows its code and what it captures, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.distributed.captured import digest
from regard.distributed.consistency import fingerprint
from regard.masks import causal, predicate

WIDTH = 3


def closure(width: Any) -> Callable[..., Tensor]:
    return lambda batch, head, i, j: (i - j).abs() <= width


def default(width: int) -> Callable[..., Tensor]:
    def f(batch: Tensor, head: Tensor, i: Tensor, j: Tensor, *, width: int = width) -> Tensor:
        return (i - j).abs() <= width

    return f


def near(i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= WIDTH


def by_global(width: int) -> Callable[..., Tensor]:
    """A function whose helper reads a global, in a copy of this module's globals."""
    there = {"WIDTH": width, "__name__": __name__}
    there["near"] = FunctionType(near.__code__, there, "near")

    def f(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return near(i, j)

    return FunctionType(f.__code__, there, "f")


def free(width: int, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= width


class Rule:
    def __init__(self, width: int, rank: int = 0) -> None:
        self.width, self.rank = width, rank

    def reach(self) -> int:
        return self.width

    def method(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= self.reach()

    def __call__(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= self.width


class Slots:
    __slots__ = ("width",)

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= self.width


class Learned(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor(float(width)))

    def method(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= self.width


KINDS: dict[str, Callable[[int], Callable[..., Tensor]]] = {
    "closure": closure,
    "a tensor in a closure": lambda width: closure(torch.tensor([0, width])),
    "a dict of lists in a closure": lambda width: closure({"a": [1, {2, width}], "b": None}),
    "a mask in a closure": lambda width: closure(causal(offset=width)),
    "a function in a closure": lambda width: closure(closure(width)),
    "default": default,
    "global": by_global,
    "partial": lambda width: partial(free, width),
    "keywords of a partial": lambda width: partial(default(0), width=width),
    "attribute of a bound object": lambda width: Rule(width).method,
    "attribute of a callable": Rule,
    "slot": Slots,
    "parameter": lambda width: Learned(width).method,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_equal_captures_agree_and_others_do_not(make: Callable[[int], Callable[..., Tensor]]) -> None:
    assert fingerprint(predicate(make(3))) == fingerprint(predicate(make(3)))
    assert fingerprint(predicate(make(3))) != fingerprint(predicate(make(4)))
    assert digest(make(3)).unread == ()


def test_an_attribute_that_the_code_does_not_read_may_differ() -> None:
    assert digest(Rule(3, rank=0).method) == digest(Rule(3, rank=1).method)


def test_what_cannot_be_read_is_named() -> None:
    assert digest(closure(iter([1]))).unread == ("builtins.list_iterator",)


def test_an_object_that_holds_itself_has_a_digest() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert digest(closure(loop)) == digest(closure(loop))


def test_another_process_finds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "from functools import partial\nfrom regard.distributed.captured import digest\n"
        "import torch\ndef f(w, t, b, h, i, j): return i >= j + w\n"
        "print(digest(partial(f, {'a', 'b', 'c'}, torch.arange(3))).content)"
    )
    there = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == there
    assert len(there.strip()) == 64

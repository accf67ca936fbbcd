"""Invalid input to Memory: one clear error before anything changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError, DeviceError, DtypeError, RegardError, ShapeError
from regard.memory import Memory
from regard.scores import Bilinear, Temperature

x, y = torch.ones(3, 2), torch.ones(3, 1)
nan = torch.tensor([[1.0, torch.nan]])

WRONG: dict[str, tuple[Callable[[Memory], Any], type[RegardError], str]] = {
    "keys of another dim": (lambda m: m.write(torch.ones(3, 4), y), ShapeError, "keys must be (n, 2), or (2,)"),
    "values of another dim": (lambda m: m.write(x, x), ShapeError, "values must be (n, 1)"),
    "keys in three dimensions": (lambda m: m.write(x[None], y), ShapeError, "Got (1, 3, 2)"),
    "more keys than values": (lambda m: m.write(x, y[:2]), ShapeError, "every key needs one value"),
    "keys of another dtype": (lambda m: m.write(x.double(), y), DtypeError, "keys must be torch.float32"),
    "values of whole numbers": (lambda m: m.write(x, y.long()), DtypeError, "values must be torch.float32"),
    "keys in a list": (lambda m: m.write([[1.0, 2.0]], y), DtypeError, "keys must be a tensor. Got list"),
    "a NaN": (lambda m: m.write(nan, y[:1]), ArgumentError, "keys must be finite"),
    "an infinite value": (lambda m: m.write(x[:1], y[:1] / 0), ArgumentError, "values must be finite"),
    "keys elsewhere": (lambda m: m.write(x.to("meta"), y), DeviceError, "keys must be on cpu. Got meta"),
    "an id held already": (lambda m: m.write(x, y, ids=[7, 1, 8]), ArgumentError, "already holds the ids 1"),
    "an id twice": (lambda m: m.write(x, y, ids=[7, 8, 7]), ArgumentError, "ids must be unique. These are repeated: 7"),
    "too few ids": (lambda m: m.write(x, y, ids=[7]), ShapeError, "every row needs one id. Got 3 rows and 1 ids"),
    "fractions as ids": (lambda m: m.write(x[:1], y[:1], ids=[0.5]), DtypeError, "ids must be whole numbers"),
    "words as ids": (lambda m: m.write(x[:1], y[:1], ids=["a"]), DtypeError, "ids must be whole numbers"),
    "an id below 0": (lambda m: m.write(x[:1], y[:1], ids=[-4]), ArgumentError, "Got -4"),
    "an id too large": (lambda m: m.write(x[:1], y[:1], ids=[2**64]), DtypeError, "ids must be whole numbers"),
    "deleting unknown ids": (lambda m: m.delete([0, 50, 60]), ArgumentError, "no rows with the ids 50, 60. Nothing"),
    "deleting twice at once": (lambda m: m.delete([0, 0]), ArgumentError, "These are repeated: 0"),
    "deleting nothing": (lambda m: m.delete(None), DtypeError, "Got None"),
    "queries of another dim": (
        lambda m: m.read(torch.ones(1, 3)),
        ShapeError,
        "must be key_dim, 2. Got queries (1, 3)",
    ),
    "a number as a query": (lambda m: m.read(torch.tensor(1.0)), ShapeError, "Got a single number"),
    "queries of another dtype": (lambda m: m.read(x.half()), DtypeError, "queries must be torch.float32"),
    "a temperature of 0": (lambda m: m.read(x, 0.0), ArgumentError, "above 0. Got 0.0; to read only the nearest row"),
    "a temperature below 0": (lambda m: m.read(x, torch.tensor(-1.0)), ArgumentError, "above 0. Got -1.0"),
    "an infinite temperature": (lambda m: m.read(x, torch.inf), ArgumentError, "finite"),
    "two temperatures": (lambda m: m.read(x, torch.ones(2)), ShapeError, "one floating number"),
    "a word as temperature": (lambda m: m.read(x, "hot"), DtypeError, "temperature must be a number. Got str"),
    "top of 0": (lambda m: m.read(x, top=0), ArgumentError, "top must be a whole number of rows, at least 1"),
    "top as a fraction": (lambda m: m.read(x, top=1.5), ArgumentError, "Got 1.5"),
    "progress in words": (lambda m: m.read(x, progress="yes"), DtypeError, "progress must be True, False, None or"),
    "a path of numbers": (lambda m: m.save(3), DtypeError, "path must be the path of a folder"),
}


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("case", WRONG)
def test_invalid_input_is_one_error_and_changes_nothing(case: str, where: str, tmp_path: Path) -> None:
    memory = Memory(2, 1)
    memory.write(torch.randn(2, 2), y[:2])
    if where == "disk":
        memory.save(tmp_path / "memory")
        memory = Memory.open(tmp_path / "memory", "a")
    before = [part.clone() for chunk in memory for part in chunk]
    call, kind, words = WRONG[case]
    with pytest.raises(kind, match=rf"^Memory\.(write|read|delete|save): .*{re.escape(words)}"):
        call(memory)
    after = [part for chunk in memory for part in chunk]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert memory.write(x[:1], y[:1]).tolist() == [2]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((0, 1), ArgumentError, "key_dim must be at least 1"),
        ((2, 1.0), DtypeError, "value_dim must be an integer"),
        ((2, 1, "cosine"), DtypeError, "score must be a regard.scores Score or None. Got str"),
    ],
)
def test_a_memory_with_invalid_arguments_is_refused(arguments: Any, kind: type[RegardError], words: str) -> None:
    with pytest.raises(kind, match=rf"^Memory: {words}"):
        Memory(*arguments)


def test_a_dtype_that_is_not_floating_is_refused() -> None:
    with pytest.raises(DtypeError, match=r"^Memory: dtype must be one of torch.float64.*Got torch.int64"):
        Memory(2, 1, dtype=torch.int64)


def test_reading_before_writing_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"Memory.read: the memory is empty.*Call write\(keys, values\)"):
        Memory(2, 1).read(x)


def test_a_score_says_which_queries_it_takes() -> None:
    memory = Memory(2, 1, Bilinear(3, 2))
    memory.write(x, y)
    assert memory.read(torch.ones(4, 3)).shape == (4, 1)
    with pytest.raises(ShapeError, match=r"^Memory.read: it was made for query dim 3 and key dim 2"):
        memory.read(x)
    heads = Memory(2, 1, Temperature(1.0, heads=4))
    heads.write(x, y)
    with pytest.raises(ShapeError, match=r"^Memory.read: it has one temperature for each of 4 heads"):
        heads.read(x)


def test_modes_other_than_reading_and_appending_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^Memory.open: mode must be 'r' to read or 'a' to append. Got 'w'"):
        Memory.open(tmp_path, "w")  # type: ignore[arg-type]

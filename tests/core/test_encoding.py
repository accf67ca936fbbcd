"""What an operator gets of an engine: a constant string, numbers and tensors, and the same object again from them."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

import regard
from mask_cases import CASES
from regard.core import encoding
from regard.core.encoding import decode, encode
from regard.core.spec import Spec
from regard.masks import Mask


def again(x: object) -> object:
    encoded = encode(x)
    assert encoded is not None
    return decode(*encoded)


def test_every_mask_comes_back() -> None:
    for mask in {repr(case): case for case in CASES}.values():
        found = again(mask.mask)
        assert found == mask.mask
        assert type(found) is type(mask.mask)


def test_a_constant_mask_is_the_same_object_each_time() -> None:
    mask = regard.window(3) & ~regard.blocks(4)
    assert again(mask) is again(regard.window(3) & ~regard.blocks(4))
    assert again(mask) is not again(regard.window(2) & ~regard.blocks(4))
    assert again(Spec(5, 6, mask, seed=torch.tensor(3))).mask is again(mask)  # type: ignore[attr-defined]


def test_what_a_mask_remembered_is_found_by_the_same_tensors_until_they_change() -> None:
    lengths = torch.tensor([2, 3])

    def remembered(mask: Mask) -> object:
        found = again(mask)
        assert isinstance(found, Mask)
        return found.remembered("key", object)

    first = remembered(regard.padding(lengths) & regard.causal())
    assert remembered(regard.padding(lengths) & regard.causal()) is first
    assert remembered(regard.padding(lengths) & regard.causal(1)) is not first
    assert remembered(regard.padding(lengths.clone()) & regard.causal()) is not first
    lengths.add_(1)
    assert remembered(regard.padding(lengths) & regard.causal()) is not first


def test_memory_keeps_no_tensor_alive() -> None:
    table = torch.ones(4, 4, dtype=torch.bool)
    alive = weakref.ref(table)
    mask = again(regard.dense(table))
    assert isinstance(mask, Mask)
    mask.remembered("key", object)
    del mask, table
    gc.collect()
    assert alive() is None


def test_a_tensor_that_outlives_the_module_is_forgotten_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    ids = torch.tensor([0, 0, 1])
    again(regard.documents(ids))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", said.append)
        patch.setattr(encoding, "_MEMORIES", None)  # as when the interpreter exits
        del ids
        gc.collect()
    assert said == []


def captures(far: int, ids: Tensor) -> Mask:
    return regard.predicate(lambda batch, head, i, j: ids[i] + far >= ids[j])


def test_a_function_comes_back_with_what_it_captured() -> None:
    ids = torch.tensor([3, 1, 2])
    one, two = encode(captures(0, ids)), encode(captures(5, ids))
    assert one is not None
    assert two is not None
    assert one.code == two.code
    assert one.tensors[0] is ids
    for mask, far in ((decode(*one), 0), (decode(*two), 5)):
        assert torch.equal(mask.dense(3, 3), captures(far, ids).dense(3, 3))


def two_classes_of_one_name() -> list[type[Mask]]:
    made = []
    for step in (2, 3):

        @dataclass(frozen=True, eq=False, repr=False)
        class Every(Mask):
            def allows(self, i: Tensor, j: Tensor, n: int, m: int, step: int = step) -> Tensor:  # type: ignore[override]
                return (torch.as_tensor(i) - torch.as_tensor(j)) % step == 0

        made.append(Every)
    return made


def test_classes_of_one_name_stay_apart() -> None:
    one, two = (kind() for kind in two_classes_of_one_name())
    assert type(again(one)) is type(one)
    assert type(again(two)) is type(two)


@pytest.mark.parametrize("f", [partial(lambda far, b, h, i, j: i - j < far, 3), lambda b, h, i, j, far=3: i - j < far])
def test_what_a_compiler_could_not_guard_has_no_code(f: object) -> None:
    assert encode(regard.predicate(f)) is None  # type: ignore[arg-type]

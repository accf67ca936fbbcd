"""A mask that is moved, pickled or copied hides the same pairs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import regard
from attention_inputs import inputs
from regard.compat.torch import is_wrapped

TRAVELLING = {
    "causal": lambda: regard.causal(),
    "padding": lambda: regard.padding([5, 9]),
    "keep": lambda: regard.padding(torch.arange(22).reshape(2, 11) % 3 > 0),
    "documents": lambda: regard.documents(torch.arange(9) // 4, torch.arange(11) // 4),
    "dense": lambda: regard.dense(torch.ones(9, 11).tril().bool()),
    "composed": lambda: regard.causal() & regard.padding([5, 9]) | regard.global_tokens([0]),
}


@pytest.mark.parametrize("name", TRAVELLING)
def test_a_mask_moved_pickled_or_copied_hides_the_same(name: str) -> None:
    tensors, mask = inputs(), TRAVELLING[name]()
    expected = regard.attention(*tensors, mask=mask)
    for other in (mask.to("cpu"), pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert torch.equal(regard.attention(*tensors, mask=other), expected)
        assert torch.equal(regard.observe(*tensors, mask=other).visible, regard.observe(*tensors, mask=mask).visible)


def test_a_mask_moved_within_a_transform_is_of_use_after_it() -> None:
    mask = regard.padding([3, 5]) & regard.documents(torch.tensor([0, 0, 1, 1, 1]))
    moved: list[regard.Mask] = []

    def loss(x: Tensor) -> Tensor:
        moved.append(mask.to("meta"))
        return x.sum()

    torch.func.jvp(torch.func.grad(loss), (torch.ones(2),), (torch.ones(2),))
    assert mask.to("meta") is moved[0]  # it is kept
    assert all(x.is_meta and not is_wrapped(x) for x in moved[0].tensors)

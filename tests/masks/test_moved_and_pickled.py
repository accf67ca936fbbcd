"""A mask that is moved, pickled or copied hides the same pairs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import regard
from attention_inputs import inputs

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

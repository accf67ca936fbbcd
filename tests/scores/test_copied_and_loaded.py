"""A score that is copied, pickled or loaded gives the same logits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import regard
from attention_inputs import inputs
from score_cases import SCORES


@pytest.mark.parametrize("name", SCORES)
def test_a_score_copied_pickled_or_loaded_scores_the_same(name: str) -> None:
    torch.manual_seed(0)
    tensors, score = inputs(), SCORES[name]()
    expected = regard.attention(*tensors, score=score)
    loaded = SCORES[name]()
    loaded.load_state_dict(score.state_dict())
    for other in (copy.deepcopy(score), pickle.loads(pickle.dumps(score)), loaded):
        assert torch.equal(regard.attention(*tensors, score=other), expected)

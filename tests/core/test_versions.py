"""A mask's tensor that changes before the backward pass gives an error, or the gradient of the mask as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from attention_inputs import our_backends
from changed_masks import KINDS, Held, N, change, gradients, holds_what_the_call_saw, leaves, table
from regard.core.versions import Versions
from regard.errors import ChangedError


@pytest.mark.parametrize("kind", KINDS)
@our_backends
def test_a_mask_changed_before_the_backward_gives_no_other_gradient(backend: str, kind: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return regard.attention(q, k, v, mask=mask, backend=backend)

    raised = [holds_what_the_call_saw(kind, attend, order) for order in (1, 2)]
    assert raised == [backend == "chunked"] * 2  # `reference` keeps the whole matrix anyway


@pytest.mark.parametrize("kind", KINDS)
def test_neither_does_one_of_auto_or_of_an_observation(kind: str) -> None:
    holds_what_the_call_saw(kind, lambda q, k, v, mask: regard.attention(q, k, v, mask=mask), 1)
    holds_what_the_call_saw(kind, lambda q, k, v, mask: regard.attention(q, k, v, mask=mask), 2)
    assert holds_what_the_call_saw(kind, lambda q, k, v, mask: regard.observe(q, k, v, mask=mask).output, 1)


@pytest.mark.parametrize("kind", ["predicate", "an object that is called", "dense"])
def test_a_late_member_of_an_observation_sees_the_change_too(kind: str) -> None:
    tensor = KINDS[kind].tensor()
    seen = regard.observe(*leaves(), mask=KINDS[kind].mask(tensor))
    change(tensor)
    for ask in (lambda: seen.weights(), lambda: seen.received, lambda: seen.kept()):
        with pytest.raises(ChangedError, match="changed in place"):
            ask()


def test_a_change_of_what_the_mask_does_not_read_is_none() -> None:
    held, given = Held(table()), leaves()
    output = regard.attention(*given, mask=regard.predicate(held), backend="chunked")
    held.unread.add_(1)
    output.sum().backward()


def test_inference_tensors_are_copied_since_nothing_counts_their_changes() -> None:
    with torch.inference_mode():
        tensor = table()
    given = leaves()
    output = regard.attention(*given, mask=tensor, backend="chunked")
    expected = gradients(regard.attention(*given, mask=table(), backend="chunked"), given, 1)
    with torch.inference_mode():
        tensor.logical_not_()
    for a, b in zip(gradients(output, given, 1), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_observation_answers_as_the_original(how: str) -> None:
    mask = table()
    given = [x.detach().clone() for x in leaves()]
    seen = regard.observe(*given, mask=mask, sink=torch.zeros(2), bias=torch.randn(N, N))
    for _ in range(2):
        mask.logical_not_()  # twice: the version is no longer 0
    seen = regard.observe(*given, mask=mask, sink=torch.zeros(2), bias=torch.randn(N, N))
    twin = COPIES[how](seen)
    for ask in (lambda x: x.weights(), lambda x: x.received, lambda x: x.top(2)[0], lambda x: x.map(2, 2)):
        torch.testing.assert_close(ask(twin), ask(seen), rtol=0, atol=0)
    expected = twin.weights()
    mask.logical_not_()
    torch.testing.assert_close(twin.weights(), expected, rtol=0, atol=0)
    with pytest.raises(ChangedError):
        seen.weights()
    with pytest.raises(ChangedError):  # a copy of what has changed is no better
        COPIES[how](seen).weights()
    twin._problem.mask.tensors[0].logical_not_()
    with pytest.raises(ChangedError):
        twin.weights()


def test_versions_notice_a_change_and_another_tensor() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    read = Versions([a])
    assert not read.changed()
    assert not read.differ_from([a])
    assert read.differ_from([b])
    assert read.differ_from([a, b])
    a.add_(1)
    assert read.changed()
    assert read.differ_from([a])

"""Inference mode and no_grad: the same numbers, and no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from attention_inputs import every_backend, inputs, our_backends


@every_backend
def test_inference_mode_gives_the_same_numbers(backend: str) -> None:
    tensors = inputs()
    expected = regard.attention(*tensors, mask=regard.causal(), backend=backend)
    with torch.inference_mode():
        found = regard.attention(*(x.clone() for x in tensors), mask=regard.causal(), backend=backend)
        assert found.is_inference()
    assert torch.equal(found, expected)


@our_backends
def test_everything_can_be_observed_in_inference_mode(backend: str) -> None:
    tensors = inputs()
    truth = regard.observe(*tensors, mask=regard.causal(), backend=backend)
    with torch.inference_mode():
        seen = regard.observe(*(x.clone() for x in tensors), mask=regard.causal(), backend=backend)
        for name in ("output", "lse", "entropy", "received", "visible", "gradient_health"):
            assert torch.equal(getattr(seen, name), getattr(truth, name))
        assert torch.equal(seen.weights(), truth.weights())
    assert torch.equal(seen.map(3, 3), truth.map(3, 3))
    assert torch.equal(seen.top(2)[1], truth.top(2)[1])


CHANGED_UNSEEN: dict[str, Callable[[], dict[str, Any]]] = {
    "query": dict,
    "key": dict,
    "bias": lambda: {"bias": torch.randn(9, 11)},
    "scale": lambda: {"scale": torch.ones(4)},
    "sink": lambda: {"sink": torch.ones(4)},
    "mask": lambda: {"mask": torch.rand(9, 11) > 0.3},
    "mixed": dict,
}


@pytest.mark.parametrize("what", CHANGED_UNSEEN)
def test_a_change_that_inference_mode_does_not_count_gives_no_wrong_number(what: str) -> None:
    """Tensors made there have no version: the late members look at copies, or raise."""
    with torch.inference_mode():
        query, key, value = (x.clone() for x in inputs())
        more = CHANGED_UNSEEN[what]()
        if what == "mixed":  # an ordinary query beside keys made in inference mode
            with torch.inference_mode(False):
                (query, *_) = inputs()
        seen = regard.observe(query, key, value, **more)
        expected = seen.weights()
        target = {"query": query, "key": key, "mixed": key}.get(what, more.get(what))
        if what == "mask":
            target.logical_not_()
        else:
            target.mul_(3)
        assert torch.equal(seen.weights(), expected)  # it looks at copies: changes cannot be traced here


@every_backend
def test_without_grad_nothing_is_kept(backend: str) -> None:
    tensors = inputs(grad=True)
    with torch.no_grad():
        found = regard.attention(*tensors, backend=backend)
        seen = regard.observe(*tensors)
    assert not found.requires_grad
    assert not seen.entropy.requires_grad
    torch.testing.assert_close(found, regard.attention(*tensors, backend="reference"))

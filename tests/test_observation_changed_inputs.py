"""Inputs that change in place after the call: a late member of an observation, or the backward pass, raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from attention_inputs import every_backend, inputs
from regard.errors import ChangedError
from regard.scores import Bilinear, Scaled, Temperature

LATE: dict[str, Callable[[regard.Observation], object]] = {
    "visible": lambda seen: seen.visible,
    "received": lambda seen: seen.received,
    "gradient_health": lambda seen: seen.gradient_health,
    "weights": lambda seen: seen.weights(),
    "scores": lambda seen: seen.scores(rows=[0]),
    "top": lambda seen: seen.top(2),
    "map": lambda seen: seen.map(2, 2),
}


def changeable() -> tuple[regard.Observation, dict[str, Tensor]]:
    query, key, value = inputs()
    held = {
        "query": query,
        "key": key,
        "bias": torch.randn(9, 11),
        "sink": torch.zeros(4),
        "mask": torch.rand(2, 1, 9, 11) > 0.3,
    }
    score = Scaled(nn.Parameter(torch.ones(4)))
    seen = regard.observe(query, key, value, score=score, mask=held["mask"], bias=held["bias"], sink=held["sink"])
    return seen, held | {"score": score.scale}


@pytest.mark.parametrize("member", LATE)
@pytest.mark.parametrize("what", ["query", "key", "bias", "sink", "mask", "score"])
def test_an_input_changed_in_place_is_an_error_in_every_late_member(member: str, what: str) -> None:
    seen, held = changeable()
    with torch.no_grad():
        held[what].logical_not_() if what == "mask" else held[what].add_(1)
    with pytest.raises(ChangedError, match=f"^{member}: .*changed in place.*observe again") as caught:
        LATE[member](seen)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("member", LATE)
def test_a_late_member_is_there_while_nothing_changes(member: str) -> None:
    seen, _ = changeable()
    LATE[member](seen)
    LATE[member](seen)


def test_a_member_asked_for_before_the_change_stays() -> None:
    seen, held = changeable()
    before = seen.received.clone()
    held["query"].zero_()
    assert torch.equal(seen.received, before)
    assert torch.equal(seen.perplexity, seen.entropy.exp())


CHANGES: dict[str, Callable[[], tuple[dict[str, Any], Tensor]]] = {
    "a scale": lambda: (lambda t: ({"scale": t}, t))(torch.ones(4)),
    "a scale of one value": lambda: (lambda t: ({"scale": t}, t))(torch.tensor(1.0)),
    "lengths of padding": lambda: (lambda t: ({"mask": regard.padding(t)}, t))(torch.tensor([5, 9])),
    "a dense mask": lambda: (lambda t: ({"mask": regard.dense(t)}, t))(torch.ones(9, 11).bool()),
    "a part of a composed mask": lambda: (lambda t: ({"mask": regard.causal() & regard.dense(t)}, t))(
        torch.ones(9, 11).bool()
    ),
    "slopes": lambda: (lambda t: ({"bias": regard.biases.alibi(t)}, t))(torch.ones(4)),
    "a parameter": lambda: (lambda s: ({"score": s}, s.weight))(Bilinear(8, 8)),
    "a temperature": lambda: (lambda s: ({"score": s}, s.log_ratio))(Temperature(2.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_tensor_that_the_weights_depend_on_is_watched(what: str) -> None:
    arguments, tensor = CHANGES[what]()
    seen = regard.observe(*inputs(), **arguments)
    with torch.no_grad():
        tensor.zero_()
    with pytest.raises(ChangedError):
        seen.weights()


def test_a_buffer_of_a_score_is_watched_too() -> None:
    held = torch.ones(4)
    seen = regard.observe(*torch.randn(3, 2, 4, 9, 8).unbind(), score=Scaled(held))
    held.zero_()
    with pytest.raises(ChangedError):
        seen.weights()


def test_a_score_that_gains_a_parameter_is_a_change() -> None:
    score = Bilinear(8, 8)
    seen = regard.observe(*torch.randn(3, 2, 4, 9, 8).unbind(), score=score)
    score.register_parameter("more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(ChangedError):
        seen.weights()


def test_a_step_of_an_optimizer_is_a_change() -> None:
    score = Bilinear(8, 8)
    seen = regard.observe(*inputs(), score=score)
    seen.entropy.sum().backward()
    torch.optim.SGD(score.parameters(), lr=0.1).step()
    with pytest.raises(ChangedError):
        seen.received


def test_a_parameter_put_in_the_place_of_another_gives_no_wrong_number() -> None:
    score = Bilinear(8, 8)
    seen = regard.observe(*inputs(), score=score)
    score.weight = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(ChangedError):
        seen.weights()


def test_what_is_observed_in_a_functional_call_is_of_its_parameters() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = Bilinear(8, 8)

        def forward(self, *tensors: Tensor) -> regard.Observation:
            return regard.observe(*tensors, score=self.score)

    module, twin = Looking(), Looking()
    expected = twin(*inputs())
    seen = torch.func.functional_call(module, {"score.weight": twin.score.weight}, tuple(inputs()))
    torch.testing.assert_close(seen.lse, expected.lse)
    with pytest.raises(ChangedError):
        seen.weights()


def test_a_change_of_the_values_alone_changes_no_weight() -> None:
    query, key, value = inputs()
    seen = regard.observe(query, key, value)
    before = seen.weights().clone()
    value.zero_()
    assert torch.equal(seen.weights(), before)


def test_a_change_of_a_query_that_is_also_the_value_is_an_error() -> None:
    query, key, _ = inputs()
    seen = regard.observe(query, key, key)
    shared = regard.observe(query, key, query.expand_as(query) if query.shape == key.shape else key)
    query.mul_(2)
    for observation in (seen, shared):
        with pytest.raises(ChangedError):
            observation.weights()


@every_backend
def test_an_input_changed_before_the_backward_pass_is_an_error(backend: str) -> None:
    leaves = inputs(grad=True)
    query, key, value = (x * 1 for x in leaves)
    found = regard.attention(query, key, value, backend=backend)
    with torch.no_grad():
        key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()

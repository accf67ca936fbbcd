"""Contexts of sharded tensors: the last one entered takes the call, and by default there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.core import contexts
from regard.core.contexts import ACTIVE, ShardedContext, active_context, outside_context, refuse_in_context
from regard.errors import ArgumentError


class Named(ShardedContext):
    """A context that returns its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return self.name

    def observe(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return f"observed by {self.name}"

    def token_positions(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device) + 100


@pytest.fixture
def two() -> Iterator[None]:
    ACTIVE.extend((Named("outer"), Named("inner")))
    yield
    ACTIVE.clear()


X = torch.ones(1, 1, 3, 4)


def test_by_default_there_is_none() -> None:
    assert active_context(X) is None
    assert contexts.token_positions(3, X.device) is None
    refuse_in_context("steps")
    assert isinstance(regard.attention(X, X, X), Tensor)


def test_the_last_context_takes_calls_and_knows_positions(two: None) -> None:
    assert regard.attention(X, X, X) == "inner"
    assert regard.observe(X, X, X) == "observed by inner"
    assert contexts.token_positions(3, X.device).tolist() == [100, 101, 102]


def test_a_tensor_type_that_is_sharded_by_itself_goes_first(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contexts.TENSOR_TYPES, "Tensor", lambda: Named("by type"))
    assert regard.attention(X, X, X) == "by type"


def test_outside_the_contexts_calls_are_plain_and_errors_restore_them(two: None) -> None:
    with outside_context():
        assert isinstance(regard.attention(X, X, X), Tensor)
    with pytest.raises(KeyError), outside_context():
        raise KeyError
    assert regard.attention(X, X, X) == "inner"


def test_a_function_without_shards_is_refused_by_name(two: None) -> None:
    with pytest.raises(ArgumentError, match=r"^steps: inside regard\.distributed\.over"):
        refuse_in_context("steps")

"""Meta and fake tensors have shapes and no values, and make_fx records operations: masks go with all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import regard
from regard.errors import ArgumentError

MASKS: dict[str, Callable[[], regard.Mask]] = {
    "causal": regard.causal,
    "window": lambda: regard.window(2) | regard.prefix(1),
    "lengths": lambda: regard.causal() & regard.padding(torch.tensor([5, 12])),
    "keep": lambda: regard.padding(torch.arange(12) < 7),
    "dense": lambda: regard.dense(torch.ones(12, 12).tril().bool()),
    "documents": lambda: regard.documents(torch.arange(12) // 5),
    "packed": lambda: regard.packed([5, 7]),
    "predicate": lambda: regard.predicate(lambda batch, head, i, j: i + head >= j),
}


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS.keys())
def test_meta_tensors_take_every_mask(make: Callable[[], regard.Mask]) -> None:
    x = torch.empty(2, 2, 12, 8, device="meta", requires_grad=True)
    regard.attention(x, x, x, mask=make()).sum().backward()
    seen = regard.observe(x, x, x, mask=make())
    assert x.grad is not None
    assert x.grad.is_meta
    assert seen.lse.shape == (2, 2, 12)
    assert seen.received.is_meta


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS.keys())
def test_fake_tensors_take_every_mask_and_leave_nothing_behind(make: Callable[[], regard.Mask]) -> None:
    mask, x = make(), torch.randn(3, 2, 2, 12, 8)
    for backend in ("auto", "reference"):
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.empty(2, 2, 12, 8, requires_grad=True)
            regard.attention(fake, fake, fake, mask=mask, backend=backend).sum().backward()
            assert regard.attention(*x.unbind(), mask=make()).shape == (2, 2, 12, 8)
        assert fake.grad is not None
    found = regard.attention(*x.unbind(), mask=mask)
    torch.testing.assert_close(found, regard.attention(*x.unbind(), mask=mask, backend="reference"))
    assert type(found) is Tensor


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS.keys())
def test_a_recorded_call_gives_the_same_for_other_numbers(make: Callable[[], regard.Mask]) -> None:
    mask = make()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=mask)

    before, now = (torch.randn(3, 2, 2, 12, 8).unbind() for _ in range(2))
    for function in (call, torch.func.grad(lambda *x: call(*x).sin().sum())):
        recorded = make_fx(function)(*before)
        torch.testing.assert_close(recorded(*now), function(*now), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_call_recorded_with_shapes_alone_gives_the_same(mode: str) -> None:
    def call(x: Tensor, lengths: Tensor) -> Tensor:
        return regard.attention(x, x, x, mask=regard.window(3) & regard.padding(lengths))

    x, lengths = torch.randn(2, 2, 12, 8), torch.tensor([5, 12])
    recorded = make_fx(call, tracing_mode=mode)(torch.zeros_like(x), torch.tensor([12, 12]))
    torch.testing.assert_close(recorded(x, lengths), call(x, lengths))


def test_hidden_keys_leave_no_trace_in_a_recorded_call() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=regard.padding([5, 12]))

    query, key, value = torch.randn(3, 2, 2, 12, 8).unbind()
    recorded, expected = make_fx(call)(query, key, value), call(query, key, value)
    key[0, :, 5:], value[0, :, 5:] = torch.nan, torch.inf
    torch.testing.assert_close(recorded(query, key, value), expected)


def test_dropout_is_not_recorded() -> None:
    x = torch.randn(1, 2, 6, 4)
    with pytest.raises(ArgumentError, match=r"^attention: dropout draws a seed at each call"):
        make_fx(lambda x: regard.attention(x, x, x, dropout=0.5))(x)

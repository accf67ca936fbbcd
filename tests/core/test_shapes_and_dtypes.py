"""Shapes and dtypes that validation accepts: how leading dimensions, masks and biases broadcast, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from attention_inputs import every_backend, gradients, inputs, our_backends
from regard.scores import Balanced


@every_backend
@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((), ()),
        ((3,), (3,)),
        ((3,), (1,)),
        ((1,), (3,)),
        ((2, 4), (1, 4)),
        ((1, 4), (2, 4)),
        ((2, 4), (1, 1)),
        ((2, 3, 4), (2, 3, 4)),
        ((2, 3, 4), (1, 3, 2)),
        ((2, 1, 4), (1, 3, 4)),
        ((2, 1, 3, 4), (2, 2, 1, 2)),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast_with_their_gradients(
    backend: str, q: tuple[int, ...], k: tuple[int, ...]
) -> None:
    made = torch.Generator().manual_seed(0)
    shapes = (*q, 5, 4), (*k, 6, 4), (*k, 6, 4)
    leaves = [torch.randn(s, generator=made, dtype=torch.float64).requires_grad_() for s in shapes]
    found = regard.attention(*leaves, backend=backend)
    query, key, value = leaves
    if len(q) >= 2:
        groups = q[-1] // k[-1]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    expected = (query @ key.mT / 2).softmax(-1) @ value
    torch.testing.assert_close(found, expected)
    for a, b in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b)


@every_backend
@pytest.mark.parametrize("lead", [(), (2,), (2, 4), (2, 3, 4)], ids=str)
def test_an_item_of_a_mask_is_an_item_of_the_first_dimension(backend: str, lead: tuple[int, ...]) -> None:
    tensors = inputs(*lead) if lead else [x[0, 0] for x in inputs()]
    lengths = [5, 8] if lead else [5]
    found = regard.attention(*tensors, mask=regard.padding(lengths), backend=backend)
    for b, length in enumerate(lengths):
        query, key, value = (x[b] for x in tensors) if lead else tensors
        plain = regard.attention(query, key[..., :length, :], value[..., :length, :], backend="reference")
        torch.testing.assert_close(found[b] if lead else found, plain)


MASKS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # lead of the inputs, shape of the mask
    "keys": ((2, 4), (11,)),
    "pairs": ((2, 4), (9, 11)),
    "rows": ((2, 4), (9, 1)),
    "heads": ((2, 4), (4, 9, 11)),
    "one head": ((2, 4), (1, 9, 11)),
    "items and keys": ((2, 4), (2, 1, 1, 11)),
    "items and pairs": ((2, 4), (2, 1, 9, 11)),
    "one item": ((2, 4), (1, 1, 9, 11)),
    "all": ((2, 4), (2, 4, 9, 11)),
    "without heads": ((3,), (3, 9, 11)),
    "without heads, one item": ((3,), (1, 9, 11)),
    "without heads, keys": ((3,), (3, 1, 11)),
    "five dimensions": ((2, 3, 4), (2, 1, 4, 9, 11)),
    "the inner of five dimensions": ((2, 3, 4), (3, 1, 9, 11)),
    "one number": ((2, 4), ()),
}


@every_backend
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_a_mask_tensor_broadcasts_right_aligned_whatever_its_dtype(backend: str, case: str, dtype: torch.dtype) -> None:
    lead, shape = MASKS[case]
    query, key, value = inputs(*lead, dtype=torch.float64)
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(5)) > 0.4
    if shape:
        allowed[..., 0] = True
    else:
        allowed = torch.tensor(True)
    found = regard.attention(query, key, value, mask=allowed.to(dtype), backend=backend)
    logits = (query @ key.mT / math.sqrt(8)).masked_fill(~allowed, -math.inf)
    torch.testing.assert_close(found, logits.softmax(-1) @ value)


def test_whole_numbers_may_hide_everything_but_floats_may_not() -> None:
    tensors = inputs()
    assert not regard.attention(*tensors, mask=torch.zeros(9, 11, dtype=torch.int64)).any()
    assert not regard.attention(*tensors, mask=torch.zeros(9, 11, dtype=torch.bool)).any()
    with pytest.raises(ValueError, match="zeros"):
        regard.attention(*tensors, mask=torch.zeros(9, 11))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_querys_dtype(backend: str, dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype, grad=True)
    for more in (
        {},
        {"mask": regard.causal()},
        {"score": Balanced()},
        {"scale": torch.ones(4)},
        {"bias": torch.zeros(9, 11)},
    ):
        found = regard.attention(*tensors, backend=backend, **more)
        assert found.dtype == dtype
        assert all(g.dtype == dtype for g in gradients(found, tensors))


@our_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_bias_may_have_any_floating_dtype_and_gets_its_gradient_in_it(backend: str, dtype: torch.dtype) -> None:
    tensors = inputs()
    bias = torch.randn(9, 11).to(dtype).requires_grad_()
    found = regard.attention(*tensors, bias=bias, backend=backend)
    torch.testing.assert_close(found, regard.attention(*tensors, bias=bias.detach().float(), backend="reference"))
    found.square().sum().backward()
    assert bias.grad.dtype == dtype
    assert bias.grad.any()


@pytest.mark.parametrize("mask", [None, regard.causal()], ids=str)
def test_shapes_can_be_asked_on_the_meta_device(mask: regard.Mask | None) -> None:
    query, key, value = (x.to("meta") for x in inputs(n=11))
    found = regard.attention(query, key, value, mask=mask)
    assert found.device.type == "meta"
    assert found.shape == query.shape


@every_backend
@pytest.mark.parametrize(
    "mask",
    [
        lambda: torch.ones(0, 1, 3, 5).bool(),
        lambda: regard.dense(torch.ones(0, 2, 3, 5).bool()),
        lambda: regard.padding(torch.zeros(0).long()),
        lambda: regard.padding(keep=torch.ones(0, 5).bool()),
        lambda: regard.documents(torch.zeros(0, 3).long(), torch.zeros(0, 5).long()),
        lambda: regard.causal(offset=torch.zeros(0).long()),
        lambda: regard.predicate(lambda batch, head, i, j: (batch + i + j) % 2 == 0),
    ],
)
def test_a_batch_of_no_items_may_have_a_mask_per_item(backend: str, mask: Callable[[], Any]) -> None:
    query, key = torch.randn(0, 2, 3, 4, requires_grad=True), torch.randn(0, 2, 5, 4)
    regard.attention(query, key, key, mask=mask(), backend=backend).sum().backward()
    seen = regard.observe(query, key, key, mask=mask(), backend=backend)
    assert seen.output.shape == query.grad.shape == (0, 2, 3, 4)
    assert seen.weights().shape == seen.scores().shape == (0, 2, 3, 5)
    assert seen.received.shape == (0, 2, 5)
    assert regard.steps(query, key, key, mask=mask()).weights.shape == (0, 2, 3, 5)


EMPTY: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "no items, a mask for each": ((0, 2), {"mask": regard.padding(lengths=[])}),
    "no inner items, a mask for each outer one": ((2, 0, 3), {"mask": regard.padding(lengths=[1, 2])}),
    "no heads, a mask for each": ((2, 0), {"mask": torch.ones(2, 0, 4, 5, dtype=torch.bool)}),
    "no heads, dropout": ((2, 0), {"dropout": 0.5}),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_dimensions_of_size_0_give_empty_results(backend: str, name: str) -> None:
    lead, arguments = EMPTY[name]
    query, key = torch.randn(*lead, 4, 3, requires_grad=True), torch.randn(*lead, 5, 3, requires_grad=True)
    seen = regard.observe(query, key, key, **arguments, backend=backend)
    assert seen.output.shape == (*lead, 4, 3)
    assert seen.weights().shape == (*lead, 4, 5)
    assert seen.scores().shape == (*lead, 4, 5)
    assert [g.shape for g in torch.autograd.grad(seen.output.sum(), (query, key))] == [query.shape, key.shape]

"""Dropout in our kernels: the pairs that `regard.dropout.keep` names, as on every backend, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import regard
from contract_cases import Shape, agree, as_double, leaves
from regard import biases, scores
from regard.core.dropout import keep, keep_pairs, row_keys
from regard.kernels.portable.dropout_keys import Origin, dropout_keys

FEW = Shape(batch=2, heads=2, kv_heads=1, n=20, m=40)


def inputs(s: Shape = FEW, lead: tuple[int, ...] = ()) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    lead = lead or (s.batch,)
    shapes = (s.heads, s.n, s.d), (s.kv_heads, s.m, s.d), (s.kv_heads, s.m, s.dv)
    return [torch.randn(*lead, *tail, generator=made).requires_grad_() for tail in shapes]


def pulled(backend: str, tensors: list[Tensor], kwargs: dict[str, Any]) -> list[Tensor]:
    """Output and gradients with a seed of its own."""
    torch.manual_seed(7)
    seen = regard.observe(*tensors, **kwargs, dropout=0.4, backend=backend)
    weight = torch.linspace(-1, 1, seen.output.numel()).view(seen.output.shape)
    loss = (seen.output * weight).sum() + seen.entropy.square().sum()
    return [seen.output, seen.entropy, *torch.autograd.grad(loss, leaves(tensors, kwargs))]


made = torch.Generator().manual_seed(1)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": regard.causal()},
    "bits": {"mask": regard.strided(3)},
    "sink and bias": {
        "sink": torch.ones(2, requires_grad=True),
        "bias": torch.randn(2, 20, 40, generator=made, requires_grad=True),
    },
    "softcap and scales": {"softcap": 2.0, "scale": torch.full((2,), 0.3, requires_grad=True)},
    "relative": {"bias": biases.relative(torch.randn(2, 9, generator=made, requires_grad=True))},
    "additive": {"score": scores.Additive(16, 16, 3)},
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_pairs_are_dropped_forward_and_backward(name: str) -> None:
    tensors, kwargs = inputs(), CASES[name]
    agree(pulled("triton", tensors, kwargs), pulled("reference", *as_double(tensors, kwargs)), [], 2, "result")


def test_the_same_pairs_are_dropped_where_keys_are_split() -> None:
    found = []
    for backend in ("triton", "chunked"):
        torch.manual_seed(7)
        tensors = inputs(Shape(batch=1, heads=4, kv_heads=2, n=2, m=1030))
        found.append(regard.attention(*tensors, mask=regard.causal(), dropout=0.4, backend=backend))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


def test_the_same_pairs_are_dropped_with_several_leading_dimensions() -> None:
    tensors = inputs(Shape(heads=2, kv_heads=1, n=5, m=7), lead=(2, 3))
    agree(pulled("triton", tensors, {}), pulled("reference", *as_double(tensors, {})), [], 2, "result")


def test_the_weights_that_survive_are_those_that_keep_says() -> None:
    """With the identity as values, the output is the matrix of weights after dropout."""
    query, key, _ = (x.detach() for x in inputs())
    value = torch.eye(40).expand(2, 1, 40, 40)
    torch.manual_seed(8)
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    survive = keep(0.3, seed, *map(torch.arange, (2, 2, 20, 40)))
    torch.manual_seed(8)
    found = regard.attention(query, key, value, dropout=0.3, backend="triton")
    assert torch.equal(found != 0, survive)
    expected = regard.observe(query, key, value, backend="reference").weights() * survive / 0.7
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_statistics_and_passes_are_before_dropout() -> None:
    tensors = inputs()
    plain = regard.observe(*tensors, mask=regard.causal(), backend="triton")
    seen = regard.observe(*tensors, mask=regard.causal(), dropout=0.6, backend="triton")
    for name in ("lse", "entropy", "max_logit", "received", "gradient_health"):
        assert torch.equal(getattr(seen, name), getattr(plain, name))
    assert not torch.equal(seen.output, plain.output)


def test_the_seed_comes_from_torchs_generator() -> None:
    tensors = [x.detach() for x in inputs()]
    torch.manual_seed(1)
    first, second = (regard.attention(*tensors, dropout=0.4, backend="triton") for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, regard.attention(*tensors, dropout=0.4, backend="triton"))


def test_a_checkpoint_drops_the_same_pairs_again() -> None:
    tensors = inputs(Shape(batch=1, heads=2, kv_heads=1, n=9, m=12))

    def attend(*inputs: Tensor) -> Tensor:
        return regard.attention(*inputs, dropout=0.4, backend="triton").square().sum()

    torch.manual_seed(3)
    once = torch.autograd.grad(attend(*tensors), tensors)
    torch.manual_seed(3)
    again = torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(once, torch.autograd.grad(again, tensors), strict=True))


@pytest.mark.parametrize("seed", [0, 7, 2**62 - 1, torch.tensor(2**61 + 5)])
def test_one_kernel_finds_the_keys_of_all_rows(seed: int | Tensor) -> None:
    items, heads, rows, cols = (torch.arange(size) for size in (4, 3, 150, 9))
    device = torch.device("cpu")
    whole = row_keys(seed, items, heads, rows)
    assert torch.equal(dropout_keys(seed, (4, 3, 150), Origin(0, 0, 0, 0, 1), device), whole)
    part = dropout_keys(seed, (4, 2, 30), Origin(1, 1, 100, 6, 2), device)
    expected = keep_pairs(0.4, whole[[1, 1, 2, 2], 1:, 100:130], cols[6:])
    assert torch.equal(keep_pairs(0.4, part, cols[:3]), expected)
    assert dropout_keys(seed, (4, 0, 30), Origin(0, 0, 0, 0, 1), device).shape == (4, 0, 30)

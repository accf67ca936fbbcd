"""Torch's `CausalBias` means a causal mask wherever a mask is taken, with every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard
from regard.errors import MaskError

N, M = 4, 6
BIASES = {"upper left": (causal_upper_left, 0), "lower right": (causal_lower_right, M - N)}


def inputs() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, size, 8, generator=made).requires_grad_() for size in (N, M, M)]


def multihead(**given: Any) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        attend = regard.nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)
        return attend(q[:, 0], k[:, 0], v[:, 0], **given)[0]

    return call


def over_group(name: str, mask: Any) -> Callable[..., Tensor]:
    def call(*tensors: Tensor) -> Tensor:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            output = regard.distributed.attention(*tensors, **{name: mask})
            output.sum().backward(retain_graph=True)  # the backward pass needs the group
            return torch.cat([x.grad.flatten() for x in tensors if x.grad is not None])
        finally:
            dist.destroy_process_group()

    return call


ENTRIES: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "mask=": lambda mask: lambda *x: regard.attention(*x, mask=mask),
    "mask= on reference": lambda mask: lambda *x: regard.attention(*x, mask=mask, backend="reference"),
    "observe": lambda mask: lambda *x: regard.observe(*x, mask=mask).output,
    "steps": lambda mask: lambda *x: regard.steps(*x, mask=mask).output,
    "attention_with_weights": lambda mask: lambda *x: regard.attention_with_weights(*x, mask)[1],
    "module": lambda mask: lambda *x: regard.nn.ScaledDotProductAttention()(*x, mask)[0],
    "MultiheadAttention": lambda mask: multihead(mask=mask),
    "dense": lambda mask: lambda *x: regard.attention(*x, mask=regard.dense(mask)),
    "&": lambda mask: lambda *x: regard.attention(*x, mask=regard.window(3, 9) & mask),
    "distributed": lambda mask: over_group("mask", mask),
}


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_causal_bias_is_the_mask_that_it_stands_for(entry: str, kind: str) -> None:
    make, offset = BIASES[kind]
    table = torch.ones(N, M, dtype=torch.bool).tril(offset)
    compare(ENTRIES[entry](make(N, M)), ENTRIES[entry](table))


ADDED: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "bias=": lambda bias: lambda *x: regard.attention(*x, bias=bias),
    "bias= beside a mask": lambda bias: lambda *x: regard.attention(*x, bias=bias, mask=torch.arange(M) % 2 == 0),
    "observe": lambda bias: lambda *x: regard.observe(*x, bias=bias).lse,
    "attn_mask": lambda bias: lambda *x: regard.scaled_dot_product_attention(*x, attn_mask=bias),
    "attn_mask of the module": lambda bias: multihead(attn_mask=bias),
    "distributed": lambda bias: over_group("bias", bias),
}


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("entry", ADDED)
def test_a_causal_bias_that_is_added_hides_the_same_pairs(entry: str, kind: str) -> None:
    make, offset = BIASES[kind]
    table = torch.zeros(N, M).masked_fill(~torch.ones(N, M, dtype=torch.bool).tril(offset), -torch.inf)
    compare(ADDED[entry](make(N, M)), ADDED[entry](table))


def compare(found: Callable[..., Tensor], expected: Callable[..., Tensor]) -> None:
    ours, theirs = inputs(), inputs()
    a, b = found(*ours), expected(*theirs)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if a.requires_grad:
        for x, y in zip(
            torch.autograd.grad(a.square().sum(), ours, allow_unused=True),
            torch.autograd.grad(b.square().sum(), theirs, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_causal_bias_fits_only_its_own_lengths() -> None:
    q, k, v = inputs()
    wrong = causal_upper_left(N, N)
    for use in (
        lambda: regard.attention(q, k, v, mask=wrong),
        lambda: regard.attention(q, k, v, bias=wrong),
        lambda: regard.attention(q, k, v, mask=regard.window(2) & wrong),
        lambda: regard.dense(wrong).density(N, M),
        lambda: regard.scaled_dot_product_attention(q, k, v, wrong),
    ):
        with pytest.raises(MaskError, match="CausalBias is for 4 rows and 4 keys; there are 4 and 6"):
            use()
    with torch.no_grad(), pytest.raises(MaskError, match="CausalBias"):  # the fast path checks it too
        regard.attention(k, k, k, mask=regard.dense(wrong))


def test_a_watched_model_may_pass_a_causal_bias_without_heads() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=causal_upper_left(5, 5))

    model, x = Model(), torch.randn(2, 5, 8)
    before = model(x)
    with regard.watch(model) as seen:
        torch.testing.assert_close(model(x), before)
    assert not seen.missed
    assert seen[""].visible[0, 0].tolist() == [1, 2, 3, 4, 5]

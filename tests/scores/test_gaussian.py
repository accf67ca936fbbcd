"""The Gaussian score depends on differences of queries and keys only, wherever they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.scores import Gaussian


def truth(query: Tensor, key: Tensor, bandwidth: float) -> Tensor:
    """The logits by differences, in float64."""
    groups = query.shape[1] // key.shape[1]
    far = query.double()[..., :, None, :] - key.double().repeat_interleave(groups, 1)[..., None, :, :]
    return -far.square().sum(-1) / (2 * bandwidth**2)


@settings(max_examples=25)
@given(
    offset=st.sampled_from([0.0, 1.0, -100.0, 1e3, 1e6]),
    keys=st.sampled_from([1, 2, 62, 63, 64, 200]),
    hidden=st.sampled_from([None, 0.0, 1e9, math.inf, math.nan]),
    backend=st.sampled_from(["auto", "chunked", "reference"]),
    watched=st.booleans(),
)
def test_attention_far_from_the_origin_is_as_exact_as_near_it(
    offset: float, keys: int, hidden: float | None, backend: str, watched: bool
) -> None:
    torch.manual_seed(keys)
    query, key, value = torch.rand(2, 4, 5, 3), torch.rand(2, 2, keys, 3), torch.randn(2, 2, keys, 2)
    query, key = query + offset * torch.tensor([1.0, -0.5, 0.7]), key + offset * torch.tensor([1.0, -0.5, 0.7])
    shown = max(1, keys - keys // 3) if hidden is not None else keys
    if hidden is not None:
        key[:, :, shown:] = hidden
    weights = truth(query, key[:, :, :shown], 0.3).softmax(-1)
    expected = weights @ value[:, :, :shown].double().repeat_interleave(2, 1)
    query.requires_grad_(watched)
    mask = None if hidden is None else regard.padding([shown, shown])
    found = regard.attention(query, key, value, score=Gaussian(0.3), mask=mask, backend=backend)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_derivatives_do_not_notice_the_centre() -> None:
    torch.manual_seed(0)
    score = Gaussian(0.7, learnable=True).double()
    tensors = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def attend(*x: Tensor) -> Tensor:
        return regard.attention(*x, score=score, mask=regard.causal(), backend="chunked")

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, tensors, fast_mode=True)
    items = [torch.stack((x, x + 5.0)).detach() for x in tensors]
    torch.testing.assert_close(torch.vmap(attend)(*items)[0], attend(*tensors))


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_no_keys_and_no_dims_have_a_centre_too(shape: tuple[int, int]) -> None:
    query, key = torch.randn(1, 2, 4, shape[1]), torch.randn(1, 2, *shape)
    assert regard.attention(query, key, torch.randn(1, 2, shape[0], 3), score=Gaussian(0.7)).isfinite().all()


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_a_later_key_leaves_the_bits_of_earlier_rows(offset: float) -> None:
    query, key, value = torch.randn(3, 1, 2, 70, 4, generator=torch.Generator().manual_seed(2)).unbind()
    query, key = query + offset, key + offset
    arguments = {"score": Gaussian(0.7), "mask": regard.causal(), "backend": "chunked"}
    before = regard.attention(query, key, value, **arguments)
    for at in (-1, -2, -8):
        changed = key.clone()
        changed[..., at:, :] += 50.0
        assert torch.equal(regard.attention(query, changed, value, **arguments)[..., :at, :], before[..., :at, :])

"""NaN, inf and overflow in keys and queries that take no part leave no trace."""

from __future__ import annotations

import pytest
import torch

import regard


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@pytest.mark.parametrize("watched", [False, True])
def test_nan_in_the_keys_behind_a_causal_mask_from_the_top_leaves_no_trace(backend: str, watched: bool) -> None:
    q, k, v = torch.randn(2, 4, 37, 16), torch.randn(2, 4, 41, 16), torch.randn(2, 4, 41, 16)
    k[..., 37:, :] = torch.nan
    v[..., 37:, :] = torch.inf
    q, k, v = (x.requires_grad_(watched) for x in (q, k, v))
    found = regard.attention(q, k, v, mask=regard.causal(offset=0), backend=backend)
    assert found.isfinite().all()
    if watched:
        assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), (q, k, v)))


def test_nan_in_a_query_that_a_small_mask_leaves_without_keys_reaches_no_gradient() -> None:
    q, k, v = torch.randn(1, 2, 13, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    q[..., 0, :] = torch.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    found = regard.attention(q, k, v, mask=regard.causal(offset=-1))  # every key is seen, row 0 sees none
    assert not found[..., 0, :].any()
    dq, dk, dv = torch.autograd.grad(found.square().sum(), (q, k, v))
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    assert not dq[..., 0, :].any()


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("mask", [regard.prefix(5), regard.dense(torch.arange(9) < 5), regard.padding([5])], ids=repr)
def test_a_hidden_key_so_large_that_its_logits_overflow_leaves_no_trace(mask: regard.Mask, watched: bool) -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    true = regard.attention(q, k, v, mask=mask)
    k = k.clone()
    k[:, :, 7] = 3e38
    q = q.requires_grad_(watched)
    torch.testing.assert_close(regard.attention(q, k, v, mask=mask), true)


def test_vmap_over_a_bias_that_hides_differently_each_time_equals_a_loop() -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 4).unbind()
    v[..., 5, :] = torch.nan
    bias = torch.zeros(3, 6, 6)
    bias[..., 5] = -torch.inf
    bias[0, :, 2] = -torch.inf
    found = torch.vmap(lambda b: regard.attention(q, k, v, bias=b, backend="chunked"))(bias)
    alone = torch.stack([regard.attention(q, k, v, bias=b, backend="chunked") for b in bias])
    torch.testing.assert_close(found, alone)


PARAMETERS = {
    "relative": (regard.biases.relative, (3,)),
    "relative per head": (regard.biases.relative, (2, 3)),
    "alibi": (regard.biases.alibi, (2,)),
}


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_vmap_over_the_parameters_of_a_bias_equals_a_loop_whatever_is_hidden(
    name: str, backend: str, bad: float
) -> None:
    make, shape = PARAMETERS[name]
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    for x in (k, v):
        x[..., 4, :] = bad
    mask = regard.padding([4])
    parameters = torch.rand(3, 2, *shape)
    parameters[0, 0] = torch.inf if name == "alibi" else -torch.inf

    def attend(t: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, k, v, mask=mask, bias=make(t[0]), backend=backend).nan_to_num(7.0)

    def nested(t: torch.Tensor) -> torch.Tensor:  # two levels of vmap, the inner one over the last dimension
        return torch.vmap(lambda x: attend(x[None]), in_dims=-1)(t.movedim(0, -1))

    alone = torch.stack([torch.stack([attend(x[None]) for x in t]) for t in parameters])
    torch.testing.assert_close(torch.vmap(attend)(parameters), alone[:, 0])
    torch.testing.assert_close(torch.vmap(nested)(parameters), alone)

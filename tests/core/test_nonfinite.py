"""NaN, inf and overflow in keys and queries that take no part leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.core import nonfinite


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


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"mask": regard.causal()},
    "window": {"mask": regard.window(2, 1)},
    "per item": {"mask": regard.causal() & regard.padding([9, 4])},
    "bias": {"bias": torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1) > 0, -torch.inf)},
    "additive, sink, dropout": {
        "mask": regard.causal(),
        "score": regard.scores.Additive(4, 4, 3),
        "sink": torch.zeros(4),
        "dropout": 0.3,
    },
}


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_rows_that_do_not_see_a_nan_are_as_without_it(backend: str, name: str, bad: float, where: str) -> None:
    torch.manual_seed(0)
    options = OPTIONS[name]
    clean = [torch.randn(2, heads, 9, 4) for heads in (4, 2, 2)]
    spoilt = [x.clone() for x in clean]
    spoilt[1 if where == "key" else 2][0, 1, 5, 2] = bad
    allowed = options["mask"].dense(9, 9) if "mask" in options else options["bias"] == 0
    sees = torch.zeros(2, 4, 9, dtype=torch.bool)
    sees[0, 2:] = allowed.reshape(-1, 9, 9)[0, :, 5]
    results = []
    for tensors in (clean, spoilt):
        query = tensors[0].requires_grad_()
        torch.manual_seed(1)
        seen = regard.observe(*tensors, **options, backend=backend)
        (grad,) = torch.autograd.grad(seen.output.sum() + seen.entropy.sum(), query)
        results.append([x[~sees] for x in (seen.output, seen.lse, seen.entropy, seen.max_logit, grad)])
        assert not (tensors is spoilt and bad != bad and seen.output[sees].isfinite().all())
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


LAYOUTS = {
    "dense": lambda: torch.randn(2, 3, 5, 4),
    "heads inside": lambda: torch.randn(2, 5, 3, 4).transpose(1, 2),
    "with gaps": lambda: torch.randn(2, 3, 5, 8)[..., ::2],
    "half": lambda: torch.randn(2, 3, 5, 4).bfloat16(),
    "double": lambda: torch.randn(2, 3, 5, 4).double() * 1e30,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_number_that_is_not_finite_or_whose_square_overflows_is_found(name: str) -> None:
    x = LAYOUTS[name]()
    assert nonfinite.all_finite(x, x[:0])
    for bad in (torch.nan, torch.inf, -torch.inf, 1e300 if x.dtype == torch.float64 else -1e20):
        x[1, 2, 3, 2] = bad
        assert not nonfinite.all_finite(x)


def test_finite_inputs_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    monkeypatch.setattr(nonfinite, "_sum_of_squares", lambda x: norms.append(x) or 1.0)
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    regard.attention(q, k, v, mask=regard.causal(), backend="chunked")
    assert len(norms) == 3


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_a_query_that_is_not_finite_reaches_no_gradient_if_there_is_no_key(backend: str) -> None:
    query, key = torch.full((1, 2, 3, 4), torch.nan), torch.randn(1, 2, 0, 4)
    scale = torch.tensor(0.5, requires_grad=True)
    output = regard.attention(query, key, key, scale=scale, backend=backend)
    assert not output.any()
    assert torch.autograd.grad(output.sum(), scale)[0] == 0

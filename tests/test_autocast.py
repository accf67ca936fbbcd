"""Autocast: the dtypes of torch's own function, exact statistics, and gradients that do not depend on where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from attention_inputs import every_backend, inputs, our_backends
from regard.errors import DtypeError
from regard.scores import Additive, Bilinear, Cosine, Gaussian


@every_backend
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_autocast_casts_as_torchs_function_does(backend: str, kind: torch.dtype, given: torch.dtype) -> None:
    tensors = inputs(dtype=given)
    with torch.autocast("cpu", dtype=kind):
        expected = F.scaled_dot_product_attention(*tensors)
        found = regard.attention(*tensors, backend=backend)
    assert found.dtype == expected.dtype
    tolerance = 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@every_backend
def test_autocast_joins_what_would_otherwise_be_mixed(backend: str) -> None:
    query, key, value = inputs()
    mixed = query, key.bfloat16(), value.half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert regard.attention(*mixed, backend=backend).dtype == torch.bfloat16
    with pytest.raises(DtypeError):
        regard.attention(*mixed, backend=backend)


@our_backends
@pytest.mark.parametrize("score", [None, Cosine(0.1), Bilinear(8, 8), Additive(8, 8, 4), Gaussian(1.0)], ids=str)
def test_statistics_under_autocast_are_those_of_the_rounded_inputs_in_float32(backend: str, score: Any) -> None:
    tensors = inputs(dtype=torch.float32)
    rounded = [x.bfloat16().double() for x in tensors]
    bias = torch.randn(9, 11)
    more = {"mask": regard.causal(), "bias": bias, "sink": torch.zeros(4), "softcap": 5.0}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = regard.observe(*tensors, score=score, backend=backend, **more)
        late = seen.received, seen.scores(), seen.gradient_health, seen.map(3, 3)
        assert seen.weights().dtype == seen.output.dtype == torch.bfloat16
    truth = regard.observe(*rounded, score=score, backend="reference", **more)
    for name in ("lse", "entropy", "max_logit"):
        found = getattr(seen, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), getattr(truth, name), rtol=2e-5, atol=2e-5)
    wanted = truth.received, truth.scores(), truth.gradient_health, truth.map(3, 3)
    for found, expected in zip(late, wanted, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@every_backend
@pytest.mark.parametrize("inside", [False, True])
def test_the_backward_pass_is_the_same_inside_and_outside_autocast(backend: str, inside: bool) -> None:
    tensors, twin = inputs(grad=True), inputs(grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = regard.attention(*tensors, mask=regard.causal(), backend=backend)
        if inside:
            found.float().square().sum().backward()
    if not inside:
        found.float().square().sum().backward()
    rounded = [x.bfloat16().float() for x in twin]
    regard.attention(*rounded, mask=regard.causal(), backend="reference").square().sum().backward()
    for x, y in zip(tensors, twin, strict=True):
        assert x.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad, y.grad, rtol=5e-2, atol=5e-2)
        assert (x.grad - y.grad).norm() < 0.02 * y.grad.norm()


@our_backends
def test_autocast_leaves_the_gradients_of_statistics_exact(backend: str) -> None:
    tensors = inputs(grad=True)
    twin = [x.detach().bfloat16().double().requires_grad_() for x in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = regard.observe(*tensors, backend=backend)
        (seen.entropy.sum() + seen.lse.sum()).backward()
    truth = regard.observe(*twin, backend="reference")
    (truth.entropy.sum() + truth.lse.sum()).backward()
    for x, y in zip(tensors[:2], twin[:2], strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_gradients_and_second_gradients_have_the_same_bits_inside_and_outside_autocast(backend: str) -> None:
    def derivatives(inside: bool) -> Sequence[Tensor]:
        q, k, v = (
            x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 8, generator=torch.Generator().manual_seed(0)).unbind()
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = regard.attention(q, k, v, mask=regard.causal(), backend=backend).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            first = torch.autograd.grad(output.square().sum(), (q, k, v), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
        return [*first, *second]

    for a, b in zip(derivatives(True), derivatives(False), strict=True):
        assert torch.equal(a, b)


def test_the_first_gradient_has_the_same_bits_inside_and_outside_autocast() -> None:
    def derivatives(inside: bool) -> Sequence[Tensor]:
        q, k, v = (
            x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 8, generator=torch.Generator().manual_seed(0)).unbind()
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = regard.observe(q, k, v, mask=regard.causal(), backend="chunked")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return torch.autograd.grad(seen.output.float().square().sum() + seen.entropy.sum(), (q, k, v))

    for a, b in zip(derivatives(True), derivatives(False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("score", [Bilinear(8, 8), Additive(8, 8, 4)], ids=["Bilinear", "Additive"])
def test_a_score_under_autocast_in_a_compiled_call_is_that_outside(score: Any) -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()

    def call() -> Tensor:
        return regard.attention(q, k, v, score=score, softcap=5.0)

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(call(), torch.compile(call, backend="eager")(), atol=0, rtol=0)

"""The contract of the core on a CUDA device: `make test-gpu`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract_cases import CASES, Case, leaves
from torch import Tensor

import regard
from regard import biases
from regard.backends import Backend, Chunked

DTYPES = [torch.float32, torch.bfloat16]
BACKENDS: dict[str, str | Backend] = {
    "chunked": "chunked",
    "chunked by 7": Chunked(chunk_size=7),
    "triton": "triton",
    "auto": "auto",
}
HALVES = {"plain", "causal", "all together", "Bilinear", "Additive", "relative", "bias broadcast", "dense per head"}
ASKED = [
    *((case, dtype, backend) for backend in BACKENDS for dtype in DTYPES for case in CASES),
    *((case, torch.float16, "triton") for case in CASES if case.name in HALVES),
]


def moved(x: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor):
        if x.dtype.is_floating_point:
            return x.detach().to(device, dtype).requires_grad_()
        return x.to(device)
    if isinstance(x, biases.Alibi):
        return biases.alibi(moved(x.slopes, device, dtype), x.offset)
    if isinstance(x, biases.Relative):
        return biases.relative(moved(x.table, device, dtype), x.offset)
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x).to(device, dtype)
    return x


def found(backend: str | Backend, tensors: list[Tensor], kwargs: dict[str, Any], passes: bool = True) -> list[Tensor]:
    seen = regard.observe(*tensors, **kwargs, backend=backend)
    lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
    loss = seen.output.double().sin().sum() + lse.double().sin().sum() + seen.entropy.double().square().sum()
    grads = torch.autograd.grad(loss, leaves(tensors, kwargs), allow_unused=True)
    late = [seen.received, seen.map(1, 1), seen.gradient_health, seen.visible] if passes else []
    results = [seen.output, seen.lse, seen.entropy, seen.max_logit, *late]
    return [*results, *(torch.zeros(()) if g is None else g for g in grads)]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype", "backend"), ASKED, ids=lambda x: getattr(x, "name", str(x)))
def test_the_gpu_agrees_with_float64_on_the_cpu(case: Case, dtype: torch.dtype, backend: str) -> None:
    tensors, kwargs = case.inputs(dtype)
    on_gpu = [moved(t, "cuda", dtype) for t in tensors], {k: moved(v, "cuda", dtype) for k, v in kwargs.items()}
    doubled = (
        [moved(t, "cpu", torch.float64) for t in tensors],
        {k: moved(v, "cpu", torch.float64) for k, v in kwargs.items()},
    )
    tolerance = 3e-4 if dtype == torch.float32 else 3e-2
    passes = "chunked" in backend or dtype == torch.float32  # our kernels for them are compiled for one dtype only
    for x, true in zip(found(BACKENDS[backend], *on_gpu, passes), found("reference", *doubled, passes), strict=True):
        scale = max(1.0, float(true.detach().nan_to_num(0, 0, 0).abs().max())) if true.numel() else 1.0
        x, true = x.detach().double().cpu(), true.detach().double()
        assert float(torch.where(x == true, 0.0, (x - true).abs()).max() if x.numel() else 0.0) <= tolerance * scale


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.padding([100, 200])], ids=str)
def test_a_plain_call_on_the_gpu_is_right_with_every_derivative(mask: regard.Mask | None, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    tolerance = 2e-3 if dtype == torch.float32 else 3e-2
    true = regard.attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    output = regard.attention(q, k, v, mask=mask)
    torch.testing.assert_close(output.double(), true, atol=tolerance, rtol=tolerance)
    first = torch.autograd.grad(output.double().square().sum(), q, create_graph=True)[0]
    true_first = torch.autograd.grad(true.square().sum(), q, create_graph=True)[0]
    torch.testing.assert_close(first.double(), true_first.double(), atol=10 * tolerance, rtol=10 * tolerance)
    second = torch.autograd.grad(first.double().square().sum(), k)[0]
    assert torch.isfinite(second).all()
    assert second.abs().sum() > 0


@pytest.mark.gpu
def test_two_runs_give_the_same_bits() -> None:
    q, k, v = (torch.randn(2, 4, 700, 64, device="cuda", requires_grad=True) for _ in range(3))

    def once() -> list[Tensor]:
        seen = regard.observe(q, k, v, mask=regard.causal(), dropout=0.2, backend="chunked")
        return [seen.output, *torch.autograd.grad(seen.output.sum() + seen.entropy.sum(), (q, k, v))]

    torch.manual_seed(0)
    first = once()
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.gpu
def test_why_names_the_kernel_that_torch_takes() -> None:
    x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    assert "kernel" in str(regard.why(x, x, x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "mask", [regard.window(2, 0, offset=-10), regard.padding([0, 20]), regard.causal(offset=-9)], ids=repr
)
def test_rows_that_see_nothing_are_zero_on_every_kernel(mask: regard.Mask, dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 48, 64, device="cuda", dtype=dtype)
    empty = mask.visible(torch.arange(48), 48, 48) == 0
    found = regard.attention(x, x, x, mask=mask)
    assert not found[empty.expand(2, 4, 48)].any()
    true = regard.attention(x.double(), x.double(), x.double(), mask=mask, backend="reference")
    torch.testing.assert_close(found.double(), true, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_a_float32_bias_of_half_precision_is_not_rounded() -> None:
    x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    for bias in (torch.randn(64, 64, device="cuda") * 30, torch.full((64, 64), torch.finfo().min, device="cuda")):
        true = regard.attention(x.double(), x.double(), x.double(), bias=bias.float(), backend="reference")
        torch.testing.assert_close(regard.attention(x, x, x, bias=bias).double(), true, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
def test_a_map_has_the_same_bits_every_time() -> None:
    x = torch.randn(1, 4, 1500, 64, device="cuda")
    seen = regard.observe(x, x, x, mask=regard.causal())
    first = seen.map(37, 41)
    assert all(torch.equal(first, seen.map(37, 41)) for _ in range(5))


@pytest.mark.gpu
def test_one_row_of_keys_for_all_items_is_taken_in_half_precision() -> None:
    x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.float16)
    keep = torch.rand(64, device="cuda") > 0.5
    true = regard.attention(x.double(), x.double(), x.double(), mask=regard.padding(keep), backend="reference")
    torch.testing.assert_close(
        regard.attention(x, x, x, mask=regard.padding(keep)).double(), true, atol=1e-2, rtol=1e-2
    )

"""One meaning: every backend, in every case, agrees with `reference` in float64 (DESIGN.md §3, guarantee 1)."""

from __future__ import annotations

import pytest
import torch

import regard
from contract_cases import (
    ARGUMENTS,
    CASES,
    MASKS,
    SCORES,
    Case,
    agree,
    as_double,
    leaves,
    plain,
    plain_results,
    results,
    truth,
    zero_if_none,
)
from regard.backends import KNOWN, Backend, Chunked

BACKENDS: dict[str, str | Backend] = {name: name for name in KNOWN} | {"chunked by 7": Chunked(chunk_size=7)}
HERE = [name for name in BACKENDS if name not in ("sdpa", "flash4", "triton")]  # those with statistics on a CPU

# What torch's fused kernels do exactly, on a CPU. A case that leaves this list is a regression.
SDPA_TAKES = {
    "plain square",
    "multi-head",
    "scale tensor",
    "causal square",
    "one-sided window",
    "documents",
    "packed",
    "cumulative lengths",
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_statistics_and_every_gradient_agree_in_float32(case: Case, backend: str) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results(BACKENDS[backend], tensors, kwargs)
    assert [x.dtype for x in found] == [torch.float32] * 4
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in {"all together", "causal", "Bilinear", "Cosine", "relative", "bias"}],
    ids=lambda c: c.name,
)
def test_half_precision_agrees_too(case: Case, backend: str, dtype: torch.dtype) -> None:
    tensors, kwargs = case.inputs(dtype)
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results(BACKENDS[backend], tensors, kwargs)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32, torch.float32]
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_what_sdpa_takes_is_pinned_and_exact(case: Case) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    if regard.why(*tensors, **kwargs).backend != "sdpa":
        assert case.name not in SDPA_TAKES
        with pytest.raises(regard.errors.BackendError, match="sdpa"):
            regard.attention(*tensors, **kwargs, backend="sdpa")
        return
    assert case.name in SDPA_TAKES
    output = regard.attention(*tensors, **kwargs, backend="sdpa")
    doubled, double_kwargs = as_double(tensors, kwargs)
    true = regard.attention(*doubled, **double_kwargs, backend="reference")
    ordinary = plain(*tensors, **kwargs)[0]
    agree([output], [true], [ordinary], 2, "output")
    weight = torch.linspace(-1, 1, output.numel()).view(output.shape)
    grads, true_grads, ordinary_grads = (
        torch.autograd.grad((o * weight).sum(), leaves(t, k), allow_unused=True)
        for o, t, k in ((output, tensors, kwargs), (true, doubled, double_kwargs), (ordinary, tensors, kwargs))
    )
    filled = [list(map(zero_if_none, g)) for g in (grads, true_grads, ordinary_grads)]
    agree(*filled, 3, "gradient")


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("case", [*ARGUMENTS, *MASKS[:3], SCORES[4]], ids=lambda c: c.name)
def test_attention_is_what_observe_puts_out(case: Case, backend: str) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    output = regard.attention(*tensors, **kwargs, backend=backend)
    assert torch.equal(output, regard.observe(*tensors, **kwargs, backend=backend).output)

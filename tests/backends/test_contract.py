"""One meaning: every backend, in every case, agrees with `reference` in float64 (DESIGN.md §3, guarantee 1)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from contract_cases import (
    ARGUMENTS,
    CASES,
    MASKS,
    SCORES,
    Case,
    agree,
    as_double,
    error,
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
}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_in_float64_is_the_textbook(case: Case) -> None:
    tensors, kwargs = case.inputs()
    found, grads = results("reference", tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    for x, y in zip([*found[:3], *grads], [*ordinary, *ordinary_grads], strict=True):
        assert error(x, y) < 1e-9


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


@pytest.mark.parametrize("backend", ["chunked", "chunked by 7"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_chunked_in_float64_is_reference_to_rounding(case: Case, backend: str) -> None:
    tensors, kwargs = case.inputs()
    true, true_grads = results("reference", tensors, kwargs)
    found, grads = results(BACKENDS[backend], tensors, kwargs)
    for x, y in zip([*found, *grads], [*true, *true_grads], strict=True):
        assert error(x, y) < 1e-10


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


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_our_kernels_refuse_tensors_that_are_on_no_gpu(case: Case) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    reason = "the tensors are on cpu; it needs a GPU" if find_spec("triton") else "triton is not installed"
    with pytest.raises(regard.errors.BackendError, match=f"'triton' refuses: {reason}"):
        regard.attention(*tensors, **kwargs, backend="triton")


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("case", [*ARGUMENTS, *MASKS[:3], SCORES[4]], ids=lambda c: c.name)
def test_attention_is_what_observe_puts_out(case: Case, backend: str) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    output = regard.attention(*tensors, **kwargs, backend=backend)
    assert torch.equal(output, regard.observe(*tensors, **kwargs, backend=backend).output)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 70), st.integers(0, 200),
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 80), st.sampled_from(MASKS), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_shapes_that_nobody_thought_of(
    batch: int, kv: int, groups: int, n: int, m: int, d: int, dv: int, chunk: int, mask: Case, cap: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(batch, kv * groups, n, d, dtype=torch.float64, requires_grad=True)
    k = torch.randn(batch, kv, m, d, dtype=torch.float64, requires_grad=True)
    v = torch.randn(batch, kv, m, dv, dtype=torch.float64, requires_grad=True)
    made = mask.make(mask.shape)["mask"]
    fitting = made if isinstance(made, regard.Mask) and made.lead == (1, 1) and made.misfit(n, m) is None else None
    kwargs = {"mask": fitting, "softcap": 3.0 if cap else None}
    true, true_grads = results("reference", [q, k, v], kwargs)
    found, grads = results(Chunked(chunk_size=chunk), [q, k, v], kwargs)
    for x, y in zip([*found, *grads], [*true, *true_grads], strict=True):
        assert error(x, y) < 1e-10

"""Torch's function and torch's kernels: the same meaning, and never a kernel that does something else."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import regard
from regard.backends.sdpa.derivatives import attend_on_gpu, second_derivatives
from regard.chunked.foreign import AttentionFormula
from regard.errors import BackendError

INF = math.inf


def made(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def additive(*shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    x[..., 1::3] = -INF
    return x


def selective(*shape: int) -> Tensor:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(9)) > 0.4
    x[..., 0] = True
    return x


L, S, E, V = 5, 7, 8, 6
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {}),
    "values of another dim": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, V)), {}),
    "one sequence": (((L, E), (S, E), (S, E)), {}),
    "three dimensions": (((3, L, E), (3, S, E), (3, S, V)), {}),
    "five dimensions": (((2, 1, 3, L, E), (2, 4, 3, S, E), (2, 4, 3, S, E)), {}),
    "scale": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"scale": 0.7}),
    "causal square": (((2, 3, S, E), (2, 3, S, E), (2, 3, S, E)), {"is_causal": True}),
    "causal, more keys": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"is_causal": True}),
    "causal, fewer keys": (((2, 3, S, E), (2, 3, L, E), (2, 3, L, E)), {"is_causal": True}),
    "causal without heads": (((3, L, E), (3, S, E), (3, S, E)), {"is_causal": True}),
    "mask": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"attn_mask": selective(L, S)}),
    "mask a head": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"attn_mask": selective(3, L, S)}),
    "mask an item": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"attn_mask": selective(2, 1, L, S)}),
    "mask of keys": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"attn_mask": selective(2, 1, 1, S)}),
    "mask of rows": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"attn_mask": torch.ones(L, 1).bool()}),
    "mask of three dimensions": (((3, L, E), (3, S, E), (3, S, E)), {"attn_mask": selective(3, L, S)}),
    "added": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"attn_mask": additive(L, S)}),
    "added an item": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, V)), {"attn_mask": additive(2, 1, 1, S)}),
    "added without heads": (((3, L, E), (3, S, E), (3, S, E)), {"attn_mask": additive(3, L, S)}),
    "one key head for all": (((2, 4, L, E), (2, 1, S, E), (2, 1, S, E)), {}),
    "one query head for all": (((1, 1, L, E), (2, 3, S, E), (2, 3, S, E)), {}),
    "key of a batch of one": (((2, 3, L, E), (1, 3, S, E), (2, 1, S, E)), {}),
    "ranks that differ": (((L, E), (2, 3, S, E), (3, S, E)), {}),
    "grouped": (((2, 6, L, E), (2, 2, S, E), (2, 2, S, E)), {"enable_gqa": True}),
    "grouped and causal": (((2, 6, S, E), (2, 3, S, E), (2, 3, S, E)), {"enable_gqa": True, "is_causal": True}),
    "grouped with a batch of one": (((2, 4, L, E), (1, 2, S, E), (1, 2, S, E)), {"enable_gqa": True}),
    "grouped and masked": (
        ((2, 4, L, E), (2, 2, S, E), (2, 2, S, V)),
        {"enable_gqa": True, "attn_mask": selective(2, 4, L, S)},
    ),
    "grouped in three dimensions": (((4, L, E), (2, S, E), (2, S, E)), {"enable_gqa": True}),
    "grouped with equal heads": (((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), {"enable_gqa": True}),
    "empty rows": (
        ((1, 2, L, E), (1, 2, S, E), (1, 2, S, E)),
        {"attn_mask": torch.arange(L)[:, None].expand(L, S) % 2 == 0},
    ),
    "no keys": (((1, 2, L, E), (1, 2, 0, E), (1, 2, 0, E)), {}),
    "no queries": (((1, 2, 0, E), (1, 2, S, E), (1, 2, S, E)), {}),
    "one pair": (((1, 1, 1, E), (1, 1, 1, E), (1, 1, 1, E)), {"is_causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_our_function_does_what_torchs_does_with_gradients(name: str) -> None:
    shapes, arguments = CASES[name]
    ours, theirs = made(*shapes), made(*shapes)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*theirs, **arguments)
    found = regard.scaled_dot_product_attention(*ours, **arguments)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    with sdpa_kernel(SDPBackend.MATH):
        expected.backward(upstream)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "causal square", "grouped", "mask an item", "added"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_our_function_keeps_the_dtype_as_torchs_does(name: str, dtype: torch.dtype) -> None:
    shapes, arguments = CASES[name]
    tensors = made(*shapes, dtype=dtype, grad=False)
    mask = arguments.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        arguments = {**arguments, "attn_mask": mask.to(dtype)}
    found = regard.scaled_dot_product_attention(*tensors, **arguments)
    exact = {
        **arguments,
        **({"attn_mask": arguments["attn_mask"].double()} if mask is not None and mask.is_floating_point() else {}),
    }
    expected = F.scaled_dot_product_attention(*(x.double() for x in tensors), **exact)
    assert found.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_an_attention_mask_that_adds_gets_its_gradient() -> None:
    tensors, other = made((2, 3, L, E), (2, 3, S, E), (2, 3, S, E)), made((2, 3, L, E), (2, 3, S, E), (2, 3, S, E))
    ours, theirs = (torch.randn(3, 1, S, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    regard.scaled_dot_product_attention(*tensors, attn_mask=ours).square().sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*other, attn_mask=theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_dropout_has_the_mean_of_torchs() -> None:
    query, key, value = made((1, 1, 2, 4), (1, 1, 300, 4), (1, 1, 300, 2), grad=False)
    torch.manual_seed(0)
    draws = torch.stack([regard.scaled_dot_product_attention(query, key, value, dropout_p=0.5) for _ in range(200)])
    assert draws.std(0).min() > 0
    plain = F.scaled_dot_product_attention(query, key, value)
    assert ((draws.mean(0) - plain).abs() < 5 * draws.std(0) / math.sqrt(200)).all()


def test_the_arguments_stand_in_torchs_order() -> None:
    query, key, value = made((1, 2, L, E), (1, 2, S, E), (1, 2, S, E), grad=False)
    found = regard.scaled_dot_product_attention(query, key, value, None, 0.0, True)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, None, 0.0, True))


# The backend.

ACCEPTED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"n": 40, "m": 40}, {"mask": regard.causal()}),
    "causal from the top, more keys": ({"n": 20, "m": 33}, {"mask": regard.causal(offset=0)}),
    "causal from the top, fewer keys": ({"n": 33, "m": 20}, {"mask": regard.causal(offset=0)}),
    "causal to the end": ({"n": 20, "m": 33}, {"mask": regard.causal()}),
    "one row": ({"n": 1}, {"mask": regard.causal()}),
    "one row and one key": ({"n": 1, "m": 1}, {"mask": regard.causal()}),
    "everything": ({}, {"mask": regard.everything()}),
    "window": ({}, {"mask": regard.window(3, 2)}),
    "window with empty rows": ({"n": 33, "m": 20}, {"mask": regard.window(3)}),
    "padding": ({}, {"mask": regard.padding([9, 33])}),
    "padding of everything": ({}, {"mask": regard.padding([0, 33])}),
    "keep": ({}, {"mask": regard.padding(torch.arange(66).reshape(2, 33) % 3 == 0)}),
    "documents": ({"n": 33}, {"mask": regard.documents(torch.arange(66).reshape(2, 33) // 9)}),
    "composed": ({"n": 33}, {"mask": regard.causal() & ~regard.strided(3)}),
    "predicate": ({}, {"mask": regard.predicate(lambda b, h, i, j: (b + h + i + j) % 3 > 0)}),
    "tensor": ({}, {"mask": selective(20, 33)}),
    "tensor a head": ({}, {"mask": selective(4, 20, 33)}),
    "tensor an item": ({}, {"mask": selective(2, 1, 20, 33)}),
    "tensor of keys": ({}, {"mask": selective(33)}),
    "bias": ({}, {"bias": additive(20, 33)}),
    "bias a head": ({}, {"bias": additive(4, 1, 33)}),
    "bias in float64": ({}, {"bias": additive(20, 33).double()}),
    "bias in half": ({}, {"bias": additive(20, 33).half()}),
    "scale": ({}, {"scale": 0.9}),
    "scale below 0": ({}, {"scale": -0.5}),
    "scale a head": ({}, {"scale": torch.tensor([0.1, 0.2, 0.3, 0.9])}),
    "grouped": ({"kv_heads": 2}, {"mask": regard.window(3, 2)}),
    "one key head": ({"kv_heads": 1, "n": 33}, {"mask": regard.causal()}),
    "cosine": ({}, {"score": regard.scores.Cosine(0.2)}),
    "balanced": ({}, {"score": regard.scores.Balanced()}),
    "bilinear": ({}, {"score": regard.scores.Bilinear(8, 8)}),
    "temperature": ({}, {"score": regard.scores.Temperature(1.5, heads=4)}),
}


def posed(n: int = 20, m: int = 33, kv_heads: int = 4, **more: Any) -> list[Tensor]:
    return made((2, 4, n, 8), (2, kv_heads, m, 8), (2, kv_heads, m, 8), **more)


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("watched", [False, True])
def test_what_torchs_kernels_accept_equals_the_reference_with_gradients(name: str, watched: bool) -> None:
    shape, arguments = ACCEPTED[name]
    tensors, twin = posed(**shape, grad=watched), posed(**shape, dtype=torch.float64)
    score = arguments.get("score")
    found = regard.attention(*tensors, backend="sdpa", **arguments)
    expected = regard.attention(*twin, backend="reference", **arguments)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    if not watched:
        return
    upstream = torch.randn_like(found)
    parameters = [] if score is None else list(score.parameters())
    got = torch.autograd.grad(found, [*tensors, *parameters], upstream)
    wanted = torch.autograd.grad(expected, [*twin, *parameters], upstream.double())
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-3, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 2.0}, "softcap"),
    "sink": ({"sink": torch.zeros(4)}, "sink"),
    "dropout": ({"dropout": 0.1}, "dropout"),
    "additive": ({"score": regard.scores.Additive(8, 8, 3)}, "no dot product"),
    "alibi": ({"bias": regard.biases.alibi(torch.ones(4))}, "matrix"),
    "bias that learns": ({"bias": torch.zeros(20, 33, requires_grad=True)}, "gradient"),
    "mask and bias": ({"bias": torch.zeros(20, 33), "mask": selective(20, 33)}, "one of mask and bias"),
    "scale beyond the digits": ({"scale": -1e30, "mask": regard.causal()}, "digits of logits"),
    "bias beyond the digits": ({"bias": torch.full((20, 1), -1e9)}, "leaves no digits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sdpa_named_by_the_user_raises_with_its_reasons_and_never_falls_back(name: str) -> None:
    arguments, reason = REFUSED[name]
    with pytest.raises(BackendError, match=reason):
        regard.attention(*posed(), backend="sdpa", **arguments)
    assert regard.why(*posed(), **arguments).backend == "chunked"


def test_sdpa_gives_no_statistics() -> None:
    with pytest.raises(BackendError, match="statistics"):
        regard.observe(*posed(), backend="sdpa")


@pytest.mark.parametrize("grad", [False, True])
def test_values_of_another_dim_go_to_torchs_matrix_and_so_are_refused(grad: bool) -> None:
    tensors = made((2, 4, 20, 8), (2, 4, 33, 8), (2, 4, 33, 5), grad=grad)
    with pytest.raises(BackendError, match="matrix path"):
        regard.attention(*tensors, backend="sdpa")
    torch.testing.assert_close(regard.attention(*tensors), regard.attention(*tensors, backend="reference"))


@pytest.mark.parametrize(
    "hidden",
    [{"mask": regard.padding([9, 20])}, {"bias": additive(1, 33).mul(INF).nan_to_num(0, INF, -INF).clamp(max=0)}],
)
def test_a_nan_that_torch_would_let_through_is_a_reason(hidden: dict[str, Any]) -> None:
    query, key, value = posed(grad=False)
    assert regard.why(query, key, value, **hidden).backend == "sdpa"
    for x in (key, value):
        dirty = x.clone()
        dirty[:, :, 31:] = math.nan
        pair = (dirty, value) if x is key else (key, dirty)
        assert any("leak" in r for r in regard.why(query, *pair, **hidden).refusals["sdpa"])


# torch's switches


def test_auto_honours_torchs_kernel_switches() -> None:
    tensors = posed()
    expected = regard.attention(*tensors, backend="reference")
    with sdpa_kernel(SDPBackend.MATH):
        plan = regard.why(*tensors)
        found = regard.attention(*tensors)
        with pytest.raises(BackendError, match="switched off"):
            regard.attention(*tensors, backend="sdpa")
    assert plan.backend == "chunked"
    assert "switched off" in str(plan)
    torch.testing.assert_close(found, expected)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert regard.why(*tensors).backend == "sdpa"


def test_our_function_works_with_torchs_kernels_switched_off() -> None:
    tensors = posed()
    with sdpa_kernel(SDPBackend.MATH):
        found = regard.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*tensors))


def test_deterministic_algorithms_are_obeyed_and_change_no_result() -> None:
    tensors = posed()
    before = regard.attention(*tensors, mask=regard.causal())
    torch.use_deterministic_algorithms(True)
    try:
        after = regard.attention(*tensors, mask=regard.causal())
        seen = regard.observe(*tensors, mask=regard.causal())
        (after.sum() + seen.entropy.sum()).backward()
        seen.received, seen.map(3, 3), seen.top(2)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(before, after)


# what a predicate closes over may change


def test_a_predicate_is_asked_again_at_every_call() -> None:
    query, key, value = posed(grad=False)
    limit = torch.tensor(3)
    mask = regard.predicate(lambda b, h, i, j: j < limit)
    for until in (3, 8, 5):
        limit.fill_(until)
        found = regard.attention(query, key, value, mask=mask)
        torch.testing.assert_close(found, regard.attention(query, key[:, :, :until], value[:, :, :until]))


def test_an_offset_given_as_a_tensor_is_read_at_every_call() -> None:
    query, key, value = posed(grad=False)
    offset = torch.tensor([3, 3])
    mask = regard.causal(offset=offset)
    for at in (3, 8):
        offset.fill_(at)
        expected = regard.attention(query, key, value, mask=regard.causal(offset=at), backend="reference")
        torch.testing.assert_close(regard.attention(query, key, value, mask=mask), expected)


def test_a_plain_call_costs_one_kernel_and_no_copies() -> None:
    query, key, value = posed(grad=False)
    with torch.profiler.profile() as profile:
        regard.attention(query, key, value)
    names = [event.name for event in profile.events()]
    assert sum("flash_attention_for_cpu" in name for name in names) == 1
    assert not any(name in ("aten::clone", "aten::copy_", "aten::bmm") for name in names)


def test_strides_are_no_reason_for_sdpa_to_refuse() -> None:
    x = torch.randn(16, 2, 4, 9).movedim(0, -1)
    assert x.stride(-1) != 1
    assert regard.why(x, x, x).backend == "sdpa"


def test_a_mask_shared_by_leading_dimensions_is_a_reason_of_its_own() -> None:
    x = torch.randn(2, 3, 4, 9, 8)
    assert any("leading dimensions" in r for r in regard.why(x, x, x, mask=regard.padding([5, 9])).refusals["sdpa"])


def test_half_precision_that_sums_beyond_its_range_is_finite() -> None:
    x = torch.full((2, 4, 300, 64), 0.5).half()
    assert regard.why(x, x, x, mask=regard.padding([5, 300])).backend == "sdpa"


def test_one_row_of_keys_for_all_items_pads_every_item() -> None:
    q, k, v = torch.randn(3, 2, 2, 400, 8).unbind()
    keep = torch.rand(400) > 0.5
    found = regard.attention(q, k, v, mask=regard.padding(keep), backend="sdpa")
    torch.testing.assert_close(found, regard.attention(q, k, v, mask=regard.padding(keep), backend="reference"))


@pytest.mark.parametrize("more", ["bias", "head bias"])
def test_second_derivatives_under_a_fixed_bias_are_those_of_the_formula(more: str) -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 6, 4).unbind())
    bias = torch.randn(6, 6) if more == "bias" else torch.randn(2, 6, 6)
    assert regard.why(q, k, v, bias=bias).backend == "sdpa"

    def twice(backend: str) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(
            regard.attention(q, k, v, bias=bias, backend=backend).sin().sum(), q, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), (q, k, v))

    for a, b in zip(twice("sdpa"), twice("reference"), strict=True):
        torch.testing.assert_close(a, b)


# every edge of scale, lengths, strides and dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given_as", [float, torch.tensor, regard.scores.Scaled])
def test_a_scale_of_any_sign_under_a_causal_mask(dtype: torch.dtype, given_as: Any) -> None:
    tensors = posed(n=17, m=17, dtype=dtype)
    for scale in (-0.3, 0.0, -0.0, -1.0):
        option = {"score" if given_as is regard.scores.Scaled else "scale": given_as(scale)}
        results = []
        for backend in ("auto", "reference"):
            output = regard.attention(*tensors, mask=regard.causal(), backend=backend, **option)
            results.append((output, *torch.autograd.grad(output.double().square().sum(), tensors)))
        assert regard.why(*tensors, mask=regard.causal(), **option).backend == "sdpa"
        tolerance = 1000 * torch.finfo(dtype).eps if dtype != torch.bfloat16 else 0.3
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_rows_of_a_bias_far_below_zero_get_the_gradient_of_equal_weights() -> None:
    tensors, twin = posed(n=6, m=7), posed(n=6, m=7, dtype=torch.float64)
    bias = torch.zeros(6, 7)
    bias[4:] = torch.finfo(torch.float32).min
    found = torch.autograd.grad(regard.attention(*tensors, bias=bias).square().sum(), tensors)
    expected = torch.autograd.grad(regard.attention(*twin, bias=bias, backend="reference").square().sum(), twin)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def strided_tensor(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor:
    """Numbers of this shape, in memory as sliced, transposed or expanded tensors have them."""
    b, h, n, d = shape
    made = {
        "contiguous": lambda: torch.randn(shape),
        "heads inside": lambda: torch.randn(b, n, h, d).transpose(1, 2),
        "transposed": lambda: torch.randn(b, h, d, n).mT,
        "every other number": lambda: torch.randn(b, h, n, 2 * d)[..., ::2],
        "a part": lambda: torch.randn(b, h + 1, n + 2, d + 1)[:, 1:, 1:-1, 1:],
        "one head": lambda: torch.randn(b, 1, n, d).expand(shape),
        "one row": lambda: torch.randn(b, h, 1, d).expand(shape),
    }
    return made[kind]().to(dtype)


STRIDES = st.sampled_from(
    ["contiguous", "heads inside", "transposed", "every other number", "a part", "one head", "one row"]
)
EDGE_MASKS: dict[str, Any] = {
    "none": lambda n, m: {},
    "causal": lambda n, m: {"mask": regard.causal()},
    "causal from the top": lambda n, m: {"mask": regard.causal(offset=0)},
    "causal below": lambda n, m: {"mask": regard.causal(offset=-2)},
    "padding": lambda n, m: {"mask": regard.padding(torch.tensor([m // 2, 0]))},
    "tensor": lambda n, m: {"mask": torch.rand(n, m) > 0.5},
    "nothing": lambda n, m: {"mask": torch.zeros(n, 1, dtype=torch.bool)},
    "bias": lambda n, m: {"bias": torch.where(torch.rand(4, n, m) < 0.3, -INF, torch.randn(4, n, m))},
}


@settings(max_examples=60)
@given(
    scale=st.sampled_from([None, 0.0, -0.0, 0.7, -0.7, 4.0, -4.0, 1e-30, -1e-30, 1e-45, 2e3, -1e30, 1e38, 1e300]),
    lengths=st.sampled_from([(1, 1), (1, 2), (1, 33), (5, 5), (17, 3), (3, 17), (40, 40), (2, 513), (130, 31)]),
    dims=st.sampled_from([1, 2, 7, 16, 65]),
    kv_heads=st.sampled_from([1, 2, 4]),
    strides=st.tuples(STRIDES, STRIDES, STRIDES),
    masked=st.sampled_from(sorted(EDGE_MASKS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_every_edge_that_torchs_kernels_accept_equals_the_reference(
    scale: float | None,
    lengths: tuple[int, int],
    dims: int,
    kv_heads: int,
    strides: tuple[str, str, str],
    masked: str,
    dtype: torch.dtype,
) -> None:
    n, m = lengths
    torch.manual_seed(n + m)
    shapes = (2, 4, n, dims), (2, kv_heads, m, dims), (2, kv_heads, m, dims)
    tensors = [strided_tensor(s, kind, dtype).requires_grad_() for s, kind in zip(shapes, strides, strict=True)]
    twin = [x.detach().double().requires_grad_() for x in tensors]
    options = {"scale": scale, **EDGE_MASKS[masked](n, m)}
    if regard.why(*tensors, **options).refusals["sdpa"]:
        return
    found = regard.attention(*tensors, backend="sdpa", **options)
    expected = regard.attention(*twin, backend="reference", **options)
    tolerance = {torch.float32: 3e-5, torch.float64: 1e-11, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(found.double().sum(), tensors)
    wanted = torch.autograd.grad(expected.sum(), twin)
    for x, y, inner in zip(got, wanted, (m, n, n), strict=True):
        margin = tolerance * max(1.0, abs(scale or 1.0)) * inner * math.sqrt(dims)
        torch.testing.assert_close(x.double(), y, rtol=10 * tolerance, atol=margin)


def hooked(formula: AttentionFormula, causal: bool, last: int = 8) -> Callable[..., Tensor]:
    """As on a GPU, but with the node of torch's CPU kernel, which has no second derivative either."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=formula.scale)
        return output if last == 8 else output[..., :last]  # torch slices padded dims

    hook = second_derivatives(formula)
    return lambda q, k, v: attend_on_gpu(attend, q, k, v, formula, hook)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("last", [8, 5])
def test_torchs_own_node_gets_second_derivatives_by_a_hook(causal: bool, last: int) -> None:
    mask = regard.causal(offset=0) if causal else None
    x = made((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), dtype=torch.float64)
    made_upstream = torch.randn(1, 2, 6, last, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    upstream = made_upstream.requires_grad_()

    def matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=mask, scale=0.3, backend="reference")[..., :last]

    found: list[list[Tensor]] = []
    for function in (hooked(AttentionFormula(mask, None, 0.3), causal, last), matrix):
        first = torch.autograd.grad(function(*x), x, upstream, create_graph=True)
        (alone,) = torch.autograd.grad(function(*x), x[1], upstream, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in (*first, alone)), [*x, upstream])
        plain = torch.autograd.grad(function(*x), x, upstream)
        found.append([*first, alone, *again, *plain])
    torch.testing.assert_close(*found)


def test_second_derivatives_of_a_checkpointed_call() -> None:
    x = made((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), dtype=torch.float64)
    function = hooked(AttentionFormula(None, None, 0.3), False)
    found: list[tuple[Tensor, ...]] = []
    for call in (function, lambda *x: checkpoint(function, *x, use_reentrant=False)):
        (first,) = torch.autograd.grad(call(*x).square().sum(), x[0], create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), x)))
    torch.testing.assert_close(*found)


def test_the_hook_is_on_this_calls_node_and_on_no_earlier_one() -> None:
    """Where torch takes its matrix path, which has every derivative, nothing is hooked."""
    x = made((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), dtype=torch.float64)
    first = F.scaled_dot_product_attention(*x)
    asked: list[object] = []
    formula = AttentionFormula(None, None, 0.3)
    by_matrix = torch.softmax(first @ x[1].mT, -1)
    attend_on_gpu(lambda q, k, v: by_matrix @ v, *x, formula, lambda *_: asked.append(1)).sum().backward()
    assert not asked


def test_the_hook_keeps_no_tensor_alive() -> None:
    x = made((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    query = x[0] * 2
    kept = weakref.ref(query)
    loss = hooked(AttentionFormula(None, None, 0.3), False)(query, x[1], x[2]).sum()
    del query
    assert kept() is not None
    loss.backward()
    assert kept() is None

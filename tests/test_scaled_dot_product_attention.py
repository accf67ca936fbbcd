"""The cases of torch's own tests of scaled_dot_product_attention, put to ours beside torch's float64 formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import functional

INF = math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def made(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_like_torch(tensors: list[Tensor], **arguments: Any) -> None:
    """Compare output and gradients with torch's formula in float64; views keep their strides."""
    bases = [x.detach().requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    doubled = dict(arguments)
    mask = arguments.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        doubled["attn_mask"] = mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*exact, **doubled)
        upstream = made(*expected.shape, seed=9).bfloat16()
        expected_grads = torch.autograd.grad(expected, exact, upstream.double())
    found = regard.scaled_dot_product_attention(*bases, **arguments)
    assert found.dtype == tensors[0].dtype
    grads = torch.autograd.grad(found, bases, upstream.to(found.dtype))
    tolerance = TOLERANCE[found.dtype]
    for x, y in zip((found, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(
            x.double(), y, rtol=tolerance, atol=tolerance * max(1.0, float(y.detach().abs().max()))
        )


N, H, L, S, E = 2, 3, 4, 6, 8
SHAPES = {2: (), 3: (N,), 4: (N, H)}


def mask_shapes(rank: int) -> list[tuple[int, ...]]:
    """The shapes of a mask that torch takes for inputs of a rank, up to that rank."""
    lead = SHAPES[rank]
    full = [(*lead[len(lead) - k :], L, S) for k in range(len(lead) + 1)]
    return full + [(*(1 for _ in shape[:-2]), L, S) for shape in full if len(shape) > 2]


def masks(rank: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}, {"is_causal": True}, {"is_causal": True, "scale": -0.3}, {"scale": 0.0}]
    for shape in mask_shapes(rank):
        hidden = made(*shape, seed=3) < -0.5
        found += [{"attn_mask": ~hidden}, {"attn_mask": made(*shape, seed=4)}]
        found.append({"attn_mask": torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -INF), "scale": 1.5})
    return found


@pytest.mark.parametrize(("rank", "dtype"), list(product(SHAPES, DTYPES)), ids=str)
def test_every_rank_dtype_and_kind_of_mask(rank: int, dtype: torch.dtype) -> None:
    lead = SHAPES[rank]
    tensors = [made(*lead, n, E, dtype=dtype, seed=n) for n in (L, S, S)]
    for arguments in masks(rank):
        mask = arguments.get("attn_mask")
        added = {} if mask is None or mask.dtype == torch.bool else {"attn_mask": mask.to(dtype)}
        assert_like_torch(tensors, **arguments | added)


# Batch, heads, heads of keys, rows, keys, dim: blocks of torch's CPU kernels that are cut, met exactly, and passed.
LENGTHS = [
    (1, 1, 1, 1, 267, 16),
    (2, 3, 3, 33, 65, 8),
    (1, 2, 2, 130, 130, 16),
    (1, 4, 2, 7, 534, 7),
    (12, 1, 1, 2, 5, 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("sizes", LENGTHS, ids=str)
def test_lengths_heads_and_dims_of_torchs_cpu_kernels(sizes: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    batch, heads, kv_heads, n, m, d = sizes
    shapes = ((batch, heads, n, d), (batch, kv_heads, m, d), (batch, kv_heads, m, d))
    tensors = [made(*shape, dtype=dtype, seed=at) for at, shape in enumerate(shapes)]
    assert_like_torch(tensors, is_causal=causal, enable_gqa=heads != kv_heads)


Make = Callable[..., Tensor]
LAYOUTS: dict[str, Callable[[Make], list[Tensor]]] = {
    "tokens before heads": lambda x: [x(N, n, H, E, seed=n).transpose(1, 2) for n in (L, S, S)],
    "one packed projection": lambda x: [
        y.unflatten(-1, (H, E)).transpose(1, 2) for y in x(N, L, 3 * H * E).chunk(3, -1)
    ],
    "one storage": lambda x: [x(N, H, L, E)] * 3,
    "unaligned": lambda x: [x(N * H * L * E + 1, seed=n)[1:].view(N, H, L, E) for n in range(3)],
    "every other dim": lambda x: [x(N, H, n, 2 * E, seed=n)[..., ::2] for n in (L, S, S)],
    "one dim with a stride": lambda x: [x(N, H, n, 4, seed=n)[..., :1] for n in (L, S, S)],
    "one head for all": lambda x: [x(N, 1, n, E, seed=n).expand(N, H, n, E) for n in (L, S, S)],
    "turned": lambda x: [x(N, H, E, n, seed=n).mT for n in (L, S, S)],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_strides_of_inputs_and_masks_mean_nothing(layout: Callable[[Make], list[Tensor]], dtype: torch.dtype) -> None:
    make = partial(made, dtype=dtype)
    tensors = layout(make)
    n, m = tensors[0].shape[-2], tensors[1].shape[-2]
    assert_like_torch(tensors)
    for mask in (make(n, 1).expand(n, m), make(m, n).mT, make(n, 2 * m)[:, ::2], make(m).expand(N, 1, n, m)):
        assert_like_torch(tensors, attn_mask=mask)
        assert_like_torch(tensors, attn_mask=mask > -0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_hidden_whole_give_zeros_and_no_gradient(dtype: torch.dtype) -> None:
    tensors = [made(N, H, n, E, dtype=dtype, seed=n) for n in (L, S, S)]
    for rows in ([0], [1, 3], [0, 1, 2, 3]):
        seen = torch.ones(L, S, dtype=torch.bool)
        seen[rows] = False
        assert_like_torch(tensors, attn_mask=seen)
        assert_like_torch(tensors, attn_mask=torch.zeros(L, S, dtype=dtype).masked_fill(~seen, -INF))


def test_second_derivatives_are_those_of_the_formula() -> None:
    for arguments in ({}, {"is_causal": True}, {"attn_mask": made(L, S, seed=3) > -0.5}, {"scale": -0.4}):
        tensors = [made(1, n, 2, seed=n).requires_grad_() for n in (L, S, S)]

        def call(*x: Tensor, given: dict[str, Any] = arguments) -> Tensor:
            return regard.scaled_dot_product_attention(*x, **given)

        assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


q, k = made(N, H, L, E), made(N, H, S, E)
WRONG: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "one dimension": ((q[0, 0, 0], k[0, 0, 0], k[0, 0, 0]), {}),
    "several dtypes": ((q.float(), k, k), {}),
    "integers": ((q.int(), k.int(), k.int()), {}),
    "complex numbers": ((q.to(torch.complex64), k.to(torch.complex64), k.to(torch.complex64)), {}),
    "an integer mask": ((q, k, k), {"attn_mask": torch.ones(L, S, dtype=torch.int32)}),
    "a mask of another length": ((q, k, k), {"attn_mask": torch.ones(L + 1, S, dtype=torch.bool)}),
    "a mask of more dimensions": ((q, k, k), {"attn_mask": torch.ones(1, 1, 1, L, S, dtype=torch.bool)}),
    "a mask of more items": ((q[:1], k[:1], k[:1]), {"attn_mask": torch.ones(2, 1, L, S, dtype=torch.bool)}),
    "several dims": ((q, k[..., :4], k), {}),
    "heads that do not broadcast": ((q[:, :2], k, k), {}),
    "heads without enable_gqa": ((torch.cat((q, q), 1), k, k), {}),
    "heads that do not divide": ((q[:, :2], k, k), {"enable_gqa": True}),
    "nested tensors": (
        (torch.nested.nested_tensor([q[0, 0], q[0, 0, :2]], layout=torch.jagged),) * 3,
        {"is_causal": True},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_refuses_is_refused_in_words_of_our_own(name: str) -> None:
    tensors, arguments = WRONG[name]
    if name != "nested tensors":  # torch takes some layouts of these
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*tensors, **arguments)
    with pytest.raises(regard.errors.RegardError, match=r"^scaled_dot_product_attention: "):
        regard.scaled_dot_product_attention(*tensors, **arguments)


# What torch answers on this device and we refuse: `docs/migrate.md` lists these.
REFUSED: dict[str, dict[str, Any]] = {
    "a mask beside is_causal": {"attn_mask": torch.ones(L, S, dtype=torch.bool), "is_causal": True},
    "a dropout of one": {"dropout_p": 1.0},
    "a scale that is not finite": {"scale": math.nan},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_refuse_and_torch_does_not_is_listed(name: str) -> None:
    F.scaled_dot_product_attention(q, k, k, **REFUSED[name])
    with pytest.raises(regard.errors.ArgumentError):
        regard.scaled_dot_product_attention(q, k, k, **REFUSED[name])


def test_a_call_like_an_earlier_one_is_posed_like_it_and_any_other_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "_POSED", {})
    posed = partial(functional.posed_as_torch, is_causal=True)
    q, k, v = torch.randn(3, 2, 3, 5, 8).unbind()
    first = posed(q, k, v)
    monkeypatch.setattr(functional, "_posed_as_torch", None)
    again = posed(v, q, k)
    assert (again.query is v, again.key is q, again.value is k) == (True, True, True)
    assert again[3:] == first[3:]
    changed: list[tuple[Callable[[], object], str]] = [
        (lambda: posed(q, k, v.double()), "a dtype"),
        (lambda: posed(q, k, v[..., :4]), "a dim"),
        (lambda: posed(q, k, v, scale=0.5), "the scale"),
        (lambda: posed(q, k, v, is_causal=False), "the mask"),
        (lambda: posed(q, k, v, dropout_p=0.5), "dropout"),
        (lambda: posed(q, k, v.mT.contiguous().mT), "strides"),
    ]
    for call, what in changed:
        with pytest.raises(TypeError):
            pytest.fail(f"{what} did not count: {call()}")

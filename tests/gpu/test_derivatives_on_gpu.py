"""Tangents and second derivatives of our kernels on a CUDA device: exact, repeatable, in linear memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
MASKS: dict[str, regard.Mask | None] = {
    "none": None,
    "causal": regard.causal(),
    "window": regard.window(50, 7),
    "padding": regard.padding([113, 300]),
    "strided": regard.strided(3),
    "documents": regard.documents(torch.arange(300) // 70, torch.arange(300) // 90),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def inputs(d: int, dv: int, n: int = 300, m: int = 300) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    shapes = (2, 4, n, d), (2, 2, m, d), (2, 2, m, dv)
    x = tuple(random(*s, seed=at).bfloat16().double() for at, s in enumerate(shapes))
    return x, tuple(random(*t.shape, seed=7 + at).bfloat16().double() for at, t in enumerate(x))


def derivatives(
    x: tuple[Tensor, ...], w: tuple[Tensor, ...], dtype: torch.dtype, backend: str, **kwargs: Any
) -> list[Tensor]:
    """Tangents of output, lse and entropy, and a Hessian times a vector in three ways."""
    x, w = tuple(t.to(dtype) for t in x), tuple(t.to(dtype) for t in w)
    kwargs = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in kwargs.items()}

    def rows(*x: Tensor) -> tuple[Tensor, ...]:
        seen = regard.observe(*x, **kwargs, backend=backend)
        return seen.output, torch.where(seen.lse > -torch.inf, seen.lse, 0.0), seen.entropy

    def loss(*x: Tensor) -> Tensor:
        return sum((y.double().sin().sum() for y in rows(*x)), torch.zeros((), device=DEVICE, dtype=torch.float64))

    tangents = torch.func.jvp(rows, x, w)[1]
    forward_over_reverse = torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), x, w)[1]
    reverse_over_forward = torch.func.grad(lambda *x: torch.func.jvp(loss, x, w)[1], (0, 1, 2))(*x)
    leaves = [t.clone().requires_grad_() for t in x]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    twice = torch.autograd.grad(first, leaves, w)
    return [t.detach().double() for t in (*tangents, *forward_over_reverse, *reverse_over_forward, *twice)]


def as_exact_as_plain_torch(x: tuple[Tensor, ...], w: tuple[Tensor, ...], dtype: torch.dtype, **kwargs: Any) -> None:
    """Within three times the error of the same derivatives by plain operations in the same dtype."""
    true = derivatives(x, w, torch.float64, "reference", **kwargs)
    plain = derivatives(x, w, dtype, "reference", **kwargs)
    for a, b, t in zip(derivatives(x, w, dtype, "triton", **kwargs), plain, true, strict=True):
        assert a.isfinite().all()
        error, ordinary = float((a - t).norm() / t.norm()), float((b - t).norm() / t.norm())
        assert error <= 3 * ordinary + 1e-5, f"{error:.1e}, plain torch {ordinary:.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_derivatives_are_as_exact_as_plain_torch(mask: str, d: int, dtype: torch.dtype) -> None:
    as_exact_as_plain_torch(*inputs(d, 64), dtype, mask=MASKS[mask])


@pytest.mark.parametrize(("d", "dv"), [(16, 40), (80, 128), (128, 128), (256, 256)])
def test_odd_dims_and_lengths(d: int, dv: int) -> None:
    as_exact_as_plain_torch(*inputs(d, dv, 77, 259), torch.bfloat16, mask=regard.causal())


@pytest.mark.parametrize(
    "more",
    [
        {"softcap": 3.0},
        {"sink": torch.tensor([0.5, -1.0, 0.0, 2.0], device=DEVICE)},
        {"scale": torch.tensor([0.1, 0.2, -0.1, 0.3], device=DEVICE)},
        {"scale": -0.2},
        {"bias": biases.alibi(torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE))},
    ]
    if torch.cuda.is_available()
    else [],
    ids=lambda m: next(iter(m)),
)
def test_every_argument_has_second_derivatives(more: dict[str, Any]) -> None:
    as_exact_as_plain_torch(*inputs(64, 64), torch.bfloat16, mask=regard.causal(), **more)


def test_derivatives_repeat_bit_for_bit() -> None:
    x, w = inputs(128, 128, 1000, 1000)
    first = derivatives(x, w, torch.bfloat16, "triton", mask=regard.causal())
    for _ in range(20):
        again = derivatives(x, w, torch.bfloat16, "triton", mask=regard.causal())
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("mask", [regard.padding([113, 200]), regard.strided(2) & regard.padding([113, 200])], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_hidden_keys_leave_no_trace_in_a_tangent(d: int, mask: regard.Mask) -> None:
    x, w = ([t.bfloat16() for t in tensors] for tensors in inputs(d, d))

    def tangents(hidden: float) -> list[Tensor]:
        for t in (*x[1:], *w[1:]):
            t[0, :, 113:] = t[1, :, 200:] = hidden
        seen = torch.func.jvp(lambda *x: regard.attention(*x, mask=mask, backend="triton"), tuple(x), tuple(w))
        return list(seen)

    for clean, other in zip(tangents(0.0), tangents(torch.nan), strict=True):
        assert torch.equal(clean, other)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), (0, 2), (1, 2), (2,)], ids=str)
def test_tensors_without_a_tangent_count_as_if_theirs_were_zero(which: tuple[int, ...]) -> None:
    x, w = ([t.bfloat16() for t in tensors] for tensors in inputs(128, 128))

    def attend(*parts: Tensor) -> Tensor:
        given = dict(zip(which, parts, strict=True))
        return regard.attention(*(given.get(at, t) for at, t in enumerate(x)), mask=regard.causal(), backend="triton")

    part = torch.func.jvp(attend, tuple(x[at] for at in which), tuple(w[at] for at in which))[1]
    filled = tuple(t if at in which else torch.zeros_like(t) for at, t in enumerate(w))
    whole = torch.func.jvp(lambda *x: regard.attention(*x, mask=regard.causal(), backend="triton"), tuple(x), filled)[1]
    torch.testing.assert_close(part, whole, atol=2e-2, rtol=2e-2)


def test_per_sample_gradients_on_the_kernels() -> None:
    q = random(3, 2, 4, 100, 64, seed=1).bfloat16()

    def gradient(q: Tensor) -> Tensor:
        mask = regard.padding([60, 100])
        return torch.func.grad(lambda q: regard.attention(q, q, q, mask=mask, backend="triton").float().sin().sum())(q)

    together = torch.vmap(gradient)(q)
    torch.testing.assert_close(together, torch.stack([gradient(x) for x in q]))


def test_auto_takes_the_kernels_in_every_mode() -> None:
    q = random(1, 2, 256, 64, seed=1).bfloat16()
    chosen: list[str | None] = []

    def f(q: Tensor) -> Tensor:
        chosen.append(regard.why(q, q, q).backend)
        return regard.attention(q, q, q).float().sum()

    torch.func.jvp(f, (q,), (q,))
    torch.func.grad(f)(q)
    torch.vmap(f)(q[None])
    assert set(chosen) == {"triton"}


@pytest.mark.parametrize("what", ["jvp", "double backward"])
def test_memory_is_linear(what: str) -> None:
    n = 16384
    q, k, v, a, b, c = (random(1, 2, n, 64, seed=s).bfloat16() for s in range(6))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if what == "jvp":
        torch.func.jvp(lambda *x: regard.attention(*x, backend="triton"), (q, k, v), (a, b, c))
    else:
        x = [t.requires_grad_() for t in (q, k, v)]
        first = torch.autograd.grad(regard.attention(*x, backend="triton").float().square().sum(), x, create_graph=True)
        torch.autograd.grad(first, x, (a, b, c))
    torch.cuda.synchronize()
    used = (torch.cuda.max_memory_allocated() - before) / 2**20
    assert used < 256, f"{used:.0f} MiB; one head's matrix alone would take 512"


def test_a_compiled_transform_gives_the_numbers_of_eager_mode() -> None:
    q, w = (random(1, 2, 128, 64, seed=s).bfloat16() for s in range(2))

    def product(q: Tensor) -> Tensor:
        return torch.func.jvp(torch.func.grad(lambda q: regard.attention(q, q, q).float().sin().sum()), (q,), (w,))[1]

    torch.testing.assert_close(torch.compile(product)(q), product(q), atol=2e-2, rtol=2e-2)

"""Differentiable as far as users need (DESIGN.md §3, guarantee 5): every order, every mode, in linear memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import regard
from contract_cases import ARGUMENTS, BY_NAME, MASKS, SCORES, Case, Shape, leaves
from regard.backends import Backend, Chunked

SMALL = Shape(batch=2, heads=2, kv_heads=1, n=3, m=5, d=2, dv=3)
BY_ROWS = Chunked(chunk_size=2)
SIZED = {"causal offset per item", "padding", "padding by keep", "prefix per item", "composed", "packed", "documents"}
RESIZED = [
    Case("causal offset per item, small", lambda s: {"mask": regard.causal(offset=torch.tensor([0, 2]))}),
    Case("padding, small", lambda s: {"mask": regard.padding([4, 0])}),
    Case("padding by keep, small", lambda s: {"mask": regard.padding(torch.arange(10).view(2, 5) % 3 > 0)}),
    Case("prefix per item, small", lambda s: {"mask": regard.prefix(torch.tensor([0, 3]))}),
    Case("documents, small", lambda s: {"mask": regard.documents(torch.arange(3) // 2, torch.arange(5) // 3)}),
    Case("composed, small", lambda s: {"mask": (regard.causal() & regard.padding([3, 5])) | ~regard.window(1, 1)}),
]
PARTNERS = [regard.causal(), regard.strided(2), regard.padding([4, 1])]


def crossed(case: Case, at: int) -> Case:
    """A score with a mask of another kind, a bias and, every other time, a cap and a sink."""

    def make(s: Shape) -> dict[str, Any]:
        more = {"softcap": 2.0, "sink": torch.linspace(-1, 1, s.heads)} if at % 2 else {}
        return {**case.make(s), "mask": PARTNERS[at % 3], "bias": torch.randn(s.heads, s.n, s.m), **more}

    return Case(f"{case.name} with mask, bias{' and all' if at % 2 else ''}", make)


CHECKED = [
    *(c for c in ARGUMENTS if "square" not in c.name and c.name != "several strips"),
    *(c for c in MASKS if c.name not in SIZED),
    *RESIZED,
    *SCORES,
    *(crossed(case, at) for at, case in enumerate(SCORES)),
]


def small(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    return Case(case.name, case.make, SMALL).inputs()


def of_leaves(tensors: list[Tensor], kwargs: dict[str, Any], backend: str | Backend) -> Any:
    """(function of every leaf, the leaves): parameters of scores and biases by functional substitution."""
    direct = [k for k, v in kwargs.items() if isinstance(v, Tensor) and v.requires_grad]
    fixed = {k: v for k, v in kwargs.items() if k not in direct and v is not None}

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(direct, args[3:], strict=True))
        seen = regard.observe(*args[:3], **given, **fixed, backend=backend)
        return seen.output, torch.where(seen.lse > -torch.inf, seen.lse, 0.0), seen.entropy

    return function, [*tensors, *(kwargs[k] for k in direct)]


def checkable(case: Case, backend: str | Backend) -> tuple[Any, list[Tensor]]:
    tensors, kwargs = small(case)
    if case.name == "bias with −inf":
        kwargs["bias"] = kwargs["bias"].detach()  # finite differences cannot start from −inf
    function, args = of_leaves(tensors, kwargs, backend)
    return function, args


@pytest.mark.parametrize("case", CHECKED, ids=lambda c: c.name)
def test_first_derivatives_are_right_in_both_modes_and_batched(case: Case) -> None:
    function, args = checkable(case, BY_ROWS)
    assert gradcheck(function, args, fast_mode=True, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("backend", ["reference", BY_ROWS], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "bias", "bias with −inf", "sink", "all together", "Additive"])
def test_second_derivatives_are_right_in_both_modes(name: str, backend: str | Backend) -> None:
    mask = {"mask": regard.causal()} if "mask" in BY_NAME[name].make(SMALL) else {}
    case = Case(name, lambda s: {**BY_NAME[name].make(s), **mask})
    function, args = checkable(case, backend)
    assert gradgradcheck(function, args, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("case", [c for c in CHECKED if {"score", "bias"} & {*c.make(SMALL)}], ids=lambda c: c.name)
def test_parameters_of_scores_and_biases_have_second_derivatives(case: Case) -> None:
    tensors, kwargs = small(case)
    every = leaves(tensors, kwargs)

    def penalty(backend: str | Backend) -> list[Tensor]:
        seen = regard.observe(*tensors, **kwargs, backend=backend)
        grads = torch.autograd.grad(seen.output.sin().sum() + seen.entropy.sum(), every, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), every, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(every, second, strict=True)]

    for a, b in zip(penalty("reference"), penalty(BY_ROWS), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["sdpa", "chunked"])
def test_torch_func_composes(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64).unbind()
    t = torch.randn_like(q)

    def f(q: Tensor, kind: str = backend) -> Tensor:
        return regard.attention(q, k, v, mask=regard.causal(), backend=kind).sin().sum()

    def true(q: Tensor) -> Tensor:
        return f(q, "reference")

    gradient = torch.func.grad(f)(q)
    torch.testing.assert_close(gradient, torch.func.grad(true)(q))
    _, forward_over_reverse = torch.func.jvp(torch.func.grad(f), (q,), (t,))
    reverse_over_forward = torch.func.grad(lambda q: torch.func.jvp(f, (q,), (t,))[1])(q)
    torch.testing.assert_close(forward_over_reverse, reverse_over_forward)
    torch.testing.assert_close(forward_over_reverse, torch.func.jvp(torch.func.grad(true), (q,), (t,))[1])
    torch.testing.assert_close(torch.func.hessian(f)(q), torch.func.hessian(true)(q))


@pytest.mark.parametrize("backend", ["sdpa", "chunked"])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 2), (None, None, 0)], ids=str)
def test_vmap_over_any_input_equals_a_loop(backend: str, in_dims: tuple[int | None, ...]) -> None:
    torch.manual_seed(0)
    mask = regard.padding([3, 7])
    x = [torch.randn(2, 2, 7, 4) for _ in range(3)]
    inputs = [t if d is None else torch.stack([t, t.flip(0), t + 1], d) for t, d in zip(x, in_dims, strict=True)]

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=mask, backend=backend)

    found = torch.vmap(f, in_dims=in_dims)(*inputs)
    looped = [f(*(t if d is None else t.select(d, i) for t, d in zip(inputs, in_dims, strict=True))) for i in range(3)]
    torch.testing.assert_close(found, torch.stack(looped))


@pytest.mark.parametrize("name", ["bias", "Additive", "relative", "dropout"])
def test_vmap_over_queries_with_shared_parameters_equals_a_loop(name: str) -> None:
    if name == "dropout":
        tensors, kwargs = BY_NAME["plain"].inputs()
        kwargs["dropout"] = 0.3
    else:
        tensors, kwargs = BY_NAME[name].inputs()
    queries = torch.stack([tensors[0], tensors[0] * 2]).detach()

    def f(q: Tensor) -> Tensor:
        torch.manual_seed(5)
        return regard.attention(q, *tensors[1:], **kwargs, backend="chunked").square().sum()

    found = torch.vmap(torch.func.grad(f), randomness="same")(queries)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(f)(q) for q in queries]))


def test_gradients_a_sample_are_those_of_each_sample() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 1, 2, 9, 4).unbind()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.observe(q, k, v, mask=regard.window(3)).entropy.square().sum()

    together = torch.vmap(torch.func.grad(f, (0, 1)))(q, k, v)
    alone = [torch.func.grad(f, (0, 1))(*item) for item in zip(q, k, v, strict=True)]
    for at in (0, 1):
        torch.testing.assert_close(together[at], torch.stack([g[at] for g in alone]))


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_a_tangent_is_never_silently_zero(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v, t = torch.randn(4, 1, 1, 6, 4, dtype=torch.float64).unbind()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, t)
        tangent = forward_ad.unpack_dual(regard.attention(dual, k, v, backend=backend)).tangent
    step = 1e-6
    ahead, behind = (regard.attention(q + s * t, k, v, backend="reference") for s in (step, -step))
    assert tangent is not None
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), atol=1e-8, rtol=1e-6)


def test_the_gradient_of_lse_is_the_mean_key() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64).unbind()
    q.requires_grad_()
    seen = regard.observe(q, k, v, scale=0.7)
    (found,) = torch.autograd.grad(seen.lse.sum(), q)
    torch.testing.assert_close(found, 0.7 * seen.weights() @ k)


def test_the_future_gets_no_gradient() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 600, 8, requires_grad=True) for _ in range(3))
    for backend in ("reference", "chunked", "sdpa"):
        output = regard.attention(q, k, v, mask=regard.causal(), backend=backend)
        grads = torch.autograd.grad(output[:, :, :300].square().sum(), (k, v))
        assert all(g[:, :, :300].abs().sum() > 0 and not g[:, :, 300:].any() for g in grads)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: regard.dense(x > 3),
        lambda x: regard.padding(x[0, :2]),
        lambda x: regard.documents(x[0]) & regard.causal(),
        lambda x: regard.causal(offset=x[0, :2]),
    ],
    ids=["dense", "padding", "documents", "offset"],
)
def test_vmap_over_a_mask_equals_a_loop_with_gradients(make: Any) -> None:
    torch.manual_seed(0)
    queries = torch.randn(3, 2, 2, 7, 4, dtype=torch.float64)
    hints = torch.randint(0, 7, (3, 7, 7))

    def f(q: Tensor, hint: Tensor) -> Tensor:
        return regard.attention(q, q, q, mask=make(hint)).sin().sum()

    found = torch.vmap(torch.func.grad(f))(queries, hints)
    torch.testing.assert_close(
        found, torch.stack([torch.func.grad(f)(q, h) for q, h in zip(queries, hints, strict=True)])
    )


def test_what_has_no_rule_in_a_transform_says_so() -> None:
    x = torch.randn(3, 5, 4)
    with pytest.raises(regard.errors.ArgumentError, match=r"^received: "):
        torch.vmap(lambda x: regard.observe(x, x, x).received)(x)
    with pytest.raises(regard.errors.ArgumentError, match="randomness='same'"):
        torch.vmap(lambda x: regard.attention(x, x, x, dropout=0.5), randomness="different")(x)

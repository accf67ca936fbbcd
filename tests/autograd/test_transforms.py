"""The transforms of torch.func: grad, jvp, hessian and vmap compose, over every input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import BY_NAME
from regard.core.validation import pose


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


@pytest.mark.parametrize(
    "make",
    [
        lambda x: regard.dense(x > 3),
        lambda x: regard.padding(x[0, :2]),
        lambda x: regard.causal() & (regard.padding(x[0, :2]) & regard.padding(x[1] > 2)),
        lambda x: regard.documents(x[0]) & regard.causal(),
        lambda x: regard.causal(offset=x[0, :2]),
    ],
    ids=["dense", "padding", "causal padding", "documents", "offset"],
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


def test_vmap_over_the_lengths_of_a_mask_takes_memory_linear_in_the_keys() -> None:
    x, sizes = torch.randn(2, 1, 50, 4), []

    def f(lengths: Tensor) -> Tensor:
        posed = pose(x, x, x, mask=regard.causal() & regard.padding(lengths))
        sizes.append((posed.mask, posed.bias.shape))
        return lengths

    torch.vmap(f)(torch.tensor([[5, 50], [7, 9]]))
    assert sizes == [(regard.causal(), (2, 1, 1, 50))]


def test_per_sample_products_with_a_hessian_equal_a_loop() -> None:
    torch.manual_seed(0)
    q, w = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64).unbind()

    def product(q: Tensor, w: Tensor) -> Tensor:
        def loss(q: Tensor) -> Tensor:
            return (
                regard.observe(q[None], q[None], q[None], mask=regard.causal(), backend="chunked")
                .entropy.square()
                .sum()
            )

        return torch.func.jvp(torch.func.grad(loss), (q,), (w,))[1]

    together = torch.vmap(product)(q, w)
    torch.testing.assert_close(together, torch.stack([product(a, b) for a, b in zip(q, w, strict=True)]))


def test_what_has_no_rule_in_a_transform_says_so() -> None:
    x = torch.randn(3, 5, 4)
    with pytest.raises(regard.errors.ArgumentError, match=r"^received: "):
        torch.vmap(lambda x: regard.observe(x, x, x).received)(x)
    with pytest.raises(regard.errors.ArgumentError, match="randomness='same'"):
        torch.vmap(lambda x: regard.attention(x, x, x, dropout=0.5), randomness="different")(x)


def test_what_would_be_linearised_wrongly_is_refused_by_name() -> None:
    x = torch.randn(2, 5, 4)

    def f(x: Tensor, backend: str = "auto") -> Tensor:
        return regard.attention(x, x.detach(), x.detach(), backend=backend)

    with pytest.raises(regard.errors.ArgumentError, match=r"^attention: torch\.func\.linearize"):
        torch.func.linearize(f, x)


VECTORISED: dict[str, dict[str, Any]] = {
    "causal": {"mask": regard.causal()},
    "bias": {"bias": torch.randn(2, 3, 3, dtype=torch.float64)},
    "relative": {"bias": regard.biases.relative(torch.randn(2, 3, dtype=torch.float64))},
    "sink": {"sink": torch.zeros(2, dtype=torch.float64)},
    "additive": {"score": regard.scores.Additive(2, 2, 3).double()},
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [("auto", "causal"), ("sdpa", "causal"), *(("chunked", name) for name in VECTORISED)],
)
def test_vectorised_forward_mode_of_torch_autograd_equals_a_loop(backend: str, name: str) -> None:
    torch.manual_seed(0)
    tensors = tuple(torch.randn(3, 1, 2, 3, 2, dtype=torch.float64).unbind())

    def f(*x: Tensor) -> Tensor:
        return regard.attention(*x, backend=backend, **VECTORISED[name])

    def number(*x: Tensor) -> Tensor:
        return f(*x).sin().sum()

    def jacobian(**how: Any) -> Any:
        return torch.autograd.functional.jacobian(f, tensors, **how)

    torch.testing.assert_close(jacobian(vectorize=True, strategy="forward-mode"), jacobian())
    hessian = torch.autograd.functional.hessian
    mixed = hessian(number, tensors, vectorize=True, outer_jacobian_strategy="forward-mode")
    torch.testing.assert_close(mixed, hessian(number, tensors))

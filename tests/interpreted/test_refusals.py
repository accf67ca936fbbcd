"""What our kernels do not take, they refuse with a reason, which `why` shows; and `auto` takes another backend."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import regard
from regard.backends import KNOWN
from regard.errors import BackendError
from regard.scores import Prepared, Score


class Cityblock(Score):
    """A score that is no product, and that no kernel knows."""

    pairwise = True

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return Prepared(query, key)

    @staticmethod
    def pair(query: Tensor, key: Tensor) -> Tensor:
        return -(query[..., :, None, :] - key[..., None, :, :]).abs().sum(-1)


HALVED = regard.scores.Pointwise(lambda s, b, h, i, j: s / 2)
NO_RULES = r"'triton' refuses: under torch\.compile it is an operator, which has no rules for forward mode"


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


REFUSED: dict[str, tuple[Callable[[], tuple[list[Tensor], dict[str, Any]]], str]] = {
    "float64": (lambda: ([x(1, 1, 4, 8, dtype=torch.float64)] * 3, {}), "float64"),
    "wide keys": (
        lambda: ([x(1, 1, 4, 577)] * 2 + [x(1, 1, 4, 8)], {}),
        "the dim of keys is 577; its tiles hold up to 576",
    ),
    "wide values": (
        lambda: ([x(1, 1, 4, 8)] * 2 + [x(1, 1, 4, 513)], {}),
        "the dim of values is 513; its tiles hold up to 512",
    ),
    "many hidden units": (
        lambda: ([x(1, 1, 4, 8)] * 3, {"score": regard.scores.Additive(8, 8, 257)}),
        "the dim of keys is 257; its tiles hold up to 256",
    ),
    "wide keys and a function of the scores": (
        lambda: ([x(1, 1, 4, 257)] * 2 + [x(1, 1, 4, 8)], {"score": HALVED}),
        "the dim of keys is 257; its tiles hold up to 256 with a function of the scores",
    ),
    "listed keys and a function of the scores": (
        lambda: ([x(1, 1, 4, 8)] * 3, {"score": HALVED, "mask": regard.chosen(torch.tensor([[0], [1], [0], [2]]))}),
        "its kernels for listed keys have no score Pointwise",
    ),
    "a score of a user": (lambda: ([x(1, 1, 4, 8)] * 3, {"score": Cityblock()}), "no kernel for the score Cityblock"),
    "no rows": (lambda: ([x(1, 1, 0, 8), x(1, 1, 4, 8), x(1, 1, 4, 8)], {}), "nothing is there to compute"),
    "no keys": (lambda: ([x(1, 1, 4, 8), x(1, 1, 0, 8), x(1, 1, 0, 8)], {}), "nothing is there to compute"),
    "no values": (lambda: ([x(1, 1, 4, 8)] * 2 + [x(1, 1, 4, 0)], {}), "nothing is there to compute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_its_reason_in_why_and_in_the_error(name: str) -> None:
    make, reason = REFUSED[name]
    tensors, kwargs = make()
    plan = regard.why(*tensors, **kwargs)
    assert plan.backend not in (None, "triton")
    assert any(reason in said for said in plan.refusals["triton"])
    assert reason in str(plan)
    with pytest.raises(BackendError, match=f"'triton' refuses: .*{reason}"):
        regard.attention(*tensors, **kwargs, backend="triton")
    assert regard.attention(*tensors, **kwargs).shape == (*tensors[0].shape[:3], tensors[2].shape[3])


@pytest.mark.parametrize(("dim", "of_values"), [(512, 512), (576, 512)])
def test_wide_dims_are_taken(dim: int, of_values: int) -> None:
    assert not KNOWN["triton"].refuses(
        regard.core.validation.pose(x(1, 1, 4, dim), x(1, 1, 4, dim), x(1, 1, 4, of_values))
    )


def attended(query: Tensor) -> Tensor:
    return regard.attention(query, query, query, backend="triton")


def gradient(query: Tensor) -> Tensor:
    return torch.func.grad(lambda q: attended(q).sin().sum())(query)


def tangent(query: Tensor) -> Tensor:
    return torch.func.jvp(attended, (query,), (torch.ones_like(query),))[1]


def batched(query: Tensor) -> Tensor:
    return torch.vmap(attended)(query[None])[0]


@pytest.mark.parametrize("derivative", [gradient, tangent, batched])
def test_under_torch_compile_torch_func_is_refused_by_name_and_right_behind_a_graph_break(
    derivative: Callable[[Tensor], Tensor],
) -> None:
    query = x(1, 2, 4, 8)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=NO_RULES):
        torch.compile(derivative, backend="aot_eager", fullgraph=True)(query)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(derivative, backend="aot_eager")(query), derivative(query))


def test_under_torch_compile_a_dual_tensor_is_refused_by_name_or_right() -> None:
    """torch 2.15 runs a call with dual tensors outside of the graph; older versions trace it, and we refuse."""
    query = x(1, 2, 4, 8)
    torch.compiler.reset()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        expected = forward_ad.unpack_dual(attended(dual)).tangent
        assert expected is not None
        try:
            found = forward_ad.unpack_dual(torch.compile(attended, backend="aot_eager")(dual)).tangent
        except BackendError as error:
            if not re.search(NO_RULES, str(error)):
                raise
        else:
            torch.testing.assert_close(found, expected)


def test_what_the_interpreter_takes_is_named_by_why() -> None:
    query = x(1, 2, 4, 8)
    plan = regard.why(query, query, query, softcap=2.0, backend="triton")
    assert plan.backend == "triton"
    assert "→ triton" in str(plan)
    assert "by triton" in repr(regard.observe(query, query, query, backend="triton"))

"""Structured biases: one contract, and each tile compared with a plain loop."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import regard
from regard.biases import Alibi, Bias, Relative, alibi, relative
from regard.errors import DtypeError, ShapeError
from regard.positions import alibi_slopes


def make(name: str, offset: int | None = None) -> Bias:
    torch.manual_seed(0)
    if name == "alibi":
        return alibi(torch.rand(3, dtype=torch.float64), offset)
    return relative(torch.randn((3, 5) if name == "relative by head" else (5,), dtype=torch.float64), offset)


def truth(bias: Bias, h: int, i: int, j: int, n: int, m: int) -> Tensor:
    assert isinstance(bias, Alibi | Relative)
    offset = m - n if bias.offset is None else bias.offset
    if isinstance(bias, Alibi):
        return -bias.slopes[h] * abs(i + offset - j)
    return bias.table.reshape(-1, 5)[h, min(max(j - i - offset, -2), 2) + 2]


every = pytest.mark.parametrize("name", ["alibi", "relative", "relative by head"])


def test_every_bias_is_in_the_contract() -> None:
    ours = {kind for kind in Bias.__subclasses__() if kind.__module__ == Bias.__module__}
    assert ours == {Alibi, Relative}


@every
@pytest.mark.parametrize("offset", [None, 0, 2, -3])
@pytest.mark.parametrize(("n", "m"), [(4, 4), (3, 7), (7, 3), (0, 2), (1, 1)])
def test_the_dense_bias_is_the_formula(name: str, offset: int | None, n: int, m: int) -> None:
    bias = make(name, offset)
    dense = bias.dense(n, m)
    assert dense.shape == (bias.heads, n, m)
    for h in range(bias.heads):
        for i in range(n):
            for j in range(m):
                torch.testing.assert_close(dense[h, i, j], truth(bias, h, i, j, n, m))


@every
def test_a_tile_is_a_part_of_the_whole_for_any_indices(name: str) -> None:
    bias = make(name)
    i, j = torch.tensor([5, 0, 3]), torch.tensor([1, 6])
    assert torch.equal(bias.tile(bias.tensors, i, j, 6, 7), bias.dense(6, 7)[:, i][:, :, j])
    assert bias.misfit(6, 7) is None


@every
def test_a_tile_is_a_differentiable_function_of_its_tensors(name: str) -> None:
    bias = make(name)
    i, j = torch.arange(3), torch.arange(4)

    def tile(*tensors: Tensor) -> Tensor:
        return bias.tile(tensors, i, j, 3, 4)

    values = tuple(t.detach().clone().requires_grad_() for t in bias.tensors)
    assert torch.autograd.gradcheck(lambda *t: tile(*t).sin(), values, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *t: tile(*t).sin(), values)
    _, pull = torch.func.vjp(tile, *bias.tensors)
    cotangent = torch.randn(bias.heads, 3, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(tile(*values), values, cotangent)
    torch.testing.assert_close(pull(cotangent)[0], expected)
    stacked = torch.stack([bias.tensors[0], bias.tensors[0] * 2])
    torch.testing.assert_close(torch.func.vmap(tile)(stacked)[1], 2 * tile(*bias.tensors))


@every
def test_half_parameters_give_exact_float32_tiles(name: str) -> None:
    full = make(name)
    half = type(full)(full.tensors[0].to(torch.bfloat16))  # type: ignore[call-arg]
    wide = type(full)(full.tensors[0].to(torch.bfloat16).float())  # type: ignore[call-arg]
    assert half.dense(1, 1000).dtype == torch.float32
    assert torch.equal(half.dense(1, 1000), wide.dense(1, 1000))


@every
def test_biases_move_copy_and_pickle(name: str) -> None:
    bias = make(name, 1)
    assert bias.to("meta").tensors[0].device.type == "meta"
    assert bias.to("meta").dense(2, 3).shape == (bias.heads, 2, 3)
    for twin in (copy.deepcopy(bias), pickle.loads(pickle.dumps(bias))):
        assert torch.equal(twin.dense(3, 4), bias.dense(3, 4))


def test_the_repr_describes_the_bias() -> None:
    assert repr(alibi(alibi_slopes(8))) == "alibi(slopes of 8 heads)"
    assert repr(relative(torch.zeros(4, 9), offset=2)) == "relative(table of 4 heads, reach 4, offset=2)"


def test_an_invalid_bias_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"relative: table must be .* an odd number of columns"):
        relative(torch.zeros(3, 4))
    with pytest.raises(ShapeError, match="relative: table"):
        relative(torch.zeros(2, 3, 5))
    with pytest.raises(ShapeError, match="alibi: slopes must have one value per head"):
        alibi(torch.zeros(2, 3))
    with pytest.raises(DtypeError, match="alibi: slopes must be of a floating dtype"):
        alibi(torch.arange(3))
    with pytest.raises(DtypeError, match="relative: table must be a tensor"):
        relative([0.0, 1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="alibi: offset must be an int"):
        alibi(torch.ones(2), offset=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_minus_infinity_in_a_relative_table_hides_as_a_mask_does(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    table = torch.zeros(2, 5)
    table[:, 3:] = -torch.inf
    seen = regard.observe(q, k, v, bias=relative(table), backend=backend)
    same = regard.observe(q, k, v, mask=regard.causal(), backend=backend)
    for member in ("output", "lse", "entropy", "visible", "received"):
        torch.testing.assert_close(getattr(seen, member), getattr(same, member))

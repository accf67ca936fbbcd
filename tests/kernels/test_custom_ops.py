"""The operators themselves, without a compiler: schemas, fake results, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard.chunked.engine import ChunkedEngine
from regard.core.encoding import Encoded, encode
from regard.core.spec import Spec
from regard.core.tiling import TileSizes
from regard.kernels import custom_ops  # noqa: F401  (it registers the operators)


def given(mask: regard.masks.Mask, observed: bool = True) -> tuple[list[Tensor | None], Encoded]:
    made = torch.Generator().manual_seed(0)
    shapes = (2, 2, 2, 6, 4), (2, 2, 5, 4), (2, 2, 5, 3)
    x: list[Tensor | None] = [torch.randn(s, generator=made) for s in shapes]
    encoded = encode(ChunkedEngine(Spec(6, 5, mask, period=2), TileSizes(), observed))
    assert encoded is not None
    return [*x, None], encoded


@pytest.mark.parametrize("mask", [regard.window(2), regard.padding([3, 5])])
def test_schemas_and_fake_results_are_right(mask: regard.masks.Mask) -> None:
    x, encoded = given(mask)
    checks = ("test_schema", "test_faketensor")
    for alone in (True, False):
        torch.library.opcheck(torch.ops.regard.attend.default, (x, alone, *encoded), test_utils=checks)
    found = torch.ops.regard.attend(x, False, *encoded)
    assert len({t.untyped_storage().data_ptr() for t in found}) == len(found), "a row's statistics share memory"
    back = (x, found, [torch.ones_like(found[0]), None, None], [True, False, True, False], *encoded)
    torch.library.opcheck(torch.ops.regard.attend_backward.default, back, test_utils=checks)
    assert [g.shape for g in torch.ops.regard.attend_backward(*back)] == [x[0].shape, x[2].shape]  # type: ignore[union-attr]


def test_a_second_derivative_is_refused() -> None:
    x, encoded = given(regard.window(2))
    leaf = x[0]
    assert leaf is not None
    rows = torch.ops.regard.attend_with_gradient([leaf.requires_grad_(), *x[1:]], False, *encoded)
    with pytest.raises(RuntimeError, match="a compiled call has no second derivative"):
        torch.autograd.grad(rows[0].sum(), leaf, create_graph=True)


def test_rows_and_keys_without_a_part_are_named_only_if_something_is_not_finite() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    encoded = encode(Spec(4, 4, regard.prefix(2)))
    assert encoded is not None
    _, keys = torch.ops.regard.visible(q, k, v, None, *encoded)
    assert keys.all()
    _, keys = torch.ops.regard.visible(q, k * torch.nan, v, None, *encoded)
    assert keys[0, 0].tolist() == [True, True, False, False]


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch has no such tag")
@pytest.mark.parametrize("name", ["attend", "attend_backward", "visible"])
def test_a_captured_cuda_graph_leaves_them_outside(name: str) -> None:
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.regard, name).default.tags

"""The shortcut for the plainest calls is the straight line, only shorter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.backends.sdpa import fast_path

MASKS = {
    "no mask": None,
    "causal": regard.causal(),
    "window": regard.window(3, 1),
    "blocks": regard.blocks(4) | regard.strided(3),
    "prefix": regard.prefix(3),
    "offset": regard.causal(offset=-2) & regard.prefix(9),
    "padding": regard.padding([5, 12]),
    "padding to nothing": regard.padding([0, 12]),
}


def tensors() -> list[torch.Tensor]:
    return [*torch.randn(3, 2, 4, 12, 8, generator=torch.Generator().manual_seed(0)).unbind()]


@pytest.mark.parametrize("name", MASKS)
def test_it_gives_the_bits_of_the_straight_line(name: str) -> None:
    answer = fast_path(*tensors(), MASKS[name])
    assert answer is not None
    assert torch.equal(answer, regard.attention(*tensors(), mask=MASKS[name], backend="sdpa"))


def leaking() -> list[torch.Tensor]:
    q, k, v = tensors()
    v[0, :, 9] = torch.nan
    return [q, k, v]


REFUSED: dict[str, Any] = {
    "three dimensions": lambda: ([x[0] for x in tensors()], None),
    "other lengths": lambda: ([tensors()[0][:, :, :5], *tensors()[1:]], None),
    "no rows": lambda: ([x[:, :, :0] for x in tensors()], None),
    "half precision": lambda: ([x.half() for x in tensors()], None),
    "mixed dtypes": lambda: ([tensors()[0].double(), *tensors()[1:]], None),
    "a derivative": lambda: ([tensors()[0].requires_grad_(), *tensors()[1:]], None),
    "strides": lambda: ([x.mT.contiguous().mT for x in tensors()], None),
    "something else": lambda: ([[1.0], *tensors()[1:]], None),
    "NaN behind padding": lambda: (leaking(), regard.padding([5, 12])),
    "a padding that does not fit": lambda: (tensors(), regard.padding([5, 12, 3])),
    "NaN behind a prefix": lambda: (leaking(), regard.prefix(3)),
    "a mask too large to lay out": lambda: ([torch.randn(1, 1, 300, 8)] * 3, regard.window(3, 1)),
    "a mask of the wrong length": lambda: (tensors(), regard.packed([3, 4])),
    "a predicate": lambda: (tensors(), regard.predicate(lambda b, h, i, j: i == j)),
    "a tensor": lambda: (tensors(), torch.ones(12, 12, dtype=torch.bool)),
    "an offset for each item": lambda: (tensors(), regard.causal(offset=[1, 2])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_leaves_everything_else_to_the_straight_line(name: str) -> None:
    given, mask = REFUSED[name]()
    assert fast_path(*given, mask) is None


def test_it_stands_back_from_autocast_transforms_and_forward_mode() -> None:
    q, k, v = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast_path(q, k, v, None) is None
        assert regard.attention(q, k, v).dtype == torch.bfloat16
    seen: list[object] = []
    torch.func.grad(lambda q: (seen.append(fast_path(q, k, v, None)), q.sum())[1])(q)
    with torch.autograd.forward_ad.dual_level():
        seen.append(fast_path(q, k, v, None))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        seen.append(fast_path(q, k, v, None))
    assert seen == [None, None, None]


def test_errors_do_not_change_by_it() -> None:
    q, k, v = tensors()
    with pytest.raises(regard.errors.ShapeError, match=r"^attention: "):
        regard.attention(q, k, v[:, :, :3])
    with pytest.raises(regard.errors.BackendError, match=r"^attention: "):
        regard.attention(q, k, v, backend="nonsense")

"""Which calls count as like an earlier one: those that are checked, chosen and prepared in the same way."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.backends import KNOWN, Triton, remembered
from regard.backends.remembered import key_of, recall, remember
from regard.compat.triton import INTERPRETED
from regard.core.validation import pose

TENSORS = ("query", "key", "value")
LENGTHS = torch.tensor([3, 5])
KEPT = regard.padding(LENGTHS)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_CALLS", {})


def call(**more: Any) -> dict[str, Any]:
    """The arguments of a call, with tensors of its own."""
    x: dict[str, Any] = dict.fromkeys(("mask", "scale", "softcap", "sink"))
    x |= {name: torch.randn(2, 4, 6, 8) for name in TENSORS}
    return x | {"backend": "auto", "observed": False} | more


def turned() -> Tensor:
    return torch.randn(2, 6, 4, 8).transpose(1, 2)


CHANGES: dict[str, dict[str, Any]] = {
    **{f"shape of {name}": {name: torch.randn(2, 4, 6, 8)[:, :2]} for name in TENSORS},
    **{f"strides of {name}": {name: turned()} for name in TENSORS},
    **{f"dtype of {name}": {name: torch.randn(2, 4, 6, 8, dtype=torch.float64)} for name in TENSORS},
    **{f"device of {name}": {name: torch.empty(2, 4, 6, 8, device="meta")} for name in TENSORS},
    "a derivative": {"query": torch.randn(2, 4, 6, 8, requires_grad=True)},
    "mask": {"mask": regard.causal()},
    "another mask": {"mask": regard.window(3)},
    "mask with tensors": {"mask": KEPT},
    "a mask with other tensors": {"mask": regard.padding(torch.tensor([3]))},
    "documents": {"mask": regard.documents(torch.tensor([0, 0, 1, 0, 2, 2]))},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 9.0},
    "sink": {"sink": torch.zeros(4)},
    "a shared sink": {"sink": torch.zeros(1)},
    "a learnable sink": {"sink": torch.zeros(4, requires_grad=True)},
    "backend": {"backend": "chunked"},
    "observed": {"observed": True},
    "a mask, observed": {"mask": regard.window(3), "observed": True},
}


def test_calls_differ_by_all_that_decides_them_and_by_nothing_else() -> None:
    for change in CHANGES.values():
        key_of(**call(**change))  # the first call of a mask may not count
    keys = [key_of(**call()), *(key_of(**call(**change)) for change in CHANGES.values())]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert keys == [key_of(**call()), *(key_of(**call(**change)) for change in CHANGES.values())]


def test_masks_made_anew_are_the_same_if_they_hold_no_tensor() -> None:
    assert key_of(**call(mask=regard.window(3) & regard.prefix(2))) == key_of(
        **call(mask=regard.window(3) & regard.prefix(2))
    )


def test_intervals_made_anew_are_the_same_if_their_tensors_differ_by_values_alone() -> None:
    first, second = (regard.packed(torch.tensor(lengths)) & regard.causal() for lengths in ([2, 4], [5, 1]))
    assert key_of(**call(mask=first)) == key_of(**call(mask=second))
    wrong = regard.packed(torch.tensor([5, 2])) & regard.causal()
    assert key_of(**call(mask=wrong)) is None  # the whole road ends in an error


def test_other_masks_are_the_same_while_their_tensors_are_not_changed() -> None:
    ids = torch.tensor([0, 0, 1, 0, 2, 2])
    mask = regard.documents(ids)
    assert key_of(**call(mask=mask)) is None  # such a mask is often made for one call
    before = key_of(**call(mask=mask))
    assert key_of(**call(mask=mask)) == before
    other = regard.documents(ids)
    assert key_of(**call(mask=other)) != key_of(**call(mask=other)) != before
    ids[0] = 4
    assert key_of(**call(mask=mask)) != before


def test_switches_of_torch_count() -> None:
    before = key_of(**call())
    for mask in (None, regard.causal(), regard.everything()):
        there = key_of(**call(mask=mask))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert key_of(**call(mask=mask)) != there
    with torch.no_grad():
        assert key_of(**call()) != before
    torch.use_deterministic_algorithms(True)
    try:
        assert key_of(**call()) != before
    finally:
        torch.use_deterministic_algorithms(False)


OTHERS: dict[str, dict[str, Any]] = {
    "a tensor as mask": {"mask": torch.ones(6, 6, dtype=torch.bool)},
    "no mask": {"mask": "causal"},
    "a tensor as scale": {"scale": torch.tensor(0.5)},
    "no scale": {"scale": "0.5"},
    "no softcap": {"softcap": True},
    "no sink": {"sink": [0.0] * 4},
    "a backend object": {"backend": KNOWN["chunked"]},
    "a list": {"key": [[1.0]]},
    "a parameter": {"query": torch.nn.Parameter(torch.randn(2, 4, 6, 8))},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_take_the_whole_road(name: str) -> None:
    assert key_of(**call(**OTHERS[name])) is None


def test_modes_of_torch_take_the_whole_road() -> None:
    with torch.autocast("cpu"):
        assert key_of(**call()) is None
    with forward_ad.dual_level():
        assert key_of(**call()) is None
    x = call()
    with TorchDispatchMode():
        assert key_of(**x) is None
    found: list[Any] = []
    torch.func.grad(lambda x: (found.append(key_of(**call())), x)[1])(torch.tensor(1.0))
    assert found == [None]


def test_only_what_a_backend_prepares_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    x = call()
    q, k, v = x["query"], x["key"], x["value"]
    problem, backend = pose(q, k, v), KNOWN["chunked"]
    key = key_of(**x)
    assert key is not None
    remember(key, (q, k, v, None), problem, backend)
    assert recall(key) is None  # it prepares nothing
    made = object()
    monkeypatch.setattr(type(backend), "prepare", lambda self, p: made)
    remember(key, (q.clone(), k, v, None), problem, backend)
    assert recall(key) is None  # the problem has another query than the caller gave
    remember(key, (q, k, v, None), problem, backend)
    found = recall(key)
    assert found is not None
    again = found.problem(v, k, q, None, torch.zeros(1))
    assert again.sink is not None
    assert (again.query is v, again.scale, again.lead, again.observed) == (True, problem.scale, (2, 4), True)
    assert again.sink.shape == (4,)
    assert found.attend is made


def test_few_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    x = call()
    q, k, v = x["query"], x["key"], x["value"]
    monkeypatch.setattr(type(KNOWN["chunked"]), "prepare", lambda self, p: object())
    for n in range(remembered._SIZE + 5):
        remember((n,), (q, k, v, None), pose(q, k, v), KNOWN["chunked"])
    assert len(remembered._CALLS) == remembered._SIZE
    assert recall((0,)) is None


@pytest.mark.parametrize("mask", [lambda: regard.documents(torch.tensor([0, 0, 1, 0, 2, 2])), regard.window])
def test_what_our_kernels_prepare_keeps_no_mask_with_tensors_alive(mask: Any) -> None:
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("the interpreter prepares nothing")
    p = pose(*torch.randn(3, 2, 4, 6, 8).unbind(), mask=mask() if mask is not regard.window else mask(3))
    assert p.mask is not None
    kept, constant = weakref.ref(p.mask), p.mask.constant
    prepared = Triton().prepare(p)
    del p
    gc.collect()
    assert prepared is not None
    assert (kept() is not None) is constant

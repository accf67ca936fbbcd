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
from regard.backends.remembered import Key, key_of, recall, remember
from regard.compat.torch import likeness
from regard.compat.triton import INTERPRETED
from regard.core.rows import Rows
from regard.core.validation import pose
from regard.kernels.engine import TritonEngine
from regard.kernels.known_form import Size, known_form
from regard.scores import Pointwise, Scaled

TENSORS = ("query", "key", "value")
LENGTHS = torch.tensor([3, 5])
KEPT = regard.padding(LENGTHS)
SLOPES = torch.ones(4)
LEARNT = torch.zeros(4, 11, requires_grad=True)
CAP = Pointwise(lambda score, b, h, i, j: 5.0 * torch.tanh(score / 5.0))


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
    "slopes": {"bias": regard.biases.alibi(torch.ones(4))},
    "slopes and an offset": {"bias": regard.biases.alibi(torch.ones(4), offset=1)},
    "learnable slopes": {"bias": regard.biases.alibi(torch.ones(4, requires_grad=True))},
    "a table": {"bias": regard.biases.relative(torch.ones(4, 5))},
    "a shared table": {"bias": regard.biases.relative(torch.ones(5))},
    "a function that is a cap": {"score": CAP},
    "another such function": {"score": Pointwise(lambda score, b, h, i, j: 9.0 * torch.tanh(score / 9.0))},
    "a function that is a bias": {"score": Pointwise(lambda score, b, h, i, j: score - SLOPES[h] * (i - j).abs())},
    "a function that is a cap, and slopes": {"score": CAP, "bias": regard.biases.alibi(torch.ones(4))},
    "backend": {"backend": "chunked"},
    "observed": {"observed": True},
    "a mask, observed": {"mask": regard.window(3), "observed": True},
}


def is_recalled(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether the second call is taken for one like the first, which is remembered."""
    return is_recalled_by(remembered_key(first), second)


def remembered_key(x: dict[str, Any]) -> Key:
    key = key_of(**x)
    assert key is not None
    remembered._CALLS[key.values] = ((likeness(key.tensors), ANY),)
    return key


def is_recalled_by(key: Key, x: dict[str, Any]) -> bool:
    remembered._CALLS = {made: calls for made, calls in remembered._CALLS.items() if made == key.values}
    other = key_of(**x)
    return other is not None and recall(other) is not None


ANY: Any = object()


def test_calls_differ_by_all_that_decides_them_and_by_nothing_else() -> None:
    changes = [{}, *CHANGES.values()]
    for change in changes:
        key_of(**accepted(call(**change)))  # the first call of a mask may not count
    for first in changes:
        alike = [second for second in changes if is_recalled(call(**first), call(**second))]
        assert alike == [first]


def test_a_tensor_that_is_given_twice_counts() -> None:
    x = torch.randn(2, 4, 6, 8)
    same: list[dict[str, Any]] = [
        {},
        {"query": x, "key": x},
        {"key": x, "value": x},
        {"query": x, "value": x},
        {"query": x, "key": x, "value": x},
    ]
    for first in same:
        assert [second for second in same if is_recalled(call(**first), call(**second))] == [first]


def test_masks_made_anew_are_the_same_if_they_hold_no_tensor() -> None:
    first, second = (call(mask=regard.window(3) & regard.prefix(2)) for _ in range(2))
    assert is_recalled(first, second)


def test_intervals_made_anew_are_the_same_if_their_tensors_differ_by_values_alone() -> None:
    first, second = (regard.packed(torch.tensor(lengths)) & regard.causal() for lengths in ([2, 4], [5, 1]))
    assert is_recalled(call(mask=first), call(mask=second))
    wrong = regard.packed(torch.tensor([5, 2])) & regard.causal()
    assert key_of(**call(mask=wrong)) is None  # the whole road ends in an error


def test_sorted_documents_made_anew_are_the_same_too() -> None:
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    first, second = (regard.documents(x) & regard.causal() for x in (ids, ids // 2))
    key = remembered_key(call(mask=first))
    assert is_recalled_by(key, call(mask=second))
    assert not is_recalled_by(key, call(mask=regard.documents(ids.int()) & regard.causal()))
    ids[0] = 4  # now they are no intervals
    assert not is_recalled_by(key, call(mask=first))


def test_other_masks_are_the_same_while_their_tensors_are_not_changed() -> None:
    ids = torch.tensor([0, 0, 1, 0, 2, 2])
    mask, other = regard.documents(ids), regard.documents(ids)
    assert key_of(**call(mask=mask)) is None  # such a mask is often made for one call
    key = remembered_key(call(mask=mask))
    assert is_recalled_by(key, call(mask=mask))
    assert not is_recalled_by(key, call(mask=other))
    assert not is_recalled_by(key, call(mask=other))
    ids[0] = 4
    assert not is_recalled_by(key, call(mask=mask))


def accepted(x: dict[str, Any]) -> dict[str, Any]:
    """The same arguments after an accepted call, which found what the function is."""
    if isinstance(x.get("score"), Pointwise):
        q, k = x["query"], x["key"]
        known_form(x["score"], Size(q.shape[1], q.shape[2], k.shape[2], q.device))
    return x


def test_a_function_counts_once_a_call_found_what_it_is_while_it_captures_the_same() -> None:
    slopes = torch.ones(4)

    def made() -> Pointwise:
        return Pointwise(lambda score, b, h, i, j: score - slopes[h] * (i - j).abs())

    score = made()
    for _ in range(2):
        assert key_of(**call(score=score)) is None
    key = remembered_key(accepted(call(score=score)))
    assert key.bias is not None
    assert is_recalled_by(key, call(score=score))
    assert not is_recalled_by(key, accepted(call(score=made())))
    slopes.mul_(3)  # values may change, and count
    assert key_of(**call(score=score)) is None
    changed = key_of(**accepted(call(score=score)))
    assert changed is not None
    assert changed.bias is not None
    assert torch.equal(changed.bias.tensors[0], slopes)
    assert is_recalled_by(key, call(score=score))
    slopes = torch.ones(4)  # another tensor may have another size
    assert key_of(**call(score=score)) is None
    assert not is_recalled_by(key, accepted(call(score=score)))


def test_looking_for_an_earlier_call_leaves_errors_and_empty_calls_alone() -> None:
    score = Pointwise(lambda score, b, h, i, j: score - 0.1 * (i - j).abs())
    keep = torch.ones(11, dtype=torch.bool)
    table = torch.zeros(11)
    by_data = Pointwise(lambda score, b, h, i, j: score + table[keep][i - j + 5])
    accepted(call(score=by_data))
    assert key_of(**call(score=by_data)) is None  # its table may have another size at the next call
    empty = {name: torch.randn(2, 4, 0, 8) for name in TENSORS}
    for wrong in (empty, {"key": torch.randn(8)}, {"key": torch.tensor(1.0)}, {"query": torch.randn(8)}):
        for mask in (None, regard.causal()):
            for _ in range(2):
                key_of(**call(score=score, mask=mask, **wrong))
    assert score.known_form is None
    torch.func.grad(lambda x: (key_of(**call(score=score)), x)[1])(torch.tensor(1.0))
    assert score.known_form is None


def test_a_tensor_that_is_both_sink_and_slopes_takes_the_whole_road() -> None:
    assert key_of(**call(sink=SLOPES, bias=regard.biases.alibi(SLOPES))) is None


def test_switches_of_torch_count() -> None:
    for mask in (None, regard.causal(), regard.everything()):
        key = remembered_key(call(mask=mask))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert not is_recalled_by(key, call(mask=mask))
        assert is_recalled_by(key, call(mask=mask))
    key = remembered_key(call())
    with torch.inference_mode():
        assert not is_recalled_by(key, call())
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_recalled_by(key, call())
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_derivative_that_is_asked_for_counts() -> None:
    x = torch.randn(2, 4, 6, 8, requires_grad=True)
    key = remembered_key(call(query=x))
    with torch.no_grad():
        assert not is_recalled_by(key, call(query=x))
    assert is_recalled_by(key, call(query=x))


OTHERS: dict[str, dict[str, Any]] = {
    "a tensor as mask": {"mask": torch.ones(6, 6, dtype=torch.bool)},
    "no mask": {"mask": "causal"},
    "a tensor as scale": {"scale": torch.tensor(0.5)},
    "no scale": {"scale": "0.5"},
    "no softcap": {"softcap": True},
    "no sink": {"sink": [0.0] * 4},
    "a backend object": {"backend": KNOWN["chunked"]},
    "a list": {"key": [[1.0]]},
    "a tensor as bias": {"bias": torch.zeros(6, 6)},
    "a function that is neither a cap nor a bias": {"score": Pointwise(lambda score, b, h, i, j: score * score)},
    "a table that learns": {"score": Pointwise(lambda score, b, h, i, j: score + LEARNT[h, i - j + 5])},
    "a scale that learns": {"score": Pointwise(lambda score, b, h, i, j: score + i - j, Scaled(torch.tensor(0.3)))},
    "two biases": {
        "score": Pointwise(lambda score, b, h, i, j: score + (i - j)),
        "bias": regard.biases.alibi(torch.ones(4)),
    },
    "another score": {"score": regard.scores.Cosine()},
    "a parameter": {"query": torch.nn.Parameter(torch.randn(2, 4, 6, 8))},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_take_the_whole_road(name: str) -> None:
    for _ in range(2):
        assert key_of(**accepted(call(**OTHERS[name]))) is None


def test_modes_of_torch_take_the_whole_road(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = call(), []
    given = x["query"], x["key"], x["value"], None
    problem, backend = pose(*given[:3]), KNOWN["chunked"]
    monkeypatch.setattr(type(backend), "prepare", lambda self, p: ANY)
    remembered_key(x)

    def whole_road() -> bool:
        """Whether nothing is recalled, and nothing is remembered."""
        key = key_of(**x)
        return key is None or (recall(key) is None and remember(key, given, problem, backend) is None)

    assert not whole_road()
    with torch.autocast("cpu"):
        assert whole_road()
    with forward_ad.dual_level():
        assert whole_road()
    with TorchDispatchMode():
        assert whole_road()
    torch.func.grad(lambda y: (found.append(whole_road()), y)[1])(torch.tensor(1.0))
    assert found == [True]


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
    again = found.problem(v, k, q, None, torch.zeros(1), None, None)
    assert again.sink is not None
    assert (again.query is v, again.scale, again.lead, again.observed) == (True, problem.scale, (2, 4), True)
    assert again.sink.shape == (4,)
    assert found.attend is made


def test_few_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    x = call()
    q, k, v = x["query"], x["key"], x["value"]
    monkeypatch.setattr(type(KNOWN["chunked"]), "prepare", lambda self, p: object())
    for n in range(remembered._SIZE + 5):
        remember(Key((n,), (q, k, v)), (q, k, v, None), pose(q, k, v), KNOWN["chunked"])
    assert len(remembered._CALLS) == remembered._SIZE
    assert recall(Key((0,), (q, k, v))) is None


def test_few_variants_of_a_call_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(KNOWN["chunked"]), "prepare", lambda self, p: object())
    keys = []
    for n in range(remembered._VARIANTS + 1):
        x = call(value=torch.randn(2, 4, 6, 8 + n))
        q, k, v = x["query"], x["key"], x["value"]
        keys.append(key_of(**x))
        assert keys[-1] is not None
        remember(keys[-1], (q, k, v, None), pose(q, k, v), KNOWN["chunked"])
    assert [key is not None and recall(key) is not None for key in keys] == [False] + [True] * remembered._VARIANTS


@pytest.mark.parametrize("kind", ["slopes", "a table"])
def test_what_our_kernels_prepare_takes_the_bias_and_the_mask_of_each_call(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("the interpreter prepares nothing")
    make = regard.biases.alibi if kind == "slopes" else regard.biases.relative
    shape = (4,) if kind == "slopes" else (4, 5)
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    key[:, :, 5] = value[:, :, 5] = torch.nan
    mask = regard.padding(torch.tensor([5, 5]))
    prepared = Triton().prepare(pose(query, key, value, mask=mask, bias=make(torch.randn(shape))))
    assert prepared is not None
    monkeypatch.setattr(TritonEngine, "forward", lambda self, x: Rows(*self.formula(x), *self.formula(x)[1:]))
    for lengths in ([5, 5], [3, 4]):
        given: dict[str, Any] = {"mask": regard.padding(torch.tensor(lengths)), "bias": make(torch.randn(shape))}
        found = prepared(query, key, value, given["mask"], None, given["bias"])
        torch.testing.assert_close(found, regard.attention(query, key, value, **given, backend="reference"))


@pytest.mark.parametrize("learnt", [False, True])
def test_what_our_kernels_prepare_keeps_no_bias_alive(learnt: bool) -> None:
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("the interpreter prepares nothing")
    slopes = torch.ones(4, requires_grad=learnt)
    kept = weakref.ref(slopes)
    p = pose(*torch.randn(3, 2, 4, 6, 8).unbind(), bias=regard.biases.alibi(slopes))
    prepared = Triton().prepare(p)
    del p, slopes
    gc.collect()
    assert prepared is not None
    assert kept() is None


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

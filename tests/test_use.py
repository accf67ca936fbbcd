"""As users work: autocast, checkpointing, inference mode, threads, views, moved and pickled masks, changed inputs."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard.errors import ChangedError, DtypeError
from regard.scores import Additive, Balanced, Bilinear, Cosine, Gaussian, Scaled, Temperature

OURS = ("reference", "chunked")
everyone = pytest.mark.parametrize("backend", [*OURS, "auto"])
ours = pytest.mark.parametrize("backend", OURS)


def inputs(
    *lead: int,
    n: int = 9,
    m: int = 11,
    d: int = 8,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    seed: int = 0,
) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    lead = lead or (2, 4)
    shapes = (*lead, n, d), (*lead, m, d), (*lead, m, d)
    return [torch.randn(s, generator=made).to(dtype).requires_grad_(grad) for s in shapes]


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return list(torch.autograd.grad(output, leaves, upstream))


# autocast


@everyone
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_autocast_casts_as_torchs_function_does(backend: str, kind: torch.dtype, given: torch.dtype) -> None:
    tensors = inputs(dtype=given)
    with torch.autocast("cpu", dtype=kind):
        expected = F.scaled_dot_product_attention(*tensors)
        found = regard.attention(*tensors, backend=backend)
    assert found.dtype == expected.dtype
    tolerance = 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@everyone
def test_autocast_joins_what_would_otherwise_be_mixed(backend: str) -> None:
    query, key, value = inputs()
    mixed = query, key.bfloat16(), value.half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert regard.attention(*mixed, backend=backend).dtype == torch.bfloat16
    with pytest.raises(DtypeError):
        regard.attention(*mixed, backend=backend)


@ours
@pytest.mark.parametrize("score", [None, Cosine(0.1), Bilinear(8, 8), Additive(8, 8, 4), Gaussian(1.0)], ids=str)
def test_statistics_under_autocast_are_those_of_the_rounded_inputs_in_float32(backend: str, score: Any) -> None:
    tensors = inputs(dtype=torch.float32)
    rounded = [x.bfloat16().double() for x in tensors]
    bias = torch.randn(9, 11)
    more = {"mask": regard.causal(), "bias": bias, "sink": torch.zeros(4), "softcap": 5.0}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = regard.observe(*tensors, score=score, backend=backend, **more)
        late = seen.received, seen.scores(), seen.gradient_health, seen.map(3, 3)
        assert seen.weights().dtype == seen.output.dtype == torch.bfloat16
    truth = regard.observe(*rounded, score=score, backend="reference", **more)
    for name in ("lse", "entropy", "max_logit"):
        found = getattr(seen, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), getattr(truth, name), rtol=2e-5, atol=2e-5)
    wanted = truth.received, truth.scores(), truth.gradient_health, truth.map(3, 3)
    for found, expected in zip(late, wanted, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@everyone
@pytest.mark.parametrize("inside", [False, True])
def test_the_backward_pass_is_the_same_inside_and_outside_autocast(backend: str, inside: bool) -> None:
    tensors, twin = inputs(grad=True), inputs(grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = regard.attention(*tensors, mask=regard.causal(), backend=backend)
        if inside:
            found.float().square().sum().backward()
    if not inside:
        found.float().square().sum().backward()
    rounded = [x.bfloat16().float() for x in twin]
    regard.attention(*rounded, mask=regard.causal(), backend="reference").square().sum().backward()
    for x, y in zip(tensors, twin, strict=True):
        assert x.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad, y.grad, rtol=5e-2, atol=5e-2)
        assert (x.grad - y.grad).norm() < 0.02 * y.grad.norm()


@ours
def test_autocast_leaves_the_gradients_of_statistics_exact(backend: str) -> None:
    tensors = inputs(grad=True)
    twin = [x.detach().bfloat16().double().requires_grad_() for x in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = regard.observe(*tensors, backend=backend)
        (seen.entropy.sum() + seen.lse.sum()).backward()
    truth = regard.observe(*twin, backend="reference")
    (truth.entropy.sum() + truth.lse.sum()).backward()
    for x, y in zip(tensors[:2], twin[:2], strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-2, atol=1e-2)


# activation checkpointing


@everyone
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_checkpoint_gives_the_same_gradients(backend: str, reentrant: bool, dropout: float) -> None:
    def attend(*leaves: Tensor) -> Tensor:
        hidden = regard.attention(*leaves, mask=regard.causal(), dropout=dropout, backend=backend)
        return regard.attention(hidden, *leaves[1:], dropout=dropout, backend=backend)

    tensors = inputs(grad=True)
    torch.manual_seed(3)
    expected = attend(*tensors)
    wanted = gradients(expected, tensors)
    torch.manual_seed(3)
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = checkpoint(attend, *leaves, use_reentrant=reentrant)
    torch.manual_seed(999)
    found.backward(torch.randn(found.shape, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(found, expected)
    for x, y in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(x.grad, y)


@ours
def test_a_checkpoint_of_statistics_gives_the_same_gradients(backend: str) -> None:
    def look(*leaves: Tensor) -> Tensor:
        seen = regard.observe(*leaves, backend=backend)
        return seen.output.sum(-1) + seen.entropy + seen.lse

    tensors = inputs(grad=True)
    wanted = gradients(look(*tensors), tensors)
    found = gradients(checkpoint(look, *tensors, use_reentrant=False), tensors)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


# inference mode and no_grad


@everyone
def test_inference_mode_gives_the_same_numbers(backend: str) -> None:
    tensors = inputs()
    expected = regard.attention(*tensors, mask=regard.causal(), backend=backend)
    with torch.inference_mode():
        found = regard.attention(*(x.clone() for x in tensors), mask=regard.causal(), backend=backend)
        assert found.is_inference()
    assert torch.equal(found, expected)


@ours
def test_everything_can_be_observed_in_inference_mode(backend: str) -> None:
    tensors = inputs()
    truth = regard.observe(*tensors, mask=regard.causal(), backend=backend)
    with torch.inference_mode():
        seen = regard.observe(*(x.clone() for x in tensors), mask=regard.causal(), backend=backend)
        for name in ("output", "lse", "entropy", "received", "visible", "gradient_health"):
            assert torch.equal(getattr(seen, name), getattr(truth, name))
        assert torch.equal(seen.weights(), truth.weights())
    assert torch.equal(seen.map(3, 3), truth.map(3, 3))
    assert torch.equal(seen.top(2)[1], truth.top(2)[1])


CHANGED_UNSEEN: dict[str, Callable[[], dict[str, Any]]] = {
    "query": dict,
    "key": dict,
    "bias": lambda: {"bias": torch.randn(9, 11)},
    "scale": lambda: {"scale": torch.ones(4)},
    "sink": lambda: {"sink": torch.ones(4)},
    "mask": lambda: {"mask": torch.rand(9, 11) > 0.3},
    "mixed": dict,
}


@pytest.mark.parametrize("what", CHANGED_UNSEEN)
def test_a_change_that_inference_mode_does_not_count_gives_no_wrong_number(what: str) -> None:
    """Tensors made there have no version: the late members look at copies, or raise."""
    with torch.inference_mode():
        query, key, value = (x.clone() for x in inputs())
        more = CHANGED_UNSEEN[what]()
        if what == "mixed":  # an ordinary query beside keys made in inference mode
            with torch.inference_mode(False):
                (query, *_) = inputs()
        seen = regard.observe(query, key, value, **more)
        expected = seen.weights()
        target = {"query": query, "key": key, "mixed": key}.get(what, more.get(what))
        if what == "mask":
            target.logical_not_()
        else:
            target.mul_(3)
        assert torch.equal(seen.weights(), expected)  # it looks at copies: changes cannot be traced here


@everyone
def test_without_grad_nothing_is_kept(backend: str) -> None:
    tensors = inputs(grad=True)
    with torch.no_grad():
        found = regard.attention(*tensors, backend=backend)
        seen = regard.observe(*tensors)
    assert not found.requires_grad
    assert not seen.entropy.requires_grad
    torch.testing.assert_close(found, regard.attention(*tensors, backend="reference"))


# changes in place between observe and a late member

LATE: dict[str, Callable[[regard.Observation], object]] = {
    "visible": lambda seen: seen.visible,
    "received": lambda seen: seen.received,
    "gradient_health": lambda seen: seen.gradient_health,
    "weights": lambda seen: seen.weights(),
    "scores": lambda seen: seen.scores(rows=[0]),
    "top": lambda seen: seen.top(2),
    "map": lambda seen: seen.map(2, 2),
}


def changeable() -> tuple[regard.Observation, dict[str, Tensor]]:
    query, key, value = inputs()
    held = {
        "query": query,
        "key": key,
        "bias": torch.randn(9, 11),
        "sink": torch.zeros(4),
        "mask": torch.rand(2, 1, 9, 11) > 0.3,
    }
    score = Scaled(nn.Parameter(torch.ones(4)))
    seen = regard.observe(query, key, value, score=score, mask=held["mask"], bias=held["bias"], sink=held["sink"])
    return seen, held | {"score": score.scale}


@pytest.mark.parametrize("member", LATE)
@pytest.mark.parametrize("what", ["query", "key", "bias", "sink", "mask", "score"])
def test_an_input_changed_in_place_is_an_error_in_every_late_member(member: str, what: str) -> None:
    seen, held = changeable()
    with torch.no_grad():
        held[what].logical_not_() if what == "mask" else held[what].add_(1)
    with pytest.raises(ChangedError, match=f"^{member}: .*changed in place.*observe again") as caught:
        LATE[member](seen)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("member", LATE)
def test_a_late_member_is_there_while_nothing_changes(member: str) -> None:
    seen, _ = changeable()
    LATE[member](seen)
    LATE[member](seen)


def test_a_member_asked_for_before_the_change_stays() -> None:
    seen, held = changeable()
    before = seen.received.clone()
    held["query"].zero_()
    assert torch.equal(seen.received, before)
    assert torch.equal(seen.perplexity, seen.entropy.exp())


CHANGES: dict[str, Callable[[], tuple[dict[str, Any], Tensor]]] = {
    "a scale": lambda: (lambda t: ({"scale": t}, t))(torch.ones(4)),
    "a scale of one value": lambda: (lambda t: ({"scale": t}, t))(torch.tensor(1.0)),
    "lengths of padding": lambda: (lambda t: ({"mask": regard.padding(t)}, t))(torch.tensor([5, 9])),
    "a dense mask": lambda: (lambda t: ({"mask": regard.dense(t)}, t))(torch.ones(9, 11).bool()),
    "a part of a composed mask": lambda: (lambda t: ({"mask": regard.causal() & regard.dense(t)}, t))(
        torch.ones(9, 11).bool()
    ),
    "slopes": lambda: (lambda t: ({"bias": regard.biases.alibi(t)}, t))(torch.ones(4)),
    "a parameter": lambda: (lambda s: ({"score": s}, s.weight))(Bilinear(8, 8)),
    "a temperature": lambda: (lambda s: ({"score": s}, s.log_ratio))(Temperature(2.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_tensor_that_the_weights_depend_on_is_watched(what: str) -> None:
    arguments, tensor = CHANGES[what]()
    seen = regard.observe(*inputs(), **arguments)
    with torch.no_grad():
        tensor.zero_()
    with pytest.raises(ChangedError):
        seen.weights()


def test_a_step_of_an_optimizer_is_a_change() -> None:
    score = Bilinear(8, 8)
    seen = regard.observe(*inputs(), score=score)
    seen.entropy.sum().backward()
    torch.optim.SGD(score.parameters(), lr=0.1).step()
    with pytest.raises(ChangedError):
        seen.received


def test_a_parameter_put_in_the_place_of_another_gives_no_wrong_number() -> None:
    score = Bilinear(8, 8)
    seen = regard.observe(*inputs(), score=score)
    score.weight = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(ChangedError):
        seen.weights()


def test_what_is_observed_in_a_functional_call_is_of_its_parameters() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = Bilinear(8, 8)

        def forward(self, *tensors: Tensor) -> regard.Observation:
            return regard.observe(*tensors, score=self.score)

    module, twin = Looking(), Looking()
    expected = twin(*inputs())
    seen = torch.func.functional_call(module, {"score.weight": twin.score.weight}, tuple(inputs()))
    torch.testing.assert_close(seen.lse, expected.lse)
    with pytest.raises(ChangedError):
        seen.weights()


def test_a_change_of_the_values_alone_changes_no_weight() -> None:
    query, key, value = inputs()
    seen = regard.observe(query, key, value)
    before = seen.weights().clone()
    value.zero_()
    assert torch.equal(seen.weights(), before)


@everyone
def test_an_input_changed_before_the_backward_pass_is_an_error(backend: str) -> None:
    leaves = inputs(grad=True)
    query, key, value = (x * 1 for x in leaves)
    found = regard.attention(query, key, value, backend=backend)
    with torch.no_grad():
        key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


# graphs


@everyone
def test_a_graph_can_be_walked_twice(backend: str) -> None:
    leaves = inputs(grad=True)
    found = regard.attention(*leaves, mask=regard.causal(), backend=backend).square().sum()
    first = torch.autograd.grad(found, leaves, retain_graph=True)
    second = torch.autograd.grad(found, leaves)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(found, leaves)


@everyone
@pytest.mark.parametrize(
    "needing", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_the_gradients_that_are_needed_are_given(backend: str, needing: tuple[bool, ...]) -> None:
    tensors = [x.requires_grad_(need) for x, need in zip(inputs(), needing, strict=True)]
    regard.attention(*tensors, mask=regard.causal(), backend=backend).square().sum().backward()
    twin = inputs(grad=True)
    regard.attention(*twin, mask=regard.causal(), backend="reference").square().sum().backward()
    for x, y, need in zip(tensors, twin, needing, strict=True):
        if need:
            torch.testing.assert_close(x.grad, y.grad)
        else:
            assert x.grad is None


@everyone
def test_gradients_pass_through_to_what_the_inputs_were_made_of(backend: str) -> None:
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()

    def layer(backend: str) -> list[Tensor]:
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 4)).transpose(1, 2) for w in weight)
        return gradients(regard.attention(q, k, v, mask=regard.causal(), backend=backend).transpose(1, 2), [x, weight])

    for a, b in zip(layer(backend), layer("reference"), strict=True):
        torch.testing.assert_close(a, b)


@everyone
def test_one_tensor_may_be_query_key_and_value(backend: str) -> None:
    x = inputs(n=7, dtype=torch.float64, grad=True)[0]
    found = gradients(regard.attention(x, x, x, backend=backend), [x])[0]
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    expected = sum(gradients(regard.attention(*parts, backend="reference"), parts))
    torch.testing.assert_close(found, expected)


@ours
def test_the_loss_may_use_statistics_only(backend: str) -> None:
    query, key, value = inputs(grad=True)
    regard.observe(query, key, value, backend=backend).entropy.sum().backward()
    assert query.grad.any()
    assert key.grad.any()
    assert value.grad is None or not value.grad.any()


# shapes


@everyone
@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((), ()),
        ((3,), (3,)),
        ((3,), (1,)),
        ((1,), (3,)),
        ((2, 4), (1, 4)),
        ((1, 4), (2, 4)),
        ((2, 4), (1, 1)),
        ((2, 3, 4), (2, 3, 4)),
        ((2, 3, 4), (1, 3, 2)),
        ((2, 1, 4), (1, 3, 4)),
        ((2, 1, 3, 4), (2, 2, 1, 2)),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast_with_their_gradients(
    backend: str, q: tuple[int, ...], k: tuple[int, ...]
) -> None:
    made = torch.Generator().manual_seed(0)
    shapes = (*q, 5, 4), (*k, 6, 4), (*k, 6, 4)
    leaves = [torch.randn(s, generator=made, dtype=torch.float64).requires_grad_() for s in shapes]
    found = regard.attention(*leaves, backend=backend)
    query, key, value = leaves
    if len(q) >= 2:
        groups = q[-1] // k[-1]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    expected = (query @ key.mT / 2).softmax(-1) @ value
    torch.testing.assert_close(found, expected)
    for a, b in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b)


@everyone
@pytest.mark.parametrize("lead", [(), (2,), (2, 4), (2, 3, 4)], ids=str)
def test_an_item_of_a_mask_is_an_item_of_the_first_dimension(backend: str, lead: tuple[int, ...]) -> None:
    tensors = inputs(*lead) if lead else [x[0, 0] for x in inputs()]
    lengths = [5, 8] if lead else [5]
    found = regard.attention(*tensors, mask=regard.padding(lengths), backend=backend)
    for b, length in enumerate(lengths):
        query, key, value = (x[b] for x in tensors) if lead else tensors
        plain = regard.attention(query, key[..., :length, :], value[..., :length, :], backend="reference")
        torch.testing.assert_close(found[b] if lead else found, plain)


MASKS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # lead of the inputs, shape of the mask
    "keys": ((2, 4), (11,)),
    "pairs": ((2, 4), (9, 11)),
    "rows": ((2, 4), (9, 1)),
    "heads": ((2, 4), (4, 9, 11)),
    "one head": ((2, 4), (1, 9, 11)),
    "items and keys": ((2, 4), (2, 1, 1, 11)),
    "items and pairs": ((2, 4), (2, 1, 9, 11)),
    "one item": ((2, 4), (1, 1, 9, 11)),
    "all": ((2, 4), (2, 4, 9, 11)),
    "without heads": ((3,), (3, 9, 11)),
    "without heads, one item": ((3,), (1, 9, 11)),
    "without heads, keys": ((3,), (3, 1, 11)),
    "five dimensions": ((2, 3, 4), (2, 1, 4, 9, 11)),
    "the inner of five dimensions": ((2, 3, 4), (3, 1, 9, 11)),
    "one number": ((2, 4), ()),
}


@everyone
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_a_mask_tensor_broadcasts_right_aligned_whatever_its_dtype(backend: str, case: str, dtype: torch.dtype) -> None:
    lead, shape = MASKS[case]
    query, key, value = inputs(*lead, dtype=torch.float64)
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(5)) > 0.4
    if shape:
        allowed[..., 0] = True
    else:
        allowed = torch.tensor(True)
    found = regard.attention(query, key, value, mask=allowed.to(dtype), backend=backend)
    logits = (query @ key.mT / math.sqrt(8)).masked_fill(~allowed, -math.inf)
    torch.testing.assert_close(found, logits.softmax(-1) @ value)


def test_whole_numbers_may_hide_everything_but_floats_may_not() -> None:
    tensors = inputs()
    assert not regard.attention(*tensors, mask=torch.zeros(9, 11, dtype=torch.int64)).any()
    assert not regard.attention(*tensors, mask=torch.zeros(9, 11, dtype=torch.bool)).any()
    with pytest.raises(ValueError, match="zeros"):
        regard.attention(*tensors, mask=torch.zeros(9, 11))


@everyone
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_querys_dtype(backend: str, dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype, grad=True)
    for more in (
        {},
        {"mask": regard.causal()},
        {"score": Balanced()},
        {"scale": torch.ones(4)},
        {"bias": torch.zeros(9, 11)},
    ):
        found = regard.attention(*tensors, backend=backend, **more)
        assert found.dtype == dtype
        assert all(g.dtype == dtype for g in gradients(found, tensors))


@ours
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_bias_may_have_any_floating_dtype_and_gets_its_gradient_in_it(backend: str, dtype: torch.dtype) -> None:
    tensors = inputs()
    bias = torch.randn(9, 11).to(dtype).requires_grad_()
    found = regard.attention(*tensors, bias=bias, backend=backend)
    torch.testing.assert_close(found, regard.attention(*tensors, bias=bias.detach().float(), backend="reference"))
    found.square().sum().backward()
    assert bias.grad.dtype == dtype
    assert bias.grad.any()


@pytest.mark.parametrize("mask", [None, regard.causal()], ids=str)
def test_shapes_can_be_asked_on_the_meta_device(mask: regard.Mask | None) -> None:
    query, key, value = (x.to("meta") for x in inputs(n=11))
    found = regard.attention(query, key, value, mask=mask)
    assert found.device.type == "meta"
    assert found.shape == query.shape


# masks, scores and modules that travel

TRAVELLING = {
    "causal": lambda: regard.causal(),
    "padding": lambda: regard.padding([5, 9]),
    "keep": lambda: regard.padding(torch.arange(22).reshape(2, 11) % 3 > 0),
    "documents": lambda: regard.documents(torch.arange(9) // 4, torch.arange(11) // 4),
    "dense": lambda: regard.dense(torch.ones(9, 11).tril().bool()),
    "composed": lambda: regard.causal() & regard.padding([5, 9]) | regard.global_tokens([0]),
}


@pytest.mark.parametrize("name", TRAVELLING)
def test_a_mask_moved_pickled_or_copied_hides_the_same(name: str) -> None:
    tensors, mask = inputs(), TRAVELLING[name]()
    expected = regard.attention(*tensors, mask=mask)
    for other in (mask.to("cpu"), pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert torch.equal(regard.attention(*tensors, mask=other), expected)
        assert torch.equal(regard.observe(*tensors, mask=other).visible, regard.observe(*tensors, mask=mask).visible)


SCORES = {
    "balanced": Balanced,
    "scaled": lambda: Scaled(nn.Parameter(torch.rand(4))),
    "temperature": lambda: Temperature(heads=4),
    "cosine": lambda: Cosine(0.1, learnable=True),
    "bilinear": lambda: Bilinear(8, 8),
    "additive": lambda: Additive(8, 8, 5),
    "gaussian": lambda: Gaussian(1.5, learnable=True),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_copied_pickled_or_loaded_scores_the_same(name: str) -> None:
    torch.manual_seed(0)
    tensors, score = inputs(), SCORES[name]()
    expected = regard.attention(*tensors, score=score)
    loaded = SCORES[name]()
    loaded.load_state_dict(score.state_dict())
    for other in (copy.deepcopy(score), pickle.loads(pickle.dumps(score)), loaded):
        assert torch.equal(regard.attention(*tensors, score=other), expected)


@pytest.mark.parametrize("name", ["scaled", "cosine", "bilinear", "additive", "gaussian", "temperature"])
@everyone
def test_a_score_works_in_a_functional_call_with_gradients_of_its_parameters(name: str, backend: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = SCORES[name]()

        def forward(self, *tensors: Tensor) -> Tensor:
            return regard.attention(*tensors, score=self.score, backend=backend)

    torch.manual_seed(0)
    layer, tensors = Layer(), inputs()
    layer(*tensors)
    other = {key: torch.rand_like(p).requires_grad_() for key, p in layer.named_parameters()}
    found = torch.func.functional_call(layer, other, tuple(tensors))
    got = gradients(found, list(other.values()))
    with torch.no_grad():
        for key, p in layer.named_parameters():
            p.copy_(other[key])
    expected = layer(*tensors)
    torch.testing.assert_close(found, expected)
    for a, b in zip(got, gradients(expected, list(layer.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# threads


@everyone
def test_several_threads_at_once_get_what_one_gets_alone(backend: str) -> None:
    jobs = [inputs(1, 2, n=40 + i, m=50 + i, seed=i) for i in range(12)]

    def work(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        found = regard.attention(*leaves, mask=regard.causal(), backend=backend)
        seen = regard.observe(*tensors, mask=regard.window(7))
        return [found.detach(), *gradients(found, leaves), seen.entropy, seen.received, *seen.top(3)]

    alone = [work(job) for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(work, jobs))
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)


def test_a_change_of_a_query_that_is_also_the_value_is_an_error() -> None:
    query, key, _ = inputs()
    seen = regard.observe(query, key, key)
    shared = regard.observe(query, key, query.expand_as(query) if query.shape == key.shape else key)
    query.mul_(2)
    for observation in (seen, shared):
        with pytest.raises(ChangedError):
            observation.weights()

"""One contract for all scores: the test finds those of the package, and each must have a case here."""

from __future__ import annotations

import copy
import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import regard.scores
from regard.errors import DeviceError, DtypeError, ShapeError
from regard.scores import Additive, Balanced, Bilinear, Cosine, Gaussian, Pointwise, Scaled, Score, Temperature


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Score]
    truth: Callable[[Score, Tensor, Tensor, int], Tensor]
    """(score, one query, one key, head) -> its logit, straight from the formula."""
    parity: int = 1
    """The factor of the logit if both vectors change sign."""
    key_dim: int = 4


def temperature(score: Score, q: Tensor, k: Tensor, h: int) -> Tensor:
    assert isinstance(score, Temperature)
    T = score.temperature.to(q.dtype)
    return q @ k / (T[h] if T.ndim else T)


def cosine(score: Score, q: Tensor, k: Tensor, h: int) -> Tensor:
    assert isinstance(score, Cosine)
    return q @ k / (q.norm() * k.norm() * score.temperature.to(q.dtype))


def bilinear(score: Score, q: Tensor, k: Tensor, h: int) -> Tensor:
    assert isinstance(score, Bilinear)
    W = score.weight.to(q.dtype)
    return q @ (W if W.ndim == 2 else W[h]) @ k


def additive(score: Score, q: Tensor, k: Tensor, h: int) -> Tensor:
    assert isinstance(score, Additive)
    W1, W2, v = (w.to(q.dtype) for w in (score.query_weight, score.key_weight, score.vector))
    return v @ torch.tanh(W1 @ q + W2 @ k)


def gaussian(score: Score, q: Tensor, k: Tensor, h: int) -> Tensor:
    assert isinstance(score, Gaussian)
    return -((q - k) ** 2).sum() / (2 * score.bandwidth.to(q.dtype) ** 2)


def tripled(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * 3


SCALES = torch.tensor([0.3, -1.0, 2.0, 0.7])
CASES = [
    Case("scaled", Scaled, lambda s, q, k, h: q @ k / 2),
    Case("scaled by a number", lambda: Scaled(0.25), lambda s, q, k, h: q @ k / 4),
    Case("scaled by a tensor", lambda: Scaled(torch.tensor([0.25])), lambda s, q, k, h: q @ k / 4),
    Case("scaled by head", lambda: Scaled(nn.Parameter(SCALES.clone())), lambda s, q, k, h: q @ k * SCALES[h].double()),
    Case("balanced", Balanced, lambda s, q, k, h: q @ k / 2),
    Case("temperature", Temperature, temperature),
    Case("temperature given", lambda: Temperature(3.0), temperature),
    Case("temperature by head", lambda: Temperature(heads=4), temperature),
    Case("temperature fixed", lambda: Temperature(1.5, learnable=False), temperature),
    Case("cosine", Cosine, cosine),
    Case("cosine learnable", lambda: Cosine(0.07, learnable=True), cosine),
    Case("bilinear", lambda: Bilinear(4, 3), bilinear, key_dim=3),
    Case("bilinear by head", lambda: Bilinear(4, 3, heads=4), bilinear, key_dim=3),
    Case("additive", lambda: Additive(4, 3, hidden=5), additive, parity=-1, key_dim=3),
    Case("gaussian", lambda: Gaussian(0.5), gaussian),
    Case("gaussian learnable", lambda: Gaussian(0.8, learnable=True), gaussian),
    Case("pointwise", lambda: Pointwise(tripled), lambda s, q, k, h: q @ k * 1.5),
]


def over(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.name)


every = over(CASES)


def tensors(case: Case, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, 3, 4).to(dtype), torch.randn(2, key_heads, 5, case.key_dim).to(dtype)


def brute(case: Case, score: Score, query: Tensor, key: Tensor) -> Tensor:
    B, H, N, M, group = *query.shape[:3], key.shape[2], query.shape[1] // key.shape[1]
    pairs = [
        case.truth(score, query[b, h, i], key[b, h // group, j], h)
        for b in range(B)
        for h in range(H)
        for i in range(N)
        for j in range(M)
    ]
    return torch.stack(pairs).reshape(B, H, N, M)


def test_every_score_of_the_package_has_a_case() -> None:
    for module in pkgutil.iter_modules(regard.scores.__path__):
        importlib.import_module(f"regard.scores.{module.name}")
    found = {c for c in Score.__subclasses__() if c.__module__.startswith("regard.scores.")}
    assert found == {type(case.make()) for case in CASES}
    assert {c.__name__ for c in found} <= set(regard.scores.__all__)


@every
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_forward_is_the_formula(case: Case, key_heads: int) -> None:
    query, key = tensors(case, key_heads)
    score = case.make()
    logits = score(query, key)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, brute(case, score, query, key), rtol=1e-6, atol=1e-12)


@every
def test_prepared_queries_and_keys_give_the_logits(case: Case) -> None:
    query, key = tensors(case, 4)
    score = case.make()
    prepared = score.prepare(query, key)
    assert prepared.query.shape[:-1] == query.shape[:-1]
    assert prepared.key.shape[:-1] == key.shape[:-1]
    if score.pairwise:
        logits = score.pair(prepared.query, prepared.key, *prepared.shared)
    else:
        assert prepared.shared == ()
        logits = prepared.query @ prepared.key.mT
    torch.testing.assert_close(logits, score(query, key))
    assert score.cost == (5 if isinstance(score, Additive) else 1)


@over([c for c in CASES if "by head" not in c.name])
def test_inputs_without_heads_have_one(case: Case) -> None:
    query, key = tensors(case, 4)
    score = case.make()
    logits = score(query[:, :1], key[:, :1])
    torch.testing.assert_close(score(query[:, 0], key[:, 0]), logits[:, 0])
    torch.testing.assert_close(score(query[0, 0], key[0, 0]), logits[0, 0])


@every
def test_inputs_and_parameters_have_exact_gradients_of_two_orders(case: Case) -> None:
    query, key = tensors(case)
    query, key = query[:1, :, :2].requires_grad_(), key[:1, :, :2].requires_grad_()
    score = case.make().double()
    score(query, key)
    names = [name for name, _ in score.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in score.parameters()]

    def logits(query: Tensor, key: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(score, dict(zip(names, parameters, strict=True)), (query, key))

    assert torch.autograd.gradcheck(logits, (query, key, *values), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(logits, (query, key, *values), fast_mode=True)


@every
def test_every_parameter_gets_a_gradient_in_its_own_dtype(case: Case) -> None:
    query, key = tensors(case)
    score = case.make()
    score(query.requires_grad_(), key).sin().sum().backward()
    for parameter in score.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.abs().min() > 0


@every
@pytest.mark.parametrize("used", [False, True])
def test_the_state_dict_round_trips(case: Case, used: bool) -> None:
    query, key = tensors(case)
    score = case.make()
    if used:
        score(query, key)
    with torch.no_grad():
        for parameter in score.parameters():
            parameter.add_(0.25)
    other = case.make()
    other.load_state_dict(copy.deepcopy(score.state_dict()))
    assert torch.equal(other(query, key), score(query, key))
    twin = copy.deepcopy(score)
    assert torch.equal(twin(query, key), score(query, key))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_and_half_parameters_give_float32_logits(case: Case, dtype: torch.dtype) -> None:
    query, key = tensors(case, dtype=dtype)
    score = case.make()
    logits = score(query, key)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, score(query.float(), key.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(score(query, key), logits)
    assert score.to(dtype)(query, key).dtype == torch.float32


@every
def test_parity_is_even_for_products_and_odd_for_the_additive_score(case: Case) -> None:
    query, key = tensors(case)
    score = case.make()
    torch.testing.assert_close(score(-query, -key), case.parity * score(query, key))
    if case.parity == 1 and not isinstance(score, Gaussian):
        torch.testing.assert_close(score(-query, key), -score(query, key))


@every
def test_vmap_and_empty_inputs_work(case: Case) -> None:
    query, key = tensors(case)
    score = case.make()
    mapped = torch.func.vmap(lambda q, k: score.prepare(q, k).query)(query, key)
    torch.testing.assert_close(mapped, score.prepare(query, key).query)
    assert score(query[:, :, :0], key).shape == (2, 4, 0, 5)
    assert score(query, key[:, :, :0]).shape == (2, 4, 3, 0)
    assert score(query[:0], key[:0]).shape == (0, 4, 3, 5)


@over([c for c in CASES if not c.name.startswith(("scaled", "balanced", "pointwise"))])
def test_resetting_gives_a_fresh_score(case: Case) -> None:
    score = case.make()
    query, key = tensors(case)
    before = score(query, key)
    with torch.no_grad():
        for parameter in score.parameters():
            parameter.fill_(math.nan)
    score.reset_parameters()
    after = score(query, key)
    assert after.isfinite().all()
    if not isinstance(score, Bilinear | Additive):
        assert torch.equal(before, after)


@every
def test_the_repr_names_the_score(case: Case) -> None:
    assert repr(case.make()).startswith(type(case.make()).__name__ + "(")


@every
def test_misuse_gets_one_clear_error_that_names_the_score(case: Case) -> None:
    query, key = tensors(case)
    score = case.make()
    name = type(score).__name__
    with pytest.raises(ShapeError, match=f"{name}: .*dim"):
        score(query, key[..., :-1])
    with pytest.raises(ShapeError, match=f"{name}: query has 3 heads and key has 2"):
        score(query[:, :3], key)
    with pytest.raises(ShapeError, match=f"{name}: query and key must both be"):
        score(query, key[0])
    with pytest.raises(ShapeError, match=f"{name}: the leading dimensions"):
        score(query, torch.cat([key, key[:1]]))
    with pytest.raises(DtypeError, match=f"{name}: query and key must share"):
        score(query, key.float())
    with pytest.raises(DeviceError, match=f"{name}: query is on cpu and key is on meta"):
        score(query, key.to("meta"))
    if list(score.parameters()):
        with pytest.raises(DeviceError, match=rf"{name}: its parameters are on meta.*score\.to\('cpu'\)"):
            score.to("meta")(query, key)
    if "by head" in case.name:
        with pytest.raises(ShapeError, match=f"{name}: it.* for each of 4 heads, but query has 2"):
            score(query[:, :2], key)


@every
def test_a_score_compiles_in_one_graph(case: Case) -> None:
    score = case.make().double()
    query, key = tensors(case)
    true = score(query, key)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(score, fullgraph=True, backend="eager")(query, key), true)

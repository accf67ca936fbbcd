"""Kernels for the divergence between two attentions: values and gradients against float64 in strips of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.chunked.divergence import divergence_in_strips
from regard.functional import _side
from regard.kernels import divergence as kernels
from regard.kernels.portable import divergence_launch

CAUSAL, BITS, WINDOW = regard.causal(), regard.strided(3), regard.window(5)
MANY, FEW = 37, 9  # two blocks of rows and of keys, or one


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def sides(a: dict[str, Any], b: dict[str, Any], heads: tuple[int, int] = (2, 2), n: int = FEW) -> list[dict[str, Any]]:
    """Grouped heads against ungrouped ones, with dims of their own."""
    one = {"query": random(1, heads[0], n, 8), "key": random(1, 1, n, 8)}
    two = {"query": random(1, heads[1], n, 5), "key": random(1, heads[1], n, 5, seed=1)}
    return [one | a, two | b]


def tensors(given: list[dict[str, Any]]) -> list[Tensor]:
    return [x for side in given for x in side.values() if isinstance(x, Tensor)]


def in_strips(given: list[dict[str, Any]], kind: Any, heads: Any, epsilon: float | None) -> Tensor:
    problems = [_side(side, "a") for side in given]
    wide = [p._replace(query=p.query.double(), key=p.key.double(), value=p.key[..., :0].double()) for p in problems]
    found = divergence_in_strips(*wide, kind, heads, epsilon)
    return found[:, 0] if heads == "mean" else found


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernels compared."""
    found: list[Any] = []
    forward = kernels._forward

    def noted(pair: Any) -> Any:
        found.append(pair)
        return forward(pair)

    monkeypatch.setattr(kernels, "_forward", noted)
    return found


@pytest.fixture
def lse_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sides whose lse had to be computed, in a pass of its own."""
    found: list[Any] = []
    lse = divergence_launch.lse

    def noted(w: Any) -> Tensor:
        found.append(w)
        return lse(w)

    monkeypatch.setattr(divergence_launch, "lse", noted)
    return found


def slopes(found: Tensor, x: list[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    return torch.autograd.grad(found, x, weight)


def halved(x: Any) -> Any:
    return x.detach().half().requires_grad_() if isinstance(x, Tensor) else x


def agree(
    given: list[dict[str, Any]], kind: Any, heads: Any = None, epsilon: float | None = None, slack: float = 1
) -> Tensor:
    found = regard.divergence(*given, kind, heads=heads, epsilon=epsilon)  # type: ignore[misc]
    true = in_strips(given, kind, heads, epsilon)
    torch.testing.assert_close(found.double(), true, atol=2e-6 * slack, rtol=1e-5)
    for g, t in zip(slopes(found, tensors(given)), slopes(true, tensors(given)), strict=True):
        torch.testing.assert_close(g, t, atol=3e-6 * slack, rtol=1e-4)
    return found.detach()


def observed(side: dict[str, Any]) -> regard.Observation:
    options = {name: x for name, x in side.items() if name not in ("query", "key")}
    return regard.observe(side["query"], side["key"], side["key"], **options)


def weights(side: dict[str, Any]) -> Tensor:
    """The matrix of weights in float64, with the sink as the last column."""
    q, k = (side[name].double() for name in ("query", "key"))
    S = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    S = torch.where(side["mask"].dense(*S.shape[-2:]), S, -torch.inf)
    sink = side.get("sink")
    last = torch.full((), -torch.inf) if sink is None else sink.double()[:, None, None]
    S = torch.cat((S, last.expand(*S.shape[:-1], 1)), -1)
    some = S.isfinite().any(-1, keepdim=True)
    return torch.where(some, torch.where(some, S, 0.0).softmax(-1), 0.0)


def js_of_matrices(P: Tensor, R: Tensor) -> Tensor:
    def kl(X: Tensor, M: Tensor) -> Tensor:
        return (X * (torch.where(X > 0, X, 1.0).log() - torch.where(M > 0, M, 1.0).log())).sum(-1)

    return (kl(P, (P + R) / 2) + kl(R, (P + R) / 2)) / 2


LATE = regard.causal(offset=-2)  # the first two rows see nothing
OBSERVED = [
    ({"mask": CAUSAL}, {"mask": CAUSAL}),
    ({"mask": LATE}, {"mask": BITS, "sink": random(2)}),
    ({"mask": LATE, "sink": random(2)}, {"mask": LATE}),
]


@pytest.mark.parametrize(("a", "b"), OBSERVED, ids=["the same mask", "other masks and a sink", "a sink and empty rows"])
def test_js_of_observations_is_that_of_matrices(
    a: dict[str, Any], b: dict[str, Any], fused: list[Any], lse_of: list[Any]
) -> None:
    given = sides(a, b)
    found, true = regard.divergence(*map(observed, given), "js"), js_of_matrices(*map(weights, given))  # type: ignore[misc]
    torch.testing.assert_close(found.double(), true, atol=1e-6, rtol=1e-6)
    for g, t in zip(slopes(found, tensors(given)), slopes(true, tensors(given)), strict=True):
        torch.testing.assert_close(g, t, atol=2e-6, rtol=1e-4)
    assert fused
    assert not lse_of


@pytest.mark.parametrize(
    ("kind", "heads", "epsilon"), [("js", None, None), ("reverse", None, 0.1), ("kl", "mean", None)], ids=str
)
def test_the_lse_of_an_observation_is_not_computed_again(
    kind: Any, heads: Any, epsilon: float | None, lse_of: list[Any]
) -> None:
    one, two = sides({"mask": CAUSAL}, {"mask": WINDOW} if kind == "js" else {"mask": CAUSAL})
    found = []
    for given, dims in (((one, two), [8, 5]), ((observed(one), two), [5]), ((observed(one), observed(two)), [])):
        lse_of.clear()
        value = regard.divergence(*given, kind, heads=heads, epsilon=epsilon)
        assert sorted(w.query.shape[3] for w in lse_of) == sorted(dims)  # of a reverse, b comes first
        found.append([value, *slopes(value, tensors([one, two]))])
    for x, y, z in zip(*found, strict=True):
        torch.testing.assert_close(y, x, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(z, x, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [None, "mean"])
@pytest.mark.parametrize(("kind", "epsilon"), [("js", None), ("kl", 0.1), ("kl", 1e-30)])
def test_16_bits_take_one_logarithm_of_a_pair(kind: Any, epsilon: float | None, heads: Any, fused: list[Any]) -> None:
    masks = {"mask": LATE}, {"mask": regard.window(3, 2) if kind == "js" else LATE}
    given = [{name: halved(x) for name, x in side.items()} for side in sides(*masks)]
    found, true = regard.divergence(*given, kind, heads=heads, epsilon=epsilon), in_strips(given, kind, heads, epsilon)
    assert fused[0].quick
    torch.testing.assert_close(found.double(), true, atol=2e-6, rtol=1e-5)
    for g, t in zip(slopes(found, tensors(given)), slopes(true, tensors(given)), strict=True):
        assert (g - t).norm() <= 5e-3 * t.norm()


def test_js_is_never_below_zero() -> None:
    q, k = (halved(random(1, 2, MANY, 8, seed=at)) for at in range(2))
    for heads in (None, "mean"):
        found = regard.divergence((q, k), (q, k), "js", heads=heads)  # type: ignore[arg-type]
        assert found.min() >= 0
        assert found.max() < 1e-6


@pytest.mark.parametrize(
    ("kind", "epsilon", "a", "b"),
    [("reverse", None, CAUSAL, CAUSAL), ("js", None, CAUSAL, BITS), ("kl", 0.1, WINDOW, BITS)],
    ids=str,
)
def test_masks_may_be_the_same_or_differ(
    kind: str, epsilon: float | None, a: regard.Mask, b: regard.Mask, fused: list[Any]
) -> None:
    agree(sides({"mask": a}, {"mask": b}, (1, 1), MANY), kind, epsilon=epsilon)
    assert [pair.listed for pair in fused] == [a is b]


@pytest.mark.parametrize(("kind", "epsilon"), [("kl", None), ("js", None), ("kl", 0.1)])
def test_sinks_caps_and_scales_have_gradients(kind: str, epsilon: float | None, fused: list[Any]) -> None:
    a = {"mask": BITS, "sink": random(2), "softcap": 2.0, "scale": -0.3}
    agree(sides(a, {"mask": BITS, "sink": random(2, seed=1), "scale": random(2, seed=2)}), kind, epsilon=epsilon)
    assert fused


def test_a_row_with_weight_on_a_key_that_the_other_hides_is_infinite_and_has_no_gradient(fused: list[Any]) -> None:
    found = agree(sides({"mask": CAUSAL}, {"mask": WINDOW}, (1, 1)), "kl")
    assert found.isinf().tolist() == [[[False] * 6 + [True] * (FEW - 6)]]
    assert regard.divergence(*sides({"sink": random(1)}, {}, (1, 1))).isinf().all()
    assert len(fused) == 2


@pytest.mark.parametrize(
    ("kind", "epsilon", "a", "b", "heads"),
    [
        ("kl", None, CAUSAL, CAUSAL, (2, 1)),
        ("js", None, WINDOW, BITS, (2, 2)),
        ("reverse", 0.1, None, CAUSAL, (1, 2)),
    ],
    ids=str,
)
def test_means_over_heads_are_compared(
    kind: str,
    epsilon: float | None,
    a: regard.Mask | None,
    b: regard.Mask | None,
    heads: tuple[int, int],
    fused: list[Any],
) -> None:
    agree(sides({"mask": a}, {"mask": b}, heads, MANY if kind == "kl" else FEW), kind, "mean", epsilon)
    assert fused[0].mean


def test_a_mean_that_underflows_keeps_its_log(fused: list[Any]) -> None:
    found = agree(sides({"scale": 0.1}, {"scale": 60.0}, (1, 2)), "kl", "mean", slack=30)  # logits of hundreds
    assert found.isfinite().all()
    assert found.max() > 100
    assert fused


@pytest.mark.parametrize(("kind", "epsilon"), [("kl", None), ("kl", 0.1), ("reverse", 0.1), ("js", None)], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_a_row_that_sees_nothing_has_no_weights(kind: str, epsilon: float | None, sink: bool, fused: list[Any]) -> None:
    options: dict[str, Any] = {"mask": CAUSAL} | ({"sink": random(2, seed=1)} if sink else {})
    for a, b in (({"mask": LATE}, {"mask": LATE}), ({"mask": LATE}, options)):
        found = agree(sides(a, b), kind, epsilon=epsilon)
        assert not found.isnan().any()
    assert len(fused) == 2


def test_a_hidden_nan_leaves_no_trace_and_a_visible_one_does() -> None:
    q, k, q2, k2 = (random(1, 1, 6, 4, seed=at) for at in range(4))
    bad = k.detach().clone()
    bad[:, :, 4] = torch.nan
    seen = regard.padding([4])
    for heads, kind in ((None, "kl"), ("mean", "js")):
        rows = []
        for key in (k, bad):
            pair = {"query": q, "key": key, "mask": seen}, {"query": q2, "key": k2, "mask": seen}
            found = regard.divergence(*pair, kind, heads=heads)  # type: ignore[arg-type]
            rows.append((found, *torch.autograd.grad(found.sum(), (q, q2, k2))))
        assert all(torch.equal(x, y) for x, y in zip(*rows, strict=True))
        assert regard.divergence((q, bad), (q2, k2), kind, heads=heads).isnan().all()  # type: ignore[arg-type]


def test_second_derivatives_differentiate_the_formula() -> None:
    q, k, q2, k2 = (random(1, 1, 5, 3, seed=at) for at in range(4))

    def slope(found: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(found.sin().sum(), q, create_graph=True)
        return torch.autograd.grad(g.square().sum(), q2)[0]

    true = in_strips([{"query": q, "key": k}, {"query": q2, "key": k2}], "kl", None, None)
    torch.testing.assert_close(slope(regard.divergence((q, k), (q2, k2))), slope(true), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        ({"bias": torch.zeros(FEW, FEW)}, None),
        ({"score": regard.scores.Pointwise(lambda s, b, h, i, j: s.sin() - (i - j) / 9)}, None),
        ({}, "pairs"),
        ({"sink": torch.zeros(2)}, "mean"),
    ],
)
def test_what_has_no_kernel_is_computed_in_strips(options: dict[str, Any], heads: Any, fused: list[Any]) -> None:
    given = sides(options, options)
    found = regard.divergence(*given, heads=heads)
    torch.testing.assert_close(found.double(), in_strips(given, "kl", heads, None), atol=1e-6, rtol=1e-6)
    assert not fused

"""Divergences: against float64 matrices, with derivatives of both orders, whatever is hidden, in linear memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.chunked import divergence as module
from regard.lab.online import peak_bytes
from support.contract_cases import CASES, Case, Shape, as_double, leaves, plain

LOG_2 = torch.tensor(2.0, dtype=torch.float64).log()


def kl(P: Tensor, R: Tensor) -> Tensor:
    some = P > 0
    P, R = torch.where(some, P, 1.0), torch.where(some, R, 1.0)
    return (P * (P.log() - R.log())).sum(-1)  # a hidden key of R gives +inf


def js(P: Tensor, R: Tensor) -> Tensor:
    M = (P + R) / 2
    M = torch.where(M > 0, M, 1.0)
    return (kl(P, M) + kl(R, M)) / 2


DIVERGENCES = {"kl": kl, "reverse": lambda P, R: kl(R, P), "js": js}


def side(tensors: list[Tensor], options: dict[str, Any]) -> dict[str, Any]:
    return {"query": tensors[0], "key": tensors[1], **options}


def weights(tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    """The matrix of weights in float64, with the sink as one more column."""
    tensors, options = as_double(tensors, options)
    P = plain(*tensors, **options)[3]
    return P if "sink" not in options else torch.cat((P, 1 - P.sum(-1, keepdim=True)), -1)


def close(found: Tensor, wanted: Tensor) -> bool:
    """To 1e-6 of each number; infinities must be the same."""
    same = found.double() == wanted
    near = (found.double() - wanted).abs() <= 1e-6 * wanted.abs() + 1e-12
    return bool((same | near).all())


@pytest.fixture
def strips_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_attention", lambda p, r: False)


def compared(case: Case) -> tuple[dict[str, Any], dict[str, Any], Tensor, Tensor]:
    """Two sides with the same options and different tensors, and their weights."""
    one, options = case.inputs(torch.float32)
    two, others = case.inputs(torch.float32, seed=1)
    others = {name: options[name] if name == "mask" else x for name, x in others.items()}
    return side(one, options), side(two, others), weights(one, options), weights(two, others)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_mask_score_and_option_agrees_with_float64_matrices(case: Case) -> None:
    a, b, P, R = compared(case)
    for kind, true in DIVERGENCES.items():
        found = regard.divergence(a, b, kind)  # type: ignore[arg-type]
        assert found.dtype == torch.float32
        assert close(found, true(P, R)), kind


@pytest.mark.parametrize("name", ["causal", "several strips", "all together", "Additive", "dense per head"])
def test_heads_are_averaged_or_paired_before_they_are_compared(name: str) -> None:
    a, b, P, R = compared(next(case for case in CASES if case.name == name))
    for kind, true in DIVERGENCES.items():
        mean, pairs = (regard.divergence(a, b, kind, heads=heads) for heads in ("mean", "pairs"))  # type: ignore[arg-type]
        assert close(mean, true(P.mean(1), R.mean(1)))
        assert close(pairs, true(P[:, :, None], R[:, None]))


@pytest.mark.parametrize("name", ["causal", "several strips", "packed", "scale per head", "Gaussian"])
def test_strips_agree_where_attention_could_answer(name: str, strips_alone: None) -> None:
    a, b, P, R = compared(next(case for case in CASES if case.name == name))
    assert close(regard.divergence(a, b), kl(P, R))


@pytest.mark.parametrize("mask", [None, regard.causal()], ids=repr)
@pytest.mark.parametrize("kind", ["kl", "reverse"])
def test_no_rounding_makes_a_divergence_negative_or_takes_its_gradient(
    kind: Any, mask: regard.masks.Mask | None
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 1, 64, 8, dtype=torch.float64).unbind()
    near = (200 * x + 1e-5 * torch.randn_like(x)).requires_grad_()
    found = regard.divergence(*({"query": q, "key": y, "mask": mask} for q in (200 * x, near)), kind=kind)
    assert bool((found >= 0).all())
    assert bool((found == 0).any())
    (gradient,) = torch.autograd.grad(found[found == 0].sum(), near)
    assert bool((gradient != 0).any())


@pytest.mark.parametrize("strips", [False, True])
def test_a_kl_has_its_second_derivative_where_both_sides_are_the_same(
    strips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strips:
        monkeypatch.setattr(module, "_is_attention", lambda p, r: False)
    x, y = torch.randn(2, 1, 1, 6, 4, dtype=torch.float64).unbind()

    def found(q: Tensor) -> Tensor:
        return regard.divergence((x, y), (q, y)).sum()

    def wanted(q: Tensor) -> Tensor:
        return kl(*((t @ y.mT / 2).softmax(-1) for t in (x, q))).sum()

    ours, true = (torch.autograd.functional.hvp(f, x.clone(), torch.ones_like(x))[1] for f in (found, wanted))
    torch.testing.assert_close(ours, true)


@pytest.mark.parametrize("name", ["bias", "bias with −inf", "alibi", "softcap", "Additive", "padding"])
def test_any_attention_can_be_compared_with_plain_dot_products(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    one, options = case.inputs(torch.float32)
    if name == "bias with −inf":
        options["bias"] = options["bias"].detach().index_fill(0, torch.tensor([5]), -torch.inf)
    two, same = case.inputs(torch.float32, seed=1)[0], {"mask": options["mask"]} if "mask" in options else {}
    P, R = weights(one, options), weights(two, same)
    assert close(regard.divergence(side(one, options), side(two, same)), kl(P, R))
    assert close(regard.divergence(side(two, same), side(one, options), "reverse"), kl(P, R))


def test_a_function_of_the_scores_can_be_compared() -> None:
    """A function that hides a pair by −inf, with a table that gets a gradient, against products under the same mask."""
    torch.manual_seed(0)
    (q, k), (q2, k2) = torch.randn(2, 2, 2, 3, 40, 8).unbind()
    table = torch.randn(3, 40).requires_grad_()
    hides = regard.causal()

    def f(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((i - j) % 5 == 4, -torch.inf, s.sin() * (b + 1) + table[h, i - j])

    batch, head, row, key = (torch.arange(size) for size in (2, 3, 40, 40))
    seen = row[:, None] >= key
    pairs = batch[:, None, None, None], head[:, None, None], row[:, None], key
    S, S2 = (x.double() @ y.double().mT / 8**0.5 for x, y in ((q, k), (q2, k2)))
    P, R = (X.masked_fill(~seen, -torch.inf).softmax(-1) for X in (f(S, *pairs), S2))
    one, two = side([q, k], {"mask": hides, "score": regard.scores.Pointwise(f)}), side([q2, k2], {"mask": hides})
    for found, true in ((regard.divergence(one, two), kl(P, R)), (regard.divergence(two, one, "js"), js(P, R))):
        assert close(found, true)
        ours, wanted = (torch.autograd.grad(x.sum(), table, retain_graph=True)[0] for x in (found, true))
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "groups", "rows"), [(20, (1, 2), 40), (36, (3, 2), 18)])
def test_tiles_of_some_heads_and_batch_items_fit_both_groupings(heads: int, groups: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    q, q2 = torch.randn(2, 2, heads, rows, 4).unbind()
    k, k2 = (torch.randn(2, heads // group, 1024, 4) for group in groups)
    mask = regard.predicate(lambda b, h, i, j: (i + 2 * j + 3 * h + 5 * b) % 4 != 0)
    for one, two in (({}, {}), ({"mask": mask}, {"mask": mask | regard.strided(3)})):
        true = js(weights([q, k, k], one), weights([q2, k2, k2], two))
        assert close(regard.divergence(side([q, k], one), side([q2, k2], two), "js"), true)


def test_strips_skip_only_what_both_sides_hide() -> None:
    q, k = torch.randn(2, 1, 1, 700, 4).unbind()
    near, far = {"mask": regard.window(10)}, {"mask": regard.causal() & ~regard.window(300)}
    for one, two in ((near, far), (far, near)):
        found = regard.divergence(side([q, k], one), side([k, q], two), "js")
        assert close(found, js(weights([q, k, k], one), weights([k, q, q], two)))


def test_close_attentions_keep_their_digits() -> None:
    q, k = torch.randn(2, 1, 2, 50, 16).unbind()
    near = q + 1e-3 * torch.randn_like(q)
    P, R = (weights([x, k, k], {}) for x in (q, near))
    found = regard.divergence((q, k), (near, k))
    assert found.max() < 1e-5
    assert close(found, kl(P, R))


@pytest.mark.parametrize(
    "name", ["Additive", "Cosine", "alibi", "relative", "scale per head", "all together", "packed"]
)
def test_gradients_of_parameters_agree_with_those_of_float64_matrices(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    (one, options), (two, others) = case.inputs(), case.inputs(seed=1)
    found = regard.divergence(side(one, options), side(two, others), "js")
    P, R = plain(*one, **options)[3], plain(*two, **others)[3]
    if "sink" in options:
        P, R = (torch.cat((X, 1 - X.sum(-1, keepdim=True)), -1) for X in (P, R))
    assert torch.allclose(found, js(P, R))
    inputs = [*leaves(one[:2], options), *leaves(two[:2], others)]
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape)
    grads, true = (torch.autograd.grad((x * weight).sum(), inputs) for x in (found, js(P, R)))
    assert all(torch.allclose(g, t, atol=1e-12) for g, t in zip(grads, true, strict=True))


def random_sides(n: int = 3, m: int = 4, groups: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((1, 2, n, 2), (1, 1 if groups else 2, m, 2), (1, 2, n, 3), (1, 2, m, 3))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("kind", "heads"), [("kl", None), ("reverse", "mean"), ("js", "pairs"), ("js", None)])
def test_gradients_reach_every_tensor_of_both_sides(kind: Any, heads: Any) -> None:
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def function(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, sink: Tensor, bias: Tensor) -> Tensor:
        a = {"query": q, "key": k, "mask": regard.causal(), "sink": sink, "softcap": 2.0}
        b = {"query": q2, "key": k2, "bias": bias, "sink": sink * 2, "mask": regard.window(1)}
        return regard.divergence(a, b, kind, heads=heads, epsilon=None if kind == "js" else 0.1)

    assert torch.autograd.gradcheck(function, (*random_sides(), sink, bias), fast_mode=heads is not None)


@pytest.mark.parametrize("groups", [False, True], ids=["by attention", "by strips"])
def test_kl_has_second_derivatives_and_tangents(groups: bool) -> None:
    def function(*x: Tensor) -> Tensor:
        return regard.divergence({"query": x[0], "key": x[1], "mask": mask}, {"query": x[2], "key": x[3], "mask": mask})

    mask = regard.causal()
    tensors = random_sides(2, 3, groups)
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)
    many = torch.randn(3, *tensors[0].shape, dtype=torch.float64)
    each = torch.stack([function(q, *tensors[1:]) for q in many])
    assert torch.allclose(torch.vmap(lambda q: function(q, *tensors[1:]))(many), each)


def test_a_row_is_infinite_where_it_has_weight_on_a_key_that_the_other_hides() -> None:
    q, k, q2, k2 = random_sides(6, 6, groups=False)
    wide = {"query": q, "key": k, "mask": regard.causal()}
    narrow = {"query": q2, "key": k2, "mask": regard.window(2)}
    found = regard.divergence(wide, narrow)
    assert found.isinf().tolist() == [[[False] * 3 + [True] * 3] * 2]
    found.sum().backward()
    assert q.grad is not None
    assert q.grad[:, :, 3:].eq(0).all()
    assert q.grad[:, :, 1:3].ne(0).all()
    assert k2.grad is not None
    assert k2.grad.isfinite().all()
    assert regard.divergence(wide, narrow, "reverse").isfinite().all()
    disjoint = {"query": q, "key": k, "mask": regard.causal() & ~regard.window(2)}
    assert torch.allclose(regard.divergence(disjoint, narrow, "js")[..., 3:], LOG_2)


@pytest.mark.parametrize("other", [regard.window(1, 1), regard.causal(), None], ids=str)
def test_epsilon_mixes_the_second_attention_with_the_keys_that_one_of_them_sees(other: regard.Mask | None) -> None:
    q, k, q2, k2 = random_sides(6, 6, groups=False)
    one, two = {"mask": regard.causal()}, {} if other is None else {"mask": other}
    P, R = weights([q, k, k], one), weights([q2, k2, k2], two)
    seen = ((P > 0) | (R > 0)).double()
    U = seen / seen.sum(-1, keepdim=True)
    for kind, (first, second) in {"kl": (P, R), "reverse": (R, P)}.items():
        found = regard.divergence(side([q, k], one), side([q2, k2], two), kind, epsilon=0.05)  # type: ignore[arg-type]
        assert torch.allclose(found, kl(first, 0.95 * second + 0.05 * U))


def test_a_sink_is_one_more_outcome_that_a_side_without_one_never_has() -> None:
    q, k, q2, k2 = random_sides()
    drained = {"query": q, "key": k, "sink": torch.zeros(2, dtype=torch.float64)}
    P, R = weights([q, k, k], {"sink": drained["sink"]}), weights([q2, k2, k2], {})
    R = torch.cat((R, torch.zeros_like(R[..., :1])), -1)
    assert regard.divergence(drained, (q2, k2)).isinf().all()
    assert torch.allclose(regard.divergence(drained, (q2, k2), "reverse"), kl(R, P))
    assert torch.allclose(regard.divergence(drained, (q2, k2), "js"), js(P, R))


def test_a_row_that_sees_nothing_gives_zero_and_a_hidden_nan_leaves_no_trace() -> None:
    q, k, q2, k2 = (x.detach() for x in random_sides(4, 4, groups=False))
    none = ~regard.everything()
    for kind in ("kl", "reverse", "js"):
        found = regard.divergence({"query": q, "key": k, "mask": none}, {"query": q2, "key": k2, "mask": none}, kind)  # type: ignore[arg-type]
        assert found.eq(0).all()
        clean = [{"query": x, "key": y, "mask": regard.padding([3])} for x, y in ((q, k), (q2, k2))]
        spoilt = [{**each, "key": each["key"].clone().index_fill_(2, torch.tensor([3]), torch.nan)} for each in clean]
        assert torch.equal(regard.divergence(*clean, kind), regard.divergence(*spoilt, kind))  # type: ignore[arg-type, misc]
        for heads in (None, "mean"):
            assert regard.divergence((q, spoilt[0]["key"]), (q2, k2), kind, heads=heads).isnan().all()  # type: ignore[arg-type]


def test_weights_that_underflow_are_no_weights() -> None:
    q, k, q2, k2 = (x.detach().float() for x in random_sides(5, 5))
    bias = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float32).min)
    added = {"query": q, "key": k, "bias": bias}
    masked = {"query": q2, "key": k2, "mask": regard.causal()}
    same = regard.divergence({"query": q, "key": k, "mask": regard.causal()}, masked)
    assert torch.allclose(regard.divergence(added, masked), same)


def test_an_observation_is_a_side_by_its_weights_before_dropout() -> None:
    q, k, q2, k2 = (x.detach() for x in random_sides(groups=False))
    seen = regard.observe(q, k, k, dropout=0.5)
    other = regard.observe(q2, k2, k2)
    assert torch.equal(regard.divergence(seen, other), regard.divergence((q, k), [q2, k2]))
    q.zero_()
    with pytest.raises(regard.errors.ChangedError, match=r"divergence: an input of observe was changed"):
        regard.divergence(seen, other)


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (2, 3, 2)], ids=str)
def test_results_have_the_leading_dimensions_of_the_queries(lead: tuple[int, ...]) -> None:
    q, k = torch.randn(2, *lead, 5, 4).unbind()
    batch, heads = (lead[:-1], lead[-1:]) if len(lead) > 1 else (lead, ())
    assert regard.divergence((q, k), (k, q)).shape == (*lead, 5)
    assert regard.divergence((q, k), (k, q), heads="mean").shape == (*batch, 5)
    assert regard.divergence((q, k), (k, q), heads="pairs").shape == (*batch, *(heads or (1,)) * 2, 5)


def test_one_head_is_compared_with_the_mean_of_many() -> None:
    q, k = torch.randn(2, 2, 6, 9, 4).unbind()
    index = torch.randn(2, 9, 3)
    P, R = weights([q, k, k], {}).mean(1), weights([index[:, None]] * 3, {})[:, 0]
    assert close(regard.divergence((q, k), (index, index), heads="mean"), kl(P, R))


def test_memory_is_linear_forward_and_backward() -> None:
    q, k = torch.randn(2, 1, 1, 2048, 8).unbind()
    q.requires_grad_()
    matrix = 2048 * 2048 * 8
    for kind, mask in (("js", None), ("kl", regard.causal())):
        a, b = ({"query": x, "key": k, "mask": mask} for x in (q, k))
        assert peak_bytes(lambda: regard.divergence(a, b, kind).sum().backward()) < matrix / 2  # noqa: B023


def test_compiled_code_gives_the_same() -> None:
    q, k, q2, k2 = random_sides()

    def function(q: Tensor) -> Tensor:
        return regard.divergence((q * 2, k), (q2, k2), "js").sum() * 3

    compiled = torch.compile(function, backend="aot_eager")
    assert torch.allclose(compiled(q), function(q))
    (found,) = torch.autograd.grad(compiled(q), q)
    assert torch.allclose(found, torch.autograd.grad(function(q), q)[0])
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"divergence leaves the graph.*Leave out fullgraph=True"):
        torch.compile(function, backend="eager", fullgraph=True)(q)


X = torch.zeros(1, 2, 4, 8)
BAD: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((X, X), {}, "a must be an Observation, a pair"),
    (((X, X), {"query": X}), {}, "b must be an Observation.* Got a dict of query"),
    (((X, X), {"query": X, "key": X, "dropout": 0.1}), {}, "no option dropout.* Got it in b"),
    (((X, X), (X, X[..., :3])), {}, ", b: query and key must have the same dim"),
    (((X, X), (X, X)), {"kind": "tv"}, 'kind must be "kl", "reverse" or "js". Got \'tv\''),
    (((X, X), (X, X)), {"heads": "max"}, 'heads must be None, "mean" or "pairs". Got \'max\''),
    (((X, X), (X, X)), {"epsilon": 1.0}, "epsilon must be a number above 0 and below 1. Got 1.0"),
    (((X, X), (X, X)), {"kind": "js", "epsilon": 0.1}, "is finite for all masks and takes no epsilon"),
    (((X, X), (X[:, :, :3], X)), {}, "4 rows and 4 keys in a, 3 rows and 4 keys in b"),
    (((X, X), (X[:, :1], X[:, :1])), {}, 'a has 2 heads and b has 1. Write heads="mean"'),
    (((X, X), (X.expand(3, -1, -1, -1),) * 2), {}, r"the same batch. Got \(1,\) and \(3,\)"),
    (((X, X), (X.to("meta"),) * 2), {}, "a and b must be on one device. Got cpu and meta"),
]


@pytest.mark.parametrize(("sides", "options", "says"), BAD, ids=[says[:30] for *_, says in BAD])
def test_bad_input_gets_one_clear_error(sides: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(regard.errors.RegardError, match=f"^divergence.*{says}"):
        regard.divergence(*sides, **options)


def test_shapes_without_keys_rows_or_batch_give_empty_rows() -> None:
    for shape in (Shape(m=0), Shape(n=0), Shape(batch=0)):
        tensors, _ = Case("empty", lambda s: {}, shape).inputs()
        found = regard.divergence(tuple(tensors[:2]), tuple(tensors[:2]), "js")
        assert found.shape == (shape.batch, shape.heads, shape.n)
        assert found.eq(0).all()


@pytest.mark.parametrize("kind", ["kl", "reverse", "js"])
@pytest.mark.parametrize("heads", [None, "mean", "pairs"])
def test_masks_over_no_keys_give_zeros(kind: Any, heads: Any) -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 0, 8)
    hidden = {"query": q, "key": k, "mask": regard.dense(torch.ones(5, 0, dtype=torch.bool))}
    assert regard.divergence(hidden, {**hidden, "query": 2 * q}, kind, heads=heads).eq(0).all()

"""Every member of an observation, held against the whole matrix in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ArgumentError, DtypeError

INF = math.inf
BACKENDS = ("reference", "chunked")
backends = pytest.mark.parametrize("backend", BACKENDS)


def inputs(
    *lead: int, n: int = 13, m: int = 17, d: int = 8, kv_heads: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(7)
    shared = lead if kv_heads is None else (*lead[:-1], kv_heads)
    shapes = (*lead, n, d), (*shared, m, d), (*shared, m, 5)
    query, key, value = (torch.randn(s, generator=made, dtype=dtype) for s in shapes)
    return query * 2, key, value


class Truth:
    """The formula on the whole matrix, in float64, from its definition."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed: Tensor | None = None,
        bias: Tensor | None = None,
        scale: Tensor | float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> None:
        query, key, value = query.double(), key.double(), value.double()
        if query.dim() >= 4:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        S = query @ key.mT * (scale.double().reshape(-1, 1, 1) if isinstance(scale, Tensor) else scale)
        S = S if softcap is None else softcap * torch.tanh(S / softcap)
        S = S if bias is None else S + bias.double()
        self.S = S if allowed is None else S.masked_fill(~allowed, -INF)
        top = torch.full_like(S[..., :1], -INF) if sink is None else sink.double()[:, None, None].expand_as(S[..., :1])
        self.lse = torch.cat((self.S, top), -1).logsumexp(-1)
        empty = self.lse == -INF
        self.P = (self.S - self.lse.masked_fill(empty, 0.0)[..., None]).exp()
        self.output = self.P @ value
        self.entropy = -torch.xlogy(self.P, self.P).sum(-1)
        self.max_logit = self.S.amax(-1)
        self.visible = (self.S > -INF).sum(-1)
        self.perplexity = self.entropy.exp()
        self.received = self.P.sum(-2)
        self.gradient_health = (self.P * (1 - self.P)).sum(-1)
        n, m = self.P.shape[-2:]
        own = torch.arange(n)[:, None] + m - n
        self.distance = (self.P * (own - torch.arange(m)).abs()).sum(-1)

    def map(self, height: int, width: int) -> Tensor:
        n, m = self.P.shape[-2:]
        grid = self.P.new_zeros(*self.P.shape[:-2], height, width)
        for a in range(height):
            for b in range(width):
                rows = [i for i in range(n) if i * height // n == a]
                cols = [j for j in range(m) if j * width // m == b]
                grid[..., a, b] = self.P[..., rows, :][..., cols].mean((-2, -1))
        return grid


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "plain": ((2, 4), {}, {}),
    "one sequence": ((), {}, {}),
    "a batch without heads": ((3,), {}, {}),
    "five dimensions": ((2, 3, 4), {"kv_heads": 2}, {}),
    "grouped": ((2, 6), {"kv_heads": 2}, {"mask": regard.causal()}),
    "window": ((2, 2), {}, {"mask": regard.window(3, 1)}),
    "padding": ((2, 2), {}, {"mask": regard.padding([5, 17])}),
    "five dimensions, padded": ((2, 3, 2), {}, {"mask": regard.padding([5, 17])}),
    "empty rows": ((1, 2), {"n": 17, "m": 13}, {"mask": regard.causal()}),
    "tensor mask": ((2, 2), {}, {"mask": torch.rand(2, 1, 13, 17, generator=torch.Generator().manual_seed(1)) > 0.7}),
    "bias": ((2, 4), {}, {"bias": torch.randn(4, 13, 17, generator=torch.Generator().manual_seed(2))}),
    "bias that hides": ((2, 2), {}, {"bias": torch.eye(13, 17).log()}),
    "softcap": ((2, 4), {}, {"softcap": 1.5}),
    "scale a head": ((2, 4), {}, {"scale": torch.tensor([0.1, 0.5, 1.0, 3.0])}),
    "sink": ((2, 4), {}, {"sink": torch.tensor([-2.0, 0.0, 1.0, 5.0])}),
    "sink and empty rows": (
        (1, 2),
        {"n": 17},
        {"mask": regard.window(2, offset=-1), "sink": torch.tensor([0.5, -1.0])},
    ),
    "all together": (
        (2, 4),
        {"kv_heads": 2},
        {
            "mask": regard.causal(),
            "bias": torch.randn(13, 17, generator=torch.Generator().manual_seed(3)),
            "softcap": 2.0,
            "scale": 0.7,
            "sink": torch.tensor([0.1, 0.2, -3.0, 1.0]),
        },
    ),
    "several blocks": ((1, 2), {"n": 40, "m": 1300}, {"mask": regard.window(700, 0)}),
}


def case(name: str, backend: str, dtype: torch.dtype = torch.float32) -> tuple[regard.Observation, Truth]:
    lead, shape, arguments = CASES[name]
    tensors = inputs(*lead, dtype=dtype, **shape)
    mask = arguments.get("mask")
    n, m = tensors[0].shape[-2], tensors[1].shape[-2]
    allowed = mask.dense(n, m) if isinstance(mask, regard.Mask) else mask
    if len(lead) == 3 and isinstance(allowed, Tensor) and allowed.dim() == 4:
        allowed = allowed.unsqueeze(1)  # a batch item is one of the first dimension
    truth = Truth(*tensors, allowed=allowed, **{k: v for k, v in arguments.items() if k != "mask"})
    return regard.observe(*tensors, backend=backend, **arguments), truth


MEMBERS = (
    *("output", "lse", "entropy", "max_logit", "visible", "perplexity", "received", "gradient_health"),
    *("distance", "weights", "scores", "map"),
)


def members(seen: regard.Observation, truth: Truth) -> dict[str, tuple[Tensor, Tensor]]:
    named = {name: (getattr(seen, name), getattr(truth, name)) for name in MEMBERS[:9]}
    rest = {
        "weights": (seen.weights(), truth.P),
        "scores": (seen.scores(), truth.S),
        "map": (seen.map(5, 7), truth.map(5, 7)),
    }
    return named | rest


@backends
@pytest.mark.parametrize("name", CASES)
def test_every_member_says_what_the_whole_matrix_says(backend: str, name: str) -> None:
    seen, truth = case(name, backend)
    for member, (found, expected) in members(seen, truth).items():
        assert found.shape == expected.shape, member
        torch.testing.assert_close(
            found.double(), expected.double(), rtol=2e-4, atol=2e-5, msg=lambda text, m=member: f"{m}: {text}"
        )


@backends
@pytest.mark.parametrize("name", ["all together", "sink and empty rows", "several blocks", "bias that hides"])
def test_every_member_is_exact_to_float64_for_float64(backend: str, name: str) -> None:
    seen, truth = case(name, backend, torch.float64)
    for member, (found, expected) in members(seen, truth).items():
        if member != "visible":
            assert found.dtype == torch.float64, member
        torch.testing.assert_close(
            found.double(), expected.double(), rtol=1e-10, atol=1e-11, msg=lambda text, m=member: f"{m}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_half_precision_are_float32_and_the_output_is_half(dtype: torch.dtype) -> None:
    tensors = inputs(1, 2, dtype=dtype)
    seen, truth = regard.observe(*tensors), Truth(*tensors)
    assert seen.output.dtype == seen.weights().dtype == seen.top(2)[0].dtype == dtype
    for member in ("lse", "entropy", "max_logit", "perplexity", "received", "gradient_health"):
        found = getattr(seen, member)
        assert found.dtype == torch.float32, member
        torch.testing.assert_close(found.double(), getattr(truth, member), rtol=1e-5, atol=1e-5)
    assert seen.scores().dtype == torch.float32
    assert seen.map(3, 3).dtype == torch.float32
    assert not seen.visible.dtype.is_floating_point


@backends
def test_statistics_are_before_dropout_and_the_output_is_after(backend: str) -> None:
    tensors = inputs(2, 2)
    truth = Truth(*tensors)
    seen = regard.observe(*tensors, dropout=0.5, backend=backend)
    for member, (found, expected) in members(seen, truth).items():
        if member != "output":
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(seen.output.double(), truth.output, atol=1e-2)


@backends
def test_the_output_is_that_of_attention(backend: str) -> None:
    tensors = inputs(2, 4, kv_heads=2)
    for arguments in ({}, {"mask": regard.causal()}, {"sink": torch.ones(4)}, {"softcap": 2.0}):
        one = regard.observe(*tensors, backend=backend, **arguments).output
        assert torch.equal(one, regard.attention(*tensors, backend=backend, **arguments))


def test_a_sink_takes_its_share_of_every_row() -> None:
    tensors = inputs(1, 2)
    sink = torch.tensor([0.0, 2.0])
    seen, plain = regard.observe(*tensors, sink=sink), regard.observe(*tensors)
    left = (plain.lse - seen.lse).exp()
    assert (left < 1).all()
    torch.testing.assert_close(seen.weights().sum(-1), left)
    torch.testing.assert_close(seen.lse, torch.logaddexp(plain.lse, sink[:, None].expand_as(plain.lse)))
    torch.testing.assert_close(seen.max_logit, plain.max_logit)


# top


def ranked(row: list[float], k: int) -> list[int]:
    """The k largest, ties to the lowest index, −1 where nothing is visible."""
    order = sorted((j for j in range(len(row)) if row[j] > -INF), key=lambda j: (-row[j], j))[:k]
    return order + [-1] * (k - len(order))


def check_top(seen: regard.Observation, k: int) -> None:
    values, where = seen.top(k)
    S, P = seen.scores(), seen.weights()
    assert values.shape == where.shape == (*S.shape[:-1], k)
    assert where.dtype == torch.int64
    expected = torch.tensor([ranked(row, k) for row in S.reshape(-1, S.shape[-1]).tolist()]).reshape(where.shape)
    assert torch.equal(where, expected)
    held = torch.where(where < 0, 0.0, P.gather(-1, where.clamp(min=0)))
    torch.testing.assert_close(values, held, rtol=1e-5, atol=1e-7)
    assert not values[where < 0].any()


@backends
@pytest.mark.parametrize("k", [1, 3, 17, 30])
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(2), regard.causal(offset=-4)], ids=str)
def test_top_gives_the_largest_weights_and_their_keys(backend: str, k: int, mask: regard.Mask | None) -> None:
    check_top(regard.observe(*inputs(2, 2), mask=mask, backend=backend), k)


def few_levels(n: int, m: int, levels: int) -> tuple[Tensor, Tensor]:
    """Queries and keys whose logits are small whole numbers, so that many are exactly equal."""
    made = torch.Generator().manual_seed(levels)
    key = torch.randint(-levels, levels + 1, (1, 1, m, 1), generator=made).float()
    return torch.tensor([1.0, -1.0, 0.0]).repeat(n)[:n].reshape(1, 1, n, 1), key


@backends
@pytest.mark.parametrize("m", [5, 64, 255, 256, 1000, 1511, 6000])
@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("levels", [1, 40])
def test_equal_weights_go_to_the_lowest_index(backend: str, m: int, k: int, levels: int) -> None:
    query, key = few_levels(6, m, levels)
    check_top(regard.observe(query, key, key, scale=1.0, backend=backend), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "mask", [regard.causal(), regard.strided(37), regard.prefix(3), regard.window(100, offset=900)], ids=str
)
def test_equal_weights_go_to_the_lowest_visible_index_over_many_keys(dtype: torch.dtype, mask: regard.Mask) -> None:
    query, key = (x.to(dtype) for x in few_levels(9, 1500, 2))
    check_top(regard.observe(query, key, key, scale=1.0, mask=mask), 8)


def test_plus_and_minus_zero_tie() -> None:
    key = torch.tensor([0.0, -0.0, 0.0, -0.0, -1.0]).reshape(1, 1, 5, 1)
    query = torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1)
    _, where = regard.observe(query, key, key, scale=1.0).top(4)
    assert where[0, 0].tolist() == [[0, 1, 2, 3], [4, 0, 1, 2]]


def test_top_of_one_number_over_many_keys_is_the_maximum() -> None:
    query, key, value = inputs(1, 2, n=5, m=3001)
    values, where = regard.observe(query, key, value).top(1)
    truth = Truth(query, key, value).P.max(-1)
    torch.testing.assert_close(values[..., 0].double(), truth.values, rtol=1e-4, atol=1e-7)
    assert torch.equal(where[..., 0], truth.indices)


# map


@backends
@pytest.mark.parametrize(("height", "width"), [(1, 1), (13, 17), (4, 6), (12, 16), (7, 1)])
def test_the_map_is_the_mean_weight_of_each_cell(backend: str, height: int, width: int) -> None:
    tensors = inputs(2, 2)
    seen = regard.observe(*tensors, mask=regard.causal(), backend=backend)
    truth = Truth(*tensors, allowed=regard.causal().dense(13, 17))
    torch.testing.assert_close(seen.map(height, width).double(), truth.map(height, width), rtol=1e-4, atol=1e-6)


def test_the_map_over_several_strips_and_runs_keeps_the_total() -> None:
    tensors = inputs(1, 2, n=650, m=1100)
    seen = regard.observe(*tensors, backend=regard.backends.Chunked(chunk_size=48))
    torch.testing.assert_close(
        seen.map(7, 9), regard.observe(*tensors, backend="reference").map(7, 9), rtol=1e-4, atol=1e-7
    )
    whole = seen.map(1, 1)
    torch.testing.assert_close(whole, torch.full_like(whole, 1 / 1100), rtol=1e-4, atol=0)


# parts of weights and scores

PARTS: dict[str, tuple[Any, Any]] = {
    "rows": (slice(2, 5), None),
    "cols": (None, slice(3, None)),
    "a step": (slice(1, None, 3), slice(None, None, 2)),
    "backwards": (slice(None, None, -1), slice(10, 2, -3)),
    "nothing": (slice(4, 4), None),
    "from the end": (slice(-3, None), slice(None, -5)),
    "a list": ([3, 1, 1], [0]),
    "negative numbers": ([-1, 0, -13], [-17, 16]),
    "an index": (torch.tensor([5, 2]), torch.tensor([1, 1, 0])),
    "an index of small integers": (torch.tensor([5, 2], dtype=torch.int16), torch.tensor([0], dtype=torch.uint8)),
    "truths": (torch.arange(13) % 3 == 0, torch.arange(17) > 14),
    "an empty list": ([], None),
}


def places(part: Any, length: int) -> Tensor:
    if part is None or isinstance(part, slice):
        return torch.tensor(range(length)[part or slice(None)], dtype=torch.int64)
    part = torch.as_tensor(part)
    return torch.arange(length)[part if part.dtype == torch.bool else part.long()]


@backends
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["plain", "all together", "tensor mask", "five dimensions", "one sequence"])
def test_a_part_of_the_weights_is_that_part_of_the_whole(backend: str, part: str, name: str) -> None:
    seen, truth = case(name, backend)
    rows, cols = PARTS[part]
    i, j = places(rows, truth.P.shape[-2]), places(cols, truth.P.shape[-1])
    for found, whole in ((seen.weights(rows, cols), truth.P), (seen.scores(rows, cols), truth.S)):
        expected = whole.index_select(-2, i).index_select(-1, j)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@backends
def test_the_structured_bias_of_a_part_is_that_of_its_places(backend: str) -> None:
    query, key, value = inputs(1, 2)
    bias = regard.biases.alibi(torch.tensor([0.5, 0.1]))
    seen = regard.observe(query, key, value, bias=bias, backend=backend)
    truth = Truth(query, key, value, bias=bias.dense(13, 17))
    torch.testing.assert_close(seen.scores([7, 2], [16, 0]).double(), truth.S[..., [7, 2], :][..., [16, 0]])


# derivatives


@backends
@pytest.mark.parametrize("with_sink", [False, True])
def test_weights_scores_lse_and_entropy_have_gradients(backend: str, with_sink: bool) -> None:
    query, key, value = (x.requires_grad_() for x in inputs(1, 2, n=3, m=4, d=2, dtype=torch.float64))
    bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True) if with_sink else None

    def members_of(*leaves: Tensor) -> tuple[Tensor, ...]:
        q, k, v, b, *s = leaves
        seen = regard.observe(q, k, v, bias=b, sink=s[0] if s else None, mask=regard.causal(), backend=backend)
        scores = seen.scores(rows=[2])
        return (
            seen.weights(),
            seen.weights([1, 2], slice(1, 3)),
            scores[scores > -INF],
            seen.lse,
            seen.entropy,
            seen.output,
        )

    leaves = (query, key, value, bias, *(() if sink is None else (sink,)))
    assert torch.autograd.gradcheck(members_of, leaves, fast_mode=True)


@backends
def test_the_gradient_of_hidden_weights_is_zero_and_never_nan(backend: str) -> None:
    query, key, value = (x.requires_grad_() for x in inputs(1, 1, n=5, m=5))
    seen = regard.observe(query, key, value, mask=regard.causal(offset=-2), backend=backend)
    seen.weights().square().sum().backward()
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()
    assert not query.grad[0, 0, :2].any()


def test_the_late_members_that_are_numbers_only_carry_no_graph() -> None:
    query, key, value = (x.requires_grad_() for x in inputs(1, 2))
    seen = regard.observe(query, key, value)
    for found in (
        seen.visible,
        seen.received,
        seen.gradient_health,
        seen.distance,
        seen.map(2, 2),
        *seen.top(2),
        seen.max_logit,
    ):
        assert not found.requires_grad
    for found in (seen.output, seen.lse, seen.entropy, seen.perplexity, seen.weights(), seen.scores()):
        assert found.requires_grad


# meaning


def test_the_statistics_of_equal_logits_are_those_of_the_uniform_distribution() -> None:
    zero = torch.zeros(1, 1, 4, 8)
    seen = regard.observe(zero, zero, zero, mask=regard.causal())
    count = torch.arange(1.0, 5.0)[None, None]
    torch.testing.assert_close(seen.entropy, count.log())
    torch.testing.assert_close(seen.perplexity, count)
    torch.testing.assert_close(seen.gradient_health, 1 - 1 / count)
    torch.testing.assert_close(seen.received[0, 0], torch.tensor([25 / 12, 13 / 12, 7 / 12, 3 / 12]))


def test_a_saturated_softmax_has_no_entropy_and_no_gradient_left() -> None:
    x = torch.eye(4)[None, None] * 100
    seen = regard.observe(x, x, x)
    torch.testing.assert_close(seen.entropy, torch.zeros(1, 1, 4))
    torch.testing.assert_close(seen.gradient_health, torch.zeros(1, 1, 4))
    assert (seen.gradient_health >= 0).all()


def test_large_logits_overflow_nothing() -> None:
    query, key, value = inputs(1, 1, dtype=torch.float64)
    seen = regard.observe(query * 1e3, key * 1e3, value)
    truth = Truth(query * 1e3, key * 1e3, value)
    for member in ("lse", "entropy", "max_logit", "received"):
        torch.testing.assert_close(getattr(seen, member), getattr(truth, member), rtol=1e-9, atol=1e-9)


def test_the_repr_says_sizes_and_backend() -> None:
    seen = regard.observe(*inputs(2, 4, kv_heads=2), backend="reference")
    assert repr(seen) == "Observation(heads (2, 4), 13 queries, 17 keys, by reference)"


def test_received_map_and_top_are_of_weights_before_dropout_and_with_a_sink_sum_to_less_than_one() -> None:
    tensors = torch.randn(3, 1, 2, 6, 4).unbind()
    sink = torch.tensor([0.0, 2.0])
    torch.manual_seed(0)
    seen = regard.observe(*tensors, sink=sink, dropout=0.5)
    plain = regard.observe(*tensors, sink=sink)
    weights = plain.weights()
    assert (weights.sum(-1) < 1).all()
    torch.testing.assert_close(seen.received, weights.sum(-2))
    torch.testing.assert_close(seen.map(6, 6), weights)
    torch.testing.assert_close(seen.top(2)[0], weights.topk(2).values)
    torch.testing.assert_close(seen.max_logit, regard.observe(*tensors).max_logit)
    torch.testing.assert_close(seen.entropy, -(weights * weights.log()).sum(-1))
    torch.testing.assert_close(seen.gradient_health, (weights * (1 - weights)).sum(-1))


def test_one_row_and_one_key_are_given_by_their_number() -> None:
    seen = regard.observe(*torch.randn(3, 2, 5, 4).unbind())
    for rows, same in ((3, [3]), (-1, [4])):
        torch.testing.assert_close(seen.weights(rows=rows), seen.weights(rows=same), rtol=0, atol=0)
        torch.testing.assert_close(seen.scores(cols=rows), seen.scores(cols=same), rtol=0, atol=0)
    with pytest.raises(
        DtypeError, match=r"^weights: rows must be a whole number, a slice, or whole numbers .* Got True"
    ):
        seen.weights(rows=True)
    with pytest.raises(ArgumentError, match=r"rows must be from -5 to 4\. Got 5\.$"):
        seen.weights(rows=5)

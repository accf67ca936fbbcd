"""Dropout: each weight's fate is a function of (seed, item, head, row, key), and of nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.backends import Chunked
from regard.core.dropout import _int32, _mixed, keep

I = torch.arange  # noqa: E741
BACKENDS = ("reference", "chunked", Chunked(chunk_size=3), Chunked(chunk_size=100))
backends = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def all_kept(p: float, seed: int, items: int = 1, heads: int = 1, rows: int = 256, cols: int = 256) -> Tensor:
    return keep(p, seed, I(items), I(heads), I(rows), I(cols))


def inputs(
    dtype: torch.dtype = torch.float64, heads: int = 4, kv_heads: int = 4, n: int = 11, m: int = 13
) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = (2, heads, n, 4), (2, kv_heads, m, 4), (2, kv_heads, m, 3)
    return [torch.randn(s, generator=made, dtype=dtype).requires_grad_() for s in shapes]


def dropped(tensors: list[Tensor], seed: int, p: float = 0.4, **arguments: object) -> Tensor:
    torch.manual_seed(seed)
    return regard.attention(*tensors, dropout=p, **arguments)


# The generator.


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**62 - 1),
    p=st.floats(0.0, 1.0, exclude_max=True),
    cuts=st.tuples(*[st.integers(0, 12)] * 8),
)
def test_any_tile_of_the_fates_is_that_tile_of_the_whole(seed: int, p: float, cuts: tuple[int, ...]) -> None:
    whole = keep(p, seed, I(12), I(12), I(12), I(12))
    spans = [slice(min(a, b), max(a, b)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    part = keep(p, seed, *(I(12)[s] for s in spans))
    assert torch.equal(part, whole[tuple(spans)])


def test_fates_of_places_far_away_are_found_alone() -> None:
    far = torch.tensor([2**31 - 1, 2**31, 2**33 + 5])
    for at in range(3):
        one = keep(0.5, 3, far[at : at + 1], far[at : at + 1], far[at : at + 1], I(64))
        assert torch.equal(one[0, 0, 0], keep(0.5, 3, far, far, far, I(64))[at, at, at])
        assert one.any()
        assert not one.all()


def test_nothing_is_dropped_at_probability_0_and_almost_all_near_1() -> None:
    assert all_kept(0.0, 5).all()
    assert all_kept(1 - 1e-9, 5).float().mean() < 1e-3


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
@pytest.mark.parametrize("seed", [0, 1, 2**61 + 12345])
def test_the_share_of_survivors_is_within_five_deviations_of_binomial(p: float, seed: int) -> None:
    kept = all_kept(p, seed, 2, 2, 300, 300)
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation
    for dim in range(4):
        others = [d for d in range(4) if d != dim]
        shares = kept.double().mean(others)
        deviation = math.sqrt(p * (1 - p) * kept.shape[dim] / kept.numel())
        assert ((shares - (1 - p)).abs() < 6 * deviation).all(), f"dimension {dim} is uneven"


def correlation(a: Tensor, b: Tensor) -> float:
    """In units of its deviation under independence."""
    a, b = a.double().flatten(), b.double().flatten()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("distance", [1, 2, 16])
def test_neighbours_in_every_dimension_are_independent(p: float, dim: int, distance: int) -> None:
    sizes = [4, 4, 64, 64]
    sizes[dim] = 64
    kept = keep(p, 99, *(I(size) for size in sizes))
    count = sizes[dim] - distance
    assert abs(correlation(kept.narrow(dim, 0, count), kept.narrow(dim, distance, count))) < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_pairs_of_rows_and_pairs_of_columns_agree_as_often_as_chance(p: float) -> None:
    kept = all_kept(p, 1234, rows=256, cols=2048)[0, 0].double() - (1 - p)
    for table in (kept, kept.mT[:256].contiguous()):
        table = table - table.mean(1, keepdim=True)
        unit = table / table.norm(dim=1, keepdim=True)
        z = (unit @ unit.mT).triu(1) * math.sqrt(table.shape[1])
        z = z[torch.ones_like(z).triu(1).bool()]  # about 32,000 numbers that are normal under independence
        assert z.abs().max() < 6
        assert abs(z.std().item() - 1) < 0.05


def test_transposed_and_diagonal_places_are_independent() -> None:
    kept = all_kept(0.5, 7, rows=300, cols=300)[0, 0]
    assert abs(correlation(kept.triu(1)[kept.new_ones(300, 300).triu(1)], kept.mT[kept.new_ones(300, 300).triu(1)])) < 5
    assert abs(correlation(kept[:-1, :-1], kept[1:, 1:])) < 5
    assert abs(correlation(kept[:-1, 1:], kept[1:, :-1])) < 5


def test_seeds_one_apart_are_independent() -> None:
    for seed in (0, 1, 2**40, 2**62 - 2):
        assert abs(correlation(all_kept(0.3, seed), all_kept(0.3, seed + 1))) < 5


def test_runs_of_survivors_are_as_long_as_those_of_a_coin() -> None:
    """χ² of the sixteen patterns of four neighbours along a row: 15 degrees of freedom, 99.9 % below 37.7."""
    kept = all_kept(0.5, 21, rows=512, cols=512)[0, 0].long()
    pattern = (kept.unflatten(1, (128, 4)) * torch.tensor([8, 4, 2, 1])).sum(-1)
    count = torch.bincount(pattern.flatten(), minlength=16).double()
    expected = pattern.numel() / 16
    assert float(((count - expected) ** 2 / expected).sum()) < 37.7


# Through attention.


@backends
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_backend_and_chunk_size_drops_the_same_weights(backend: str | Chunked, kv_heads: int) -> None:
    tensors, twin = inputs(kv_heads=kv_heads), inputs(kv_heads=kv_heads)
    mask = regard.causal()
    found = dropped(tensors, 3, mask=mask, backend=backend)
    expected = dropped(twin, 3, mask=mask, backend="reference")
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    for output, leaves in ((found, tensors), (expected, twin)):
        output.backward(upstream)
        assert all(x.grad is not None for x in leaves)
    for x, y in zip(tensors, twin, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@backends
def test_the_weights_that_survive_are_those_that_keep_says(backend: str | Chunked) -> None:
    """With the identity as values, the output is the matrix of weights after dropout."""
    query, key, _ = (x.detach() for x in inputs(n=9, m=7))
    value = torch.eye(7, dtype=torch.float64).expand(2, 4, 7, 7)
    torch.manual_seed(8)
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    seen = regard.observe(query, key, value)
    expected = seen.weights() * keep(0.3, seed, I(2), I(4), I(9), I(7)) / 0.7
    torch.testing.assert_close(dropped([query, key, value], 8, 0.3, backend=backend), expected)


def test_the_fate_of_an_item_follows_its_place_in_the_batch_only() -> None:
    query, key, value = (x.detach() for x in inputs())
    whole = dropped([query, key, value], 4)
    torch.testing.assert_close(dropped([query[:1], key[:1], value[:1]], 4), whole[:1])
    assert not torch.allclose(dropped([query[1:], key[1:], value[1:]], 4), whole[1:])


def test_two_items_and_two_heads_alike_are_dropped_differently() -> None:
    one = torch.randn(1, 1, 20, 4).expand(2, 2, 20, 4)
    found = dropped([one, one, one], 0)
    pairs = [(found[a, b], found[c, d]) for a, b, c, d in ((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 1, 0), (0, 0, 1, 1))]
    assert not any(torch.allclose(a, b) for a, b in pairs)


@backends
def test_the_seed_comes_from_torchs_generator(backend: str | Chunked) -> None:
    tensors = inputs()
    first = dropped(tensors, 1, backend=backend)
    second = regard.attention(*tensors, dropout=0.4, backend=backend)
    assert not torch.equal(first, second)
    assert torch.equal(first, dropped(tensors, 1, backend=backend))
    assert torch.equal(second, regard.attention(*tensors, dropout=0.4, backend=backend))
    assert not torch.equal(first, dropped(tensors, 2, backend=backend))


def test_without_dropout_torchs_generator_does_not_move() -> None:
    state = torch.get_rng_state()
    regard.attention(*inputs(), dropout=0.0)
    regard.attention(*inputs(), dropout=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_mean_over_many_seeds_is_the_output_without_dropout() -> None:
    tensors = [x.detach() for x in inputs(torch.float32, heads=1, kv_heads=1, n=3, m=5)]
    torch.manual_seed(0)
    draws = torch.stack([regard.attention(*tensors, dropout=0.5, backend="reference") for _ in range(600)])
    error = draws.std(0) / math.sqrt(600)
    assert ((draws.mean(0) - regard.attention(*tensors)).abs() < 5 * error).all()


@backends
@pytest.mark.parametrize("rich", [False, True])
def test_the_gradient_is_that_of_the_weights_that_survived(backend: str | Chunked, rich: bool) -> None:
    tensors = inputs(heads=2, kv_heads=1, n=3, m=4)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def attend(*leaves: Tensor) -> Tensor:
        more = {"sink": leaves[3], "bias": leaves[4], "softcap": 2.0} if rich else {}
        return dropped(list(leaves[:3]), 6, backend=backend, **more)

    assert torch.autograd.gradcheck(attend, (*tensors, *((sink, bias) if rich else ())), fast_mode=True)


def test_statistics_and_weights_are_before_dropout() -> None:
    tensors = inputs()
    plain, seen = regard.observe(*tensors), regard.observe(*tensors, dropout=0.6)
    for name in ("lse", "entropy", "max_logit", "received"):
        assert torch.equal(getattr(seen, name), getattr(plain, name))
    assert torch.equal(seen.weights(), plain.weights())


def test_attention_with_weights_drops_in_training_only_and_shows_the_weights_before() -> None:
    tensors = inputs()
    plain = regard.attention(*tensors)
    output, weights = regard.attention_with_weights(*tensors, dropout_p=0.5, training=False)
    torch.testing.assert_close(output, plain)
    output, shown = regard.attention_with_weights(*tensors, dropout_p=0.5)
    assert not torch.allclose(output, plain)
    assert torch.equal(shown, weights)


@backends
def test_dropout_of_a_row_that_sees_nothing_is_nothing(backend: str | Chunked) -> None:
    tensors = inputs()
    found = dropped(tensors, 1, mask=regard.causal(offset=-3), backend=backend)
    assert not found[:, :, :3].any()
    found.sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)


def test_a_probability_that_rounds_to_one_drops_without_overflow() -> None:
    i = torch.arange(100)
    assert int(keep(1 - 2.0**-50, 3, i[:1], i[:1], i, i).sum()) < 3


def test_rows_whose_keys_share_their_low_half_have_fates_of_their_own() -> None:
    i = torch.arange(400_000)
    low = _int32(_mixed(i + 1, _mixed(torch.tensor([1]), _mixed(torch.tensor([1]), 7))))
    order = low.argsort()
    twins = (low[order][1:] == low[order][:-1]).nonzero().squeeze(-1)
    assert len(twins)
    a, b = order[twins[0]], order[twins[0] + 1]
    fates = keep(0.5, 7, i[:1], i[:1], torch.stack((a, b)), i[:2000])[0, 0]
    assert not torch.equal(fates[0], fates[1])

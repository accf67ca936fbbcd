"""Outlier logits, far above the row max, on Hopper: such rows get a retry, and all others keep their bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import agree, plain_results, results, truth
from gpu.test_hopper_on_gpu import N, of_bits, pytestmark  # noqa: F401
from gpu.test_kernels_on_gpu import DEVICE, HALVES, ROWS, inputs, random, same_bits
from regard.kernels import launch_cache
from regard.kernels.hopper import forward_launch
from regard.kernels.hopper.configs import OUTLIER_BITS

SIZES = (600, 1150)
OUTLIER_NATS = OUTLIER_BITS * math.log(2)


def needle(height: float, at: float) -> Callable[[int], Tensor]:
    """One logit above all others."""

    def made(m: int) -> Tensor:
        logits = torch.zeros(m)
        logits[int(at * (m - 1))] = height
        return logits

    return made


def stairs(m: int) -> Tensor:
    """Up by more than a lazy row max allows in every block but the last, which is low."""
    logits = 20.0 * (torch.arange(m) // 128)
    logits[-m % 128 - 128 :] = 0
    return logits


# What is added to the logits of each key.
PROFILES: dict[str, Callable[[int], Tensor]] = {
    "rising": lambda m: torch.linspace(0, 60, m),
    "steeply rising": lambda m: torch.linspace(-300, 300, m),
    "falling": lambda m: torch.linspace(60, 0, m),
    "up and down": lambda m: 40 * torch.linspace(0, 30, m).sin(),
    "a needle": needle(OUTLIER_NATS + 4, 0.7),
    "about as much as may be": needle(OUTLIER_NATS, 0.7),
    "a needle beyond float32": needle(200, 0.7),
    "a needle at the end": needle(30, 1),
    "stairs": stairs,
}


def holed(n: int, m: int) -> Tensor:
    """A mask that is no span, with blocks that hide nothing."""
    seen = regard.causal(m - n).dense(n, m, device=DEVICE)
    seen[:, 5] = False
    return seen


MASKS: dict[str, Callable[[int, int], Any]] = {
    "full": lambda n, m: None,
    "causal": lambda n, m: regard.causal(m - n),
    "window": lambda n, m: regard.window(400, 100),
    "bits": of_bits,
    "bits with full blocks": holed,
}


def with_profile(
    profile: Tensor, n: int, d: int, dtype: torch.dtype, rows: slice = slice(None), heads: int = 2
) -> list[Tensor]:
    """Query, key and value; the profile is added to the logits of the given rows, 0 to those of others."""
    query, key, value = (x.detach() for x in inputs(n, len(profile), d, 2, heads, heads, dtype))
    query *= d**-0.5
    query[..., 0], key[..., 0] = 0, profile.to(DEVICE, dtype)
    query[..., rows, 0] = 1
    return [x.requires_grad_() for x in (query, key, value)]


def seen_by(tensors: list[Tensor], **kwargs: Any) -> list[Tensor]:
    seen = regard.observe(*(x.detach() for x in tensors), scale=1.0, **kwargs, backend="triton")
    return [getattr(seen, row) for row in ROWS]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("profile", PROFILES)
def test_outlier_logits_agree_with_float64(profile: str, mask: str, d: int, dtype: torch.dtype) -> None:
    n, m = SIZES
    tensors = with_profile(PROFILES[profile](m), n, d, dtype)
    kwargs: dict[str, Any] = {"mask": MASKS[mask](n, m), "scale": 1.0}
    if mask == "causal":
        kwargs["sink"] = random(2, dtype=dtype, seed=5).requires_grad_()
    written = {"mask": kwargs["mask"].dense(n, m, device=DEVICE)} if isinstance(kwargs["mask"], regard.Mask) else {}
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs | written)
    found, grads = results("triton", tensors, kwargs)
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("height", [-1.0, OUTLIER_BITS - 0.0625, OUTLIER_BITS, OUTLIER_BITS + 0.0625, 40.0, 150.0])
def test_statistics_of_an_outlier_are_right_to_the_last_digits(height: float, d: int) -> None:
    """One logit of so many bits, all others 0: sums in closed form. Half of the rows are without; values are narrow."""
    n, m = SIZES
    query, key = torch.zeros(1, 4, n, d, device=DEVICE), torch.zeros(1, 2, m, d, device=DEVICE)
    query[:, :, ::2, 0], key[:, :, 900, 0] = 1, height
    value = torch.ones(1, 2, m, 40, device=DEVICE)
    tensors = [x.bfloat16() for x in (query, key, value)]
    seen = regard.observe(*tensors, scale=math.log(2), backend="triton")
    with_needle = torch.arange(n, device=DEVICE) % 2 == 0
    bits = torch.where(with_needle, height, 0.0).double()
    lse = torch.log(m - 1 + 2**bits)
    entropy = lse - bits * math.log(2) * 2**bits / lse.exp()
    largest = bits.clamp(min=0) * math.log(2)
    for found, true in ((seen.lse, lse), (seen.entropy, entropy), (seen.max_logit, largest)):
        torch.testing.assert_close(found.double(), true.expand(1, 4, n), atol=1e-5, rtol=3e-7)
    torch.testing.assert_close(
        seen.output, torch.ones_like(seen.output), atol=2**-7, rtol=0
    )  # weights are bfloat16 there


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("height", [OUTLIER_NATS - 0.1, OUTLIER_NATS + 0.1, 30.0, 200.0])
def test_rows_without_an_outlier_keep_their_bits(
    height: float, mask: str, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows of the same group with one. Random bits leave no full block."""
    n, m = SIZES
    outliers = slice(5, None, 50)
    tensors = with_profile(needle(height, 0.7)(m), n, d, torch.bfloat16, outliers)
    without = with_profile(torch.zeros(m), n, d, torch.bfloat16, outliers)
    others = [i for i in range(n) if (i - 5) % 50]
    expected = seen_by(without, mask=MASKS[mask](n, m))
    counter = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(forward_launch, "_counters", lambda w, tile: counter)
    launch_cache.clear()  # a remembered call has counters of its own
    found = seen_by(tensors, mask=MASKS[mask](n, m))
    assert bool(counter[1:].all()) == (height >= 30 and mask != "bits") or abs(height - OUTLIER_NATS) < 1
    assert not torch.equal(found[1], expected[1])
    assert same_bits([x[:, :, others] for x in found], [x[:, :, others] for x in expected])


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("profile", PROFILES)
def test_outlier_logits_have_the_same_bits_as_spans_as_a_tensor_and_with_nothing_observed(profile: str, d: int) -> None:
    n, m = SIZES
    tensors = with_profile(PROFILES[profile](m), n, d, torch.bfloat16)
    spans = seen_by(tensors, mask=regard.causal(m - n))
    written = regard.causal(m - n).dense(n, m, device=DEVICE).expand(1, 1, n, m)
    beside = torch.cat((written, of_bits(n, m).expand(1, 1, n, m)))
    assert same_bits([x[:1] for x in seen_by(tensors, mask=beside)], [x[:1] for x in spans])
    plain = regard.attention(*(x.detach() for x in tensors), scale=1.0, mask=regard.causal(m - n), backend="triton")
    assert torch.equal(plain, spans[0])


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("rows", [slice(None), slice(3, None, 1111)], ids=["all", "some"])
def test_many_retries_change_no_bit(rows: slice, mask: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many programs there are; so the first, the last and those between get a retry."""
    n = 4 * N
    tensors = with_profile(needle(25, 0.1)(n), n, d, torch.bfloat16, rows, heads=3)

    def by(programs: int) -> list[Tensor]:
        monkeypatch.setattr(forward_launch, "multiprocessors", lambda device: programs)
        launch_cache.clear()
        return seen_by(tensors, mask=MASKS[mask](n, n))

    first = by(132)
    for programs in (1, 2, 3, 50, 10**6):
        assert same_bits(by(programs), first)
    assert all(same_bits(by(132), first) for _ in range(20))
    true = regard.observe(*(x.detach().float() for x in tensors), scale=1.0, mask=MASKS[mask](n, n), backend="chunked")
    for x, row in zip(first, ROWS, strict=True):
        assert (x - getattr(true, row)).norm() < 0.01 * getattr(true, row).norm()


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "bits with full blocks"])
def test_heads_with_many_retries_take_the_safe_loop_to_the_same_bits(
    mask: str, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only these are counted. If they are known from the start, there is no retry; after others there are fewer."""
    n, m = SIZES
    tensors = [x.detach() for x in with_profile(needle(30, 0.4)(m), n, d, torch.bfloat16, slice(5, None, 50), heads=3)]
    tensors[0][0, :2, :, 0], tensors[0][1, 1:, :, 0] = 0, 0
    outliers = [2, 3]  # of two items with three heads

    def by(programs: int, before: int) -> tuple[list[Tensor], list[int]]:
        """What is observed, and how many row blocks of each head needed a retry, where so many had before."""
        counter = torch.full((7,), before, dtype=torch.int32, device=DEVICE)
        counter[0] = 0
        monkeypatch.setattr(forward_launch, "multiprocessors", lambda device: programs)
        monkeypatch.setattr(forward_launch, "_counters", lambda w, tile: counter)
        launch_cache.clear()
        return seen_by(tensors, mask=MASKS[mask](n, m)), [int(x) - before for x in counter[1:]]

    first, counted = by(132, 0)
    assert [at for at, count in enumerate(counted) if count > 0] == outliers
    behind, fewer = by(1, 0)
    assert all(0 < fewer[at] < counted[at] for at in outliers)
    ahead, none = by(132, 1000)
    assert none == [0] * 6
    assert same_bits(behind, first)
    assert same_bits(ahead, first)


@pytest.mark.parametrize("d", [64, 128])
def test_a_row_that_is_no_number_leaves_its_neighbours_their_bits(d: int) -> None:
    n, m = SIZES
    tensors = with_profile(torch.zeros(m), n, d, torch.bfloat16)
    expected = seen_by(tensors)
    with torch.no_grad():
        tensors[0][:, :, 77] = math.nan
    found = seen_by(tensors)
    others = [i for i in range(n) if i != 77]
    assert found[0][:, :, 77].isnan().all()
    assert same_bits([x[:, :, others] for x in found], [x[:, :, others] for x in expected])

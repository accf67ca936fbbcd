"""The Hopper kernels for lists of keys without a GPU: numbers and hazards, by an interpreter of our own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from gluon_interpreter import run_hopper_kernels
from regard.kernels.hopper import chosen_launch as chip
from regard.kernels.portable import chosen_launch

N, M = 3, 300


def lists(*shape: int, below: int = M) -> Tensor:
    """Random lists: some entries are −1, and some keys are named twice."""
    return torch.randint(-1, below, shape, generator=torch.Generator().manual_seed(7))


def inputs(heads: int, key_heads: int, n: int, dims: tuple[int, int], batch: int = 1) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    sizes = ((heads, n, dims[0]), (key_heads, M, dims[0]), (key_heads, M, dims[1]))
    return [torch.randn(batch, *size, generator=made).half() for size in sizes]


SHORT = lists(N, 256)
SHORT[1, 70:] = -1
SHORT[2] = -1
BLOCKS = lists(N, 4, below=5)  # 300 keys fill four blocks and a part of the fifth
BLOCKS[0, 0], BLOCKS[1, 2:], BLOCKS[2] = 4, -1, -1
CASES = {
    "64 heads share a list": ((64, 1, N, (128, 128)), regard.chosen(SHORT)),
    "two key heads, two dims": ((128, 2, 2, (64, 128)), regard.chosen(lists(1, 2, 2, 128))),
    "lists for two rows": ((32, 1, 4, (128, 64)), regard.chosen(lists(2, 64, below=40), rows=2)),
    "two lists per key head": ((128, 1, 1, (64, 64)), regard.chosen(lists(1, 2, 1, 64))),
    "lists by batch item": ((64, 1, 1, (64, 64), 2), regard.chosen(lists(2, 1, 1, 128))),
    "four heads, lists for 16 rows": ((4, 1, 32, (64, 64)), regard.chosen(lists(2, 64, below=90), rows=16)),
    "16 heads, lists for 16 rows": ((16, 1, 32, (64, 64)), regard.chosen(lists(2, 128), rows=16)),
    "blocks of 64": ((64, 1, N, (128, 128)), regard.chosen(BLOCKS, size=64)),
    "blocks of 128": ((64, 1, N, (64, 128)), regard.chosen(lists(N, 2, below=3), size=128)),
    "16 heads, blocks for 16 rows": ((16, 1, 32, (64, 64)), regard.chosen(lists(2, 3, below=5), size=64, rows=16)),
    "two lists of blocks per key head": (
        (128, 1, 4, (64, 64)),
        regard.chosen(lists(1, 2, 2, 2, below=3), size=128, rows=2),
    ),
    "causal": ((64, 1, N, (64, 64)), regard.chosen(lists(N, 128, below=5)) & regard.causal(offset=0)),
    "causal, lists for 16 rows": (
        (16, 1, 32, (64, 64)),
        regard.chosen(lists(2, 192, below=60), rows=16) & regard.causal(offset=0),
    ),
    "causal, blocks for 16 rows": (
        (16, 1, 32, (128, 128)),
        regard.chosen(lists(2, 3, below=3), size=64, rows=16) & regard.causal(offset=60),
    ),
    "window, blocks by batch item": (
        (32, 1, 4, (64, 64), 2),
        regard.chosen(lists(2, 1, 2, 2, below=3), size=128, rows=2)
        & regard.window(70, offset=torch.tensor([100, 290])),
    ),
}
OBSERVED = ("64 heads share a list", "16 heads, blocks for 16 rows", "causal, lists for 16 rows")


def found(x: list[Tensor], mask: regard.Mask, backend: str, entropy: bool = False) -> dict[str, Tensor]:
    x = [t.clone().requires_grad_() for t in x]
    seen: Any = regard.observe(*x, mask=mask, backend=backend) if entropy else None
    output = seen.output if entropy else regard.attention(*x, mask=mask, backend=backend)
    loss = (output * torch.arange(output.numel()).view(output.shape).cos()).sum()
    if entropy:
        loss = loss + torch.where(seen.lse > -torch.inf, seen.lse, 0.0).square().sum() * 0.01
    slopes = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(loss, x), strict=True))
    return {"output": output, **({"entropy": seen.entropy, "lse": seen.lse} if entropy else {}), **slopes}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(chip, "SUMMED", (torch.float16,))  # the interpreter has no bfloat16
    return run_hopper_kernels(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_float64(name: str, started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, mask = CASES[name]
    monkeypatch.setattr(chosen_launch, "_BUFFER", 2**19)  # several chunks of lists
    x = inputs(*sizes)
    ours = found(x, mask, "triton")
    true = found([t.double() for t in x], mask, "reference")
    assert started[0] == "chosen_forward"
    assert set(started[1:]) == {"chosen_backward"}
    for what, wanted in true.items():
        error = (ours[what].double() - wanted).abs().max() / wanted.abs().max()
        assert error < 0.01, f"{what}: {error:.1e}"


@pytest.mark.parametrize("name", OBSERVED)
def test_statistics_are_those_of_float32(name: str, started: list[str]) -> None:
    sizes, mask = CASES[name]
    x = inputs(*sizes)
    ours = found(x, mask, "triton", entropy=True)
    true = found([t.double() for t in x], mask, "reference", entropy=True)
    assert set(started) == {"chosen_forward", "chosen_backward"}
    for what in ("entropy", "lse"):
        torch.testing.assert_close(ours[what].double(), true[what], rtol=1e-5, atol=1e-5)
    for what in ("output", "dq", "dk", "dv"):
        assert (ours[what].double() - true[what]).abs().max() < 0.01 * true[what].abs().max()


def wide_rows(x: Tensor) -> Tensor:
    """The same numbers with rows that begin every 136 numbers."""
    return torch.nn.functional.pad(x, (0, 136 - x.shape[-1]))[..., : x.shape[-1]]


SHARED = regard.chosen(lists(N, 64))
REFUSED: dict[str, tuple[tuple[Any, ...], regard.Mask, dict[str, Any]]] = {
    "32 rows share a list": ((32, 1, N, (64, 64)), SHARED, {}),
    "96 rows share a list": ((96, 1, N, (64, 64)), SHARED, {}),
    "a last list with fewer rows": ((64, 1, 3, (64, 64)), regard.chosen(lists(2, 64), rows=2), {}),
    "dims of 96": ((64, 1, N, (96, 96)), SHARED, {}),
    "lists of 70": ((64, 1, N, (64, 64)), regard.chosen(lists(N, 70)), {}),
    "blocks of 4": ((64, 1, N, (64, 64)), regard.chosen(lists(N, 64, below=M // 4), size=4), {}),
    "blocks of 96": ((64, 1, N, (64, 64)), regard.chosen(lists(N, 2, below=4), size=96), {}),
    "a cap": ((64, 1, N, (64, 64)), SHARED, {"softcap": 5.0}),
    "dropout": ((64, 1, N, (64, 64)), SHARED, {"dropout": 0.1}),
    "a negative scale": ((64, 1, N, (64, 64)), SHARED, {"scale": -0.1}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_problems_are_left_to_the_portable_kernels(name: str, started: list[str]) -> None:
    sizes, mask, more = REFUSED[name]
    regard.attention(*inputs(*sizes), mask=mask, backend="triton", **more)
    assert started == []


@pytest.mark.parametrize("which", range(3))
def test_rows_of_queries_may_begin_anywhere_and_those_of_keys_at_multiples_of_16(
    which: int, started: list[str]
) -> None:
    x = inputs(64, 1, N, (128, 128))
    true = regard.attention(*x, mask=SHARED, backend="reference")
    x[which] = wide_rows(x[which])
    found = regard.attention(*x, mask=SHARED, backend="triton")
    assert started == (["chosen_forward"] if which == 0 else [])
    torch.testing.assert_close(found, true, rtol=0.01, atol=0.01)


def test_gradients_in_float16_are_those_of_the_portable_kernels(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chip, "SUMMED", (torch.bfloat16,))
    found(inputs(64, 1, N, (64, 64)), SHARED, "triton")
    assert started == ["chosen_forward"]


UNSEEN = {
    "keys": regard.chosen(torch.cat([torch.arange(5, 75), -torch.ones(58, dtype=torch.long)])[None]),
    "keys under a mask": regard.chosen(torch.arange(128)[None]) & regard.window(69, offset=74),
    "blocks under a mask": regard.chosen([[0, 1]], size=64) & regard.window(69, offset=74),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_keys_that_no_row_sees_leave_no_trace(name: str, started: list[str]) -> None:
    x, mask = inputs(64, 1, 1, (128, 128)), UNSEEN[name]
    before = found(x, mask, "triton")
    for t in x[1:]:
        t[:, :, :5] = torch.nan
        t[:, :, 75:] = torch.inf
    after = found(x, mask, "triton")
    assert set(started) == {"chosen_forward", "chosen_backward"}
    for what, value in before.items():
        torch.testing.assert_close(after[what], value, rtol=0, atol=0)


@pytest.mark.parametrize("by_chip", [False, True])
def test_the_query_of_a_row_that_sees_nothing_leaves_no_trace(by_chip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_chip:
        monkeypatch.setattr(chip, "SUMMED", (torch.float16,))
        started = run_hopper_kernels(monkeypatch)
    x, mask = inputs(16, 1, 32, (64, 64)), regard.chosen(lists(2, 64, below=60), rows=16) & regard.causal(offset=-8)
    clean = found(x, mask, "triton")
    x[0][:, :, :8] = torch.nan
    for what, wanted in found(x, mask, "triton").items():
        assert torch.equal(wanted, clean[what]), what
    assert not by_chip or {*started} == {"chosen_forward", "chosen_backward"}


def test_gradients_whose_rows_need_too_much_memory_are_left_to_the_portable_kernels(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_launch, "_BUFFER", 2**16)
    sizes, mask = CASES["16 heads, lists for 16 rows"]
    found(inputs(*sizes), mask, "triton")
    assert started == ["chosen_forward"]

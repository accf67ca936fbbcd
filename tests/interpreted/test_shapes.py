"""Tensors as they come: any strides, expanded or far apart in memory, several leading dimensions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import agree, as_double, leaves, loss

N, M, D, E = 20, 40, 16, 12


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
    """Our kernels on the tensors as they are, `reference` on contiguous copies of them in float64."""
    found = []
    for backend, (given, more) in (("triton", (tensors, kwargs)), ("reference", as_double(tensors, kwargs))):
        seen = regard.observe(*given, **more, backend=backend)
        grads = torch.autograd.grad(loss(seen.output, seen.lse, seen.entropy), leaves(given, more))
        found.append([seen.output, seen.lse, seen.entropy, seen.max_logit, seen.received, *grads])
    assert [x.shape for x in found[0]] == [x.shape for x in found[1]]
    agree(*found, [], 2, "result")


STRIDED: dict[str, Callable[[int, int, int], Tensor]] = {
    "heads beside rows": lambda h, n, d: random(2, n, h, d).transpose(1, 2),
    "rows beside dims": lambda h, n, d: random(2, h, d, n).mT,
    "batch innermost": lambda h, n, d: random(h, n, d, 2).permute(3, 0, 1, 2),
    "a part of a larger one": lambda h, n, d: random(3, h + 1, n + 5, d + 7)[1:, 1:, 3 : n + 3, 2 : d + 2],
    "every second dim": lambda h, n, d: random(2, h, n, 2 * d)[..., ::2],
    "every third row": lambda h, n, d: random(2, h, 3 * n, d)[:, :, ::3],
    "one item for all": lambda h, n, d: random(1, h, n, d).expand(2, h, n, d),
    "one head for all": lambda h, n, d: random(2, 1, n, d).expand(2, h, n, d),
    "one row for all": lambda h, n, d: random(2, h, 1, d).expand(2, h, n, d),
}


@pytest.mark.parametrize("name", STRIDED)
def test_any_strides_are_taken_as_they_are(name: str) -> None:
    make = STRIDED[name]
    tensors = [make(2, N, D).requires_grad_(), make(1, M, D).requires_grad_(), make(1, M, E).requires_grad_()]
    same(tensors, {"mask": regard.causal()})


@pytest.mark.parametrize("sink", [random(1), random(4)[::2], random(2).flip(0)], ids=["shared", "stepped", "per head"])
def test_a_sink_has_any_strides(sink: Tensor) -> None:
    tensors = [random(1, heads, N, D).requires_grad_() for heads in (2, 1, 1)]
    same(tensors, {"sink": sink.requires_grad_()})


def test_a_bias_has_any_strides() -> None:
    tensors = [
        random(2, 2, N, D).requires_grad_(),
        random(2, 1, M, D).requires_grad_(),
        random(2, 1, M, E).requires_grad_(),
    ]
    for bias in (random(2, M, N).mT, random(2, 2, N, 2 * M)[..., ::2], random(2, 1, N, M).expand(2, 2, N, M)):
        same(tensors, {"bias": bias.requires_grad_()})


def test_a_cotangent_has_any_strides() -> None:
    tensors = [
        random(1, 2, N, D).requires_grad_(),
        random(1, 1, M, D).requires_grad_(),
        random(1, 1, M, E).requires_grad_(),
    ]
    doubled, _ = as_double(tensors, {})
    for upstream in (random(1, 2, 1, 1).expand(1, 2, N, E), random(1, N, 2, E).transpose(1, 2), random(1, 2, E, N).mT):
        found = torch.autograd.grad(regard.attention(*tensors, backend="triton"), tensors, upstream)
        true = torch.autograd.grad(regard.attention(*doubled, backend="reference"), doubled, upstream.double())
        agree(list(found), list(true), [], 3, "gradient")


def several(*lead: int, heads: int = 2) -> list[Tensor]:
    tails = (heads, N, D), (1, M, D), (1, M, E)
    return [random(*lead, *tail, seed=at).requires_grad_() for at, tail in enumerate(tails)]


keep = random(2, 2, N, M, seed=9) > -0.5
SEVERAL: dict[str, Callable[[], tuple[list[Tensor], dict[str, Any]]]] = {
    "a length for each of the first": lambda: (several(2, 3, heads=1), {"mask": regard.padding([40, 9])}),
    "bits for each of the first": lambda: (several(2, 3, heads=1), {"mask": regard.padding(keep[:, 0, 0])}),
    "bits for each of the first and head": lambda: (several(2, 3), {"mask": regard.dense(keep)}),
    "a tensor for each of the second": lambda: (several(3, 2, heads=1), {"mask": keep[:, :1]}),
    "a bias for each of the first": lambda: (several(2, 3, heads=1), {"bias": random(2, 1, 1, N, M).requires_grad_()}),
    "a bias for each of the second": lambda: (several(2, 3), {"bias": random(3, 2, N, 1).requires_grad_()}),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_leading_dimensions(name: str) -> None:
    same(*SEVERAL[name]())


def test_leading_dimensions_broadcast() -> None:
    query, key, value = random(2, 1, 2, N, D), random(3, 1, M, D), random(2, 3, 1, M, E)
    tensors = [query.requires_grad_(), key[None].requires_grad_(), value.requires_grad_()]
    same(tensors, {"mask": regard.causal()})


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_inputs_without_heads_have_results_without_heads(lead: tuple[int, ...]) -> None:
    tensors = [random(*lead, n, d, seed=n).requires_grad_() for n, d in ((N, D), (M, D), (M, E))]
    same(tensors, {"mask": regard.causal()})
    assert regard.observe(*tensors, backend="triton").output.shape == (*lead, N, E)


FAR = """
import mmap, warnings
import torch, regard

warnings.simplefilter("ignore")

def far(shape, strides, seed):
    '''A tensor whose numbers lie gigabytes apart, in memory that is reserved nowhere.'''
    size = 2 * (1 + sum((n - 1) * s for n, s in zip(shape, strides)))
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    x = torch.frombuffer(room, dtype=torch.float16).as_strided(shape, strides)
    return x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))

def check(what, tensors, bias=None):
    print(what, flush=True)
    near = [x.contiguous().double() for x in tensors]
    added = None if bias is None else bias.contiguous().double()
    true = regard.observe(*near, bias=added, mask=regard.causal(), backend="reference")
    tensors = [x.requires_grad_() for x in tensors]
    seen = regard.observe(*tensors, bias=bias, mask=regard.causal(), backend="triton")
    torch.testing.assert_close(seen.output.double(), true.output, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(seen.received.double(), true.received, atol=1e-4, rtol=1e-4)
    assert torch.equal(seen.top(2)[1], true.top(2)[1])
    assert all(g.isfinite().all() for g in torch.autograd.grad(seen.output.sum(), tensors))

wide = 2**30 + 8  # three of them are more than 2**31 numbers, which four bytes cannot count
for what, shape, strides in (
    ("items", (3, 1, 5, 4), (wide, 4, 4, 1)),
    ("heads", (1, 3, 5, 4), (4, wide, 4, 1)),
    ("rows", (1, 1, 5, 4), (4, 4, wide // 2, 1)),
    ("dims", (1, 1, 5, 4), (4, 4, 1, wide)),
):
    check(what, [far(shape, strides, seed) for seed in range(3)])
for what, shape, strides in (
    ("heads of the bias", (1, 3, 5, 5), (4, wide, 5, 1)),
    ("rows of the bias", (1, 1, 5, 5), (4, 4, wide // 2, 1)),
    ("keys of the bias", (1, 1, 5, 5), (4, 4, 1, wide // 2)),
):
    made = torch.Generator().manual_seed(0)
    check(what, [torch.randn(1, 3, 5, 4, generator=made).half() for _ in range(3)], far(shape, strides, 0))
print("all")
"""


def test_numbers_may_lie_more_than_two_billion_apart() -> None:
    """In a process of its own, since an offset that overflows reads memory that is not there."""
    env = {**os.environ, "PYTHONPATH": str(Path(regard.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", FAR], capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert (done.returncode, done.stdout.split("\n")[-2:-1]) == (0, ["all"]), done.stdout + done.stderr[-2000:]

"""No compilation for a mask: what Triton would compile is counted where there is no GPU, by the keys of its cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel for this system")

import regard
from uncompiled import noted

FORWARD, BACKWARD, PASSES = (
    "regard.kernels.portable.forward",
    "regard.kernels.portable.backward",
    "regard.kernels.portable.statistics",
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """What calls would compile, (kernel, key); nothing runs."""
    return noted(monkeypatch)


def call(mask: regard.Mask | torch.Tensor | None, n: int = 1024, m: int = 1024, batch: int = 2) -> None:
    """Everything that a mask has a part in: forward, backward, the passes."""
    shapes = (batch, 4, n, 64), (batch, 2, m, 64), (batch, 2, m, 64)
    tensors = [torch.zeros(s, dtype=torch.float16, requires_grad=True) for s in shapes]
    seen = regard.observe(*tensors, mask=mask, backend="triton")
    torch.autograd.grad(seen.output.float().sum() + seen.entropy.sum(), tensors)
    seen.received, seen.gradient_health, seen.top(3)
    seen.map(min(n, 4), 4), seen.survey(min(n, 4), 4)


def keep(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.4


KINDS: dict[str, tuple[Callable[[], Any], list[Callable[[], Any]]]] = {
    "intervals": (
        lambda: call(regard.causal()),
        [
            lambda: call(regard.causal(offset=3)),
            lambda: call(regard.window(5, 2)),
            lambda: call(regard.blocks(100)),
            lambda: call(regard.packed([1000, 24])),
            lambda: call(regard.prefix(7)),
            lambda: call(regard.causal(), 999, 999),
            lambda: call(regard.causal(), 2048, 1001),
            lambda: call(regard.window(9), batch=3),
        ],
    ),
    "intervals of items": (
        lambda: call(regard.causal()),
        [
            lambda: call(regard.padding([5, 1000])),
            lambda: call(regard.padding([700, 1]), 1000, 1000),
            lambda: call(regard.causal() & regard.padding([700, 1]), 999, 1001),
            lambda: call(regard.causal(offset=torch.tensor([3, 4])), 777, 1024),
        ],
    ),
    "bits": (
        lambda: call(regard.strided(3)),
        [
            lambda: call(regard.strided(5) | regard.window(9)),
            lambda: call(regard.window(9) | regard.global_tokens([0, 7])),
            lambda: call(regard.predicate(lambda b, h, i, j: (i + j) % 3 > 0)),
            lambda: call(regard.strided(5), 999, 1111),
            lambda: call(keep(1024, 1024)),
        ],
    ),
    "bits of items and heads": (
        lambda: call(regard.strided(3)),
        [
            lambda: call(regard.padding(keep(2, 1024))),
            lambda: call(regard.padding(keep(2, 999)), 999, 999),
            lambda: call(keep(4, 1024, 1024)),
            lambda: call(keep(2, 4, 555, 1000), 555, 1000),
        ],
    ),
    "few queries": (
        lambda: call(regard.causal(), 1, 8000),  # eight splits
        [
            lambda: call(regard.window(70), 1, 5000),
            lambda: call(regard.causal(), 1, 5001, batch=3),
            lambda: call(regard.padding([4, 5001]), 1, 5001),
        ],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_mask_of_a_known_kind_compiles_nothing(kind: str, compiled: set[tuple[str, str]]) -> None:
    known, others = KINDS[kind]
    known()
    before = set(compiled)
    forward = f"{FORWARD}.forward" if kind != "few queries" else "regard.kernels.portable.decode.decode_split"
    assert {forward, f"{BACKWARD}.backward_dkdv", f"{BACKWARD}.backward_dq"} <= {name for name, _ in before}
    for at, other in enumerate(others):
        other()
        assert sorted(name for name, _ in compiled - before) == [], f"call {at} compiles"


def test_the_masks_of_a_kernel_are_of_three_kinds(compiled: set[tuple[str, str]]) -> None:
    for mask in (None, regard.causal(), regard.padding([5, 1000]), regard.strided(3), keep(2, 4, 1024, 1024)):
        call(mask)
    for name in (f"{FORWARD}.forward", f"{BACKWARD}.backward_dkdv", f"{BACKWARD}.backward_dq", f"{PASSES}.received"):
        assert sum(kernel == name for kernel, _ in compiled) == 3

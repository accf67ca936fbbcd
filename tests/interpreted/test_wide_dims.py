"""Dims beyond 256: 512 as in Gemma's global layers, and 576 with values of 512 as in absorbed latent attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import agree, as_double
from regard.kernels.portable import launch
from regard.kernels.portable.configs import CHIPS, Config


def inputs(dim: int, of_values: int, n: int, m: int, heads: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (heads, n, dim), (1, m, dim), (1, m, of_values)
    return [torch.randn(1, *size, generator=draw).requires_grad_() for size in sizes]


def same(tensors: list[Tensor], derivatives: bool = True, **kwargs: Any) -> None:
    """Our kernels, and `reference` in float64: output, statistics, gradients."""
    found = []
    for backend, (given, more) in (("triton", (tensors, kwargs)), ("reference", as_double(tensors, kwargs))):
        seen = regard.observe(*given, **more, backend=backend)
        results = [seen.output, seen.lse, seen.entropy, seen.max_logit, seen.received, seen.gradient_health]
        results += [seen.map(1, 3), seen.top(3)[0]]
        if derivatives:
            total = seen.output.sin().sum() + seen.lse.cos().sum() + seen.entropy.sin().sum()
            results += torch.autograd.grad(total, given)
        found.append(results)
    agree(*found, [], 2, "result")


@pytest.mark.parametrize(("dim", "of_values"), [(300, 512), (576, 32)])
def test_output_statistics_and_gradients(dim: int, of_values: int) -> None:
    same(inputs(dim, of_values, 5, 19), mask=regard.causal())


@pytest.mark.parametrize("dim", [512, 576])
def test_many_heads_decode_in_tiles_of_rows(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MANY_KEYS", 32)
    monkeypatch.setattr(launch, "split_length", lambda keys: 16)
    tensors = [t.detach() for t in inputs(dim, 512, 1, 40, heads=18)]  # a tile has 16 rows
    ours, exact = (
        regard.observe(*given, backend=backend)
        for backend, given in (("triton", tensors), ("reference", as_double(tensors, {})[0]))
    )
    agree([ours.output, ours.lse, ours.entropy], [exact.output, exact.lse, exact.entropy], [], 2, "result")


def test_a_program_may_have_a_part_of_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels import arguments

    monkeypatch.setattr(arguments, "chip_of", lambda device: CHIPS["9.0"])
    tile = Config(16, 16, 4, 1, columns=256)
    monkeypatch.setitem(regard.kernels.portable.configs._LARGE, ("forward", 4, 512), tile)
    programs: list[int] = []
    start = launch.launch_cache.start
    monkeypatch.setattr(
        launch.launch_cache,
        "start",
        lambda *a: (programs.append(a[2]) if "PARTS" in str(a[3]["C"]) else None, start(*a)),
    )
    same(inputs(32, 512, 5, 19), mask=regard.causal())
    assert programs == [2 * 2]  # heads × parts


def test_tangents_come_from_the_formula() -> None:
    tensors = inputs(512, 512, 3, 5)
    moved = [torch.ones_like(t) for t in tensors]
    for backend in ("triton", "reference"):
        given = [t.detach().to(torch.float64 if backend == "reference" else torch.float32) for t in tensors]
        tangents = [t.to(given[0].dtype) for t in moved]

        def attend(*x: Tensor, backend: str = backend) -> Tensor:
            return regard.attention(*x, mask=regard.causal(), backend=backend)

        found = torch.func.jvp(attend, tuple(given), tuple(tangents))[1]
        if backend == "triton":
            ours = found
    torch.testing.assert_close(ours.double(), found, rtol=1e-4, atol=1e-5)

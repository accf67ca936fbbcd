"""Calls like an earlier one on a GPU: neither checked nor chosen again, with the same bits, and refused as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from gpu.test_kernels_on_gpu import DEVICE, pytestmark, random, same_bits  # noqa: F401
from regard import functional
from regard.backends import remembered
from regard.biases import Bias
from regard.kernels import launch_cache
from regard.scores import Pointwise

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": regard.causal()},
    "window": {"mask": regard.window(100)},
    "padding": {"mask": regard.padding(torch.tensor([300, 500]))},
    "strided": {"mask": regard.strided(3)},
    "softcap": {"mask": regard.window(100), "softcap": 20.0},
    "scale": {"scale": 0.2},
    "negative scale": {"scale": -0.2, "mask": regard.causal()},
    "sink": {"mask": regard.window(100), "sink": torch.randn(8)},
    "half a sink": {"mask": regard.window(100), "sink": torch.randn(8).bfloat16()},
    "slopes": {"mask": regard.causal(), "bias": regard.biases.alibi(torch.rand(8))},
    "a shared table": {"bias": regard.biases.relative(torch.randn(65))},
}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {  # which Hopper's kernels take as a cap or a bias
    "cap": lambda score, b, h, i, j: 5.0 * torch.tanh(score / 5.0),
    "bias": lambda score, b, h, i, j: score - 0.1 * (h + 1) * (i - j).abs(),
}


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if isinstance(x, Tensor | regard.Mask | Bias) else x for name, x in options.items()}


def tensors(seed: int, dtype: torch.dtype, n: int = 512) -> list[Tensor]:
    return [random(2, 8, n, 64, dtype=dtype, seed=seed + i).requires_grad_() for i in range(3)]


def results(x: list[Tensor], look: bool, options: dict[str, Any]) -> list[Tensor]:
    seen = regard.observe(*x, **options) if look else None
    output = regard.attention(*x, **options) if seen is None else seen.output
    rows = [] if seen is None else [seen.lse, seen.entropy, seen.max_logit]
    return [output.detach(), *rows, *torch.autograd.grad(output, x, torch.ones_like(output))]


@pytest.fixture(autouse=True)
def forgetful() -> None:
    remembered._CALLS.clear()
    launch_cache.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_call_has_the_bits_of_a_first_one(
    name: str, look: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = on_gpu(CALLS[name])
    ours = look or name not in ("plain", "causal", "scale")  # torch's kernels add in any order
    expected = [results(tensors(seed, dtype), look, options) for seed in (0, 10)]
    monkeypatch.setattr(functional, "pose", None)  # what is remembered is not checked again
    for _ in range(2):
        for seed, first in zip((0, 10), expected, strict=True):
            again = results(tensors(seed, dtype), look, options)
            if ours:
                assert same_bits(again, first)
            else:
                torch.testing.assert_close(again, first, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper")
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_a_cap_or_a_bias_is_remembered(
    name: str, look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"mask": regard.causal(), "score": Pointwise(FUNCTIONS[name])}
    expected = [results(tensors(seed, torch.bfloat16), look, options) for seed in (0, 10)]
    true = regard.attention(*(x.double() for x in tensors(0, torch.bfloat16)), **options)
    torch.testing.assert_close(expected[0][0].double(), true.detach(), atol=2e-2, rtol=2e-2)
    monkeypatch.setattr(functional, "pose", None)
    for _ in range(2):
        for seed, first in zip((0, 10), expected, strict=True):
            assert same_bits(results(tensors(seed, torch.bfloat16), look, options), first)


def test_slopes_that_change_or_learn_count_in_a_remembered_call() -> None:
    x = tensors(0, torch.bfloat16)
    slopes = torch.rand(8, device=DEVICE, requires_grad=True)
    for factor in (1.0, 2.0, 3.0):

        def observed(x: list[Tensor], factor: float = factor, **backend: str) -> list[Tensor]:
            seen = regard.observe(*x, mask=regard.causal(), bias=regard.biases.alibi(slopes * factor), **backend)
            total = seen.output.float().square().sum()
            return [seen.output, seen.received, *torch.autograd.grad(total, [*x, slopes])]

        found = observed(x)
        true = observed([t.detach().double().requires_grad_() for t in x], backend="reference")
        for a, b in zip(found, true, strict=True):
            most = float(b.detach().abs().max())
            torch.testing.assert_close(a.double(), b.double(), atol=2e-2 * most, rtol=2e-2)


def test_without_a_derivative_too(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [t.detach() for t in tensors(0, torch.bfloat16)]
    for mask in (None, regard.causal(), regard.window(100)):
        regard.attention(*x, mask=mask)  # the first of all sets the order of torch's kernels
        expected = regard.attention(*x, mask=mask)
        with monkeypatch.context() as patch:
            patch.setattr(functional, "pose", None)
            assert same_bits([regard.attention(*x, mask=mask)], [expected])


def test_masks_made_anew_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(512, device=DEVICE) // 100
    masks = {
        "lengths": lambda: regard.packed(torch.tensor([100, 412], device=DEVICE)),
        "list": lambda: regard.packed([100, 412]),
        "ids": lambda: regard.documents(ids),
        "ids of 32 bits": lambda: regard.documents(ids.int()),
        "ids on the CPU": lambda: regard.documents(torch.arange(512) // 100),
    }
    for make in masks.values():
        x = tensors(0, torch.bfloat16)
        expected = results(x, False, {"mask": make() & regard.causal()})
        with monkeypatch.context() as patch:
            patch.setattr(functional, "pose", None)
            assert same_bits(results(x, False, {"mask": make() & regard.causal()}), expected)
        true = regard.attention(*x, mask=make() & regard.causal(), backend="reference")
        torch.testing.assert_close(expected[0], true.detach(), atol=1e-2, rtol=1e-2)


def test_a_list_that_does_not_fit_is_refused_each_time() -> None:
    x = [t.detach() for t in tensors(0, torch.bfloat16)]
    for _ in range(2):
        regard.attention(*x, mask=regard.packed([100, 412]))
        with pytest.raises(regard.errors.MaskError, match="sum to 511"):
            regard.attention(*x, mask=regard.packed([100, 411]))


def test_ids_that_are_no_longer_sorted_are_read_again() -> None:
    x = [t.detach() for t in tensors(0, torch.bfloat16)]
    ids = torch.arange(512, device=DEVICE) // 100
    kept = regard.documents(ids)
    for _ in range(2):
        regard.attention(*x, mask=kept)
    ids.copy_(torch.arange(512, device=DEVICE) % 3)
    expected = regard.attention(*x, mask=kept, backend="reference")
    for mask in (kept, regard.documents(ids)):
        torch.testing.assert_close(regard.attention(*x, mask=mask), expected, atol=1e-2, rtol=1e-2)


def test_a_mask_changed_in_place_is_read_again() -> None:
    lengths = torch.tensor([300, 500], device=DEVICE)
    mask = regard.padding(lengths)
    x = [t.detach() for t in tensors(0, torch.bfloat16)]
    regard.attention(*x, mask=mask), regard.attention(*x, mask=mask)
    lengths.fill_(70)
    expected = regard.attention(*x, mask=mask, backend="reference")
    torch.testing.assert_close(regard.attention(*x, mask=mask), expected, atol=1e-2, rtol=1e-2)


def test_a_backward_pass_follows_hooks_on_saved_tensors() -> None:
    x = tensors(0, torch.bfloat16)
    expected = [results(x, False, {"mask": regard.window(100)}) for _ in range(2)][1]
    turned = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in x]
    for given in (x, turned):
        with torch.autograd.graph.save_on_cpu():
            assert same_bits(results(given, False, {"mask": regard.window(100)}), expected)


def test_another_stream_and_a_graph_get_the_same_bits() -> None:
    x = [t.detach() for t in tensors(0, torch.bfloat16)]
    mask = regard.padding(torch.tensor([300, 500], device=DEVICE))
    expected = [regard.attention(*x, mask=mask) for _ in range(3)][-1]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = regard.attention(*x, mask=mask)
    torch.cuda.current_stream().wait_stream(side)
    assert same_bits([found], [expected])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = regard.attention(*x, mask=mask)
    static.zero_()
    for _ in range(2):
        graph.replay()
    assert same_bits([static], [expected])


def test_what_is_refused_is_still_refused_with_the_same_words() -> None:
    x = [t.detach() for t in tensors(0, torch.bfloat16)]
    for _ in range(2):
        regard.attention(*x, mask=regard.window(100), softcap=20.0)
    for wrong in ({"dropout": 2.0}, {"dropout": None}, {"softcap": -1.0}, {"sink": torch.zeros(3, device=DEVICE)}):
        options = {"mask": regard.window(100), "softcap": 20.0, **wrong}
        with pytest.raises(regard.errors.RegardError) as on_gpu_error:
            regard.attention(*x, **options)
        there = {name: t.cpu() if isinstance(t, Tensor) else t for name, t in options.items()}
        with pytest.raises(regard.errors.RegardError) as on_cpu_error:
            regard.attention(*(t.cpu() for t in x), **there)
        assert str(on_gpu_error.value) == str(on_cpu_error.value)


@pytest.mark.parametrize("mask", [None, regard.window(100), "unsorted documents"])
def test_the_first_step_of_a_checkpointed_call(mask: regard.Mask | str | None) -> None:
    """The forward pass of the first call takes the long way, and its repetition the short one."""
    x = tensors(0, torch.bfloat16)
    if isinstance(mask, str):
        mask = regard.documents(torch.arange(x[0].shape[-2], device=DEVICE) % 3)
    for _ in range(2):
        output = checkpoint(lambda *x: regard.attention(*x, mask=mask), *x, use_reentrant=False)
        found = torch.autograd.grad(output, x, torch.ones_like(output))
    expected = results(x, False, {"mask": mask})[1:]
    torch.testing.assert_close(list(found), expected, atol=2e-2, rtol=2e-2)

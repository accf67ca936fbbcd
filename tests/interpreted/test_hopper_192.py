"""Gradients of keys of 129 to 192 dims with values of 65 to 128, by the interpreter of Hopper kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import Case, Shape, agree, plain_results, results, truth
from gluon_interpreter import run_hopper_kernels
from regard.kernels.arguments import KernelArgs
from regard.kernels.block_mask import BlockMask
from regard.kernels.hopper import backward_launch

LATENT = Shape(batch=1, heads=2, kv_heads=1, n=100, m=200, d=192, dv=128)
SEEN = torch.rand(2, 100, 200, generator=torch.Generator().manual_seed(0)) < 0.01
SEEN[:, :70, :64] = True
SLOPES = torch.tensor([0.1, 0.2])


def everything(s: Shape) -> dict[str, Any]:
    return {"mask": SEEN, "bias": torch.randn(s.heads, s.n, s.m), "softcap": 5.0}


CASES = [
    Case("plain", lambda s: {}, replace(LATENT, n=150)),
    Case("causal", lambda s: {"mask": regard.causal()}, replace(LATENT, heads=1, n=200)),
    Case("window", lambda s: {"mask": regard.window(40, 9)}, replace(LATENT, d=136, dv=72)),
    Case("padding", lambda s: {"mask": regard.padding([130])}, replace(LATENT, d=160, dv=96)),
    Case("bits by head", lambda s: {"mask": SEEN, "softcap": 3.0}, LATENT),
    Case("alibi", lambda s: {"bias": regard.biases.alibi(SLOPES)}, replace(LATENT, n=70, m=70)),
    Case("all together", everything, LATENT),
]


def tile_of(tensors: list[Tensor]) -> backward_launch.BackwardTile:
    q, k, v = tensors
    return backward_launch.tile_for(KernelArgs(q, k, v, BlockMask(q.shape[2], k.shape[2])))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_agree_with_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    tensors, kwargs = case.inputs(torch.float16)
    assert tile_of(tensors) == backward_launch.D192
    found, true, ordinary = results("triton", tensors, kwargs), truth(tensors, kwargs), plain_results(tensors, kwargs)
    agree(found[1], true[1], ordinary[1], 3, "gradient")


def test_the_order_in_which_warps_run_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in range(3):
        with monkeypatch.context() as patch:
            run_hopper_kernels(patch, seed, programs=seed + 1)
            tensors = Case("window", lambda s: {}, LATENT).inputs(torch.float16)[0]
            seen = regard.observe(*tensors, mask=regard.window(70), backend="triton")
            loss = seen.output.square().sum() + seen.entropy.sum()
            found.append([seen.output, seen.lse, *torch.autograd.grad(loss, tensors)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("d", "dv"), [(192, 64), (128, 128), (200, 128), (192, 136)])
def test_other_dims_are_not_taken(d: int, dv: int) -> None:
    q, v = torch.zeros(1, 1, 4, d), torch.zeros(1, 1, 4, dv)
    assert not tile_of([q, q, v]).d192

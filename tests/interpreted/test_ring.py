"""The ring's blocks by our kernels: one rank with two pieces of the sequence, so that four blocks are merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract_cases import BY_NAME, Case, Shape, agree, as_double, leaves, loss, plain_results, truth, zero_if_none

import regard
from regard import distributed

FEW = Shape(heads=2, kv_heads=1, n=9, m=12, d=8, dv=4)
NAMES = ("plain", "causal", "predicate", "all together", "relative", "alibi", "Additive", "Cosine", "nothing")
CASES = [replace(BY_NAME[name], shape=FEW) for name in NAMES]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ring(
    tensors: list[torch.Tensor], given: dict[str, Any], **how: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    seen = distributed.observe(*tensors, **given, **how, layout="zigzag", strategy="ring", backend="triton")
    rows = [seen.output, seen.lse, seen.entropy, seen.max_logit]
    grads = torch.autograd.grad(loss(*rows[:3]), leaves(tensors, given), allow_unused=True)
    return rows, [zero_if_none(g) for g in grads]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_by_our_kernels_merge_to_the_truth(case: Case) -> None:
    tensors, given = case.inputs(torch.float32)
    rows, grads = ring(tensors, given)
    (true_rows, true_grads), (plain_rows, plain_grads) = truth(tensors, given), plain_results(tensors, given)
    agree(rows, true_rows, plain_rows, 2, "result")
    agree(grads, true_grads, plain_grads, 3, "gradient")


def test_blocks_by_our_kernels_drop_what_one_process_drops() -> None:
    tensors, given = CASES[1].inputs(torch.float32)
    torch.manual_seed(3)
    whole = regard.attention(*tensors, **given, dropout=0.4, backend="chunked")
    torch.manual_seed(3)
    how = {"layout": "zigzag", "strategy": "ring", "backend": "triton"}
    output = distributed.attention(*tensors, **given, dropout=0.4, **how)
    assert torch.allclose(output, whole, atol=1e-5)
    slopes = [torch.autograd.grad(x.sin().sum(), tensors) for x in (output, whole)]
    for a, b in zip(*slopes, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_half_precision_is_rounded_once() -> None:
    tensors, given = CASES[1].inputs(torch.float16)
    output = distributed.attention(*tensors, **given, layout="zigzag", strategy="ring", backend="triton")
    doubled, kept = as_double(tensors, given)
    true = regard.attention(*doubled, **kept, backend="reference")
    assert output.dtype == torch.float16
    assert float((output - true).detach().abs().max()) < 2e-3


def test_what_nobody_may_see_leaves_no_trace_in_blocks_by_our_kernels() -> None:
    tensors = [x.detach() for x in CASES[0].inputs(torch.float32)[0]]
    allowed = torch.ones(9, 12, dtype=torch.bool).tril(3)
    allowed[:, [2, 7]] = False
    allowed[5] = False
    true = [x.clone().requires_grad_() for x in tensors]
    regard.attention(*true, mask=allowed).sum().backward()
    tensors[0][..., 5, :] = torch.nan
    tensors[1][..., 2, :] = torch.inf
    tensors[2][..., 7, :] = torch.nan
    found = [x.requires_grad_() for x in tensors]
    output = distributed.attention(*found, mask=allowed, layout="zigzag", strategy="ring", backend="triton")
    output.sum().backward()
    assert output.isfinite().all()
    for x, y in zip(found, true, strict=True):
        assert torch.allclose(x.grad, y.grad, atol=1e-5)

"""One meaning: our kernels agree with `reference` in float64, with all gradients, in every case of the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard
from contract_cases import BY_NAME, CASES, Case, Shape, agree, as_double, plain_results, results, truth, zero_if_none
from regard import scores

GROUPED = {"plain", "bias", "dense per head", "predicate", "all together"}  # two heads of keys with two queries each
HALVES = {"plain", "causal", "all together", "Bilinear", "Additive", "relative", "bias broadcast", "dense per head"}


def small(case: Case) -> Case:
    """The case with few heads: the interpreter pays for each."""
    s = case.shape
    heads = 1 if s.heads == 1 else 4 if case.name in GROUPED else 2
    return replace(case, shape=replace(s, heads=heads, kv_heads=2 if case.name in GROUPED | {"multi-head"} else 1))


# Rows and keys span several blocks of the kernels and several of the 128 × 128 blocks of the lists.
SEVERAL = Shape(batch=1, heads=2, kv_heads=1, n=150, m=300, d=8, dv=4)
FEW = Shape(batch=1, heads=2, kv_heads=1)
SHUT = torch.tensor([-torch.inf, 0.3])


def blocks_of_all_kinds(s: Shape) -> torch.Tensor:
    """Each item and head sees one block of 128 keys or none, whole for the first."""
    b, h, i, j = torch.meshgrid(*map(torch.arange, (s.batch, s.heads, s.n, s.m)), indexing="ij")
    seen = (j // 128 == (b + h + i // 128) % 3) & ((i >= 128) | (b == h))
    return seen & (((i + j) % 5 > 0) | (b + h == 0))


MORE = [
    Case("several strips", BY_NAME["several strips"].make, SEVERAL),
    Case("several strips of a window", lambda s: {"mask": regard.window(70, 9)}, SEVERAL),
    Case("lists of blocks", lambda s: {"mask": blocks_of_all_kinds(s)}, replace(SEVERAL, batch=2, n=131, m=290)),
    Case("additive with many units", lambda s: {"score": scores.Additive(s.d, s.d, 19)}, FEW),
    Case("scales below and at zero", lambda s: {"scale": torch.linspace(-0.4, 0.4, s.heads)}, Shape(1, 3, 1)),
    Case("scale below zero", lambda s: {"scale": -0.4, "mask": regard.causal()}, FEW),
    Case("scale zero", lambda s: {"scale": 0.0, "mask": regard.window(9)}, FEW),
    Case("scale below zero and softcap", lambda s: {"scale": -0.4, "softcap": 0.7}, FEW),
    Case("dims 59 and 111", lambda s: {"mask": regard.causal()}, Shape(1, 2, 1, 20, 40, 59, 111)),
    Case("dims 111 and 59", lambda s: {"softcap": 3.0}, Shape(1, 2, 1, 20, 40, 111, 59)),
    Case("dims 1 and 1", lambda s: {"mask": regard.causal()}, Shape(1, 2, 1, d=1, dv=1)),
    Case("dims 256 and 256", lambda s: {"mask": regard.causal()}, Shape(1, 1, 1, 20, 30, 256, 256)),
    Case("relative, one entry per head", lambda s: {"bias": regard.biases.relative(torch.ones(s.heads, 1))}, FEW),
    Case("relative, one entry", lambda s: {"bias": regard.biases.relative(torch.ones(1), offset=40)}, FEW),
    Case("sink of -inf and rows without a key", lambda s: {"sink": SHUT, "mask": regard.causal(offset=-5)}, FEW),
    Case("dims 7 and 200", lambda s: {"sink": torch.ones(s.heads)}, Shape(1, 2, 1, 20, 30, 7, 200)),
]
ALL = [*(small(c) for c in CASES if c.name != "several strips"), *MORE]
in_half = [(c, torch.float16) for c in CASES if c.name in HALVES]
in_half += [(BY_NAME[name], torch.bfloat16) for name in ("causal", "all together", "Bilinear")]


def check(case: Case, dtype: torch.dtype) -> None:
    tensors, kwargs = case.inputs(dtype)
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results("triton", tensors, kwargs)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32, torch.float32]
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_statistics_and_every_gradient_agree_in_float32(case: Case) -> None:
    check(case, torch.float32)


@pytest.mark.parametrize(("case", "dtype"), in_half, ids=lambda x: getattr(x, "name", str(x)))
def test_half_precision_agrees_too(case: Case, dtype: torch.dtype) -> None:
    check(small(case), dtype)


@pytest.mark.parametrize("name", ["plain", "dense per item", "sink", "Bilinear"])
def test_attention_is_what_observe_puts_out(name: str) -> None:
    tensors, kwargs = small(BY_NAME[name]).inputs(torch.float32)
    output = regard.attention(*tensors, **kwargs, backend="triton")
    assert torch.equal(output, regard.observe(*tensors, **kwargs, backend="triton").output)


@pytest.mark.parametrize("wanted", ["output", "lse", "entropy"])
@pytest.mark.parametrize("name", ["causal", "sink", "softcap"])
def test_each_result_alone_has_its_gradients(name: str, wanted: str) -> None:
    given = small(BY_NAME[name]).inputs(torch.float32)
    pulled = []
    for backend, (tensors, kwargs) in (("triton", given), ("reference", as_double(*given))):
        found = getattr(regard.observe(*tensors, **kwargs, backend=backend), wanted)
        weight = torch.linspace(-1, 1, found.numel()).view(found.shape)
        number = (torch.where(found > -torch.inf, found, 0.0) * weight).sum()
        pulled.append([zero_if_none(g) for g in torch.autograd.grad(number, tensors, allow_unused=True)])
    agree(*pulled, [], 3, "gradient")


@pytest.mark.parametrize("needed", range(3))
def test_a_gradient_that_nobody_asks_for_is_not_needed_for_the_others(needed: int) -> None:
    given = small(BY_NAME["causal"]).inputs(torch.float32)
    (tensors, kwargs), (doubled, _) = given, as_double(*given)
    for at, t in enumerate(tensors):
        t.requires_grad_(at == needed)
    found = regard.attention(*tensors, **kwargs, backend="triton").square().sum()
    true = regard.attention(*doubled, **kwargs, backend="reference").square().sum()
    found_grad = torch.autograd.grad(found, tensors[needed])
    agree(list(found_grad), [torch.autograd.grad(true, doubled)[needed]], [], 3, "gradient")

"""Few queries against many keys: heads packed into one tile, keys split, the parts merged; it means the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_cases import Case, Shape, agree, plain_results, results, truth

import regard
from regard import biases
from regard.kernels import launch

ONE = Shape(batch=2, heads=2, kv_heads=1, n=1, m=1030)
SIX = Shape(batch=2, heads=6, kv_heads=2, n=1, m=1030)
THREE = Shape(batch=2, heads=2, kv_heads=1, n=3, m=2050, d=8, dv=8)  # the last of three splits has two keys


def some_holes(s: Shape) -> torch.Tensor:
    bias = torch.randn(s.batch, s.heads, s.n, s.m, generator=torch.Generator().manual_seed(2))
    return bias.masked_fill(bias > 1, -torch.inf)


ARGUMENTS: dict[str, Any] = {
    "plain": lambda s: {},
    "causal": lambda s: {"mask": regard.causal()},
    "a window": lambda s: {"mask": regard.window(500, 0, offset=1020)},
    "padding by item": lambda s: {"mask": regard.padding([1025, 40])},
    "padding that hides an item": lambda s: {"mask": regard.padding([0, 1030])},
    "offset by item": lambda s: {"mask": regard.causal(offset=torch.tensor([1023, -1]))},
    "sink": lambda s: {"sink": torch.linspace(3, 5, s.heads), "mask": regard.padding([1026, 0])},
    "bias": lambda s: {"bias": some_holes(s)},
    "bias by keys": lambda s: {"bias": torch.randn(s.heads, 1, s.m)},
    "alibi": lambda s: {"bias": biases.alibi(torch.linspace(0.01, 0.05, s.heads)), "mask": regard.causal()},
    "relative": lambda s: {"bias": biases.relative(torch.randn(s.heads, 9))},
    "softcap": lambda s: {"softcap": 1.5},
    "scale per head": lambda s: {"scale": torch.linspace(-0.3, 0.5, s.heads)},
    "large logits": lambda s: {"scale": 30.0},
}
CASES = [
    *(Case(name, make, ONE) for name, make in ARGUMENTS.items()),
    *(
        Case(f"six heads, {name}", ARGUMENTS[name], SIX)
        for name in ("plain", "padding by item", "scale per head", "bias")
    ),
    *(Case(f"three rows, {name}", ARGUMENTS[name], THREE) for name in ("causal", "sink", "alibi")),
    Case("dims 59 and 111", lambda s: {"mask": regard.causal()}, Shape(1, 2, 1, 2, 1024, 59, 111)),
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way the rows went."""
    ways: list[str] = []
    run = launch._decode
    monkeypatch.setattr(launch, "_decode", lambda *given: ways.append("split") or run(*given))
    return ways


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_split_keys_agree_with_float64(case: Case, taken: list[str]) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    with torch.no_grad():
        seen = regard.observe(*tensors, **kwargs, backend="triton")
    assert taken == ["split"]
    found = [seen.output, seen.lse, seen.entropy, seen.max_logit]
    agree(found, truth(tensors, kwargs)[0], plain_results(tensors, kwargs)[0], 2, "result")


def test_gradients_of_split_keys_agree(taken: list[str]) -> None:
    case = Case("two heads", lambda s: {"mask": regard.causal(), "sink": torch.ones(2)}, Shape(1, 2, 1, 2, 1030, 8, 8))
    tensors, kwargs = case.inputs(torch.float32)
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results("triton", tensors, kwargs)
    assert taken == ["split"]
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


def test_half_precision_agrees_where_keys_are_split() -> None:
    tensors, kwargs = Case("half", ARGUMENTS["causal"], ONE).inputs(torch.float16)
    with torch.no_grad():
        seen = regard.observe(*tensors, **kwargs, backend="triton")
    assert seen.output.dtype == torch.float16
    found = [seen.output, seen.lse, seen.entropy, seen.max_logit]
    agree(found, truth(tensors, kwargs)[0], plain_results(tensors, kwargs)[0], 2, "result")


def test_an_item_does_not_depend_on_its_batch(taken: list[str]) -> None:
    made = torch.Generator().manual_seed(0)
    query, key = torch.randn(3, 4, 1, 8, generator=made), torch.randn(3, 2, 1100, 8, generator=made)
    seen = regard.observe(query, key, key, mask=regard.padding([1100, 7, 1060]), backend="triton")
    for b, length in ((0, 1100), (2, 1060)):
        one = [x[b : b + 1] for x in (query, key, key)]
        alone = regard.observe(*one, mask=regard.padding([length]), backend="triton")
        for name in ("output", "lse", "entropy", "max_logit"):
            assert torch.equal(getattr(alone, name)[0], getattr(seen, name)[b])
    assert taken == ["split"] * 3

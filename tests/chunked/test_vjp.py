"""The vjp of the chunked engine: the gradients that autograd finds through the formula on the whole matrix."""

from __future__ import annotations

import pytest
import torch

from folded_cases import CASES, cotangents, engine_of, folded, formula_of, tensors_of


@pytest.mark.parametrize("only", [None, 0, 1, 2], ids=["all", "output", "lse", "entropy"])
@pytest.mark.parametrize("name", CASES)
def test_the_vjp_is_that_of_autograd_through_the_formula(name: str, only: int | None) -> None:
    x = folded(name)
    engine, given = engine_of(x), tensors_of(x)
    g = cotangents(x, only)
    found = engine.vjp(given, engine.forward(given), g, tuple(t is not None for t in given))
    formula, leaves = formula_of(x)
    leaves = tuple(t.clone().requires_grad_() for t in leaves)
    pairs = [(y, c) for y, c in zip(formula(*leaves), g, strict=True) if c is not None]
    expected = torch.autograd.grad([y for y, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
    for a, b, t in zip((a for a in found if a is not None), expected, leaves, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(t) if b is None else b)


@pytest.mark.parametrize("needed", [0, 1, 2, 3])
def test_only_the_cotangents_that_are_needed_are_computed(needed: int) -> None:
    x = folded("bias")
    engine, given, g = engine_of(x), tensors_of(x), cotangents(x, None)
    rows = engine.forward(given)
    found = engine.vjp(given, rows, g, tuple(at == needed for at in range(len(given))))
    assert [t is None for t in found] == [at != needed for at in range(len(given))]
    torch.testing.assert_close(found[needed], engine.vjp(given, rows, g, (True,) * len(given))[needed])

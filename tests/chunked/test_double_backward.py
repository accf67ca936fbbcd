"""The double backward of the chunked engine: the tangent of its vjp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import BY_NAME
from derivative_cases import BY_ROWS, small
from folded_cases import CASES, cotangents, engine_of, folded, formula_of, random_like, tensors_of
from regard.autograd.engine import double_backward_of_formula, jvp_of_formula
from regard.chunked.engine import ChunkedEngine


@pytest.mark.parametrize("name", ["plain", "causal", "bias", "relative", "softcap", "Additive", "dropout"])
@pytest.mark.parametrize(
    "moving", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)], ids=str
)
def test_jvp_and_double_backward_are_those_of_the_formula(
    name: str, moving: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[ChunkedEngine, Any]] = []
    inner = ChunkedEngine.forward
    monkeypatch.setattr(ChunkedEngine, "forward", lambda self, x: (kept.append((self, x)), inner(self, x))[1])
    tensors, kwargs = small(BY_NAME["plain" if name == "dropout" else name])
    with torch.no_grad():
        regard.observe(*tensors, **kwargs, **({"dropout": 0.3} if name == "dropout" else {}), backend=BY_ROWS)
    engine, x = kept[0]
    x = tuple(None if t is None else t.detach() for t in x)
    made = torch.Generator().manual_seed(0)

    def like(t: Tensor | None) -> Tensor | None:
        return None if t is None else torch.randn(t.shape, dtype=t.dtype, generator=made)

    w = tuple(like(t) if at > 2 or moving[at] else None for at, t in enumerate(x))
    found, tangents = engine.jvp(x, w)
    for a, b in zip(tangents, jvp_of_formula(engine, x, w)[1], strict=True):
        torch.testing.assert_close(a, b)
    needs = tuple(t is not None for t in x)
    for only in range(3):
        g = tuple(like(t) if at == only else None for at, t in enumerate(found[:3]))
        for dg in ((None, None, None), tuple(map(like, found[:3]))):
            bent = engine.double_backward(x, found, tangents, g, w, dg, needs)
            for a, b in zip(bent, double_backward_of_formula(engine, x, g, w, dg)[1], strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", CASES)
def test_the_double_backward_is_the_jvp_of_the_vjp_of_the_formula(name: str) -> None:
    x = folded(name)
    engine, given = engine_of(x), tensors_of(x)
    w = tuple(random_like(t, at) for at, t in enumerate(given))
    g, dg = cotangents(x, None), cotangents(x, None, seed=7)
    rows, d_rows = engine.jvp(given, w)
    found = engine.double_backward(given, rows, d_rows, g, w, dg, tuple(t is not None for t in given))
    formula, leaves = formula_of(x)
    count = len(leaves)

    def vjp(*both: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(formula, *both[:count])[1](tuple(both[count:]))

    _, expected = torch.func.jvp(vjp, (*leaves, *g), (*(t for t in w if t is not None), *dg))
    for a, b in zip((a for a in found if a is not None), expected, strict=True):
        torch.testing.assert_close(a, b)

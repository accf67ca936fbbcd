"""The backend `reference`: the textbook's lines."""

from __future__ import annotations

import pytest

from contract_cases import CASES, Case, error, plain_results, results


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_in_float64_is_the_textbook(case: Case) -> None:
    tensors, kwargs = case.inputs()
    found, grads = results("reference", tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    for x, y in zip([*found[:3], *grads], [*ordinary, *ordinary_grads], strict=True):
        assert error(x, y) < 1e-9

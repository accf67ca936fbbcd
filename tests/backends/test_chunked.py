"""The backend `chunked`: the reference to rounding, at any chunk size, in less memory for smaller chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from contract_cases import CASES, MASKS, Case, error, results
from regard.backends import Backend, Chunked
from regard.lab.online import peak_bytes

SIZES: dict[str, str | Backend] = {"chunked": "chunked", "chunked by 7": Chunked(chunk_size=7)}


@pytest.mark.parametrize("backend", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_chunked_in_float64_is_reference_to_rounding(case: Case, backend: str) -> None:
    tensors, kwargs = case.inputs()
    true, true_grads = results("reference", tensors, kwargs)
    found, grads = results(SIZES[backend], tensors, kwargs)
    for x, y in zip([*found, *grads], [*true, *true_grads], strict=True):
        assert error(x, y) < 1e-10


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 70), st.integers(0, 200),
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 80), st.sampled_from(MASKS), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_shapes_that_nobody_thought_of(
    batch: int, kv: int, groups: int, n: int, m: int, d: int, dv: int, chunk: int, mask: Case, cap: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(batch, kv * groups, n, d, dtype=torch.float64, requires_grad=True)
    k = torch.randn(batch, kv, m, d, dtype=torch.float64, requires_grad=True)
    v = torch.randn(batch, kv, m, dv, dtype=torch.float64, requires_grad=True)
    made = mask.make(mask.shape)["mask"]
    fitting = made if isinstance(made, regard.Mask) and made.lead == (1, 1) and made.misfit(n, m) is None else None
    kwargs = {"mask": fitting, "softcap": 3.0 if cap else None}
    true, true_grads = results("reference", [q, k, v], kwargs)
    found, grads = results(Chunked(chunk_size=chunk), [q, k, v], kwargs)
    for x, y in zip([*found, *grads], [*true, *true_grads], strict=True):
        assert error(x, y) < 1e-10


def test_few_rows_at_a_time_take_less_memory_however_many_heads_there_are() -> None:
    q, k, v = torch.randn(3, 1, 16, 1024, 16).unbind()
    few, some, many = (
        peak_bytes(lambda size=size: regard.attention(q, k, v, backend=Chunked(size))) / 2**20 for size in (4, 16, 64)
    )
    assert few + 0.05 < some
    assert some + 0.2 < many


def test_a_chunk_size_shows_in_the_repr_and_changes_no_result() -> None:
    x = torch.randn(1, 2, 20, 8)
    small = Chunked(chunk_size=5)
    assert repr(small) == "regard.backends.Chunked(chunk_size=5)"
    assert small.chunk_size == 5
    assert eval(repr(small)).chunk_size == 5
    expected = regard.attention(x, x, x, mask=regard.causal(), backend="reference")
    torch.testing.assert_close(regard.attention(x, x, x, mask=regard.causal(), backend=small), expected)
    assert "chunked" in repr(regard.observe(x, x, x, backend=small))

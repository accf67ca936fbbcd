"""The chunked engine: its forward pass, and the memory of all its passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from attention_inputs import gradients, inputs
from folded_cases import CASES, FEW_ROWS, engine_of, folded, formula_of, tensors_of
from regard.chunked.engine import ChunkedEngine
from regard.chunked.tile_ops import multiply
from regard.core.tiling import TileSizes
from regard.lab.online import peak_bytes


def test_a_run_of_the_lowest_logits_leaves_the_entropy_finite() -> None:
    q, k, v = torch.zeros(1, 1, 512, 2), torch.zeros(1, 1, 4200, 2), torch.zeros(1, 1, 4200, 2)
    bias = torch.zeros(4200)
    bias[:4096] = torch.finfo(torch.float32).min
    seen = regard.observe(q, k, v, bias=bias, backend="chunked")
    torch.testing.assert_close(seen.entropy, torch.full_like(seen.entropy, 104).log())


@pytest.mark.parametrize("what", ["jvp", "double backward"])
def test_memory_of_a_tangent_and_of_a_double_backward_is_linear(what: str) -> None:
    n = 2048
    q, k, v, a, b, c = torch.randn(6, 1, 1, n, 16).unbind()

    def call(*x: Tensor) -> Tensor:
        return regard.attention(*x, mask=regard.causal(), backend=regard.backends.Chunked(64))

    def derivative() -> Any:
        if what == "jvp":
            return torch.func.jvp(call, (q, k, v), (a, b, c))
        x = [t.requires_grad_() for t in (q, k, v)]
        first = torch.autograd.grad(call(*x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first, x, (a, b, c))

    assert peak_bytes(derivative) < 4 * n * n / 2, "half of one matrix of weights"


@pytest.mark.parametrize("rows", [1, 4, 512])
@pytest.mark.parametrize("name", CASES)
def test_the_forward_pass_is_the_formula_for_any_number_of_rows_in_flight(name: str, rows: int) -> None:
    x = folded(name)
    found = ChunkedEngine(x.spec, TileSizes(rows), observed=True).forward(tensors_of(x))
    formula, leaves = formula_of(x)
    output, lse, entropy = formula(*leaves)
    seen = found.lse > -torch.inf
    torch.testing.assert_close(found.output, output)
    torch.testing.assert_close(torch.where(seen, found.lse, 0.0), lse)
    torch.testing.assert_close(found.entropy, entropy)
    torch.testing.assert_close(torch.where(seen, found.max_logit + found.log_row_sum, 0.0), lse)


@pytest.mark.parametrize("name", CASES)
def test_the_formula_of_the_engine_is_its_forward_pass(name: str) -> None:
    x = folded(name)
    engine = engine_of(x)
    for a, b in zip(engine.formula(tensors_of(x)), engine.forward(tensors_of(x)), strict=False):
        torch.testing.assert_close(a, b)


def test_without_statistics_the_output_keeps_its_bits() -> None:
    x = folded("causal")
    given = tensors_of(x)
    bare = ChunkedEngine(x.spec, FEW_ROWS, observed=False).forward(given)
    assert torch.equal(bare.output, engine_of(x).forward(given).output)
    assert not bare.entropy.any()


MASKED = {
    "no mask": lambda n: None,
    "causal": lambda n: regard.causal(),
    "a window": lambda n: regard.window(100),
    "a window and a global token": lambda n: regard.window(100) | regard.global_tokens([0]),
    "documents": lambda n: regard.documents(torch.arange(n) // 200),
    "padding": lambda n: regard.padding(torch.tensor([n - n // 5])),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize(("heads", "n"), [(1, 389), (1, 512), (3, 300), (1, 1), (1, 17), (2, 200)])
def test_the_bits_are_the_same_for_every_number_of_threads(name: str, heads: int, n: int) -> None:
    before = torch.get_num_threads()
    found: list[list[torch.Tensor]] = []
    try:
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            leaves = [
                x.requires_grad_() for x in inputs(1, heads, n=n, m=max(n, 300) if name == "no mask" else n, d=64)
            ]
            seen = regard.observe(*leaves, mask=MASKED[name](n), backend="chunked")
            grads = gradients((seen.output.square() + seen.entropy[..., None]).sum(), leaves)
            found.append([seen.output, seen.lse, seen.entropy, seen.max_logit, *grads])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("name", ["no mask", "documents"])
@pytest.mark.parametrize(("items", "heads", "n"), [(9, 2, 513), (2, 1, 389), (3, 3, 300)])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(name: str, items: int, heads: int, n: int) -> None:
    x = list(torch.randn(3, items, heads, n, 64))
    weights = torch.randn(items, heads, n, 64)

    def results(which: slice) -> list[Tensor]:
        leaves = [t[which].clone().requires_grad_() for t in x]
        seen = regard.observe(*leaves, mask=MASKED[name](n), backend="chunked")
        total = (seen.output * weights[which]).sum() + seen.entropy.sum()
        return [seen.output, seen.lse, seen.entropy, *torch.autograd.grad(total, leaves)]

    alone, together = results(slice(1, 2)), results(slice(None))
    assert all(torch.equal(a, b[1:2]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 0), (1, 300, 4, 0), (0, 3, 4, 5), (2, 0, 4, 5), (1, 17, 0, 5), (1, 300, 64, 9)]
)
@pytest.mark.parametrize("given", [False, True])
def test_products_have_any_shape_and_go_where_they_are_told(shape: tuple[int, ...], given: bool) -> None:
    batch, rows, dim, columns = shape
    a, b = torch.randn(batch, rows, dim), torch.randn(batch, columns, dim).mT
    out = torch.full((batch, rows, columns), torch.nan) if given else None
    found = multiply(a, b, out=out)
    torch.testing.assert_close(found, torch.bmm(a, b))
    assert out is None or found.data_ptr() == out.data_ptr()

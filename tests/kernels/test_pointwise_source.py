"""Generated functions: what their source is made of, and that one is compiled per function."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this system")

import regard
from regard.kernels.pointwise_source import Tables, function_of, source_of
from regard.scores import Pointwise
from regard.scores.tracing import trace
from uncompiled import noted

LINE = re.compile(
    r"(v\d+ = |return )((tl|ops)\.\w+|v\d+|score|batch|head|row|key|floats|whole|sizes|float|to"
    r'|"-?inf"|"nan"|[-+*/&|^~<>=!(),.\[\] ]|\d+(\.\d+)?(e-?\d+)?|True|False)+'
)

TABLE = torch.rand(4)


def made(f: object) -> tuple[str, object]:
    traced = trace(f, {}, torch.float32)  # type: ignore[arg-type]
    tables = Tables.of(traced.read({}, torch.float32)[0], nvidia=False)
    body = source_of(traced.expression, traced.value, tables)
    return body, function_of(traced.expression, traced.value, tables)


def test_the_source_holds_nothing_that_a_user_wrote() -> None:
    import_os = torch.randn(3)

    def exploit(s: Tensor, __import__: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ids = torch.tensor([1, 2, 3])
        return torch.where(i % 3 == -1, float("-inf"), s * 1e-7) + import_os[i % 3] * ids[h] / 3 - torch.tanh(s).abs()

    body, _ = made(exploit)
    assert "import" not in body
    assert all(LINE.fullmatch(line.strip()) for line in body.splitlines()), body


def test_equal_functions_are_one_and_others_are_not() -> None:
    a, b = torch.rand(4), torch.rand(9)
    one = made(lambda s, b_, h, i, j: s + a[h])
    assert made(lambda s, b_, h, i, j: s + b[h])[1] is one[1]
    assert made(lambda s, b_, h, i, j: s - b[h])[1] is not one[1]


def test_the_exponential_of_a_multiple_has_one_product() -> None:
    body, _ = made(lambda s, b, h, i, j: s * torch.exp((i - j).abs() * -0.5))
    assert f"tl.exp2(v8 * {-0.5 / math.log(2)!r})" in body


@pytest.mark.parametrize(
    ("f", "bounded"),
    [
        (lambda s, b, h, i, j: s * torch.exp(-0.01 * (i - j).abs()), True),
        (lambda s, b, h, i, j: s * torch.exp(0.01 * (i - j).abs()), False),
        (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), True),
        (lambda s, b, h, i, j: torch.where(i > j, s, 2 * s), True),
        (lambda s, b, h, i, j: torch.log(s.abs()), False),
        (lambda s, b, h, i, j: s * s, False),
        (lambda s, b, h, i, j: s * torch.cos(torch.exp(s)), False),
        (lambda s, b, h, i, j: s * TABLE[h], False),
    ],
)
def test_a_slope_is_bounded_if_no_finite_score_makes_it_infinite(f: object, bounded: bool) -> None:
    traced = trace(f, {}, torch.float32)  # type: ignore[arg-type]
    e = traced.expression
    assert e.is_bounded(e.derivative(traced.value, e.score)) is bounded


def test_the_exponential_of_an_infinite_multiple_has_no_folded_constant() -> None:
    body, _ = made(lambda s, b, h, i, j: torch.exp(s * float("inf")))
    assert all(LINE.fullmatch(line.strip()) for line in body.splitlines()), body


def test_a_new_shape_mask_or_table_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = noted(monkeypatch)

    def call(n: int, mask: regard.Mask, reach: int, batch: int = 2) -> None:
        tensors = [torch.zeros(batch, h, n, 64, dtype=torch.float16, requires_grad=True) for h in (4, 2, 2)]
        table = torch.zeros(4, 2 * reach + 1, requires_grad=True)
        size = torch.tensor(reach)
        score = Pointwise(lambda s, b, h, i, j: torch.tanh(s) + table[h, (i - j).clamp(-size, size) + size])
        seen = regard.observe(*tensors, mask=mask, score=score, backend="triton")
        torch.autograd.grad(seen.output.float().sum() + seen.entropy.sum(), [*tensors, table])

    call(1024, regard.causal(), 8)
    names = {name.rpartition(".")[2] for name, _ in compiled}
    assert {"forward", "backward_dkdv", "backward_dq", "table_gradient_by_rows"} <= names
    before = set(compiled)
    call(999, regard.window(5), 8)
    call(1024, regard.packed([1000, 24]), 15, batch=3)
    assert compiled == before
